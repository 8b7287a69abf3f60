"""Building the library: the cache, the variants, and every way in which it may fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lightning_bnn.native import library

needs_compiler = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with every variant in it."""
    cache = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        for variant in library._VARIANTS if library.load() else ():
            library._build(variant)
    return cache


@pytest.fixture(autouse=True)
def _own_cache(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(built, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@needs_compiler
def test_it_is_built_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert library.load() is not None
    (file,) = (tmp_path / "empty" / "lightning_bnn").iterdir()
    library.load.cache_clear()
    monkeypatch.setattr(library.subprocess, "run", lambda *_, **__: pytest.fail("built again"))
    assert library.load() is not None
    assert file.exists()


@pytest.mark.parametrize("value", ["no-such-compiler", "false"])
def test_a_compiler_that_fails(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    monkeypatch.setenv("CC", value)
    monkeypatch.setenv("PATH", "/usr/bin" if value == "false" else "/nonexistent")
    assert library.load() is None


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIGHTNING_BNN_COMPILE", "0")
    assert library.load() is None


@needs_compiler
@pytest.mark.parametrize("damaged", [1, len(library._VARIANTS)])
def test_a_damaged_library_is_not_used(damaged: int):
    """The next variant serves, while there is one."""
    for variant in library._VARIANTS[:damaged]:
        library._build(variant).write_bytes(b"not a library")
    assert (library.load() is None) == (damaged == len(library._VARIANTS))


@needs_compiler
def test_defaults_of_the_user_do_not_matter():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert library.load() is not None
    finally:
        torch.set_default_dtype(torch.float32)


@needs_compiler
def test_wrong_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_EXPECTED", "0" * 16)
    assert library.load() is None


@needs_compiler
def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    found = library.load()
    assert found is not None
    numbers = torch.empty(10)
    found.fill_normal(numbers, torch.arange(1, library.WORDS + 1, dtype=torch.int32))
    assert numbers.isfinite().all()


@needs_compiler
@pytest.mark.parametrize("flags", [["-O0"], *library._VARIANTS])
def test_every_build_gives_the_same_bits(flags: list[str]):
    built = library.Library(library._build(flags))
    assert library._fingerprint(built) == library._EXPECTED
