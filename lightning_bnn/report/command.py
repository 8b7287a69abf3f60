"""Compare saved posteriors on test data, and write one page about them.

``lightning-bnn report --posterior runs/vi --posterior runs/chains --data configs/data/digits.yaml``
reads posteriors from their folders, predicts the test data, and writes ``report.html`` and
``report.json``. A posterior of known layers makes its network; for any other, ``--config`` names
the configuration of the fit. What lies beside a posterior is not used.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Sequence

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import Posterior
from lightning_bnn.report.document import check_page_name, folder_problem
from lightning_bnn.report.networks import (
    instantiate,
    load_configured,
    path_names,
    read_configuration,
)
from lightning_bnn.report.posteriors import report_posteriors

__all__ = ["main"]


def main(
    arguments: Sequence[str] | None = None, load: Callable[..., Posterior] = Posterior.load
) -> int:
    """Run the command and return the exit code.

    Args:
        arguments: The words after ``lightning-bnn report``.
        load: Reads a posterior from its folder.

    Raises:
        ConfigurationError: A folder, a file or a name is wrong.
    """
    options = _parser().parse_args(arguments)
    names = options.name or path_names(options.posterior)
    if len(names) != len(options.posterior) or len(set(names)) != len(names) or "" in names:
        raise ConfigurationError(
            f"--name is given once for each --posterior, each different: there are "
            f"{len(options.posterior)} posteriors and the names {names}."
        )
    folder = os.path.dirname(check_page_name(options.out)) or "."
    if (reason := folder_problem(folder)) is not None:  # before any work
        raise ConfigurationError(f"--out cannot be written to {folder!r} ({reason}).")
    files = dict(text.partition("=")[::2] for text in options.ood)
    if len(files) != len(options.ood) or not all(name and file for name, file in files.items()):
        raise ConfigurationError(
            "--ood is expected as NAME=FILE, such as rotated=configs/data/digits_rotated.yaml, "
            f"once for each name; got {options.ood}."
        )
    posteriors = {
        name: load_configured(path, options.config, load)
        for name, path in zip(names, options.posterior, strict=True)
    }
    data = instantiate(read_configuration(options.data), "data", options.data)
    ood = {
        name: instantiate(read_configuration(file), "data", file) for name, file in files.items()
    }
    with warnings.catch_warnings():
        # Lightning's advice on workers of loaders is no part of a report
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        made = report_posteriors(posteriors, data, ood=ood, draws=options.draws)
    saved = made.save(options.out)
    print(f"{made}\nThe report is in {saved}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-bnn report",
        usage="lightning-bnn report --posterior FOLDER [--posterior FOLDER ...] --data FILE "
        "[options]",
        description="Write a page that says how far posteriors can be trusted, side by side: "
        "calibration, scores with intervals, what to do, and how out-of-distribution data are told "
        "apart. A posterior of known layers says how its network is made; for a network of your "
        "own, pass --config.",
    )
    add = parser.add_argument
    # fmt: off
    add("--posterior", action="append", required=True, metavar="FOLDER",
        help="folder or URL of a posterior, or of the run that holds it; give it several times to "
        "compare")
    add("--data", required=True, metavar="FILE",
        help="YAML file with class_path and init_args of a data module, or the configuration of a "
        "fit; its test data are used, and its validation data for the temperature")
    add("--out", default="report.html", metavar="FILE",
        help="the page; the numbers go beside it as .json (default: report.html)")
    add("--ood", action="append", default=[], metavar="NAME=FILE",
        help="out-of-distribution data: a name, and a YAML file as for --data; may be repeated")
    add("--name", action="append", metavar="NAME",
        help="name of a posterior in the report, once for each; by default the folder's")
    add("--config", metavar="FILE",
        help="configuration of the fit: its network is taken for every posterior that it fits; a "
        "config.yaml beside a posterior is used only if it is named here")
    add("--draws", type=int, metavar="N",
        help="draws of each posterior; by default 32, or all that are stored")
    # fmt: on
    return parser
