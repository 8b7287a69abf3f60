"""Methods of one fit beside plain Adam: a perceptron on MNIST, and a convolutional net on digits.

``python -m benchmarks.single_fit --data-dir DIR --json FILE`` fits each method of
:mod:`benchmarks.single_fit_methods`, of this library and of others where they are installed, with
its defaults, on the sets ``digits`` and ``mnist-mlp`` of :mod:`benchmarks.defaults_sets`, and
prints accuracy, NLL, ECE and OOD AUROC on test rows, mean and standard error over the seeds. The
cost is the processor's time of a fit over that of plain Adam that trains for all epochs, in the
same run. What is compared closely is measured in turns (:mod:`benchmarks.single_fit_pairs`).

Each run has a process and a thread of its own, and an error in one is recorded as its result. The
file is written after each run; the same command again measures only what is missing.

Bars: on one trained network the NLL of last-layer and Kronecker Laplace is at most laplace-torch's
plus 0.005, both at the precision of the prior that each finds and at laplace-torch's, and it takes
at most its time; a step of IVON costs at most 1.15 of plain Adam's, and its NLL is that of ivon-opt
within twice the standard error of the difference; a draw of MC dropout costs at most what a run of
the plain network does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.defaults import Job, gathered, measure, print_bars, print_set, run_all, stands
from benchmarks.defaults import summarise as summarise_runs
from benchmarks.defaults_sets import MOST_SEEDS, load
from benchmarks.options import versions, write
from benchmarks.single_fit_methods import DISTRIBUTIONS, SINGLE, fit
from benchmarks.single_fit_pairs import PAIRS, STRUCTURES
from benchmarks.uci import mean_and_error, without_place
from lightning_bnn.data.in_memory import DATA_VARIABLE

__all__ = ["main"]

CHOSEN = ("digits", "mnist-mlp")
NLL_ABOVE, STEP_BAR, DRAW_BAR = 0.005, 1.15, 1.0
JUDGED = ("kron", "last", "last-kron")
EVERYTHING = (*SINGLE, *PAIRS)


def run(job: Job) -> dict[str, Any]:
    """Fit and test, or measure in turns; whatever goes wrong is part of the result."""
    if job.method in SINGLE:
        return measure(job, fit)
    record: dict[str, Any] = {"settings": job.settings(), "scores": {}, "diverged": False}
    with gathered():
        try:
            problem = load(job.name, job.seed, job.data_dir, job.quick)
            record["found"] = PAIRS[job.method](problem, job.quick)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
    return record


def summarise(runs: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By set and method the scores over the seeds, and the cost."""
    summary = summarise_runs(runs, SINGLE)
    for name, rows in summary.items():
        for method, row in rows.items():
            costs = [_cost(runs, name, method, seed) for seed in row["seeds"]]
            known = [cost for cost in costs if cost is not None]
            row.pop("cost", None)
            if known:
                row["cost"] = mean_and_error(known).mean
    return summary


def _cost(runs: Mapping[str, dict[str, Any]], name: str, method: str, seed: int) -> float | None:
    """The time of a fit over that of plain Adam, as if it had not stopped early."""
    plain, mine = (runs.get(Job(name, one, seed).key, {}) for one in ("adam", method))
    if "cpu_seconds" not in plain or "cpu_seconds" not in mine:
        return None
    return float(mine["cpu_seconds"] / plain["cpu_seconds"] * plain["share"])


def judge(
    runs: Mapping[str, dict[str, Any]], summary: Mapping[str, Mapping[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What is asked, whether it holds, and the figures."""
    bars: list[dict[str, Any]] = []
    for name in CHOSEN:
        for structure in JUDGED:
            pairs = _found(runs, name, f"pairs-laplace-{structure}")
            if pairs and all("laplace-torch" in pair for pair in pairs):
                bars += _laplace_bars(f"{name}, Laplace {structure}", pairs)
        draws = [one["ours"]["ratio"] for one in _found(runs, name, "pairs-dropout")]
        if draws:
            ratio = mean_and_error(draws).mean
            text = f"{name}, MC dropout: a draw costs at most the plain network"
            bars.append(_bar(text, ratio <= DRAW_BAR, f"{ratio:.2f}"))
        steps = [one["lightning-bnn, IVON"]["ratio"] for one in _found(runs, name, "pairs-ivon")]
        if steps:
            ratio = mean_and_error(steps).mean
            text = f"IVON: a step costs at most {STEP_BAR} of plain Adam's"
            bars.append(_bar(text, ratio <= STEP_BAR, f"{ratio:.2f}"))
        nll = {
            method: {
                seed: runs[Job(name, method, seed).key]["scores"]["nll"]
                for seed in row["seeds"]
                if "nll" in runs[Job(name, method, seed).key]["scores"]
            }
            for method, row in summary.get(name, {}).items()
        }
        theirs = nll.get("ivon-opt", {})
        for ours in ("ivon-loop", "ivon"):
            shared = sorted({*nll.get(ours, {})} & {*theirs})
            if shared:
                less = mean_and_error([nll[ours][seed] - theirs[seed] for seed in shared])
                text = f"{name}, {ours}: NLL at most ivon-opt's"
                spread = less.spread or 0.0
                where = f"{less.mean:+.4f}±{spread:.4f}, {len(shared)} seeds"
                bars.append(_bar(text, less.mean <= 2 * spread, where))
    return bars


def _laplace_bars(text: str, pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    def average(name: str, what: str) -> float:
        return mean_and_error([pair[name][what] for pair in pairs]).mean

    bars = []
    for theirs, ours in product(
        ("laplace-torch", "laplace-torch, draws"), ("ours", "ours, its precision")
    ):
        mine, peer = average(ours, "nll"), average(theirs, "nll")
        bar = f"{text}: NLL of {ours} at most that of {theirs} + {NLL_ABOVE}"
        bars.append(_bar(bar, mine <= peer + NLL_ABOVE, f"{mine:.4f} and {peer:.4f}"))
    mine, peer = (
        sum(average(one, f"{part}_seconds") for part in ("fit", "predict"))
        for one in ("ours", "laplace-torch")
    )
    bars.append(_bar(f"{text}: at most its time", mine <= peer, f"{mine:.2f} s and {peer:.2f} s"))
    return bars


def _bar(text: str, passed: bool, where: str) -> dict[str, Any]:
    return {"bar": text, "passed": passed, "where": where}


def _found(runs: Mapping[str, dict[str, Any]], name: str, pair: str) -> list[dict[str, Any]]:
    records = (runs.get(Job(name, pair, seed).key, {}) for seed in range(MOST_SEEDS))
    return [record["found"] for record in records if "found" in record]


def print_pairs(runs: Mapping[str, dict[str, Any]]) -> None:
    """What was measured in turns, averaged over the seeds."""
    for name in CHOSEN:
        laplace = {key: _found(runs, name, f"pairs-laplace-{key}") for key in STRUCTURES}
        if any(laplace.values()):
            print(f"\n### {name}: Laplace of one network\n")
            print("| structure | of | NLL | ECE % | fit, s | predictions, s |")
            print("|---|---|---|---|---|---|")
        for structure, found in laplace.items():
            for which in found[0] if found else ():
                rows = [one[which] for one in found]
                cells = [
                    f"{factor * mean_and_error([row[key] for row in rows]).mean:.{digits}f}"
                    if key in rows[0]
                    else ""
                    for key, factor, digits in (
                        ("nll", 1, 4), ("ece", 100, 1), ("fit_seconds", 1, 2),
                        ("predict_seconds", 1, 2),
                    )
                ]  # fmt: skip
                print(f"| {structure} | {which} | {' | '.join(cells)} |")
        for pair in ("pairs-dropout", "pairs-ivon"):
            rows = _found(runs, name, pair)
            for which in rows[0] if rows else ():
                ratio = mean_and_error([row[which]["ratio"] for row in rows]).mean
                print(f"{name}, {pair.removeprefix('pairs-')}: {which} {ratio:.2f}")


# ---------------------------------------------------------------- the program


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.single_fit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", default=os.environ.get(DATA_VARIABLE),
        help=f"the folder that holds mnist and notmnist_test (default ${DATA_VARIABLE})",
    )  # fmt: skip
    names = ", ".join(EVERYTHING)
    parser.add_argument("--only", nargs="+", choices=EVERYTHING, metavar="METHOD", help=names)
    parser.add_argument("--sets", nargs="+", choices=CHOSEN, default=list(CHOSEN), metavar="SET")
    parser.add_argument("--seeds", type=int, default=3, help="the first so many (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results here")
    parser.add_argument("--fresh", action="store_true", help="measure what is in the file again")
    parser.add_argument(
        "--workers", type=int, default=2,
        help="processes at a time, of one thread each (default 2; 0: none but this one)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one seed, few rows and 60 steps")
    options = parser.parse_args(arguments)
    if not 1 <= options.seeds <= MOST_SEEDS:
        parser.error(f"--seeds is 1 to {MOST_SEEDS}; got {options.seeds}")
    if options.workers < 0:
        parser.error(f"--workers is at least 0; got {options.workers}")
    if "mnist-mlp" in options.sets and not (
        options.data_dir and (options.data_dir / "mnist").exists()
    ):
        parser.error(f"expected mnist in --data-dir or ${DATA_VARIABLE}; got {options.data_dir}")
    options.seeds = 1 if options.quick else options.seeds
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, print the tables, and keep the results."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    chosen = options.only or EVERYTHING
    absent = [
        name
        for name, (module, _) in DISTRIBUTIONS.items()
        if name in chosen and importlib.util.find_spec(module) is None
    ]
    jobs = [
        Job(name, method, seed, options.data_dir, options.quick)
        for seed in range(options.seeds)
        for name in options.sets
        for method in EVERYTHING
        if method in chosen and method not in absent and _applies(method, name, seed)
    ]
    kept: dict[str, Any] = {}
    if options.json and options.json.exists():
        kept = json.loads(options.json.read_text(encoding="utf-8"))
    runs: dict[str, dict[str, Any]] = kept.get("runs", {})
    waiting = [job for job in jobs if options.fresh or not stands(runs.get(job.key), job)]
    installed = {name for key, (_, name) in DISTRIBUTIONS.items() if key not in absent}
    used = {**kept.get("versions", {}), **versions(["lightning-bnn", *sorted(installed)])}

    def keep(job: Job, record: dict[str, Any]) -> None:
        runs[job.key] = record
        shown = record.get("error") or f"NLL {record['scores'].get('nll')}"
        print(f"{job.key}: {shown[:200]}", file=sys.stderr, flush=True)
        save()

    def save() -> dict[str, dict[str, dict[str, Any]]]:
        summary = summarise(runs)
        result = {
            "cores": os.cpu_count(),
            "workers": options.workers,
            "versions": used,
            "bars": judge(runs, summary),
            "summary": summary,
            "runs": runs,
        }
        if options.json:
            fresh = options.json.with_name(options.json.name + ".new")
            write(fresh, "single_fit", without_place(arguments), result)
            os.replace(fresh, options.json)  # a killed run leaves a whole file
        return summary

    print(f"{len(waiting)} runs to do, {len(jobs) - len(waiting)} in the file", file=sys.stderr)
    run_all(waiting, options.workers, keep, run)
    summary = save()
    for name in options.sets:
        if name in summary:
            print_set(name, summary[name])
    print_pairs(runs)
    for method in absent:
        print(f"{method}: not installed")
    print_bars(judge(runs, summary))


def _applies(method: str, name: str, seed: int) -> bool:
    """Steps of IVON have a network of their own: once is enough."""
    return method != "pairs-ivon" or (name == CHOSEN[-1] and seed == 0)


if __name__ == "__main__":
    main()
