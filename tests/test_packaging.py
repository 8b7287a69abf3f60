"""What is in the wheel, and what lies at the top of the tree."""

from __future__ import annotations

import zipfile

import pytest

from tests.wheels import ROOT, build_wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of the files in a wheel built from a copy of the tree."""
    path = build_wheel(tmp_path_factory.mktemp("tree"))
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_package_and_nothing_else(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_bnn"}
    for name in ("py.typed", "callbacks/prediction_writer.py", "storage/store.py", "cli.py"):
        assert f"lightning_bnn/{name}" in wheel
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_every_source_file_is_in_the_wheel(wheel: list[str]) -> None:
    package = ROOT / "lightning_bnn"
    sources = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.c", "*.h", "*.js", "*.css", "*.html")
        for path in package.rglob(pattern)
    }
    for ending in (".h", ".js", ".css", ".html"):
        assert any(name.endswith(ending) for name in sources)
    assert sources <= set(wheel)


def test_callbacks_is_a_door_to_the_package() -> None:
    assert (ROOT / "callbacks").resolve() == (ROOT / "lightning_bnn" / "callbacks").resolve()
    for name in ("pyproject.toml", "README.md", "tests", "configs", "cluster"):
        assert (ROOT / name).exists()
