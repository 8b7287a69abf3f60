"""What the step benchmarks make of their rounds: medians with quartiles, cells, and bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.interleaved import BARE, TRAINER, Entry, ratios
from benchmarks.peers.contender import Problem
from benchmarks.peers.plain import PLAIN, PLAIN_LIGHTNING

__all__ = ["cell", "figures", "print_bars", "quartiles", "report", "verdict"]

Bars = Callable[[Any, dict[str, float]], list[dict[str, Any]]]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


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


def verdict(text: str, value: float | None, limit: float) -> dict[str, Any]:
    """A bar: what is compared, the figure, the most that it may be, and whether it is."""
    passed = None if value is None else value <= limit
    return {"bar": text, "value": value, "limit": limit, "passed": passed}


def print_bars(verdicts: Sequence[dict[str, Any]], heading: str = "bars") -> None:
    print(f"  {heading}:")
    for bar in verdicts:
        value = "n/a" if bar["value"] is None else f"{bar['value']:.2f}"
        word = {None: "n/a", True: "pass", False: "FAIL"}[bar["passed"]]
        print(f"    {word:6}{value} (at most {bar['limit']})  {bar['bar']}")


def report(
    problem: Problem, entries: Sequence[Entry], absent: dict[str, str], bars: Bars
) -> dict[str, Any]:
    """Print one network's table; return the same as data.

    Args:
        problem: The network.
        entries: Everybody who took turns, in both modes.
        absent: Who did not, and why.
        bars: Judges the median ratios of the bare loop, by contender.
    """
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
    print_bars(verdicts, "bars, bare loop")
    rows.update({name: {"reason": reason} for name, reason in absent.items()})
    return {"title": problem.title, "plain_ms": plain_ms, "contenders": rows, "bars": verdicts}
