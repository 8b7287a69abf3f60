r"""Yesterday's posterior as today's prior: continual learning by Bayes' rule.

.. math:: p(w\mid D_1, D_2) \propto p(D_2\mid w)\,p(w\mid D_1),

so what was learned from :math:`D_1` is the prior of a fit on :math:`D_2` alone. The posterior is
taken as a Gaussian of its moments, :math:`N(m, \Sigma)`. Where it is Gaussian and knows its
correlations (full-rank and other structured families, Laplace, low rank, linear regression), Σ is
the whole covariance, and the prior's energy :math:`\tfrac12(w-m)^\top\Sigma^{-1}(w-m)`: linear
regression fed in two parts then is that on all data, exactly. Otherwise each weight has its mean
and its variance.

A fit begins where yesterday's ended: the network takes the means, and whatever else the posterior
has of it (point estimates, frozen weights, buffers). Members of an ensemble and chains begin at
draws.

Nguyen, Li, Bui and Turner (2018), *Variational Continual Learning*; Ritter, Botev and Barber
(2018), *Online Structured Laplace Approximations*.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_number, check_option
from lightning_bnn.curvature.base import check_room
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import rank_zero_warn
from lightning_bnn.network import copy_network, network_tensors
from lightning_bnn.posteriors.base import Posterior
from lightning_bnn.posteriors.weights import WeightPosterior
from lightning_bnn.priors import Normal, Prior, PriorLike, check_prior

__all__ = ["GivenPrior", "PosteriorPrior", "chosen_prior", "posterior_of", "starting_network"]

_MOST = 4096  # weights whose covariance is taken unasked
_LEAST = 1e-6  # of a standard deviation, once the other weights are known

_HEADS = 'For a network with parts of its own: prior={"body.*": yesterday, "*": Normal()}.'


class PosteriorPrior(Normal):
    """A posterior as the prior of a fit on other data; ``prior=posterior`` is short for it.

    Correlations between weights that are inferred today and those that are point estimates today
    are left out. What the likelihood has learned is no part of it.

    Args:
        posterior: A posterior over the weights of the network, or of one with some of the same
            tensors (see ``prior={"body.*": posterior, "*": Normal()}``); or where one was saved.
        power: What the density is raised to: below 1, yesterday counts less.
        covariance: ``"full"``: with all correlations; of draws, of which there must be many more
            than weights, as these have them. ``"diagonal"``: without them. None: ``"full"`` where
            the posterior is a Gaussian that has them, of at most 4096 weights; where this leaves
            any out, a warning says so.
        least_sd: Smaller standard deviations are raised to it, such as those of weights that were
            pruned, or that are the same in all members of an ensemble.

    Example:
        >>> from lightning_bnn import GaussianPosterior, VariationalBNN
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(1, 1, bias=False)
        >>> two, sd = {"weight": torch.full((1, 1), 2.0)}, {"weight": torch.full((1, 1), 0.1)}
        >>> yesterday = GaussianPosterior(net, Gaussian(1.0), two, sd)
        >>> today = VariationalBNN(net, Gaussian(1.0), prior=PosteriorPrior(yesterday, power=0.5))
        >>> today.posterior().mean
        {'weight': tensor([[2.]])}
    """

    def __init__(
        self,
        posterior: str | os.PathLike[str] | WeightPosterior,
        power: float = 1.0,
        covariance: Literal["diagonal", "full"] | None = None,
        least_sd: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(posterior, str | os.PathLike | WeightPosterior):
            raise ConfigurationError(
                "A prior is made of a posterior over weights, or of the directory of a saved one; "
                f"got {posterior!r:.80}. Of a posterior without weights take that of another "
                "strategy, or the network's own: prior=Normal(loc='pretrained', scale=0.1)."
            )
        self.posterior = posterior
        self.power = check_number("power", power)
        if covariance is not None:
            check_option("covariance", covariance, ("diagonal", "full"))
        self.covariance = covariance
        self.least_sd = None if least_sd is None else check_number("least_sd", least_sd)
        self.loc = "posterior"  # type: ignore[assignment]  # no number, nor the network's own
        self._loaded = posterior if isinstance(posterior, WeightPosterior) else None

    def read(self, net: nn.Module) -> WeightPosterior:
        """The posterior, read now if it is a saved one.

        Args:
            net: Serves where a saved posterior is one of a network of the user's own.
        """
        if self._loaded is None:
            assert not isinstance(self.posterior, WeightPosterior)
            try:
                read = Posterior.load(self.posterior)
            except ConfigurationError:  # of a network that cannot be made from the file
                read = Posterior.load(self.posterior, net)
            if not isinstance(read, WeightPosterior):
                raise ConfigurationError(
                    f"The posterior in {self.posterior} is a {type(read).__name__}, which is not "
                    "one over weights. Pass that of another strategy as the prior."
                )
            self._loaded = read
        return self._loaded

    def gaussian(self, net: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and precision of the weights that have this prior, in float64."""
        posterior = self.read(net)
        moments = posterior.moments()
        held = {**posterior.fixed, **moments.mean}
        spread = {**moments.variance}
        for name, tensor in tensors.items():
            _check_tensor(name, tensor, held)
            if name not in spread and self.least_sd is None:
                raise ConfigurationError(
                    f"The posterior that is the prior has no distribution of {name!r}, which is "
                    "the same in all of its draws. Freeze it, with requires_grad_(False) on the "
                    "network, and it stays where it is in the posterior; or pass "
                    "PosteriorPrior(posterior, least_sd=0.1), and it may move by so much."
                )
            spread.setdefault(name, torch.zeros_like(tensor))
        mean, variance = (
            torch.cat([part[name].detach().double().cpu().flatten() for name in tensors])
            for part in (held, spread)
        )
        if not bool(mean.isfinite().all() and variance.isfinite().all()):
            raise ConfigurationError("The posterior that is the prior holds NaN or infinity.")
        if self.least_sd is not None:
            added = (self.least_sd**2 - variance).clamp(min=0)
        else:
            added = torch.zeros_like(variance)
            self._check_spread(tensors, variance)
        if not self._is_full(posterior, len(variance)):
            return mean, self.power / (variance + added)
        matrix = posterior.covariance_of(list(tensors)) + added.diag()
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed) or bool((lower.diagonal() < _LEAST * matrix.diagonal().sqrt()).any()):
            raise ConfigurationError(
                f"The covariance of {len(matrix):,} weights cannot be inverted: it is of too few "
                "draws, or some directions have no spread. Pass "
                "PosteriorPrior(posterior, covariance='diagonal'), or least_sd=."
            )
        return mean, self.power * torch.cholesky_inverse(lower)

    def _check_spread(self, tensors: Mapping[str, Tensor], variance: Tensor) -> None:
        pieces = variance.split([tensor.numel() for tensor in tensors.values()])
        for name, piece in zip(tensors, pieces, strict=True):
            if (none := int((piece <= 0).sum())) > 0:
                raise ConfigurationError(
                    f"{none:,} of the {piece.numel():,} weights of {name!r} have no spread in the "
                    "posterior that is the prior: it is a single set of weights, or they were "
                    "pruned. As a prior they could never move. Pass PosteriorPrior(posterior, "
                    "least_sd=0.01) to give them some, or a posterior with a spread, such as that "
                    "of lightning_bnn.laplace."
                )

    def _is_full(self, posterior: WeightPosterior, size: int) -> bool:
        """Whether correlations are taken; says so where some are left out."""
        kept = posterior.correlations if posterior.has_variance else "none"
        whole = sum(posterior.net.get_parameter(name).numel() for name in posterior.varying)
        if self.covariance == "full" and kept != "none":
            check_room(
                f"The covariance of {whole:,} weights", 4 * 8 * whole**2, torch.device("cpu"),
                "Pass PosteriorPrior(posterior, covariance='diagonal').",
            )  # fmt: skip
            return size > 1
        if self.covariance is not None or kept == "none":
            return False
        if kept == "known" and whole <= _MOST:
            return size > 1
        rank_zero_warn(
            f"The prior has the mean and the variance of each of {size:,} weights of a "
            f"{type(posterior).__name__}, and leaves out their correlations. To have them, pass "
            "PosteriorPrior(posterior, covariance='full'), which keeps a matrix of that many rows; "
            "covariance='diagonal' says that none are wanted."
        )
        return False

    # ---------------------------------------------------------------- the density

    def log_prob(self, weights: Tensor, loc: Tensor | float, scale: Any) -> Tensor:
        """The log density of each weight, given the others."""
        scale = torch.as_tensor(scale)
        return -0.5 * ((weights - loc) / scale) ** 2 - scale.log() - 0.5 * math.log(2 * math.pi)

    def energy(self, weights: Tensor, loc: Tensor | float, scale: Any) -> Tensor:
        """−log p(w), summed over the last axis."""
        squares = torch.linalg.vector_norm((weights - loc) / scale, dim=-1).square()
        return 0.5 * squares + self._constant(scale)

    def add_energy_gradient(
        self, gradient: Tensor, weight: Tensor, weights: Tensor, loc: Tensor | float, scale: Any
    ) -> None:
        """The closed form by hand."""
        gradient.addcmul_(weights - loc, (weight / scale**2).to(gradient.dtype))

    def expected_energy(
        self, mean: Tensor, sd: Tensor, draw: Tensor, loc: Tensor | float, scale: Any
    ) -> Tensor:
        """Σ E[−log p(w)] in closed form."""
        distance, ratio = (mean - loc) / scale, sd / scale
        return 0.5 * (distance.square().sum() + ratio.square().sum()) + self._constant(scale)

    def sample(
        self, shape: Sequence[int], loc: Any, scale: Any, generator: torch.Generator
    ) -> Tensor:
        """Draws of each weight by itself, in float64."""
        return Normal().sample(shape, loc, scale, generator)

    def _constant(self, scale: Tensor) -> Tensor:
        return scale.log().sum() + 0.5 * scale.numel() * math.log(2 * math.pi)

    def __repr__(self) -> str:
        options = {"power": 1.0, "covariance": None, "least_sd": None}
        given = [(name, vars(self)[name]) for name in options]
        shown = "".join(f", {k}={v!r}" for k, v in given if v != options[k])
        return f"PosteriorPrior({self.posterior!r:.80}{shown})"


def _check_tensor(name: str, tensor: Tensor, held: Mapping[str, Tensor]) -> None:
    """Raise unless a posterior has a tensor of the network."""
    if name not in held:
        raise ConfigurationError(
            f"The posterior that is the prior is of another network: it has no {name!r}; its names "
            f"begin with {list(held)[:3]}. {_HEADS}"
        )
    if held[name].shape != tensor.shape:
        raise ConfigurationError(
            f"The posterior that is the prior is of another network: {name!r} has the shape "
            f"{list(held[name].shape)} in it, and {list(tensor.shape)} in this one. {_HEADS}"
        )


# ------------------------------------------------------------------ as an option of a strategy

GivenPrior = Prior | WeightPosterior | Mapping[str, Prior | WeightPosterior]


def chosen_prior(prior: GivenPrior | None, names: Sequence[str]) -> PriorLike:
    """What a user gave as a prior, checked, with posteriors as priors; by default ``Normal()``.

    Args:
        prior: It.
        names: The trainable parameters of the whole network.

    Example:
        >>> chosen_prior(None, ["0.weight"])
        Normal(loc=0.0, scale=1.0, fan_in=False)
    """
    made = _as_prior(Normal() if prior is None else prior, {})
    check_prior(made, names)
    return made


def _as_prior(prior: Any, made: dict[int, PosteriorPrior]) -> Any:
    """The same with posteriors as priors, each one prior wherever it is named."""
    if isinstance(prior, Posterior):
        if id(prior) not in made:
            made[id(prior)] = PosteriorPrior(prior)  # type: ignore[arg-type]  # it says what is wrong
        return made[id(prior)]
    if isinstance(prior, Mapping):
        return {pattern: _as_prior(one, made) for pattern, one in prior.items()}
    return prior


def posterior_of(prior: Any, name: str, net: nn.Module) -> WeightPosterior | None:
    """The posterior that is the prior of a tensor of a network, if one is.

    Args:
        prior: What a user gave as a prior.
        name: The name of a parameter, or of a buffer.
        net: The network.

    Raises:
        ConfigurationError: The posterior has no such tensor.
    """
    prior = _as_prior(prior, {})
    if isinstance(prior, Mapping):
        patterns = {each: one for each, one in prior.items() if isinstance(each, str)}
        prior = next((one for each, one in patterns.items() if fnmatchcase(name, each)), None)
    if not isinstance(prior, PosteriorPrior):
        return None
    posterior = prior.read(net)
    _check_tensor(name, network_tensors(net)[name], network_tensors(posterior.net))
    return posterior


@torch.no_grad()
def starting_network(net: Any, prior: Any) -> Any:
    """A copy of a network that begins where the posteriors among its priors are; else itself.

    Example:
        >>> from lightning_bnn import GaussianPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(1, 1, bias=False)
        >>> one = {"weight": torch.ones(1, 1)}
        >>> starting_network(net, GaussianPosterior(net, Gaussian(1.0), one, one)).weight.item()
        1.0
        >>> starting_network(net, Normal()) is net
        True
    """
    if not isinstance(net, nn.Module):
        return net
    made: nn.Module | None = None
    means: dict[int, Mapping[str, Tensor]] = {}
    for name in network_tensors(net):
        posterior = posterior_of(prior, name, net)
        if posterior is None:
            continue
        made = copy_network(net) if made is None else made
        if id(posterior) not in means:
            means[id(posterior)] = {**posterior.fixed, **posterior.mean}
        network_tensors(made)[name].copy_(means[id(posterior)][name])
    return net if made is None else made
