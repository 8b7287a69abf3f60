"""Show how a launched run stands, from any machine that reaches its storage.

``lightning-bnn status --storage s3://bucket/run7`` reads the records of a run and prints a table:
what each member does, where, how far it is, and how long it will take. It needs neither Ray nor the
program that was launched, and works while a run is under way as well as afterwards.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from lightning_bnn.errors import ConfigurationError, LightningBNNError
from lightning_bnn.launch.live import RunDisplay
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.rows import Row, run_rows
from lightning_bnn.launch.summary import summarise
from lightning_bnn.launch.table import rich_table

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
    if options.watch and options.json:
        raise ConfigurationError("--json prints the state of this moment. Leave --watch out.")
    records, rows = _read(options.storage)
    if options.json:
        print(json.dumps(rows_as_json(records.storage, rows), indent=2, allow_nan=False))
    elif options.watch:
        try:
            with RunDisplay(records) as display:
                display.wait()
        except KeyboardInterrupt:
            return _INTERRUPTED
    else:
        width = None if sys.stdout.isatty() else _WIDTH_IN_A_FILE
        Console(width=width).print(rich_table(rows))
    return 0


def _read(storage: str) -> tuple[RunRecords, list[Row]]:
    try:
        records = RunRecords(storage)
        return records, run_rows(records, time.time())
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
        >>> found = rows_as_json("runs/a", [Row((0, 1), "done", steps=40)])
        >>> found["summary"], found["units"][0]["members"], found["units"][0]["steps"]
        ({'members': 2, 'counts': {'done': 2}, 'eta': None}, (0, 1), 40)
    """
    return {
        "storage": storage,
        "summary": asdict(summarise(rows)),
        "units": [{**asdict(row), "ended": row.ended} for row in rows],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-bnn status",
        usage="lightning-bnn status --storage FOLDER [--watch | --json]",
        description="Show what the members of a launched run do, read from the storage of the run: "
        "from any machine, while it runs and afterwards.",
    )
    parser.add_argument(
        "--storage", required=True, metavar="FOLDER",
        help="the directory or the URL that the run was launched with",
    )  # fmt: skip
    parser.add_argument(
        "--watch", action="store_true",
        help="go on until the run ends: a live table on a terminal, a line now and then elsewhere",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, for scripts")
    return parser
