"""The cost of one step of a deep ensemble of ten, where the plain step of one network is 1.

``python -m benchmarks.ensemble_step`` trains ten members of three networks with this library,
stacked and as a loop, with ten plain runs one after another, and with torch-uncertainty if it is
installed, as a bare loop and through ``Trainer.fit``, all in one interleaved run. The table gives
the median over the rounds of the ratio to the plain step of the same round, and its quartiles.

See ``benchmarks/README.md`` for how to install the peer and read the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.ensemble_peers import CONTENDERS
from benchmarks.ensemble_peers.contender import MEMBERS, NETWORKS, Network
from benchmarks.ensemble_peers.ours import AUTO
from benchmarks.ensemble_peers.plain import ONE_BY_ONE, ONE_BY_ONE_FUSED
from benchmarks.figures import report, verdict
from benchmarks.interleaved import BARE, Entry, build, fewer_steps, interleave, prepare
from benchmarks.options import choose, make_parser, parse, settle, versions, write
from benchmarks.peers.contender import Contender
from benchmarks.peers.plain import PLAIN, PLAIN_LIGHTNING

__all__ = ["main"]


def entries_of(network: Network, contenders: Sequence[Contender]) -> list[Entry]:
    """Everybody who takes turns on one network."""
    entries = prepare(network, contenders)
    for entry in entries:
        if entry.contender in (ONE_BY_ONE, ONE_BY_ONE_FUSED) and entry.mode == BARE:
            add_runs(entry, network)
        if entry.contender not in (PLAIN, PLAIN_LIGHTNING):
            entry.run = fewer_steps(entry.run, MEMBERS)
    return entries


def add_runs(entry: Entry, network: Network) -> None:
    """Let a turn be that of ten networks, one after another, and a step the sum of theirs."""
    others = [build(entry.contender, BARE, network) for _ in range(MEMBERS - 1)]
    runs = [one.run for one in (entry, *others) if one.run]
    entry.run = lambda steps: sum(run(steps) for run in runs)


def bars(network: Network, medians: dict[str, float]) -> list[dict[str, Any]]:
    """The bars of a network, judged on the medians of the bare loop, by contender."""
    mine = medians.get(AUTO.name)
    verdicts = [verdict(f"{AUTO.name} to the plain step of one network", mine, network.bar)]
    if network.sequential_bar is not None:
        sequential = medians.get(ONE_BY_ONE.name)
        value = mine / sequential if mine is not None and sequential is not None else None
        text = f"{AUTO.name} to the members' plain steps {ONE_BY_ONE.name}"
        verdicts.append(verdict(text, value, network.sequential_bar))
    return verdicts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(
        "ensemble_step",
        __doc__,
        quick="few rounds of short turns",
        rounds=25,
        steps=f"timed steps of one network in a turn; of {MEMBERS} members a tenth (default "
        f"{', '.join(f'{network.steps} on {network.name}' for network in NETWORKS)}; half of it "
        "with --quick)",
        only=[contender.name for contender in CONTENDERS],
    )
    options = parse(parser, arguments)
    chosen, absent = choose(CONTENDERS, options)
    setting = settle(options, members=MEMBERS)
    networks = {}
    for network in NETWORKS:
        steps = options.steps or (network.steps // 2 if options.quick else network.steps)
        entries = entries_of(network, chosen)
        interleave(entries, steps, options.rounds, options.warm_up)
        networks[network.name] = {"steps": steps, **report(network, entries, absent, bars)}
        sys.stdout.flush()
    found = versions(contender.name for contender in chosen)
    write(
        options.json,
        "ensemble_step",
        arguments,
        {**setting, "versions": found, "networks": networks},
    )


if __name__ == "__main__":
    main()
