"""Every method with its defaults, beside plain Adam: what the first program of each gives.

``python -m benchmarks.defaults --data-dir DIR --json FILE`` fits plain Adam with early stopping,
the methods of this library, and other libraries where they are installed, each through
``Trainer.fit`` and with no number chosen but the epochs and the batch size, which are the same for
all methods of a set (:mod:`benchmarks.defaults_sets`; the methods are in
:mod:`benchmarks.defaults_methods` and :mod:`benchmarks.defaults_peers`). It prints a table for each
set, mean and standard error over the seeds, and judges the bars.

``vi``, ``sgmcmc`` and ``ensemble`` with other priors than the default one, N(0, 1), are measured
if ``--only`` names them: ``vi-fan-in``, ``vi-learned`` and so on. ``--held-out`` scores all on
training rows that are held out, by which a default may be chosen.

Each run has a process and a thread of its own, and an error in one is recorded as its result. The
file is written after each run; the same command again measures only what is missing.

Bars, over the seeds of a set: a method's NLL is at most plain Adam's, within twice the standard
error of the difference (seed by seed), on every set, and lower on most (randomised MAP, which has
one noise scale for all rows, against plain Adam that has one); the measured temperature of
each chain of SGMCMC is within 10 % of T = 1; nothing diverges or fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.defaults_methods import (
    ADAM,
    BASELINES,
    METHODS,
    OURS,
    PRIORS,
    Fitted,
    applies,
    fit,
    score,
)
from benchmarks.defaults_peers import PEERS
from benchmarks.defaults_sets import MOST_SEEDS, SETS, Problem, load
from benchmarks.options import versions, write
from benchmarks.published import SOURCES, Figure
from benchmarks.uci import mean_and_error, without_place
from lightning_bnn.data.in_memory import DATA_VARIABLE

__all__ = [
    "Job",
    "gathered",
    "main",
    "measure",
    "print_bars",
    "print_set",
    "run_all",
    "stands",
    "summarise",
]

TEMPERATURE = 1.0
OFF_AT_MOST = 0.1  # of T
LOGGERS = ("pytorch_lightning", "lightning.pytorch", "lightning.fabric", "lightning_utilities")
# what Lightning says in every fit
USUAL = (
    "does not have many workers", "LeafSpec", "logging interval", "GPU available", "TPU available",
    "litlogger", "`Trainer.fit` stopped", "Seed set to", "HPU available",
    "have no logger configured", "exists and is not empty",
)  # fmt: skip
COLUMNS = {
    "classification": {
        "nll": "NLL",
        "accuracy": "accuracy %",
        "ece": "ECE %",
        "auroc": "OOD AUROC",
    },
    "regression": {"nll": "NLL", "rmse": "RMSE", "coverage": "coverage of 90 %"},
}


class Job(NamedTuple):
    """One run."""

    name: str  # of the set
    method: str
    seed: int
    data_dir: Path | None = None
    quick: bool = False
    held_out: bool = False

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.name} {self.method} {self.seed}"

    def settings(self) -> dict[str, Any]:
        """What must be the same for a result in the file to stand."""
        chosen = SETS[self.name]
        full_batch = self.method == "hmc"
        return {
            "network": chosen.network,
            "epochs": chosen.transitions if full_batch else chosen.epochs,
            "batch_size": "all" if full_batch else chosen.batch_size,
            "quick": self.quick,
            **({"held_out": True} if self.held_out else {}),
        }


# ---------------------------------------------------------------- one run


def measure(job: Job, train: Callable[[str, Problem], Fitted] = fit) -> dict[str, Any]:
    """Fit and test; whatever goes wrong is part of the result."""
    record: dict[str, Any] = {"settings": job.settings()}
    with gathered() as (warned, notes):
        try:
            problem = load(job.name, job.seed, job.data_dir, job.quick, job.held_out)
            fitted = train(job.method, problem)
            record |= {
                "scores": score(fitted, problem),
                "seconds": round(fitted.seconds, 2),
                "cpu_seconds": round(fitted.cpu_seconds, 2),
                **fitted.facts,
            }
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
    values = [*record.get("scores", {}).values()]
    record["diverged"] = (
        "NonFiniteError" in record.get("error", "")
        or not all(map(math.isfinite, values))
        or bool(record.get("dropped_members"))
    )
    record["scores"] = {
        name: value if math.isfinite(value) else None
        for name, value in record.get("scores", {}).items()
    }
    return {**record, "warnings": warned, "notes": notes}


@contextmanager
def gathered() -> Iterator[tuple[list[str], list[str]]]:
    """Gather warnings, and what Lightning's loggers are told, each once; nothing is printed."""
    warned: list[str] = []
    notes: list[str] = []

    def add(texts: list[str], text: str) -> None:
        text = " ".join(text.split())
        if text not in texts and not any(usual in text for usual in USUAL):
            texts.append(text)

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            add(warned if record.levelno >= logging.WARNING else notes, record.getMessage())

    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(one.handlers, one.level, one.propagate) for one in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [Keep()], False
        logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield warned, notes
        for warning in caught:
            add(warned, f"{warning.category.__name__}: {warning.message}")
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.level, logger.propagate = handlers, level, propagate


# ---------------------------------------------------------------- all runs


def run_all(
    jobs: Sequence[Job],
    workers: int,
    keep: Callable[[Job, dict[str, Any]], None],
    run: Callable[[Job], dict[str, Any]] | None = None,
) -> None:
    """Measure each job in a process of its own, some at a time; with no workers in this one."""
    run = run or measure
    if not workers:
        for job in jobs:
            keep(job, run(job))
        return
    context = multiprocessing.get_context("spawn")
    waiting, running = list(jobs), dict[Any, tuple[Any, Job]]()
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(run, job, sender), daemon=True)
            process.start()
            sender.close()  # else its end would not be seen here
            running[receiver] = process, job
        for ready in wait(list(running)):
            process, job = running.pop(ready)
            try:
                record = ready.recv()  # type: ignore[union-attr]
                process.join()
            except EOFError:
                process.join()
                record = {
                    "settings": job.settings(),
                    "scores": {},
                    "error": f"the process ended with exit code {process.exitcode}",
                    "diverged": False,
                }
            keep(job, record)


def _work(run: Callable[[Job], dict[str, Any]], job: Job, sender: Connection) -> None:
    torch.set_num_threads(1)
    sender.send(run(job))


# ---------------------------------------------------------------- tables


def summarise(
    runs: Mapping[str, dict[str, Any]], methods: Iterable[str] = tuple(METHODS)
) -> dict[str, dict[str, dict[str, Any]]]:
    """By set and method: the scores over the seeds, and the difference from plain Adam."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for name in SETS:
        by_method: dict[str, dict[int, dict[str, Any]]] = {}
        for method in methods:
            for seed in range(MOST_SEEDS):
                record = runs.get(Job(name, method, seed).key)
                if record is not None:
                    by_method.setdefault(method, {})[seed] = record
        rows = {
            method: _row(seeds, by_method.get(BASELINES.get(method, ADAM), {}))
            for method, seeds in by_method.items()
        }
        if rows:
            summary[name] = rows
    return summary


def _row(seeds: Mapping[int, dict[str, Any]], adam: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"seeds": sorted(seeds)}
    done = {seed: one for seed, one in seeds.items() if "error" not in one}
    names = {name: None for one in done.values() for name in one["scores"]}
    scores = {name: [one["scores"][name] for one in done.values()] for name in names}
    row["scores"] = {
        name: mean_and_error(values)._asdict()
        for name, values in scores.items()
        if None not in values
    }
    nll = {seed: one["scores"]["nll"] for seed, one in done.items()}
    baseline = {s: one["scores"]["nll"] for s, one in adam.items() if "error" not in one}
    differences = [
        value - baseline[seed]
        for seed, value in nll.items()
        if value is not None and baseline.get(seed) is not None
    ]
    if differences:
        row["nll_less_adam"] = mean_and_error(differences)._asdict()
    shared = [seed for seed in done if "cpu_seconds" in adam.get(seed, {})]
    if shared:
        ours, plain = (
            statistics.fmean(runs[seed]["cpu_seconds"] for seed in shared) for runs in (done, adam)
        )
        row["cost"] = ours / max(plain, 1e-9)
    for fact in ("rhat", "median_rhat"):
        values = [one[fact] for one in done.values() if fact in one]
        if values:
            row[fact] = max(values)
    temperatures = [value for one in done.values() for value in one.get("temperatures", [])]
    if temperatures:
        row["temperatures"] = [min(temperatures), max(temperatures)]
    row["diverged"] = [seed for seed, one in seeds.items() if one["diverged"]]
    row["errors"] = {str(s): one["error"] for s, one in seeds.items() if "error" in one}
    row["warnings"] = sorted({text for one in seeds.values() for text in one.get("warnings", [])})
    return row


def print_set(name: str, rows: Mapping[str, dict[str, Any]]) -> None:
    """One set as a table in Markdown, with the published rows, and what was said below it."""
    columns = COLUMNS[SETS[name].task]
    headings = ["method", *columns.values(), "R-hat, median / worst", "T of the chains", "cost"]
    print(f"\n### {name}: {SETS[name].network}\n")
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for method, row in rows.items():
        cells = [_cell(score, row["scores"].get(score)) for score in columns]
        cells += [
            f"{row['median_rhat']:.2f} / {row['rhat']:.2f}" if "rhat" in row else "",
            "{:.2f} to {:.2f}".format(*row["temperatures"]) if "temperatures" in row else "",
            f"{row['cost']:.1f}" if "cost" in row else "",
        ]
        remark = " (diverged)" * bool(row["diverged"]) + " (failed)" * bool(row["errors"])
        print(f"| {method}{remark} | {' | '.join(cells)} |")
    if SETS[name].task == "regression":
        for source in SOURCES:
            likelihood = source.log_likelihood[name]
            figures = [Figure(-likelihood.mean, likelihood.spread), source.rmse[name]]
            cells = [_cell("nll", figure._asdict()) for figure in figures] + [""] * 4
            print(f"| *{source.name}*{' (sd)' * (source.spread == 'sd')} | {' | '.join(cells)} |")
    print()
    for method, row in rows.items():
        for seed, error in row["errors"].items():
            print(f"- {method}, seed {seed}: {_short(error, 300)}")
        for text in row["warnings"]:
            print(f"- {method} warned: {_short(text)}")


def _cell(score: str, figure: Mapping[str, Any] | None) -> str:
    """A figure as text; shares in per cent.

    >>> _cell("nll", {"mean": 0.1234, "spread": 0.01})
    '0.123±0.010'
    >>> _cell("ece", {"mean": 0.012, "spread": None})
    '1.2'
    """
    if figure is None:
        return ""
    factor, digits = (100, 1) if score in ("accuracy", "ece", "coverage") else (1, 3)
    spread = figure["spread"]
    error = "" if spread is None else f"±{factor * spread:.{digits}f}"
    return f"{factor * figure['mean']:.{digits}f}{error}"


def _short(text: str, size: int = 110) -> str:
    return text if len(text) <= size else text[:size].rsplit(" ", 1)[0] + " ..."


# ---------------------------------------------------------------- bars


def judge(summary: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The bars of our methods: what is asked, whether it holds, and where it does not."""
    bars: list[dict[str, Any]] = []
    for method in OURS:
        rows = {name: row[method] for name, row in summary.items() if method in row}
        compared = {n: row["nll_less_adam"] for n, row in rows.items() if "nll_less_adam" in row}
        if compared:
            above = {n: d for n, d in compared.items() if d["mean"] > 2 * (d["spread"] or 0.0)}
            lower = [name for name, d in compared.items() if d["mean"] < 0]
            where = ", ".join(f"{n} (+{d['mean']:.3f})" for n, d in above.items())
            bars += [
                _bar(f"{method}: NLL at most plain Adam's on every set", not above, where),
                _bar(
                    f"{method}: NLL below plain Adam's on most sets",
                    2 * len(lower) > len(compared),
                    f"{len(lower)} of {len(compared)}",
                ),
            ]
        if method == "sgmcmc" and rows:
            ranges = {n: row["temperatures"] for n, row in rows.items() if "temperatures" in row}
            off = {
                name: pair
                for name, pair in ranges.items()
                if max(abs(value / TEMPERATURE - 1) for value in pair) > OFF_AT_MOST
            }
            off |= {name: [] for name in rows if name not in ranges}
            where = ", ".join(
                f"{n} ({pair[0]:.2f} to {pair[1]:.2f})" if pair else f"{n} (not measured)"
                for n, pair in off.items()
            )
            bars.append(_bar(f"{method}: temperature within 10 % of T", not off, where))
        failed = [name for name, row in rows.items() if row["diverged"] or row["errors"]]
        if rows:
            bars.append(
                _bar(f"{method}: nothing diverged or failed", not failed, ", ".join(failed))
            )
    return bars


def _bar(text: str, passed: bool, where: str) -> dict[str, Any]:
    return {"bar": text, "passed": passed, "where": where}


def print_bars(bars: Sequence[Mapping[str, Any]]) -> None:
    print("\nbars:")
    for bar in bars:
        where = f"; {bar['where']}" if bar["where"] else ""
        print(f"  {'pass' if bar['passed'] else 'FAIL'}  {bar['bar']}{where}")


# ---------------------------------------------------------------- the program


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.defaults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", default=os.environ.get(DATA_VARIABLE),
        help=f"the folder that holds uci, mnist, notmnist_test and cifar10 (default "
        f"${DATA_VARIABLE}); digits need none",
    )  # fmt: skip
    names = ", ".join(METHODS)
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="METHOD", help=names)
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), metavar="SET", help=", ".join(SETS)
    )
    parser.add_argument("--seeds", type=int, default=3, help="the first so many (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results here")
    parser.add_argument("--fresh", action="store_true", help="measure what is in the file again")
    parser.add_argument(
        "--workers", type=int, default=2,
        help="processes at a time, of one thread each (default 2; 0: none but this one)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one seed, few rows and 60 steps")
    parser.add_argument(
        "--held-out", action="store_true",
        help="score on training rows that are held out, by which defaults are chosen; no test row "
        "has a say",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if not 1 <= options.seeds <= MOST_SEEDS:
        parser.error(f"--seeds is 1 to {MOST_SEEDS}; got {options.seeds}")
    if options.workers < 0:
        parser.error(f"--workers is at least 0; got {options.workers}")
    files = {SETS[name].file: None for name in options.sets if SETS[name].file}
    if files and options.data_dir is None:
        parser.error(f"pass --data-dir, or set {DATA_VARIABLE}: the sets are read from there")
    missing = [file for file in files if not (options.data_dir / file).exists()]
    if missing:
        parser.error(f"expected {', '.join(missing)} in {options.data_dir}, not there")
    options.seeds = 1 if options.quick else options.seeds
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, print the tables, and keep the results."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    chosen = options.only or [name for name in METHODS if name not in PRIORS]
    absent = {
        name: "not installed"
        for name, peer in PEERS.items()
        if name in chosen and importlib.util.find_spec(peer.import_name) is None
    }
    jobs = [
        Job(name, method, seed, options.data_dir, options.quick, options.held_out)
        for seed in range(options.seeds)
        for name in options.sets
        for method in METHODS
        if method in chosen and method not in absent and applies(method, name)
    ]
    kept: dict[str, Any] = {}
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text(encoding="utf-8"))
    runs: dict[str, dict[str, Any]] = kept.get("runs", {})
    waiting = [job for job in jobs if options.fresh or not stands(runs.get(job.key), job)]
    used = {**kept.get("versions", {}), **versions(["lightning-bnn", *_distributions(absent)])}

    def keep(job: Job, record: dict[str, Any]) -> None:
        runs[job.key] = record
        nll = record["scores"].get("nll")
        shown = record.get("error") or f"NLL {nll}, {record['seconds']} s"
        print(f"{job.key}: {_short(shown)}", file=sys.stderr, flush=True)
        save()

    def save() -> dict[str, dict[str, dict[str, Any]]]:
        summary = summarise(runs)
        result = {
            "cores": os.cpu_count(),
            "workers": options.workers,
            "versions": used,
            "bars": judge(summary),
            "summary": summary,
            "runs": runs,
        }
        if options.json:
            fresh = options.json.with_name(options.json.name + ".new")
            write(fresh, "defaults", without_place(arguments), result)
            os.replace(fresh, options.json)  # a killed run leaves a whole file
        return summary

    print(f"{len(waiting)} runs to do, {len(jobs) - len(waiting)} in the file", file=sys.stderr)
    run_all(waiting, options.workers, keep)
    summary = save()
    for name in options.sets:
        if name in summary:
            print_set(name, summary[name])
    for method, reason in absent.items():
        print(f"{method}: {reason}")
    print_bars(judge(summary))
    if options.seeds == 1:
        print("One seed has no standard error: the figures are compared as they are.")


def stands(record: Mapping[str, Any] | None, job: Job) -> bool:
    """Whether a result in the file need not be measured again."""
    return record is not None and "error" not in record and record["settings"] == job.settings()


def _distributions(absent: Mapping[str, str]) -> list[str]:
    return sorted({peer.distribution for name, peer in PEERS.items() if name not in absent})


if __name__ == "__main__":
    main()
