"""Everything that keeps the contract, by kind: ours, and the toys."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_bnn import (
    IVONBNN,
    SGMCMC,
    DeepEnsemble,
    LaplaceBNN,
    LowRankPosterior,
    MCDropoutBNN,
    PosteriorPrior,
    VariationalBNN,
)
from lightning_bnn.families import (
    FullRank,
    Kronecker,
    LowRank,
    MeanField,
    RankOne,
    VariationalDropout,
)
from lightning_bnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lightning_bnn.priors import Learned, Normal
from lightning_bnn.samplers import BAOA, HMC, PSGLD, SGHMC, SGLD, SGNHT
from lightning_bnn.strategies import Strategy
from tests.contract import toys

PRIOR = Normal(0.0, 1.0)
LEARNED = Normal(scale=Learned(by="layer"))
MakeStrategy = Callable[[nn.Module, Likelihood], Strategy]

SAMPLERS: dict[str, Any] = {s.__name__: s for s in (SGLD, PSGLD, SGHMC, SGNHT, BAOA)}
FAMILIES: dict[str, Any] = {
    "MeanField": MeanField,
    "softplus": partial(MeanField, "softplus"),
    "FullRank": FullRank,
    "LowRank": partial(LowRank, 2),
    "Kronecker": Kronecker,
    "RankOne": partial(RankOne, 3),
    "VariationalDropout": VariationalDropout,
}
LIKELIHOODS: dict[str, Any] = {
    made.__name__: made
    for made in (Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson)
}
SECTIONS: dict[str, Any] = {}
STRATEGIES: dict[str, MakeStrategy] = {
    "DeepEnsemble": partial(DeepEnsemble, prior=PRIOR, members=2, seed=0),
    "chunks": partial(DeepEnsemble, prior=PRIOR, members=3, chunk=2, seed=0, bootstrap=True),
    "IVON": partial(IVONBNN, prior=PRIOR, seed=0),
    "dropout": partial(MCDropoutBNN, prior=PRIOR, rate=0.2, seed=0),
    "concrete dropout": partial(MCDropoutBNN, prior=LEARNED, kind="concrete", seed=0),
    "flipout": partial(VariationalBNN, prior=PRIOR, estimator="flipout", seed=0),
    "HMC": partial(SGMCMC, prior=PRIOR, sampler=partial(HMC, lr=1e-4), chains=2, seed=0),
    "Laplace": partial(LaplaceBNN, prior=PRIOR, structure="full", seed=0),
    "Laplace, draws": partial(
        LaplaceBNN, structure="diagonal", predictive="draws", scales="per tensor", seed=0
    ),
    "Laplace, low rank": partial(LaplaceBNN, structure="low rank", seed=0),
    "Laplace, last layer": partial(LaplaceBNN, structure="kron", bayesian="3.*", seed=0),
    "learned scales, Laplace": partial(LaplaceBNN, prior=LEARNED, structure="diagonal", seed=0),
    "learned scales, VI": partial(VariationalBNN, prior=LEARNED, seed=0),
    "learned scales, ensemble": partial(DeepEnsemble, prior=LEARNED, members=3, chunk=2, seed=0),
    "learned scales, SGLD": partial(
        SGMCMC, prior=LEARNED, sampler=partial(SGLD, lr=1e-4), chains=2, seed=0
    ),
}


def yesterday(net: nn.Module, likelihood: Likelihood) -> PosteriorPrior:
    """A posterior whose weights are all correlated, as a prior."""
    generator = torch.Generator().manual_seed(5)
    own = {name: one.detach() for name, one in net.named_parameters()}
    variance = {name: torch.full_like(one, 0.01) for name, one in own.items()}
    columns = {
        name: 0.1 * torch.randn(3, *one.shape, generator=generator) for name, one in own.items()
    }
    made = LowRankPosterior.from_covariance(net, likelihood, own, variance, columns)
    return PosteriorPrior(made, covariance="full")


def with_yesterday(make: Callable[..., Strategy]) -> MakeStrategy:
    """A strategy whose prior is a posterior."""
    return lambda net, likelihood: make(net, likelihood, prior=yesterday(net, likelihood), seed=0)


STRATEGIES |= {
    f"yesterday, {name}": with_yesterday(make)
    for name, make in {
        "VI": VariationalBNN,
        "Laplace": partial(LaplaceBNN, structure="full"),
        "ensemble": partial(DeepEnsemble, members=3, chunk=2, randomise="anchors"),
    }.items()
}

_KINDS = {
    "sampler": SAMPLERS,
    "family": FAMILIES,
    "likelihood": LIKELIHOODS,
    "section": SECTIONS,
    "strategy": STRATEGIES,
}
for _module in pkgutil.iter_modules(toys.__path__, f"{toys.__name__}."):
    _kind, _make = import_module(_module.name).CONTRACT
    _KINDS[_kind][_make.__name__] = _make

# a sampler and a family keep the contract of a strategy, too
for _name, _sampler in SAMPLERS.items():
    STRATEGIES[_name] = partial(
        SGMCMC, prior=PRIOR, sampler=partial(_sampler, lr=1e-4), chains=2, seed=0
    )
for _name, _family in FAMILIES.items():
    STRATEGIES[_name] = partial(VariationalBNN, prior=PRIOR, family=_family(), seed=0)
