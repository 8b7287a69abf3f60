"""Test log-likelihood and RMSE on the UCI regression sets, beside published figures.

``python -m benchmarks.uci --method ensemble --data-dir DIR`` (``laplace``, ``ivon``) trains on the
standard splits of each set (see :mod:`lightning_bnn.data.uci`) and prints the mean over the
splits and its standard error, in the unit of the target, beside the published rows of
:mod:`benchmarks.published`. The log-likelihood is that of the mixture, not of a Gaussian with its
moments.

How the networks are trained, and what is chosen on which data: :mod:`benchmarks.uci_ensemble`, and
:mod:`benchmarks.uci_single` for methods of one network.

Bar, for ensembles: a log-likelihood at least as high as the published deep ensembles' on five of
the seven sets boston, concrete, energy, yacht, power, kin8nm and wine. The mean counts as it is,
not rounded.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import versions, write
from benchmarks.published import DEEP_ENSEMBLE, SOURCES, Figure, Metric, published
from benchmarks.uci_ensemble import SETTINGS, run_ensemble
from benchmarks.uci_single import STRATEGIES, run_single, settings
from lightning_bnn.data.uci import UCIName
from lightning_bnn.errors import ConfigurationError

__all__ = ["main"]

NAMES: dict[str, UCIName] = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "yacht": "yacht",
    "power": "power-plant",
    "kin8nm": "kin8nm",
    "wine": "wine-quality-red",
    "naval": "naval-propulsion-plant",
    "protein": "protein-tertiary-structure",
}
SEVEN = list(NAMES)[:7]
BAR = 5
METHODS: dict[str, tuple[str, Callable[..., list[dict[str, Any]]]]] = {
    "ensemble": (SETTINGS, run_ensemble),
    **{name: (settings(name), partial(run_single, name)) for name in STRATEGIES},
}
TITLES: dict[Metric, str] = {
    "log_likelihood": "test log-likelihood (higher is better)",
    "rmse": "RMSE (lower is better)",
}


def mean_and_error(values: Sequence[float]) -> Figure:
    """The mean over the splits and its standard error, which one split does not have.

    >>> mean_and_error([1.0, 2.0, 3.0])
    Figure(mean=2.0, spread=0.5773502691896258)
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Figure(statistics.fmean(values), error)


def cell(figure: Figure) -> str:
    """A figure as text, with two decimals as the published ones.

    >>> cell(Figure(-2.406, 0.0549)), cell(Figure(0.09))
    ('-2.41±0.05', '0.09')
    """
    spread = "" if figure.spread is None else f"±{figure.spread:.2f}"
    return f"{figure.mean:.2f}{spread}"


def print_table(metric: Metric, measured: Mapping[str, Figure], method: str) -> None:
    headings = [method, *(row.name + (" (sd)" if row.spread == "sd" else "") for row in SOURCES)]
    widths = [max(14, len(heading) + 2) for heading in headings]
    print(f"\n{TITLES[metric]}")
    print("  " + "".join([f"{'set':10}", *map(_pad, headings, widths)]).rstrip())
    for name, figure in measured.items():
        rows = [figure, *(published(row.name, metric, name) for row in SOURCES)]
        print("  " + "".join([f"{name:10}", *map(_pad, map(cell, rows), widths)]).rstrip())


def _pad(text: str, width: int) -> str:
    return text.ljust(width)


def judge(measured: Mapping[str, Figure]) -> dict[str, bool]:
    """For each set whether the log-likelihood is at least the published deep ensembles'.

    >>> judge({"boston": Figure(-2.4101), "yacht": Figure(-1.18)})
    {'boston': False, 'yacht': True}
    """
    bars = {name: published(DEEP_ENSEMBLE, "log_likelihood", name).mean for name in measured}
    return {name: figure.mean >= bars[name] for name, figure in measured.items()}


def print_verdict(verdicts: Mapping[str, bool], bar: bool = True) -> None:
    """Say on how many sets the published figure was reached; a bar is for all of the seven."""
    complete = bar and set(verdicts) >= set(SEVEN)
    counted = SEVEN if complete else list(verdicts)
    below = [name for name in counted if not verdicts[name]]
    reached = len(counted) - len(below)
    word = ("pass  " if reached >= BAR else "FAIL  ") if complete else ""
    print(
        f"\n{word}log-likelihood at least the {DEEP_ENSEMBLE} figure on {reached} of "
        f"{len(counted)} sets{f' (at least {BAR})' if complete else ''}"
        + (f"; not on {', '.join(below)}" if below else "")
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.uci",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--method", choices=list(METHODS), default="ensemble")
    parser.add_argument(
        "--sets", nargs="+", choices=list(NAMES), default=list(NAMES), metavar="SET",
        help=f"{', '.join(NAMES)}; by default all",
    )  # fmt: skip
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR",
        help="the folder that holds bostonHousing/data.txt (default $LIGHTNING_BNN_DATA/uci)",
    )  # fmt: skip
    parser.add_argument(
        "--splits", type=int, default=20, help="the first so many (default 20; protein has 5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args(arguments)
    if not 1 <= options.splits <= 20:
        parser.error(f"--splits is 1 to 20; got {options.splits}")
    return options


def without_place(arguments: Sequence[str]) -> list[str]:
    """The arguments as they are kept: where data and files lie is of no interest.

    >>> without_place(["--data-dir", "/home/me/uci", "--splits", "2", "--json", "/tmp/a.json"])
    ['--data-dir', 'DIR', '--splits', '2', '--json', 'a.json']
    """
    kept = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before in ("--data-dir", "--run"):
            kept.append("DIR")
        else:
            elsewhere = before == "--json" and Path(argument).is_absolute()
            kept.append(Path(argument).name if elsewhere else argument)
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, test, print the tables, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    described, run = METHODS[options.method]
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)  # a notice for every fit
    print(f"{options.method}: {described}", flush=True)
    sets: dict[str, Any] = {}
    result = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": versions(["lightning-bnn"]),
        "settings": described,
        "sets": sets,
    }
    figures: dict[Metric, dict[str, Figure]] = {"log_likelihood": {}, "rmse": {}}
    for name in dict.fromkeys(options.sets):
        splits = range(min(options.splits, 5) if name == "protein" else options.splits)
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's advice on loaders
            try:
                found = run(NAMES[name], splits, options.data_dir)
            except ConfigurationError as error:
                raise SystemExit(f"benchmarks.uci: {error}") from error
        seconds = time.perf_counter() - begin
        for metric, by_set in figures.items():
            by_set[name] = mean_and_error([one[metric] for one in found])
        recipes = Counter(one["recipe"] for one in found)
        chosen = "; ".join(f"{count} x {recipe}" for recipe, count in sorted(recipes.items()))
        print(
            f"{name}: log-likelihood {cell(figures['log_likelihood'][name])}, RMSE "
            f"{cell(figures['rmse'][name])} in {seconds:.0f} s; splits: {chosen}",
            flush=True,
        )
        sets[name] = {
            **{metric: by_set[name]._asdict() for metric, by_set in figures.items()},
            "seconds": round(seconds, 1),
            "splits": found,
        }
        result["at_least_published_deep_ensemble"] = judge(figures["log_likelihood"])
        write(options.json, "uci", without_place(arguments), result)  # what is done is kept
    for metric, by_set in figures.items():
        print_table(metric, by_set, "here")
    print("\n± is a standard error over the splits; (sd): a standard deviation, as published.")
    print_verdict(judge(figures["log_likelihood"]), bar=options.method == "ensemble")


if __name__ == "__main__":
    main()
