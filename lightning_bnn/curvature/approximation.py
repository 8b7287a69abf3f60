"""One pass over the data: from a trained network to a Gaussian over its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_option, check_whole
from lightning_bnn.curvature.base import Covariance, Curvature, Processes, check_room
from lightning_bnn.curvature.diagonal import Diagonal
from lightning_bnn.curvature.evidence import (
    Scales,
    best_noise,
    best_precisions,
    evidence,
    validated_precisions,
)
from lightning_bnn.curvature.full import Full
from lightning_bnn.curvature.kron import Kron
from lightning_bnn.curvature.linear import LinearisedNetwork
from lightning_bnn.curvature.low_rank import LowRank
from lightning_bnn.errors import ConfigurationError, DataError, NonFiniteError
from lightning_bnn.lightning import rank_zero_warn
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.mixtures import at_least_float32
from lightning_bnn.priors import BoundPrior

__all__ = [
    "Approximation",
    "Structure",
    "approximate",
    "check_structure",
    "collect",
    "without_curvature",
]

Structure = Literal["diagonal", "kron", "full", "low rank"]

_STRUCTURES: dict[str, type[Curvature]] = {
    "diagonal": Diagonal,
    "kron": Kron,
    "full": Full,
    "low rank": LowRank,
}


@dataclass
class Approximation:
    """What a Laplace approximation has found.

    Args:
        covariance: (H + P)⁻¹.
        precisions: P of each tensor, as given or found.
        log_evidence: log p(D), in nats.
        nll: The validation NLL, where it has chosen P.
        noise: What the evidence has multiplied a learned scale of the noise by.
    """

    covariance: Covariance
    precisions: list[float]
    log_evidence: float
    nll: float | None = None
    noise: float = 1.0


def check_structure(
    structure: str, net: nn.Module, names: Sequence[str], rank: int | None = None
) -> None:
    """Raise unless a structure can hold the curvature of some weights of a network.

    Example:
        >>> check_structure("full", nn.Linear(1000, 1000), ["weight"])
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: structure='full' of 1,000,000 weights needs ...
    """
    check_option("structure", structure, tuple(_STRUCTURES))
    kind = _STRUCTURES[structure]
    if rank is not None:
        check_whole("rank", rank, 1)
        if not kind.ranked:
            raise ConfigurationError(
                f"rank= is for structure='low rank'; got rank={rank} with {structure!r}."
            )
    weights = [net.get_parameter(name) for name in names]
    size = sum(weight.numel() for weight in weights)
    check_room(
        f"structure={structure!r} of {size:,} weights", kind.check(net, names, rank),
        weights[0].device,
        "Pass structure='kron' or 'diagonal', a smaller rank=, or fewer weights with bayesian=, "
        "such as bayesian=lightning_bnn.selection.last_layer.",
    )  # fmt: skip


@torch.no_grad()
def approximate(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    likelihood: Likelihood,
    prior: BoundPrior,
    structure: str,
    batches: Iterable[tuple[Any, Any]],
    num_data: int | None = None,
    rank: int | None = None,
    scales: Scales = "given",
    nll: Callable[[Covariance], float] | None = None,
    processes: Processes | None = None,
) -> Approximation:
    """The Laplace approximation of a network's weights, which are at their mode.

    Args:
        net: The network, in evaluation mode; no other thread may run it meanwhile.
        weights: The weights that vary, by name.
        fixed: Other parameters and buffers.
        likelihood: How outputs give targets.
        prior: The prior of the weights that vary.
        structure: ``"diagonal"``, ``"kron"``, ``"full"`` or ``"low rank"``.
        batches: Inputs and targets.
        num_data: N, if the examples seen stand for another number.
        rank: The number of eigenpairs of ``"low rank"``.
        scales: What is done with the prior's scales (see :func:`best_precisions`). Where the
            evidence finds them, it also finds a scale of the noise that is learned.
        nll: For ``scales="validation"``, the validation NLL with a covariance.
        processes: Those that share the pass.
    """
    curvature, fit = collect(
        net, weights, fixed, likelihood, structure, batches, num_data, rank, processes
    )
    if nothing := without_curvature(curvature, likelihood):
        raise ConfigurationError(nothing)
    log_likelihood = fit.log_likelihood
    if shortfall := curvature.shortfall():
        rank_zero_warn(shortfall, category=UserWarning)
    flat = flat_weights(weights)
    precisions, squares = prior.gaussian_precisions(flat), _squares(prior, flat)
    own = prior.weight_precisions()
    if own is not None:
        curvature.set_prior(own, prior.coupling)

    def covariance(precisions: Sequence[float]) -> Covariance:
        return curvature.covariance(precisions).to(dtype=flat.dtype)

    variance, lowest = 1.0, None
    if fit.count and scales in ("one", "per tensor"):
        variance = best_noise(curvature, precisions, squares, fit.residuals, fit.count)
        curvature.scale(1 / variance)
        log_likelihood -= 0.5 * (
            fit.count * math.log(variance) + fit.residuals * (1 / variance - 1)
        )
    if nll is None:
        found = best_precisions(curvature, precisions, squares, scales)
    else:
        found, lowest = validated_precisions(precisions, lambda each: nll(covariance(each)))
    value = evidence(curvature, found, squares, log_likelihood)
    return Approximation(covariance(found), found, value, lowest, math.sqrt(variance))


@dataclass
class Fit:
    """How a network fits the data at its weights.

    Args:
        log_likelihood: log p(D | w*).
        residuals: Σ of the squared residuals in units of a learned scale of the noise.
        count: Their number; 0 where there is no such scale.
    """

    log_likelihood: float
    residuals: float
    count: float


@torch.no_grad()
def collect(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    likelihood: Likelihood,
    structure: str,
    batches: Iterable[tuple[Any, Any]],
    num_data: int | None = None,
    rank: int | None = None,
    processes: Processes | None = None,
) -> tuple[Curvature, Fit]:
    """The pass over the data: H, and how well the data are fitted, as for :func:`approximate`.

    Raises:
        DataError: There are no data.
        NonFiniteError: H is not finite.
        ConfigurationError: The network gives other outputs for an example alone.
    """
    processes = processes or Processes()
    curvature = _STRUCTURES[structure](net, weights, rank)
    linear = LinearisedNetwork(net, weights, fixed)
    totals = torch.zeros(4, dtype=curvature.dtype, device=curvature.device)
    seen = 0
    with torch.autocast(curvature.device.type, enabled=False):
        for inputs, targets in batches:
            outputs = at_least_float32(linear.outputs(inputs))
            likelihood.check(outputs, targets)
            if not seen:
                linear.check(inputs, outputs)
            seen += len(outputs)
            totals[0] += likelihood.log_prob(outputs, targets).sum()
            totals[1] += len(outputs)
            residuals = likelihood.standard_residuals(outputs, targets)
            if residuals is not None:
                totals[2] += residuals.square().sum()
                totals[3] += residuals.numel()
            curvature.add(linear, inputs, likelihood.hessian_columns(outputs, targets))
    curvature.add_up(processes)
    log_likelihood, count, squares, number = processes.add_up(totals).tolist()
    if not count:
        raise DataError("There is no curvature without data: the loader gave no batch.")
    factor = 1.0 if num_data is None else num_data / count
    curvature.scale(factor)
    _check_curvature(curvature)
    return curvature, Fit(factor * log_likelihood, factor * squares, factor * number)


def flat_weights(weights: Mapping[str, Tensor]) -> Tensor:
    """Weights as one flat vector, at least in float32."""
    return torch.cat([at_least_float32(w.detach()).flatten() for w in weights.values()])


def _squares(prior: BoundPrior, flat: Tensor) -> list[float]:
    """Σ (w − m)² of each tensor; with the precisions that are its weights' own."""
    centred = flat.double() if flat.device.type != "mps" else flat.clone()
    for start, stop, _, loc, _ in prior.segments():
        centred[start:stop] -= loc
    own = prior.weight_precisions()
    pulled = centred if own is None else centred * own
    if prior.coupling is not None:
        prior.coupling.add_gradient(pulled, pulled.new_ones(()), centred)
    return [float(part.sum()) for part in (centred * pulled).split(prior.sizes)]


def without_curvature(curvature: Curvature, likelihood: Likelihood) -> str | None:
    """A sentence for where H is 0, which is wrong of all data, but may be so of some."""
    if bool(curvature.diagonal().any()):
        return None
    return (
        f"The curvature is 0 for all weights: {type(likelihood).__name__} has no second "
        "derivative, or its outputs do not depend on the weights. Write hessian_columns in "
        "a likelihood of your own whose −log p has kinks."
    )


def _check_curvature(curvature: Curvature) -> None:
    for name, part in curvature.layout.views(curvature.diagonal()).items():
        if not bool(part.isfinite().all()):
            raise NonFiniteError(
                f"The curvature of {name!r} is not finite. Check the weights and the data for NaN "
                "and infinity, and the network for functions without a derivative, such as the "
                "square root at 0."
            )
