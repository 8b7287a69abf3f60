"""What is in the wheel, and what lies at the top of the tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of the files in a wheel built from a copy of the tree."""
    copy = tmp_path_factory.mktemp("tree")
    kept = ["pyproject.toml", "README.md", "LICENSE", "lightning_bnn", "callbacks", "configs"]
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *kept],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in files:
        source, target = ROOT / name, copy / name
        if not source.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*build, "--no-index", "--wheel-dir", "dist", "."], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_package_and_nothing_else(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_bnn"}
    for name in ("py.typed", "callbacks/prediction_writer.py", "posteriors/store.py", "cli.py"):
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
