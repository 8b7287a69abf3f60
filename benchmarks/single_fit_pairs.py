"""What :mod:`benchmarks.single_fit` measures side by side, on one thread.

* ``laplace``: one network, trained by plain Adam. Of it ours and laplace-torch's approximation of
  the same structure, in turns: the curvature, one precision of the prior by the evidence, the test
  rows. The NLL is compared with each one's own precision, and with ours at laplace-torch's; of
  laplace-torch by the probit formula, its default, and by 100 draws of the outputs. Ours mixes 32
  points of the same Gaussian.
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
from collections.abc import Callable, Mapping
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
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import Normal
from lightning_bnn.selection import last_layer

__all__ = ["PAIRS"]

STRUCTURES = {
    "diagonal": ("diagonal", False),
    "kron": ("kron", False),
    "last, full": ("full", True),
    "last, kron": ("kron", True),
}
TURNS = 3
DRAWS, STEPS = 32, 20
SHORT_TURNS, QUICK_TURNS, WARM_UP = 15, 2, 2


def _seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.process_time()
    made = work()
    return made, time.process_time() - begin


def laplace_pairs(problem: Problem, quick: bool) -> dict[str, Any]:
    """By structure: the NLL and the seconds of ours and of laplace-torch."""
    module = Plain(problem.net(), problem.likelihood())
    fit_plain(problem, module)
    net, likelihood = module.net, problem.likelihood()
    theirs = importlib.util.find_spec("laplace") is not None
    return {
        name: _pair(problem, net, likelihood, structure, last, theirs, 1 if quick else TURNS)
        for name, (structure, last) in STRUCTURES.items()
    }


def _pair(
    problem: Problem, net: Any, likelihood: Any, structure: Any, last: bool, theirs: bool,
    turns: int,
) -> dict[str, Any]:  # fmt: skip
    chosen = last_layer if last else None

    def approximate(prior: Normal, scales: Any) -> Any:
        loader = train_rows(problem)
        return laplace(net, loader, likelihood, prior, structure, chosen, scales=scales)

    times: dict[str, list[tuple[float, float]]] = {"ours": [], "laplace-torch": []}
    found: dict[str, Any] = {}
    for _ in range(turns):
        ours, fitting = _seconds(lambda: approximate(Normal(0.0, 1.0), "one"))
        times["ours"].append((fitting, _predicting(problem, ours.predict)))
        found["ours"] = _scores(problem, ours.predict)
        if not theirs:
            continue
        made, fitting = _seconds(lambda: laplace_torch(net, structure, last, train_rows(problem)))
        seconds = _predicting(problem, lambda x, made=made: lt_predict(made, x))
        times["laplace-torch"].append((fitting, seconds))
    if theirs:
        found["laplace-torch"] = _scores(problem, lambda x: lt_predict(made, x))
        torch.manual_seed(0)
        found["laplace-torch, draws"] = _scores(problem, lambda x: lt_predict(made, x, "mc"))
        precision = float(made.prior_precision)
        same = approximate(Normal(0.0, precision**-0.5), "given")
        found["ours, its precision"] = _scores(problem, same.predict)
        found["laplace-torch"]["precision"] = precision
    for name, both in times.items():
        if both:
            fits, predictions = (statistics.median(part) for part in zip(*both, strict=True))
            found[name] |= {"fit_seconds": fits, "predict_seconds": predictions}
    return found


def _scores(problem: Problem, predict: Callable[[Tensor], Predictive]) -> dict[str, float]:
    return score(Fitted(predict, 0.0, 0.0), problem)


def _predicting(problem: Problem, predict: Callable[[Tensor], Predictive]) -> float:
    batches = problem.splits.test.tensors[0].split(BATCH)
    return _seconds(lambda: [predict(batch).mean for batch in batches])[1]


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


def _seeded(pair: Callable[[Problem, bool], dict[str, Any]]) -> Any:
    def run(problem: Problem, quick: bool) -> dict[str, Any]:
        pl.seed_everything(problem.seed, verbose=False)
        return pair(problem, quick)

    return run


PAIRS: dict[str, Callable[[Problem, bool], dict[str, Any]]] = {
    "pairs-laplace": _seeded(laplace_pairs),
    "pairs-dropout": _seeded(dropout_draws),
    "pairs-ivon": _seeded(ivon_steps),
}
