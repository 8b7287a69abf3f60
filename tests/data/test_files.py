from pathlib import Path

import pytest

from lightning_bnn.data.files import data_folder, missing_files
from lightning_bnn.errors import ConfigurationError


def test_data_dir_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("LIGHTNING_BNN_DATA", "/root-of-data")
    assert data_folder("/given", "uci", "x") == Path("/given")
    assert data_folder(None, "uci", "x") == Path("/root-of-data/uci")


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("LIGHTNING_BNN_DATA", "~/data")
    assert data_folder("~/sets", "uci", "x") == Path("/home/someone/sets")
    assert data_folder(None, "uci", "x") == Path("/home/someone/data/uci")


@pytest.mark.parametrize("value", [None, ""])
def test_neither_is_an_error_that_names_file_and_variable(monkeypatch, value):
    monkeypatch.delenv("LIGHTNING_BNN_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("LIGHTNING_BNN_DATA", value)
    with pytest.raises(ConfigurationError, match=r"LIGHTNING_BNN_DATA.*uci/yacht/data\.txt"):
        data_folder(None, "uci", "yacht/data.txt")


def test_missing_files_are_all_named():
    message = str(missing_files("Set", [Path("/a/b"), Path("/a/c")], "Try this."))
    assert message.startswith("Set: expected /a/b, /a/c, which are not there. Pass data_dir=")
    assert message.endswith("Try this.")
