"""What the step benchmarks take from the command line, and what they write beside their figures."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import shlex
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.contender import Contender

__all__ = ["choose", "make_parser", "parse", "settle", "versions", "write"]

LIBRARIES = ("torch", "torchvision", "pytorch-lightning", "lightning", "torchmetrics", "numpy")
QUICK_ROUNDS = 5


def make_parser(
    name: str, description: str | None, quick: str, rounds: int, steps: str, only: Sequence[str]
) -> argparse.ArgumentParser:
    """The options of a step benchmark.

    Args:
        name: The program's module.
        description: Its docstring.
        quick: What ``--quick`` does.
        rounds: Counted rounds without it.
        steps: What ``--steps`` counts.
        only: The names that ``--only`` takes.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--only", nargs="+", choices=only, metavar="NAME", help="; ".join(only))
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"counted rounds (default {rounds}, with --quick {QUICK_ROUNDS})",
    )
    parser.add_argument("--steps", type=int, help=steps)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.set_defaults(default_rounds=rounds)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    for name in ("rounds", "steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1; got {value}")
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else options.default_rounds)
    options.warm_up = 1 if options.quick else 2
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    return options


def choose(
    contenders: Sequence[Contender], options: argparse.Namespace
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders to measure, and why the others are not."""
    chosen: list[Contender] = []
    absent: dict[str, str] = {}
    for contender in contenders:
        if options.only and contender.name not in options.only:
            continue
        if options.quick and contender.slow and not options.only:
            absent[contender.name] = "left out by --quick"
        elif importlib.util.find_spec(contender.import_name) is None:
            absent[contender.name] = "not installed"
        else:
            chosen.append(contender)
    return chosen, absent


def settle(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Silence the libraries; print and return the circumstances of a run."""
    warnings.simplefilter("ignore")  # the peers' deprecations, Lightning's advice
    logging.disable(logging.WARNING)
    setting = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "rounds": options.rounds,
        "warm_up_rounds": options.warm_up,
        **more,
    }
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items()))
    return setting


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of Python, of torch and Lightning, and of every distribution that is named."""
    found = {"python": platform.python_version()}
    for name in [*LIBRARIES, "torchopt", *names]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(file: Path | None, name: str, arguments: Sequence[str], result: dict[str, Any]) -> None:
    """Write the figures and the command that made them, if a file is given."""
    if file:
        command = shlex.join(["python", "-m", f"benchmarks.{name}", *arguments])
        text = json.dumps({"command": command, **result}, indent=1)
        file.write_text(text + "\n", encoding="utf-8")
