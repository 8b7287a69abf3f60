from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.recipe import Factories
from lightning_bnn.launch.saving import member_ids
from tests.launch.programs import make_data, make_ensemble


def test_factories_get_what_they_take() -> None:
    seen: dict[str, Any] = {}

    def make_bnn(seed: int, members: list[int]) -> Any:
        seen["bnn"] = (members, seed)
        return make_ensemble(members, seed)

    def options(folder: str) -> dict[str, Any]:
        seen["folder"] = folder
        return {"max_epochs": 2}

    parts = Factories(make_bnn, make_data, options).build([2, 3], 7, "place")
    assert seen == {"bnn": ([2, 3], 7), "folder": "place"}
    assert member_ids(parts.strategy) == (2, 3)
    assert parts.trainer == {"max_epochs": 2}


def test_options_bound_by_partial() -> None:
    def make_bnn(width: int, members: list[int], seed: int) -> Any:
        return make_ensemble(members, seed)

    recipe = Factories(partial(make_bnn, 8), make_data, {})
    assert recipe.takes_members
    assert recipe.description()["bnn"].endswith("make_bnn(8)")
    other = Factories(
        partial(make_bnn, 16), partial(make_data, root=Path("a"), net=make_ensemble), {}
    )
    assert other.description()["bnn"].endswith("make_bnn(16)")
    assert other.description()["data"].endswith("make_data(root=PosixPath('a'))")


def test_what_is_bound_or_has_a_default_stays() -> None:
    given: dict[str, Any] = {}

    def make_bnn(members: list[int], seed: int = 3) -> Any:
        given["bnn"] = (members, seed)
        return make_ensemble(members, seed)

    def make_split(folder: str, batch_size: int = 4, seed: int = 5) -> Any:
        given["data"] = (folder, seed)
        return make_data()

    Factories(make_bnn, make_split, {}).build([2], 9, "here")
    assert given == {"bnn": ([2], 9), "data": ("here", 5)}
    Factories(partial(make_bnn, seed=7), partial(make_split, folder="there"), {}).build([2], 9, "")
    assert given == {"bnn": ([2], 7), "data": ("there", 5)}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((make_ensemble([0], 0), make_data, {}), "function that makes it"),
        ((make_ensemble, 3, {}), "make_datamodule= is a function"),
        ((make_ensemble, make_data, 5), "trainer= is a function that makes it or a mapping"),
        ((lambda width: None, make_data, {}), "needs 'width'"),
    ],
)
def test_what_is_no_factory(arguments: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Factories(*arguments)


def test_what_a_factory_returns_must_be_a_strategy() -> None:
    with pytest.raises(ConfigurationError, match="returns a DataLoader; a launch needs a strategy"):
        Factories(make_data, make_data, {}).build([0], 0, "")
