"""The command line: ``lightning-bnn fit|validate|test|predict|report|prune|compare|launch|status``.

The first word is the command; the words after it belong to that command. ``fit``,
``validate``, ``test`` and ``predict`` are Lightning's own command line, where a YAML file names
everything (strategy, network, likelihood, prior, optimizer, data, callbacks) and options change
single values::

    lightning-bnn fit --config configs/digits_vi.yaml --trainer.max_epochs 5
    lightning-bnn test --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt

``fit`` saves the posterior in ``<log_dir>/posterior`` or where ``--posterior`` says, unless a
SampleCollector has written its draws already. The other
three take a checkpoint (``--ckpt_path``) or a posterior of any kind (``--posterior``). ``predict``
writes ``<log_dir>/predictions.csv``, unless the configuration has a prediction writer. ``report``
compares saved posteriors (see :mod:`lightning_bnn.report.command`), and ``prune`` removes from one
what carries least signal (see :mod:`lightning_bnn.pruning.command`). ``compare`` weighs models by
their evidence and by stacking (see :mod:`lightning_bnn.evidence.command`). ``launch`` runs many
members of a configuration with Ray (see :mod:`lightning_bnn.commands.launch`), and ``status`` shows
them.

A configuration is used only where it is given by ``--config`` or ``--data``; one that lies beside a
posterior is not. It may name this package's functions to choose Bayesian weights, and those of a
module that ``--import MODULE`` names.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from argparse import Action, ArgumentParser
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from jsonargparse import DefaultHelpFormatter, get_loader, set_loader

import lightning_bnn.data
import lightning_bnn.nets  # noqa: F401  imported so that short names and --help know its classes
from lightning_bnn.callbacks import PredictionWriter, SWAGMoments
from lightning_bnn.checks import printable
from lightning_bnn.errors import ConfigurationError, LightningBNNError
from lightning_bnn.launch import load_posterior
from lightning_bnn.lightning import (
    PACKAGE,
    BasePredictionWriter,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
    pl,
)
from lightning_bnn.selection import allow_functions, look_in_current_folder, named_function
from lightning_bnn.strategies.base import Strategy

__all__ = ["LIGHTNING_COMMANDS", "OTHER_COMMANDS", "BayesianCLI", "main"]

PROGRAM = "lightning-bnn"
LIGHTNING_COMMANDS = {
    "fit": "Train a strategy and save the posterior.",
    "validate": "Measure on the validation data.",
    "test": "Measure on the test data.",
    "predict": "Predict, and write the predictions to a CSV file.",
}
# What it does, and the module whose main(words) runs it; imported only when it is used.
OTHER_COMMANDS = {
    "report": ("Say how far saved posteriors can be trusted, on one page.", "report.command"),
    "prune": (
        "Remove the weights of a saved posterior that carry least signal.",
        "pruning.command",
    ),
    "compare": (
        "Weigh saved posteriors of different models: evidence and stacking.",
        "evidence.command",
    ),
    "launch": (
        "Train many members or chains with Ray, on this machine or on a cluster.",
        "commands.launch",
    ),
    "status": ("Show how far a launched run is, from any machine.", "commands.status"),
    "demo": ("Fit small data sets in several ways, and write a calibration report.", "demo"),
}

# Lightning's own texts speak of much that does not concern this command line.
HELP = {
    "config": "YAML file with the configuration; later ones change earlier ones.",
    "seed_everything": "Seed of every random number; True draws one.",
    "posterior": "Folder or URL of the posterior. fit saves it there (<log_dir>/posterior if left "
    "out); validate, test and predict read it.",
    "ckpt_path": "Checkpoint file. fit resumes from it exactly; validate, test and predict take "
    "the weights from it.",
    "weights_only": "Whether a checkpoint may hold nothing but tensors and plain values.",
    "verbose": "Print the results.",
}
# Titles of groups of options, by an option that is in the group, in the order of the help.
TITLES = {
    "help": "options",
    "ckpt_path": "checkpoint",
    "model": "strategy",
    "data": "data",
    "trainer": "trainer (Lightning's own options)",
}
# Longer lists of known classes (every layer of torch) would hide the help around them.
LONGEST_LIST = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    Args:
        argv: The words after ``lightning-bnn``; those of the command line if None.

    Example:
        >>> main(["--help"])
        usage: lightning-bnn COMMAND [options]
        <BLANKLINE>
        Bayesian neural networks as an ordinary PyTorch Lightning job.
        ...
        0
    """
    words, modules = take_imports(sys.argv[1:] if argv is None else argv)
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help", "--version"):
        print(version("lightning-bnn") if command == "--version" else overview())
        return 0
    try:
        for name in modules:
            allow_functions(name)
        if command in {*LIGHTNING_COMMANDS, "launch"}:
            look_in_current_folder()
        if command in LIGHTNING_COMMANDS:
            with warnings.catch_warnings():
                # Lightning's use of torch, which no user can change
                warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
                BayesianCLI.run(words)
            return 0
        if command in OTHER_COMMANDS:
            module = importlib.import_module(f"lightning_bnn.{OTHER_COMMANDS[command][1]}")
            # these may not look up to the launcher, whose runs they read all the same
            reads = {"load": load_posterior} if command in ("report", "prune", "compare") else {}
            return module.main(rest, **reads) or 0
    except Exception as error:
        own = find_own_error(error)
        if own is None:
            raise
        # It says what is wrong and how to put it right; a traceback would hide that.
        lines = [printable(line) for line in str(own).split("\n")]  # it may quote a file
        print(f"lightning-bnn {command}: " + "\n".join(lines), file=sys.stderr)
        return 1
    print(f"lightning-bnn: no command {command!r}.\n\n{overview()}", file=sys.stderr)
    return 2


def take_imports(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without ``--import MODULE``, which every command takes, and the modules.

    Only the command line has this option: a configuration must not choose what is imported.

    Example:
        >>> take_imports(["fit", "--import", "choices", "--config", "c.yaml"])
        (['fit', '--config', 'c.yaml'], ['choices'])
    """
    parser = ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--import", action="append", default=[], dest="modules", metavar="MODULE")
    options, rest = parser.parse_known_args(list(words))
    return rest, options.modules


def overview() -> str:
    """The text of ``lightning-bnn --help``."""
    commands = {**LIGHTNING_COMMANDS, **{name: text for name, (text, _) in OTHER_COMMANDS.items()}}
    width = max(map(len, commands))
    lines = "\n".join(f"  {name:{width}}  {text}" for name, text in commands.items())
    return f"""usage: lightning-bnn COMMAND [options]

Bayesian neural networks as an ordinary PyTorch Lightning job.

commands:
{lines}

lightning-bnn COMMAND --help shows the options of a command. Each takes --import MODULE: a module of
your own, from the current folder too, whose functions a configuration may name. Start with
  lightning-bnn fit --config configs/digits_vi.yaml"""


def find_own_error(error: BaseException | None) -> LightningBNNError | None:
    """The error of this package that caused another one; the parser wraps what constructors raise.

    Example:
        >>> try:
        ...     raise ValueError("cannot make a prior") from ConfigurationError("scale is -1")
        ... except ValueError as error:
        ...     find_own_error(error)
        ConfigurationError('scale is -1')
    """
    while error is not None and not isinstance(error, LightningBNNError):
        error = error.__cause__
    return error


def in_this_lightning(text: str) -> str:
    """Class paths of either Lightning package as those of the one that is used.

    Example:
        >>> in_this_lightning("lightning.pytorch.loggers.CSVLogger").endswith(".loggers.CSVLogger")
        True
    """
    return re.sub(r"\b(pytorch_lightning|lightning\.pytorch)\.(?=[\w.]*[A-Z])", f"{PACKAGE}.", text)


_load_yaml = get_loader("yaml")
set_loader("yaml", lambda text: _load_yaml(in_this_lightning(text)))


class BayesianCLI(LightningCLI):
    """Lightning's command line for strategies, with the posterior at its end."""

    @classmethod
    def run(cls, arguments: list[str], **options: Any) -> BayesianCLI:
        """Parse the arguments and run the command that they begin with."""
        usage = "lightning-bnn {} --config FILE [options]"
        per_command = {
            name: {"description": text, "usage": usage.format(name)}
            for name, text in LIGHTNING_COMMANDS.items()
        }
        settings = {
            "subclass_mode_model": True,
            "subclass_mode_data": True,
            # One way to choose an optimizer: the strategy's own argument.
            "auto_configure_optimizers": False,
            "save_config_callback": _SaveFitConfig,
            "parser_class": _Parser,
            "parser_kwargs": per_command if options.get("run", True) else {},
        }
        return cls(Strategy, pl.LightningDataModule, args=arguments, **{**settings, **options})

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's commands; predictions go to files, so that there is nothing to return."""
        commands = LightningCLI.subcommands()
        commands["predict"] = commands["predict"] | {"return_predictions"}
        return commands

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--posterior``."""
        parser.add_argument("--posterior", type=str | None, default=None)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the words given to :func:`main`, whatever the process was started with."""
        self.config = parser.parse_args(args)

    def before_instantiate_classes(self) -> None:
        """Find a function that chooses the Bayesian weights; to the parser it is a string."""
        key = "model.init_args.bayesian"
        key = key if self.subcommand is None else f"{self.subcommand}.{key}"
        if (function := named_function(self.config.get(key))) is not None:
            self.config[key] = function

    def after_fit(self) -> None:
        """Save the posterior, and that of SWAG, on one rank."""
        given = self.config.fit.posterior
        # Asked for on every rank: Lightning broadcasts it.
        path = given or os.path.join(self.trainer.log_dir or ".", "posterior")
        if self.config.fit.trainer.fast_dev_run and given is None:
            return  # a trial run leaves nothing behind
        collector = getattr(self.model, "collector", None)
        streamed = collector.dirpath if collector is not None and len(collector) else None
        if streamed and (given is None or os.path.abspath(given) == os.path.abspath(streamed)):
            path = streamed  # the draws lie there already: no second copy of them
        elif self.trainer.is_global_zero:
            self.model.posterior().save(path)
        self._say(f"The posterior is in {path}")
        self._save_swag(f"{path.rstrip('/')}_swag")

    def _save_swag(self, path: str) -> None:
        """Save the posterior of SWAG beside the strategy's own; of several, each with a number."""
        swags = [callback for callback in self._callbacks() if isinstance(callback, SWAGMoments)]
        for number, callback in enumerate(swags, start=1):
            target = path if len(swags) == 1 else f"{path}_{number}"
            if callback.snapshots < 2:  # the fit stopped early
                self._say(
                    f"There is no posterior of SWAG in {target}: it needs 2 snapshots, and the fit "
                    f"took {callback.snapshots}"
                )
                continue
            # on every rank: all take part in what reads the training data
            posterior = callback.posterior()
            if self.trainer.is_global_zero:
                posterior.save(target)
            self._say(f"The posterior of SWAG is in {target}")

    def _callbacks(self) -> list[pl.Callback]:
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    def _say(self, text: str) -> None:
        if self.trainer.is_global_zero:
            print(text)

    def before_validate(self) -> None:
        """Find what to measure."""
        self._take_posterior()

    before_test = before_validate

    def before_predict(self) -> None:
        """Find what to predict with, and write to a file even if the configuration names none."""
        self._take_posterior()
        if not any(isinstance(callback, BasePredictionWriter) for callback in self._callbacks()):
            self._callbacks().append(PredictionWriter())

    def _take_posterior(self) -> None:
        """Let the strategy answer with the posterior that was named, if no checkpoint was."""
        options = self.config[self.subcommand]
        if options.ckpt_path is not None:
            return
        if options.posterior is None:
            raise ConfigurationError(
                f"{self.subcommand} needs a trained network: neither a checkpoint nor a posterior "
                "is given. Pass --ckpt_path FILE or --posterior FOLDER of an earlier fit."
            )
        strategy = self.model
        posterior = load_posterior(options.posterior, strategy.net, strategy.likelihood)
        strategy.posterior = lambda: posterior.to(strategy.device)

    def after_predict(self) -> None:
        """Say where the predictions are."""
        for callback in self._callbacks():
            if isinstance(callback, PredictionWriter):
                print("\n".join(f"The predictions are in {file}" for file in callback.files))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand == "predict":
            arguments["return_predictions"] = False
        return arguments


class _SaveFitConfig(SaveConfigCallback):
    """Keep the configuration of a fit; testing in the same folder must not replace it."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.overwrite = bool(self.config.get("ckpt_path"))  # a fit that resumes
            super().setup(trainer, pl_module, stage)


class _HelpFormatter(DefaultHelpFormatter):
    """Help without endless lists of classes."""

    def _get_help_string(self, action: Action) -> str:
        text = super()._get_help_string(action)
        before, _, classes = text.partition(", known subclasses: ")
        return f"{before})" if classes.count(",") >= LONGEST_LIST else text


class _Parser(LightningArgumentParser):
    """Help in the order of what a user of this package looks for; the trainer's options last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Defaults, because jsonargparse makes parsers of this class itself for --model.help.
        super().__init__(*args, **{"formatter_class": _HelpFormatter, "prog": PROGRAM, **kwargs})

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        for action in self._actions:
            action.help = HELP.get(action.dest, action.help)

        def place(group: Any) -> int:
            for number, (dest, title) in enumerate(TITLES.items()):
                if any(action.dest == dest for action in group._group_actions):
                    group.title = title
                    return number
            return len(TITLES)

        self._action_groups = sorted(self._action_groups, key=place)
        return super().format_help(*args, **kwargs)


if __name__ == "__main__":
    sys.exit(main())
