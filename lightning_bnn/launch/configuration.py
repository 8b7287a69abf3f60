"""A recipe from the YAML file of a local fit: the same file runs on one machine or on many."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytorch_lightning as pl
import yaml

from lightning_bnn.cli import BayesianCLI, import_function
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.recipe import Parts
from lightning_bnn.strategies.base import Strategy

__all__ = ["ConfigurationRecipe", "read_configuration"]

# Where a strategy has the numbers of what it trains.
_NUMBERS = ("members", "chains")


class _PartsCLI(BayesianCLI):
    """Lightning's command line, which makes the parts of a fit and leaves the fitting to others."""

    trainer_options: dict[str, Any]

    @classmethod
    def make(cls, arguments: Sequence[str], only_parse: bool = False) -> _PartsCLI:
        chosen = _ParsedCLI if only_parse else cls
        made = chosen.run(list(arguments), run=False, save_config_callback=None)
        assert isinstance(made, _PartsCLI)
        return made

    def _set_seed(self) -> None:
        """The launcher has done so, by the number of the member."""

    def before_instantiate_classes(self) -> None:
        """Import a function that chooses the Bayesian weights; to the parser it is a string."""
        if (function := import_function(self.config.get("model.init_args.bayesian"))) is not None:
            self.config["model.init_args.bayesian"] = function

    def instantiate_trainer(self, **options: Any) -> Any:
        """Keep the options that are not Lightning's defaults."""
        given = dict(self._get(self.config_init, "trainer", default={}))
        defaults = inspect.signature(pl.Trainer.__init__).parameters
        self.trainer_options = {
            name: value
            for name, value in given.items()
            if name not in defaults or value != defaults[name].default
        }


class _ParsedCLI(_PartsCLI):
    def instantiate_classes(self) -> None:
        """Make nothing: the configuration alone is wanted."""


@dataclass(frozen=True)
class ConfigurationRecipe:
    """A recipe that is a configuration.

    Attributes:
        text: The whole configuration as YAML, with all changes made.
        numbers: The strategy's argument for the numbers of members, if it has one.
    """

    text: str
    numbers: str | None

    @property
    def takes_members(self) -> bool:
        """Whether the strategy is told which members to train."""
        return self.numbers is not None

    def build(self, members: Sequence[int], seed: int, folder: str) -> Parts:
        """Make all parts anew, with the global generators as they are."""
        configuration = yaml.safe_load(self.text)
        options = configuration["model"].setdefault("init_args", {})
        if self.numbers is not None:
            options[self.numbers], options["seed"] = list(members), seed
        elif "seed" in options:
            options["seed"] = None  # then the number of the member decides it
        _place_loggers(configuration.get("trainer", {}), folder)
        with tempfile.TemporaryDirectory() as place:
            path = os.path.join(place, "config.yaml")
            with open(path, "w", encoding="utf-8") as file:
                yaml.safe_dump(configuration, file)
            made = _PartsCLI.make(["--config", path])
        return Parts(made.model, made.datamodule, made.trainer_options)

    def build_strategy(self, members: Sequence[int], seed: int) -> Strategy:
        """Make the strategy; the data module is made with it, and dropped unused."""
        return self.build(members, seed, "").strategy

    def trainer_options(self) -> Mapping[str, Any]:
        """The options of the trainer, as they stand in the configuration."""
        return yaml.safe_load(self.text).get("trainer") or {}

    def description(self) -> dict[str, Any]:
        """The hash of what decides the members; the length of a fit may be changed."""
        configuration = yaml.safe_load(self.text)
        decides = {name: configuration.get(name) for name in ("model", "data")}
        if self.numbers is not None:
            for name in (self.numbers, "seed"):
                decides["model"].get("init_args", {}).pop(name, None)
        text = yaml.safe_dump(decides, sort_keys=True)
        return {"configuration": sha256(text.encode()).hexdigest()[:16]}


def _place_loggers(trainer: dict[str, Any], folder: str) -> None:
    """Let every logger with a directory write to the folder of the attempt."""
    loggers = trainer.get("logger")
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(logger, dict) and "save_dir" in logger.get("init_args", {}):
            logger["init_args"] |= {"save_dir": folder, "name": "logs"}


def read_configuration(arguments: Sequence[str]) -> tuple[ConfigurationRecipe, int, int | None]:
    """The recipe that ``--config FILE`` and the options after it stand for.

    Returns:
        The recipe, the seed, and the number of members that the configuration names, if it does.

    Raises:
        ConfigurationError: No strategy is named.
    """
    if not {word.partition("=")[0] for word in arguments} & {"--config", "-c", "--model"}:
        raise ConfigurationError(
            "launch needs a strategy, and none is named. Pass --config FILE, such as "
            "--config configs/digits_ensemble.yaml."
        )
    parsed = _PartsCLI.make(arguments, only_parse=True)
    configuration = parsed.config
    options = configuration.get("model.init_args") or {}
    numbers = next((name for name in _NUMBERS if name in options), None)
    named = None if numbers is None else options[numbers]
    count = len(named) if isinstance(named, (list, tuple)) else named
    seeds = (options.get("seed"), configuration.get("seed_everything"))
    seed = next((s for s in seeds if isinstance(s, int) and not isinstance(s, bool)), 0)
    text = parsed.parser.dump(configuration, skip_none=False, skip_validation=True)
    return ConfigurationRecipe(text, numbers), seed, count
