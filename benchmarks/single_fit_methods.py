"""The methods of :mod:`benchmarks.single_fit`, each with its defaults.

Ours are built as in :mod:`benchmarks.defaults_methods`. ``vi-...`` are the families of
``VariationalBNN`` that a network of 200,000 weights has room for (``FullRank`` has not). In
``vi-dropout`` the KL grows over two thirds of the steps: with all of it from the start all weights
become noise. ``laplace-last`` and ``laplace-last-kron`` vary the last layer alone, and
``...-validation`` choose the scale of the prior by validation rows, not by the evidence.
``own-dropout`` is a network with dropout layers of 0.2 after each activation, trained by plain
Adam, under ``mc_dropout``: what torch-uncertainty's MC dropout is here, too.

laplace-torch (``lt-...``) takes the curvature of the network of plain Adam, one prior precision by
the evidence and the probit predictive, all as its README does. ``ivon-loop`` and ``ivon-opt`` are
the optimizer ``IVON`` and that of ivon-opt in one loop, with the settings of ``IVONBNN``: η 0.2,
σ₀ 0.01, β₂ = 1 − 3 / steps, a prior N(0, 1), a warm-up and a cosine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.defaults_methods import METHODS, Fitted, Plain, fit_ours, fit_plain, timed
from benchmarks.defaults_peers import PEERS, with_dropout
from benchmarks.defaults_sets import Problem
from lightning_bnn import IVON, IVONBNN, LaplaceBNN, MCDropoutBNN, VariationalBNN, mc_dropout
from lightning_bnn.families import Kronecker, LowRank, RankOne, VariationalDropout
from lightning_bnn.posteriors import GaussianPosterior
from lightning_bnn.predictive import CategoricalPredictive, Predictive
from lightning_bnn.selection import last_layer
from lightning_bnn.strategies.schedule import WarmUpCosine

__all__ = ["DISTRIBUTIONS", "SINGLE", "fit", "laplace_torch", "lt_predict", "train_rows"]

SLICE = 50  # inputs at a time for laplace-torch, which holds their Jacobians
LR, SCALE, FALL = 0.2, 0.01, 3.0  # of IVON


def _ours(make: Callable[..., Any], **options: Any) -> Callable[[Problem], Fitted]:
    def method(problem: Problem) -> Fitted:
        made = {
            name: value() if isinstance(value, type) else value for name, value in options.items()
        }
        return fit_ours(problem, make(problem.net(), problem.likelihood(), **made))

    return method


def own_dropout(problem: Problem) -> Fitted:
    module = Plain(with_dropout(problem.net()), problem.likelihood())
    fitted = fit_plain(problem, module)
    fitted.predict = mc_dropout(module.net, problem.likelihood()).predict
    return fitted


def variational_dropout(problem: Problem) -> Fitted:
    steps = problem.epochs * len(train_rows(problem))
    bnn = VariationalBNN(
        problem.net(), problem.likelihood(), family=VariationalDropout(), estimator="local",
        kl_warmup=2 * steps // 3,
    )  # fmt: skip
    return fit_ours(problem, bnn)


# ---------------------------------------------------------------- laplace-torch


def train_rows(problem: Problem) -> Any:
    """The training data in batches."""
    data = problem.data()
    data.setup()
    return data.train_dataloader()


def laplace_torch(net: nn.Module, structure: str, last: bool, loader: Any) -> Any:
    """Its curvature, with one precision of the prior by the evidence."""
    from laplace import Laplace

    subset = "last_layer" if last else "all"
    kind = {"diagonal": "diag"}.get(structure, structure)
    found = Laplace(net, "classification", subset_of_weights=subset, hessian_structure=kind)
    found.fit(loader)
    found.optimize_prior_precision(method="marglik")
    return found


def lt_predict(found: Any, inputs: Tensor, link: str = "probit") -> Predictive:
    """Its predictive: probabilities, of Monte Carlo (with its 100 draws) or the probit formula."""
    parts = [
        found(part, pred_type="glm", link_approx=link).detach() for part in inputs.split(SLICE)
    ]
    return CategoricalPredictive(torch.cat(parts).clamp_min(1e-30).log()[None])


def _laplace_torch(structure: str, last: bool, problem: Problem) -> Fitted:
    module = Plain(problem.net(), problem.likelihood())
    plain = fit_plain(problem, module)
    made: dict[str, Any] = {}

    def approximate() -> None:
        made["found"] = laplace_torch(module.net, structure, last, train_rows(problem))

    seconds, cpu_seconds = timed(approximate)
    return Fitted(
        lambda inputs: lt_predict(made["found"], inputs), plain.seconds + seconds,
        plain.cpu_seconds + cpu_seconds, plain.facts,
    )  # fmt: skip


# ---------------------------------------------------------------- IVON in a loop


def ivon_loop(problem: Problem) -> Fitted:
    def make(net: nn.Module, size: int, beta2: float) -> torch.optim.Optimizer:
        return IVON(net.parameters(), lr=LR, num_data=size, initial_scale=SCALE, beta2=beta2)

    def sampled(optimizer: Any, train: bool) -> AbstractContextManager[None]:
        return optimizer.sampled_params()

    return _in_a_loop(problem, make, sampled)


def ivon_opt(problem: Problem) -> Fitted:
    def make(net: nn.Module, size: int, beta2: float) -> torch.optim.Optimizer:
        import ivon

        decay = 1 / size
        start = 1 / (size * SCALE**2) - decay
        return ivon.IVON(
            net.parameters(), lr=LR, ess=size, hess_init=start, beta2=beta2, weight_decay=decay
        )

    def sampled(optimizer: Any, train: bool) -> AbstractContextManager[None]:
        return optimizer.sampled_params(train=train)

    return _in_a_loop(problem, make, sampled)


def _in_a_loop(problem: Problem, make: Any, sampled: Any) -> Fitted:
    net, rows = problem.net(), train_rows(problem)
    steps = problem.epochs * len(rows)
    optimizer = make(net, len(problem.splits.train), 1 - min(FALL / steps, 0.05))
    schedule = WarmUpCosine(optimizer, steps)

    def train() -> None:
        for _ in range(problem.epochs):
            for inputs, targets in rows:
                with sampled(optimizer, True):
                    optimizer.zero_grad()
                    F.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
                schedule.step()

    seconds = timed(train)
    sd: dict[str, Tensor] = {}
    if not isinstance(optimizer, IVON):
        (group,) = optimizer.param_groups
        flat = (group["ess"] * (group["hess"] + group["weight_decay"])).rsqrt()
        sizes = [one.numel() for one in net.parameters()]
        parts = zip(net.named_parameters(), flat.split(sizes), strict=True)
        sd = {name: part.view_as(one) for (name, one), part in parts}
        mean = {name: one.detach() for name, one in net.named_parameters()}
        posterior = GaussianPosterior(net, problem.likelihood(), mean, sd)
    else:
        posterior = optimizer.posterior(net, problem.likelihood())
    return Fitted(posterior.predict, *seconds, {"steps": steps})


# ---------------------------------------------------------------- all

SINGLE: Mapping[str, Callable[[Problem], Fitted]] = {
    "adam": METHODS["adam"],
    "vi": METHODS["vi"],
    "vi-low-rank": _ours(VariationalBNN, family=LowRank),
    "vi-kronecker": _ours(VariationalBNN, family=Kronecker),
    "vi-rank-one": _ours(VariationalBNN, family=RankOne),
    "vi-dropout": variational_dropout,
    "ivon": _ours(IVONBNN),
    "ivon-loop": ivon_loop,
    "ivon-opt": ivon_opt,
    "laplace-diagonal": _ours(LaplaceBNN, structure="diagonal"),
    "laplace-kron": _ours(LaplaceBNN, structure="kron"),
    "laplace-last": _ours(LaplaceBNN, structure="full", bayesian=last_layer),
    "laplace-last-kron": _ours(LaplaceBNN, structure="kron", bayesian=last_layer),
    "laplace-kron-validation": _ours(LaplaceBNN, structure="kron", scales="validation"),
    "laplace-last-validation": _ours(
        LaplaceBNN, structure="full", bayesian=last_layer, scales="validation"
    ),
    "lt-diagonal": partial(_laplace_torch, "diagonal", False),
    "lt-kron": partial(_laplace_torch, "kron", False),
    "lt-last": partial(_laplace_torch, "full", True),
    "lt-last-kron": partial(_laplace_torch, "kron", True),
    "dropout": _ours(MCDropoutBNN),
    "dropout-gaussian": _ours(MCDropoutBNN, kind="gaussian"),
    "dropout-concrete": _ours(MCDropoutBNN, kind="concrete"),
    "own-dropout": own_dropout,
    "tu-dropout": METHODS["tu-dropout"],
    "ensemble": METHODS["ensemble"],
    "swag": METHODS["swag"],
    "sgmcmc": METHODS["sgmcmc"],
}
# what must be installed: the module and the distribution
DISTRIBUTIONS = {
    **{name: ("laplace", "laplace-torch") for name in SINGLE if name.startswith("lt-")},
    "ivon-opt": ("ivon", "ivon-opt"),
    "tu-dropout": (PEERS["tu-dropout"].import_name, PEERS["tu-dropout"].distribution),
}


def fit(method: str, problem: Problem) -> Fitted:
    """Fit by a method, from the problem's seed."""
    pl.seed_everything(problem.seed, verbose=False)
    return SINGLE[method](problem)
