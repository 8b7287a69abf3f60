"""Building the generator: the cache, its races, and every way in which it may fail."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from lightning_bnn.noise import compiled

needs_compiler = pytest.mark.skipif(compiled.load() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled.load.cache_clear()
    yield
    compiled.load.cache_clear()


@needs_compiler
def test_it_is_built_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert compiled.load() is not None
    (library,) = (tmp_path / "cache" / "lightning_bnn").iterdir()
    compiled.load.cache_clear()
    monkeypatch.setattr(compiled.subprocess, "run", lambda *_, **__: pytest.fail("built again"))
    assert compiled.load() is not None
    assert library.exists()


@pytest.mark.parametrize("value", ["no-such-compiler", "false"])
def test_a_compiler_that_fails(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", value)
    monkeypatch.setenv("PATH", "/usr/bin" if value == "false" else "/nonexistent")
    assert compiled.load() is None


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIGHTNING_BNN_COMPILE", "0")
    assert compiled.load() is None


@needs_compiler
def test_a_damaged_library_is_not_used():
    compiled._library().write_bytes(b"not a library")
    assert compiled.load() is None


@needs_compiler
def test_wrong_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "_EXPECTED", "0" * 16)
    assert compiled.load() is None


@needs_compiler
def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    fill = compiled.load()
    assert fill is not None
    numbers = torch.empty(10)
    fill(numbers, torch.arange(1, compiled.WORDS + 1, dtype=torch.int32))
    assert numbers.isfinite().all()


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs POSIX owners")
def test_the_folder_is_the_users_own(tmp_path: Path):
    compiled.load()
    mode = (tmp_path / "cache" / "lightning_bnn").stat().st_mode
    assert not mode & (stat.S_IWGRP | stat.S_IWOTH)
