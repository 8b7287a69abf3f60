"""The cost of one variational training step, as a ratio to the plain Adam step.

``python -m benchmarks.vi_step`` trains two networks with this library and with each peer that is
installed, as a bare loop and, for LightningModules, through ``Trainer.fit``, all in one interleaved
run. The table gives the median over the rounds of the ratio to the plain step of the same round,
and its quartiles.

See ``benchmarks/README.md`` for how to install the peers and read the table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shlex
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.interleaved import BARE, TRAINER, Entry, measure, ratios
from benchmarks.peers import CONTENDERS
from benchmarks.peers.contender import PROBLEMS, Contender, Problem
from benchmarks.peers.plain import PLAIN, PLAIN_LIGHTNING

__all__ = ["main"]

OURS = CONTENDERS[0].name
LAYER_PEERS = [contender.name for contender in CONTENDERS if contender.converts_layers]
HALF = 0.5  # our step may cost at most so much of the cheapest of the LAYER_PEERS


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def verdict(text: str, value: float | None, limit: float) -> dict[str, Any]:
    passed = None if value is None else value <= limit
    return {"bar": text, "value": value, "limit": limit, "passed": passed}


def bars(problem: Problem, medians: dict[str, float]) -> list[dict[str, Any]]:
    """The two bars of a network, judged on the medians of the bare loop.

    Args:
        problem: The network.
        medians: Median ratio by contender, for those that were measured.
    """
    ours = medians.get(OURS)
    plain_bar = verdict(f"{OURS} to the plain step", ours, problem.bar)
    measured = {name: medians[name] for name in LAYER_PEERS if name in medians}
    text, value = f"{OURS} to the cheapest layer-converting peer", None
    if measured:
        cheapest = min(measured, key=lambda name: measured[name])
        text += f" ({cheapest}, {measured[cheapest]:.2f})"
        value = None if ours is None else ours / measured[cheapest]
    missing = [name for name in LAYER_PEERS if name not in measured]
    if missing:
        text += f"; not measured: {', '.join(missing)}"
    return [plain_bar, verdict(text, value, HALF)]


def figures(entry: Entry, entries: Sequence[Entry]) -> dict[str, Any]:
    """What is known of one contender in one mode."""
    if not entry.seconds:
        return {"reason": "no LightningModule" if entry.reason == "-" else entry.reason}
    lower, median, upper = quartiles(ratios(entry, entries))
    return {
        "ratio": median,
        "quartiles": [lower, upper],
        "baseline": entry.baseline,
        "step_ms": [1e3 * seconds for seconds in entry.seconds],
    }


def cell(found: dict[str, Any]) -> str:
    if "ratio" not in found:
        return str(found["reason"]).replace("no LightningModule", "-")
    lower, upper = found["quartiles"]
    return f"{found['ratio']:.2f} [{lower:.2f}, {upper:.2f}]"


def report(problem: Problem, entries: Sequence[Entry], absent: dict[str, str]) -> dict[str, Any]:
    """Print one network's table; return the same as data."""
    rows: dict[str, dict[str, Any]] = {}
    for entry in entries:
        rows.setdefault(entry.contender.name, {})[entry.mode] = figures(entry, entries)
    plain_ms = {
        mode: statistics.median(rows[PLAIN.name][mode]["step_ms"]) for mode in (BARE, TRAINER)
    }
    print(f"\n{problem.title}: ratio to the plain Adam step, median [quartiles] over the rounds")
    print(f"  {'':24}{BARE:24}{TRAINER}")
    plain = [f"1 = {ms:.1f} ms" for ms in plain_ms.values()]
    print(f"  {PLAIN.name:24}{plain[0]:24}{plain[1]}")
    for name, row in rows.items():
        if name in (PLAIN.name, PLAIN_LIGHTNING.name):
            continue
        bare, trainer = cell(row[BARE]), cell(row[TRAINER])
        print(f"  {name:24}" + (bare if bare == trainer else f"{bare:24}{trainer}"))
    for name, reason in absent.items():
        print(f"  {name:24}{reason}")
    medians = {
        name: row[BARE]["ratio"] for name, row in rows.items() if "ratio" in row.get(BARE, {})
    }
    verdicts = bars(problem, medians)
    print("  bars, bare loop:")
    for bar in verdicts:
        value = "n/a" if bar["value"] is None else f"{bar['value']:.2f}"
        word = {None: "n/a", True: "pass", False: "FAIL"}[bar["passed"]]
        print(f"    {word:6}{value} (at most {bar['limit']})  {bar['bar']}")
    rows.update({name: {"reason": reason} for name, reason in absent.items()})
    return {"title": problem.title, "plain_ms": plain_ms, "contenders": rows, "bars": verdicts}


def versions(contenders: Sequence[Contender]) -> dict[str, str]:
    """The versions of Python, of torch and Lightning, and of every contender."""
    names = ["torch", "torchvision", "pytorch-lightning", "lightning", "torchmetrics", "numpy"]
    found = {"python": platform.python_version()}
    for name in [*names, "torchopt", *(contender.name for contender in contenders)]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vi_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, without the slow peers")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, help="counted rounds (default 15, with --quick 5)")
    parser.add_argument(
        "--steps", type=int, help="timed steps in a turn (default 60 and 3, with --quick 10 and 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args(arguments)
    for name in ("rounds", "steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1; got {value}")
    return options


def choose(options: argparse.Namespace) -> tuple[list[Contender], dict[str, str]]:
    """The contenders to measure, and why the others are not."""
    chosen: list[Contender] = []
    absent: dict[str, str] = {}
    for contender in CONTENDERS:
        if options.only and contender.name not in options.only:
            continue
        if options.quick and contender.slow and not options.only:
            absent[contender.name] = "left out by --quick"
        elif importlib.util.find_spec(contender.import_name) is None:
            absent[contender.name] = "not installed"
        else:
            chosen.append(contender)
    return chosen, absent


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    warnings.simplefilter("ignore")  # the peers' deprecations, Lightning's advice
    logging.disable(logging.WARNING)
    chosen, absent = choose(options)
    rounds = options.rounds or (5 if options.quick else 15)
    warm_up = 1 if options.quick else 2
    setting = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "rounds": rounds,
        "warm_up_rounds": warm_up,
    }
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items()))
    problems = {}
    for problem in PROBLEMS:
        steps = options.steps or (max(1, problem.steps // 6) if options.quick else problem.steps)
        entries = measure(problem, chosen, steps, rounds, warm_up)
        problems[problem.name] = {"steps": steps, **report(problem, entries, absent)}
        sys.stdout.flush()
    if options.json:
        command = shlex.join(["python", "-m", "benchmarks.vi_step", *arguments])
        result = {"command": command, **setting, "versions": versions(chosen), "problems": problems}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
