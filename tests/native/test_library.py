"""Building the library: the cache, the variants, and every way in which it may fail."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from lightning_bnn.native import library
from tests.native.compiler import needs_compiler


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with every variant in it."""
    cache = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        for variant in library._VARIANTS if library._compiler() else ():
            build(variant)
    return cache


def build(variant: list[str]) -> Path:
    with library._folder() as folder:
        return library._build(variant, Path(folder))


@needs_compiler
def test_it_loads_where_there_is_a_compiler():
    assert library.load() is not None


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
def test_without_the_first_variants_the_next_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_VARIANTS", [["-no-such-flag"], []])
    assert library.load() is not None


@needs_compiler
@pytest.mark.parametrize("size", [0, 4096, -1])
def test_a_library_that_was_cut_short_is_built_again(size: int):
    """It is not loaded first: a process that maps a file that is too short dies of it."""
    file = build(library._VARIANTS[0])
    whole = file.read_bytes()
    os.truncate(file, size % len(whole))
    assert build(library._VARIANTS[0]).read_bytes() == whole


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_is_not_used(
    mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder = build(library._VARIANTS[0]).parent
    folder.chmod(mode)
    loaded = []
    monkeypatch.setattr(library.ctypes, "CDLL", spy(library.ctypes.CDLL, loaded))
    with caplog.at_level(logging.WARNING):
        assert library.load() is not None
    assert "others own it or can write to it" in caplog.text
    assert not any(path.startswith(str(folder)) for path in loaded)
    assert not any(Path(path).exists() for path in loaded)  # the temporary one is gone


def spy(function, calls):
    def called(argument):
        calls.append(argument)
        return function(argument)

    return called


@needs_compiler
def test_a_folder_that_is_a_link_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = build(library._VARIANTS[0]).parent
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "lightning_bnn").symlink_to(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "linked"))
    with library._folder() as used:
        assert Path(used).resolve() != folder.resolve()


@needs_compiler
@pytest.mark.parametrize("how", ["others can write it", "a link"])
def test_a_file_that_may_be_of_others_is_built_again(how: str, tmp_path: Path):
    file = build(library._VARIANTS[0])
    if how == "a link":
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    else:
        file.chmod(0o722)
    assert build(library._VARIANTS[0]) == file
    assert not file.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o700


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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    found = library.load()
    assert found is not None
    assert not list((tmp_path / "temporary").iterdir())  # and it works all the same
    numbers = torch.empty(10)
    found.fill_normal(numbers, torch.arange(1, library.WORDS + 1, dtype=torch.int32))
    assert numbers.isfinite().all()


@needs_compiler
@pytest.mark.parametrize("flags", [["-O0"], *library._VARIANTS])
def test_every_build_gives_the_same_bits(flags: list[str]):
    built = library.Library(build(flags))
    assert library._fingerprint(built) == library._EXPECTED
