"""The cost of one sampler's step, as a ratio to the plain SGD step, and that of stacked chains.

``python -m benchmarks.sgmcmc_step`` takes SGLD and SGHMC steps with this library and with each
peer that is installed, and steps of eight chains stacked and one after another, all on a network
in one interleaved run. The tables give the median over the rounds of the ratio to the plain step
of the same round (for chains: to the sequential ones), and its quartiles.

See ``benchmarks/README.md`` for how to install the peers and read the tables.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.figures import cell, figures, print_bars, verdict
from benchmarks.interleaved import BARE, Entry, build, fewer_steps, interleave
from benchmarks.options import make_parser, parse, settle, versions, write
from benchmarks.peers.contender import Contender
from benchmarks.sampler_peers import LIBRARIES
from benchmarks.sampler_peers.contender import NETWORKS, SAMPLERS, Library, Network, Step
from benchmarks.sampler_peers.ours import CHAINS, one_after_another, strategy_step
from benchmarks.sampler_peers.plain import PLAIN

__all__ = ["main"]

STACKED, SEQUENTIAL = f"{CHAINS} chains stacked", f"{CHAINS} chains one by one"
OURS = [library.name for library in LIBRARIES if not library.peer]
PEERS = [library.name for library in LIBRARIES if library.peer]
SELECTION_OF_CHAINS = "chains"  # what --only calls them

Key = tuple[str, str]  # a row's name and a sampler's
Table = dict[str, dict[str, dict[str, Any]]]


def prepare(network: Network, libraries: Sequence[Library], chains: bool) -> dict[Key, Entry]:
    """Everything that takes turns on one network, by row and sampler; the plain step first.

    Without bars a network is there for its chains, and the libraries stay out.
    """
    entries: dict[Key, Entry] = {}

    def add(row: str, sampler: str, make_step: Callable[..., Step], baseline: str) -> None:
        contender = Contender(f"{row} {sampler}", "", partial(make_step, sampler=sampler))
        entries[row, sampler] = build(contender, BARE, network)
        entries[row, sampler].baseline = baseline

    entries[PLAIN.name, ""] = build(PLAIN, BARE, network)
    entries[PLAIN.name, ""].baseline = PLAIN.name
    for library in libraries if network.bars else ():
        for sampler in library.samplers:
            add(library.name, sampler, library.make_step, PLAIN.name)
    for sampler in SAMPLERS if chains else ():
        baseline = f"{SEQUENTIAL} {sampler}"
        add(STACKED, sampler, partial(strategy_step, chains=CHAINS), baseline)
        add(SEQUENTIAL, sampler, one_after_another, baseline)
        for row in (STACKED, SEQUENTIAL):
            entries[row, sampler].run = fewer_steps(entries[row, sampler].run, CHAINS)
    return entries


def collect(entries: dict[Key, Entry]) -> Table:
    """The figures by row and sampler."""
    every = list(entries.values())
    lost = [entry.contender.name for entry in every if not entry.seconds]
    if PLAIN.name in lost:
        raise RuntimeError(f"the plain step {entries[PLAIN.name, ''].reason}")
    table: Table = {}
    for (row, sampler), entry in entries.items():
        if entry.baseline in lost and entry.seconds:
            found = {"reason": f"failed: nothing to compare with, {entry.baseline}"}
        else:
            found = figures(entry, every)
        table.setdefault(row, {})[sampler] = found
    return table


def median(table: Table, row: str, sampler: str) -> float | None:
    ratio = table.get(row, {}).get(sampler, {}).get("ratio")
    return None if ratio is None else float(ratio)


def bars(network: Network, table: Table) -> list[dict[str, Any]]:
    """The bars of a network, judged on the medians."""
    verdicts = []
    for row in (row for row in OURS if row in table):
        for sampler, limit in network.bars.items():
            mine = median(table, row, sampler)
            verdicts.append(verdict(f"{row}: {sampler} to the plain step", mine, limit))
            if network.below_peers:
                verdicts.append(against_peers(table, row, sampler, mine))
    for sampler in SAMPLERS if STACKED in table else ():
        value = median(table, STACKED, sampler)
        text = f"{STACKED} to {SEQUENTIAL}, {sampler}"
        verdicts.append(verdict(text, value, network.stacked_bar))
    return verdicts


def against_peers(table: Table, row: str, sampler: str, mine: float | None) -> dict[str, Any]:
    """Our step over the cheapest peer's, with the peers named that were not measured."""
    having = {library.name for library in LIBRARIES if sampler in library.samplers}
    found = {name: median(table, name, sampler) for name in PEERS if name in having}
    measured = {name: ratio for name, ratio in found.items() if ratio is not None}
    text, value = f"{row}: {sampler} to the cheapest peer", None
    if measured:
        cheapest = min(measured, key=lambda name: measured[name])
        text += f" ({cheapest}, {measured[cheapest]:.2f})"
        value = None if mine is None else mine / measured[cheapest]
    missing = [name for name in found if name not in measured]
    if missing:
        text += f"; not measured: {', '.join(missing)}"
    return verdict(text, value, 1.0)


def report(network: Network, entries: dict[Key, Entry], absent: dict[str, str]) -> dict[str, Any]:
    """Print one network's table; return the same as data."""
    table = collect(entries)
    plain = table.pop(PLAIN.name)[""]
    plain_ms = statistics.median(plain["step_ms"])
    print(f"\n{network.title}: ratio to the plain SGD step, median [quartiles] over the rounds")
    print(f"  {'':24}" + "".join(f"{sampler:24}" for sampler in SAMPLERS).rstrip())
    print(f"  {PLAIN.name:24}1 = {plain_ms:.2f} ms")
    for row, by_sampler in table.items():
        if row == SEQUENTIAL:  # 1 by definition
            continue
        name = "  stacked / one by one" if row == STACKED else row
        if row == STACKED:
            in_plain_steps(table, plain["step_ms"])
        cells = [cell(by_sampler.get(sampler, {"reason": "-"})) for sampler in SAMPLERS]
        same = len(set(cells)) == 1
        print(f"  {name:24}" + (cells[0] if same else "".join(f"{c:24}" for c in cells).rstrip()))
    for name, reason in absent.items() if network.bars else ():
        print(f"  {name:24}{reason}")
    verdicts = bars(network, table)
    print_bars(verdicts)
    return {"title": network.title, "plain": plain, "contenders": table, "bars": verdicts}


def in_plain_steps(table: Table, plain: Sequence[float]) -> None:
    """Print what a step of all chains costs, in plain steps, and note it in the figures."""
    for row in (STACKED, SEQUENTIAL):
        cells = []
        for found in table[row].values():
            if "step_ms" in found:
                each = [ms / base for ms, base in zip(found["step_ms"], plain, strict=True)]
                found["plain_steps"] = statistics.median(each)
                cells.append(f"{found['plain_steps']:.1f}")
            else:
                cells.append("-")
        print(f"  {row:24}" + "".join(f"{c:24}" for c in cells).rstrip())


def choose(only: Sequence[str] | None) -> tuple[list[Library], dict[str, str]]:
    """The libraries to measure, and why others that were asked for are not."""
    wanted = [library for library in LIBRARIES if not only or library.name in only]
    there = [one for one in wanted if importlib.util.find_spec(one.import_name) is not None]
    return there, {one.name: "not installed" for one in wanted if one not in there}


def noise_source() -> str:
    """Where our samplers' noise comes from; its cost is most of theirs."""
    from lightning_bnn.native import library

    return "compiled" if library.load() is not None else "torch"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(
        "sgmcmc_step",
        __doc__,
        quick="few rounds of short turns",
        rounds=25,
        steps=f"timed steps in a turn; for {CHAINS} chains an eighth of them (default "
        f"{', '.join(f'{network.steps} on {network.name}' for network in NETWORKS)}; half of it "
        "with --quick)",
        only=[*(library.name for library in LIBRARIES), SELECTION_OF_CHAINS],
    )
    options = parse(parser, arguments)
    libraries, absent = choose(options.only)
    chains = not options.only or SELECTION_OF_CHAINS in options.only
    setting = settle(options, noise=noise_source())
    results = {}
    for network in NETWORKS:
        if not (chains or network.bars):
            continue
        steps = options.steps or (network.steps // 2 if options.quick else network.steps)
        entries = prepare(network, libraries, chains)
        interleave(list(entries.values()), steps, options.rounds, options.warm_up)
        results[network.name] = {"steps": steps, **report(network, entries, absent)}
        sys.stdout.flush()
    found = versions(library.name for library in libraries)
    result = {**setting, "versions": found, "networks": results}
    write(options.json, "sgmcmc_step", arguments, result)


if __name__ == "__main__":
    main()
