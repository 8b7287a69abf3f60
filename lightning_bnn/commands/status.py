"""``lightning-bnn status``: how a launched run stands, from any machine that reaches its storage.

``lightning-bnn status --storage s3://bucket/run7`` reads the records of a run and prints a table:
what each member does, where, how far it is, how long it will take, and why it has failed. It needs
neither Ray nor the program that was launched, and works while a run is under way as well as
afterwards. With ``--diagnose`` it says whether chains agree; for that it makes the network and the
data of the configuration that ``--config`` names. The one in the storage is not used by itself: who
can write there could have it run anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml
from rich.console import Console

from lightning_bnn.commands.launch import ConfigurationRecipe
from lightning_bnn.diagnostics import Diagnosis
from lightning_bnn.errors import ConfigurationError, LightningBNNError
from lightning_bnn.launch.progress import (
    Row,
    RunDisplay,
    count_members,
    run_eta,
    run_rows,
    run_table,
)
from lightning_bnn.launch.stored import StoredRun, diagnose_chains, load_run
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.networks import find_configuration, read_configuration

__all__ = ["main", "rows_as_json"]

# Where nobody looks at it through a window, there is room for all columns.
_WIDTH_IN_A_FILE = 140
_INTERRUPTED = 130  # what shells say of a command that was ended with Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code.

    Args:
        arguments: The words after ``lightning-bnn status``.

    Raises:
        ConfigurationError: There is no run in the storage, or it cannot be read.
    """
    options = _parser().parse_args(arguments)
    if options.json and (options.watch or options.diagnose):
        raise ConfigurationError(
            "--json prints the state of this moment alone. Leave --watch and --diagnose out."
        )
    if options.config is not None and not options.diagnose:
        raise ConfigurationError("--config is for --diagnose alone. Leave it out, or add that.")
    run, rows = _read(options.storage)
    recipe = _recipe(run.storage, options.config) if options.diagnose else None
    if options.json:
        print(json.dumps(rows_as_json(run.storage, rows), indent=2, allow_nan=False))
    elif options.watch:
        try:
            with RunDisplay(run) as display:
                display.wait()
        except KeyboardInterrupt:
            return _INTERRUPTED
    else:
        console = Console(width=None if sys.stdout.isatty() else _WIDTH_IN_A_FILE)
        console.print(run_table(rows, console.width))
    if options.diagnose:
        assert recipe is not None
        print(_diagnosis(run, recipe))
    return 0


def _recipe(storage: str, configuration: str | None) -> ConfigurationRecipe:
    """How the network and the data are made."""
    if configuration is None:
        file = find_configuration(storage)
        hint = "pass --config FILE, the configuration that was launched"
        if file is not None:
            hint = f"there is {file}: pass --config {file} if you trust it"
        raise ConfigurationError(
            f"--diagnose needs the network and the data; {hint}. Of a run that was launched from "
            "Python, call run.diagnose(), or "
            "diagnose(load_run(storage).posterior(net, running=True), inputs)."
        )
    content = read_configuration(configuration)
    if not isinstance(content.get("model"), dict):
        raise ConfigurationError(f"{configuration} has no model; it has {sorted(content)}.")
    return ConfigurationRecipe(yaml.safe_dump(content), None)


def _diagnosis(run: StoredRun, recipe: ConfigurationRecipe) -> Diagnosis:
    """R-hat and ESS of the chains so far, with the network and the data of the configuration."""
    with isolated_random_state(seed=0), tempfile.TemporaryDirectory() as folder:
        parts = recipe.build([0], 0, folder)
        posterior = run.posterior(parts.strategy.net, parts.strategy.likelihood, running=True)
        return diagnose_chains(posterior, run.members, parts.training_data())


def _read(storage: str) -> tuple[StoredRun, list[Row]]:
    try:
        run = load_run(storage)
        return run, run_rows(run, time.time())
    except LightningBNNError:
        raise
    except Exception as error:  # each kind of remote storage has errors of its own
        raise ConfigurationError(
            f"--storage {storage} cannot be read: {type(error).__name__}: {error}. Check the "
            "address, the network and what you are allowed to read."
        ) from error


def rows_as_json(storage: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The rows of a run and their summary, for a program.

    Example:
        >>> document = rows_as_json("runs/a", [Row((0, 1), "done", steps=40)])
        >>> document["summary"], document["units"][0]["members"], document["units"][0]["steps"]
        ({'members': 2, 'counts': {'done': 2}, 'eta': None}, (0, 1), 40)
    """
    counts = count_members(rows)
    summary = {"members": sum(counts.values()), "counts": counts, "eta": run_eta(rows)}
    return {"storage": storage, "summary": summary, "units": [asdict(row) for row in rows]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-bnn status",
        usage="lightning-bnn status --storage FOLDER [--watch | --json] [--diagnose --config FILE]",
        description="Show what the members of a launched run do, read from the storage of the run: "
        "from any machine, while it runs and afterwards.",
    )
    add = parser.add_argument
    add("--storage", required=True, metavar="FOLDER",
        help="the directory or the URL that the run was launched with")  # fmt: skip
    add("--watch", action="store_true",
        help="until the run ends: a live table on a terminal, some lines elsewhere")  # fmt: skip
    add("--diagnose", action="store_true",
        help="say below it whether the chains so far agree: R-hat and ESS")  # fmt: skip
    add("--config", metavar="FILE",
        help="for --diagnose: the configuration that was launched, which makes the network and the "
        "data; its copy in the storage is not used unless it is named here")  # fmt: skip
    add("--json", action="store_true", help="print the rows as JSON, for scripts")
    return parser
