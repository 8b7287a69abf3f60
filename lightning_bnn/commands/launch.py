"""``lightning-bnn launch``: many members of a configuration on a cluster of Ray.

The configuration is that of ``lightning-bnn fit``, and options after it change single values::

    lightning-bnn launch --config configs/mnist_ensemble.yaml --members 20 --storage runs/ensemble
    lightning-bnn status --storage runs/ensemble

On a cluster, ``ray job submit --working-dir . -- lightning-bnn launch …`` does the same. Started
again with the same storage, it runs only what is missing. The posterior of the run is read from its
storage: ``lightning-bnn test --config … --posterior runs/ensemble``.
"""

from __future__ import annotations

import argparse
import inspect
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import yaml

from lightning_bnn.checks import is_whole
from lightning_bnn.cli import BayesianCLI
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.progress import RunDisplay
from lightning_bnn.launch.ray_backend import RayBackend
from lightning_bnn.launch.recipe import Parts
from lightning_bnn.launch.run import LaunchedRun, launch_recipe
from lightning_bnn.lightning import pl
from lightning_bnn.selection import allow_functions, allowed_modules
from lightning_bnn.strategies.base import Strategy

__all__ = ["ConfigurationRecipe", "main", "read_recipe"]


def main(arguments: Sequence[str]) -> int:
    """Launch a run, show it until it ends, and say where its posterior is."""
    options, rest = _parser().parse_known_args(list(arguments))
    recipe, seed, named = read_recipe(rest)
    members = named if options.members is None else options.members
    if members is None:
        raise ConfigurationError(
            "launch needs the number of members: the configuration names none. Pass --members N."
        )
    if options.stack > 1 and recipe.ids_option is None:
        raise ConfigurationError(
            f"--stack {options.stack}: the strategy of the configuration trains one network, so "
            "that members cannot be stacked. Leave --stack out."
        )
    resources = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
    settings = ("storage", "stack", "on_failure", "min_members", "retries")
    run = launch_recipe(
        recipe,
        RayBackend(resources, options.devices, options.address, options.allow_open_cluster),
        members,
        seed=seed if options.seed is None else options.seed,
        checkpoint_seconds=options.checkpoint_seconds,
        lost_after=options.lost_after,
        **{name: getattr(options, name) for name in settings},
    )
    try:
        run.records.files.put("config.yaml", recipe.text.encode())
        with RunDisplay(run) as display:
            for result in run.as_completed():
                display.ended(result)
    except BaseException:
        run.cancel()
        raise
    if any("draws" in result for result in run.committed().values()):
        print(_diagnosis(run))
    done = sum(result.ok for result in run.results())
    print(f"The posterior of {done} members is in {run.storage}")
    return 0


def _diagnosis(run: LaunchedRun) -> str:
    """Whether the chains agree, or why that cannot be said."""
    try:
        return str(run.diagnose())
    except Exception as error:  # too few draws, no ArviZ, no data on this machine
        return f"No R-hat: {type(error).__name__}: {error}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-bnn launch",
        description="Train many members or chains of a configuration with Ray, each by a fit of "
        "its own, and leave one posterior in the storage.",
        epilog="All other options change the configuration, as for fit: "
        "--trainer.max_epochs 5, --model.init_args.prior.init_args.scale 0.5.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--members", type=int, help="how many members or chains (default: the configuration's)")
    add("--storage", required=True, metavar="DIR|URL",
        help="a directory that all nodes share, or a URL such as s3://…")  # fmt: skip
    add("--stack", type=int, default=1, help="members that one task trains side by side")
    add("--cpus", type=float, default=1.0, help="CPUs of each device of a task")
    add("--gpus", type=float, default=0.0, help="GPUs of each device of a task, at most 1")
    add("--devices", type=int, default=1, help="devices of each member, by DDP")
    add("--seed", type=int, help="root of all seeds (default: the configuration's)")
    add("--on-failure", choices=("raise", "skip"), default="raise",
        help="what to do when a member failed for good, after all others are done")  # fmt: skip
    add("--min-members", type=int, default=1, help="with skip, the least number to continue with")
    add("--retries", type=int, default=3, help="tries in a row that get no further")
    add("--checkpoint-seconds", type=float, default=60.0, help="least time between checkpoints")
    add("--lost-after", type=float, default=120.0,
        help="seconds without a sign of life after which a member starts elsewhere")  # fmt: skip
    add("--address", help="cluster of Ray to join (default: $RAY_ADDRESS, or a new one here)")
    add("--allow-open-cluster", action="store_true",
        help="use a cluster without token authentication")  # fmt: skip
    return parser


# -------------------------------------------------------------------- a recipe from a configuration


class _PartsCLI(BayesianCLI):
    """Lightning's command line, which makes the parts of a fit and leaves the fitting to others."""

    trainer_options: dict[str, Any]

    @classmethod
    def make(cls, arguments: Sequence[str]) -> _PartsCLI:
        made = cls.run(list(arguments), run=False, save_config_callback=None)
        assert isinstance(made, _PartsCLI)
        return made

    def _set_seed(self) -> None:
        """The launcher has done so, by the number of the member."""

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
    """A recipe from the YAML file of a local fit: the same file runs on one machine or on many.

    Attributes:
        text: The whole configuration as YAML, with all changes made.
        ids_option: The strategy's argument for the numbers of members, if it has one.
        modules: Those whose functions it may name.
    """

    text: str
    ids_option: str | None
    modules: tuple[str, ...] = ()

    def build(self, members: Sequence[int], seed: int, folder: str) -> Parts:
        """Make all parts anew, with the global generators as they are."""
        for module in self.modules:
            allow_functions(module)
        configuration = yaml.safe_load(self.text)
        options = configuration["model"].setdefault("init_args", {})
        if self.ids_option is not None:
            options[self.ids_option], options["seed"] = list(members), seed
        elif "seed" in options:
            options["seed"] = None  # then the number of the member decides it
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
        if self.ids_option is not None:
            for name in (self.ids_option, "seed"):
                decides["model"].get("init_args", {}).pop(name, None)
        text = yaml.safe_dump(decides, sort_keys=True)
        return {"configuration": sha256(text.encode()).hexdigest()[:16]}


def read_recipe(arguments: Sequence[str]) -> tuple[ConfigurationRecipe, int, int | None]:
    """The recipe that ``--config FILE`` and the options after it stand for.

    Returns:
        The recipe, the seed, and the number of members that the configuration names, if it does.

    Raises:
        ConfigurationError: No strategy is named.
    """
    if not {word.partition("=")[0] for word in arguments} & {"--config", "-c", "--model"}:
        raise ConfigurationError(
            "launch needs a strategy, and none is named. Pass --config FILE, such as "
            "configs/digits_ensemble.yaml."
        )
    parsed = _ParsedCLI.make(arguments)
    configuration = parsed.config
    options = configuration.get("model.init_args") or {}
    ids_option = next((name for name in ("members", "chains") if name in options), None)
    ids = None if ids_option is None else options[ids_option]
    count = len(ids) if isinstance(ids, (list, tuple)) else ids
    seeds: list[Any] = [options.get("seed"), configuration.get("seed_everything"), 0]
    seed: int = next(seed for seed in seeds if is_whole(seed))
    text = parsed.parser.dump(configuration, skip_none=False, skip_validation=True)
    return ConfigurationRecipe(text, ids_option, allowed_modules()), seed, count
