"""Draws of the learned scales of a prior, to the draws of a posterior over weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn.checks import check_kind, check_whole
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors.weights import WeightPosterior
from lightning_bnn.priors import BoundPrior, PriorLike, check_prior

__all__ = ["prior_scales"]


def prior_scales(
    posterior: WeightPosterior,
    prior: PriorLike | BoundPrior,
    draws: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """By name, draws of the learned scales of the prior, each to one draw of the weights.

    Given the weights, a learned scale has a known law (:mod:`lightning_bnn.hyperprior`). To draws
    of a chain these are draws of the joint posterior of weights and scales.

    Args:
        posterior: A posterior over weights, such as the draws of SGMCMC.
        prior: The prior that it was made with, ``Normal(scale=Learned())`` or a mapping.
        draws: How many; by default all that the posterior has.
        seed: Seed of the draws.

    Returns:
        For each learned scale a tensor (draws,).

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import DrawsPosterior
        >>> from lightning_bnn.priors import Learned, Normal
        >>> draws = [{"weight": torch.full((1, 50), 0.1)}, {"weight": torch.full((1, 50), 0.2)}]
        >>> posterior = DrawsPosterior(nn.Linear(50, 1), Gaussian(0.1), draws)
        >>> prior_scales(posterior, Normal(scale=Learned()))
        {'weight': tensor([0.1010, 0.2132])}
    """
    check_kind("posterior", posterior, WeightPosterior, "a posterior over weights")
    if not isinstance(prior, BoundPrior):
        prior = _bind(posterior, prior)
    if prior.learned is None:
        raise ConfigurationError(
            "The prior has no scale that is learned. Pass the one that the posterior was made "
            "with, such as Normal(scale=Learned())."
        )
    count = posterior.default_draws if draws is None else check_whole("draws", draws, 1)
    generator = torch.Generator().manual_seed(check_whole("seed", seed, 0))
    device = posterior.device
    parts = []
    for stacked in posterior.draws(count, torch.Generator(device).manual_seed(seed)):
        flat = torch.cat([stacked[name].flatten(1) for name in prior.names], dim=1)
        parts.append(prior.draw_scales(flat, generator))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _bind(posterior: WeightPosterior, prior: PriorLike) -> BoundPrior:
    own = dict(posterior.net.named_parameters())
    names = [name for name in posterior.varying if name in own]
    check_prior(prior, own)
    priors = [prior] if not isinstance(prior, dict) else list(prior.values())
    if any(getattr(one, "loc", 0.0) == "pretrained" for one in priors):
        raise ConfigurationError(
            "A prior with loc='pretrained' is centred on weights that the posterior does not know. "
            "Pass the prior of the strategy: prior=strategy.prior."
        )
    return BoundPrior(prior, posterior.net, {name: own[name] for name in names})
