"""The cost of one variational training step, as a ratio to the plain Adam step.

``python -m benchmarks.vi_step`` trains two networks with this library and with each peer that is
installed, as a bare loop and, for LightningModules, through ``Trainer.fit``, all in one interleaved
run. The table gives the median over the rounds of the ratio to the plain step of the same round,
and its quartiles.

See ``benchmarks/README.md`` for how to install the peers and read the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.figures import report, verdict
from benchmarks.interleaved import interleave, prepare
from benchmarks.options import choose, make_parser, parse, settle, versions, write
from benchmarks.peers import CONTENDERS, our_ivon
from benchmarks.peers.contender import PROBLEMS, Problem

__all__ = ["main"]

OURS = CONTENDERS[0].name
LAYER_PEERS = [contender.name for contender in CONTENDERS if contender.converts_layers]
IVON, IVON_BAR = our_ivon.CONTENDER.name, 1.15  # plain steps on the perceptron
HALF = 0.5  # our step may cost at most so much of the cheapest of the LAYER_PEERS


def bars(problem: Problem, medians: dict[str, float]) -> list[dict[str, Any]]:
    """The bars of a network, judged on the medians of the bare loop.

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
    bars = [plain_bar, verdict(text, value, HALF)]
    if problem.name == "mlp":
        bars.append(verdict(f"{IVON} to the plain step", medians.get(IVON), IVON_BAR))
    return bars


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(
        "vi_step",
        __doc__,
        quick="few rounds, without the slow peers",
        rounds=15,
        steps="timed steps in a turn (default 60 and 3, with --quick 10 and 1)",
        only=[contender.name for contender in CONTENDERS],
    )
    options = parse(parser, arguments)
    chosen, absent = choose(CONTENDERS, options)
    setting = settle(options)
    problems = {}
    for problem in PROBLEMS:
        steps = options.steps or (max(1, problem.steps // 6) if options.quick else problem.steps)
        entries = prepare(problem, chosen)
        interleave(entries, steps, options.rounds, options.warm_up)
        problems[problem.name] = {"steps": steps, **report(problem, entries, absent, bars)}
        sys.stdout.flush()
    found = versions(contender.name for contender in chosen)
    result = {**setting, "versions": found, "problems": problems}
    write(options.json, "vi_step", arguments, result)


if __name__ == "__main__":
    main()
