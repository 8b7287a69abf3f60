"""What :mod:`benchmarks.single_fit` measures side by side, on one thread.

* ``laplace``, a structure: one network, trained by plain Adam. Of it ours and laplace-torch's
  approximation of this structure, in turns: the curvature, one precision of the prior by the
  evidence, the test rows (500 of them where all weights vary). The NLL is compared with each one's
  own precision, and with ours at laplace-torch's; of laplace-torch by the probit formula, its
  default, and by 100 draws of the outputs. Ours mixes 32 points of the same Gaussian, which is the
  second quantity.
* ``dropout``: a batch through a network with dropout layers, in turns: in evaluation mode, and as
  32 masks of ``mc_dropout``, or of torch-uncertainty, which is divided by 32.
* ``ivon``: steps of IVON and of plain Adam, in turns of 20, with the contenders and on the
  perceptron of :mod:`benchmarks.vi_step`.

All seconds are of the processor, the median over the turns: they are worth something also where
the machine does other work.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from benchmarks.defaults_methods import BATCH, Fitted, Plain, fit_plain, score
from benchmarks.defaults_peers import with_dropout
from benchmarks.defaults_sets import Problem
from benchmarks.peers import ivon, our_ivon
from benchmarks.peers.contender import PROBLEMS
from benchmarks.peers.plain import PLAIN
from benchmarks.single_fit_methods import laplace_torch, lt_predict, train_rows
from lightning_bnn import laplace, mc_dropout
from lightning_bnn.curvature import Scales, Structure
from lightning_bnn.data import TensorRows
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import Normal
from lightning_bnn.selection import last_layer

__all__ = ["PAIRS", "STRUCTURES"]

STRUCTURES: dict[str, tuple[Structure, bool]] = {
    "diagonal": ("diagonal", False),
    "kron": ("kron", False),
    "last": ("full", True),
    "last-kron": ("kron", True),
}
ROWS, TURNS = 500, 3  # of all weights, laplace-torch takes a tenth of a second for each row
ENOUGH = 20.0  # seconds of laplace-torch in a turn: one is enough
DRAWS, STEPS = 32, 20
SHORT_TURNS, QUICK_TURNS, WARM_UP = 15, 2, 2


def laplace_pair(
    structure: Structure, last: bool, problem: Problem, quick: bool
) -> dict[str, dict[str, float]]:
    """The NLL and the seconds of ours and of laplace-torch."""
    problem = replace(problem, outside=None)
    if not last:
        test = TensorRows(*(tensor[:ROWS] for tensor in problem.splits.test.tensors))
        problem = replace(problem, splits=replace(problem.splits, test=test))
    module = Plain(problem.net(), problem.likelihood())
    fit_plain(problem, module)
    net, chosen = module.net, last_layer if last else None

    def approximate(prior: Normal, scales: Scales) -> Any:
        loader = train_rows(problem)
        return laplace(net, loader, problem.likelihood(), prior, structure, chosen, scales=scales)

    def tested(predict: Callable[[Tensor], Predictive]) -> dict[str, float]:
        scores, seconds = _seconds(lambda: score(Fitted(predict, 0.0, 0.0), problem))
        return {**scores, "predict_seconds": seconds}

    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    peer = importlib.util.find_spec("laplace") is not None
    for _ in range(1 if quick else TURNS):
        made, seconds = _seconds(lambda: approximate(Normal(0.0, 1.0), "one"))
        ours.append({**tested(made.predict), "fit_seconds": seconds})
        if peer:
            other, seconds = _seconds(
                lambda: laplace_torch(net, structure, last, train_rows(problem))
            )
            scores = tested(lambda x, other=other: lt_predict(other, x))
            theirs.append({**scores, "fit_seconds": seconds})
            if seconds + scores["predict_seconds"] > ENOUGH:
                break
    found = {"ours": _medians(ours)}
    if peer:
        precision = float(other.prior_precision)
        same = approximate(Normal(0.0, precision**-0.5), "given")
        torch.manual_seed(0)
        found |= {
            "laplace-torch": {**_medians(theirs), "precision": precision},
            "laplace-torch, draws": tested(lambda x: lt_predict(other, x, "mc")),
            "ours, its precision": tested(same.predict),
        }
    return found


def _seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.process_time()
    made = work()
    return made, time.process_time() - begin


def _medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def dropout_draws(problem: Problem, quick: bool) -> dict[str, Any]:
    """The time of a draw of a batch over that of the plain network."""
    net = with_dropout(problem.net()).eval()
    inputs = problem.splits.test.tensors[0][:BATCH]
    posterior = mc_dropout(net, problem.likelihood())

    def plain() -> None:  # as often as there are draws
        for _ in range(DRAWS):
            net(inputs)

    ways: dict[str, Callable[[], Any]] = {
        "plain": torch.no_grad()(plain),
        "ours": lambda: posterior.predict(inputs, DRAWS),
    }
    if importlib.util.find_spec("torch_uncertainty") is not None:
        from torch_uncertainty.methods import mc_dropout as tu_dropout

        task: Any = "classification"
        peer = tu_dropout(
            with_dropout(problem.net()), DRAWS, on_batch=True, task=task, probabilistic=False
        ).eval()
        ways["torch-uncertainty"] = torch.no_grad()(lambda: peer(inputs))
    return _in_turns(ways, DRAWS, 1, QUICK_TURNS if quick else SHORT_TURNS)


def ivon_steps(problem: Problem, quick: bool) -> dict[str, Any]:
    """A step over that of plain Adam, on the perceptron of the step benchmarks."""
    chosen = [PLAIN, our_ivon.CONTENDER, our_ivon.PLAIN_LOOP]
    if importlib.util.find_spec("ivon") is not None:
        chosen.append(ivon.CONTENDER)
    ways = {each.name: each.make_step(PROBLEMS[0]) for each in chosen}
    return _in_turns(ways, 1, STEPS, QUICK_TURNS if quick else SHORT_TURNS)


def _in_turns(
    ways: Mapping[str, Callable[[], Any]], size: int, count: int, turns: int
) -> dict[str, Any]:
    """The milliseconds of each way, and its ratio to the first in the same turn; medians.

    Args:
        ways: What is done.
        size: Of so many draws or steps.
        count: How often, in a turn; once more before, which is not counted.
        turns: How many turns.
    """
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-WARM_UP, turns):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            way = ways[name]
            way()
            taken = _seconds(lambda way=way: [way() for _ in range(count)])[1]
            if turn >= 0:
                seconds[name].append(taken / (size * count))
    base = seconds[names[0]]
    return {
        name: {
            "ms": 1e3 * statistics.median(own),
            "ratio": statistics.median(a / b for a, b in zip(own, base, strict=True)),
        }
        for name, own in seconds.items()
    }


def _seeded(
    pair: Callable[[Problem, bool], dict[str, Any]], problem: Problem, quick: bool
) -> dict[str, Any]:
    pl.seed_everything(problem.seed, verbose=False)
    return pair(problem, quick)


PAIRS: dict[str, Callable[[Problem, bool], dict[str, Any]]] = {
    **{
        f"pairs-laplace-{name}": partial(_seeded, partial(laplace_pair, *which))
        for name, which in STRUCTURES.items()
    },
    "pairs-dropout": partial(_seeded, dropout_draws),
    "pairs-ivon": partial(_seeded, ivon_steps),
}
