from __future__ import annotations

from pathlib import Path

import pytest

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.configuration import ConfigurationRecipe, read_configuration

CONFIGS = Path(__file__).parents[2] / "configs"


def read(name: str, *options: str) -> tuple[ConfigurationRecipe, int, int | None]:
    return read_configuration(["--config", str(CONFIGS / f"{name}.yaml"), *options])


def test_an_ensemble_trains_the_members_that_it_is_told_to(tmp_path: Path) -> None:
    recipe, seed, members = read("digits_ensemble", "--trainer.max_epochs", "2")
    assert (recipe.numbers, seed, members) == ("members", 0, 10)
    parts = recipe.build([3, 4], 7, str(tmp_path))
    assert parts.strategy.ids == [3, 4]  # type: ignore[attr-defined]
    assert parts.strategy.seed == 7  # type: ignore[attr-defined]
    assert parts.trainer["max_epochs"] == 2
    assert parts.trainer["logger"].save_dir == str(tmp_path)
    assert "devices" not in parts.trainer  # a default: the launcher decides it


def test_chains_and_restarts(tmp_path: Path) -> None:
    recipe, _, chains = read("digits_sgmcmc")
    assert (recipe.numbers, chains) == ("chains", 4)
    assert recipe.build([5], 0, str(tmp_path)).strategy.ids == [5]  # type: ignore[attr-defined]
    recipe, _, members = read("digits_vi", "--model.init_args.seed", "3")
    assert (recipe.takes_members, members) == (False, None)
    first, second = (recipe.build([0], 0, str(tmp_path)).strategy for _ in range(2))
    assert first.noise.stream.seed != second.noise.stream.seed  # type: ignore[attr-defined]


def test_what_must_not_change_between_two_starts() -> None:
    first, _, _ = read("digits_ensemble")
    longer, _, _ = read("digits_ensemble", "--trainer.max_epochs", "99")
    more, _, _ = read("digits_ensemble", "--model.init_args.members", "3")
    other, _, _ = read("digits_ensemble", "--data.init_args.batch_size", "32")
    assert first.description() == longer.description() == more.description()
    assert first.description() != other.description()


def test_without_a_strategy() -> None:
    with pytest.raises(ConfigurationError, match="launch needs a strategy, and none is named"):
        read_configuration([])
