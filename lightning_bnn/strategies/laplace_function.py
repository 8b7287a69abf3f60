"""The Laplace approximation of a network that is trained already, and what its strategy shares.

The method is in :mod:`lightning_bnn.strategies.laplace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_option, check_whole
from lightning_bnn.curvature import (
    Approximation,
    Covariance,
    Processes,
    Scales,
    Structure,
    approximate,
    check_structure,
)
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.lightning import move_data_to_device, rank_zero_info
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.likelihoods.base import check_likelihood
from lightning_bnn.network import copy_network, network_tensors, plain_network
from lightning_bnn.posteriors import LaplacePosterior
from lightning_bnn.posteriors.laplace import PredictiveKind
from lightning_bnn.posteriors.prior import GivenPrior, chosen_prior
from lightning_bnn.priors import BoundPrior
from lightning_bnn.selection import Choice, select, trainable_names
from lightning_bnn.stacked import with_output
from lightning_bnn.target import Keys, Split, count_examples, make_split

__all__ = ["check_own_prior", "chosen_scales", "laplace", "mean_nll", "tell_scales"]

_SCALES = ("given", "one", "per tensor", "validation")


def laplace(
    net: nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood,
    prior: GivenPrior | None = None,
    structure: Structure = "kron",
    bayesian: Choice = None,
    predictive: PredictiveKind = "linearised",
    scales: Scales | None = None,
    num_data: int | None = None,
    split: Split | Keys | None = None,
    output: Callable[[Any], Tensor] | str | int | None = None,
    rank: int | None = None,
    validation: Iterable[Any] | None = None,
) -> LaplacePosterior:
    """The Laplace approximation of a network that was trained anywhere.

    Args:
        net: The network; the posterior has a copy, in evaluation mode. It is run where it lies.
        loader: The training data, in batches.
        likelihood: How outputs of the network give targets, with what it has learned.
        prior: The Gaussian prior, such as that of the weight decay it was trained with: in the
            units of a loss that is a mean over N examples, a decay λ is the scale 1/√(λN).
        structure: As for :class:`~lightning_bnn.LaplaceBNN`, like the next three.
        bayesian: Which weights vary.
        predictive: How the posterior predicts.
        scales: What is done with the prior's scales.
        num_data: N; by default the length of the loader's data, or else of what it gave.
        split: How a batch gives inputs and targets, where it is no pair of them.
        output: Which part of what the network returns is meant.
        rank: That of ``structure="low rank"``.
        validation: For ``scales="validation"``, other data, in batches that can be read several
            times.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.priors import Normal
        >>> x = torch.linspace(-1, 1, 8)[:, None]
        >>> net = nn.Linear(1, 1)
        >>> posterior = laplace(net, [(x, 2 * x)], Gaussian(0.5), Normal(), structure="full")
        >>> posterior.moments().variance["bias"]                     # 1 / (8 / 0.5² + 1)
        tensor([0.0303])
    """
    net = plain_network(net)
    check_likelihood(likelihood)
    names = select(net, bayesian)
    check_structure(structure, net, names, rank)
    gaussian = chosen_prior(prior, trainable_names(net))
    check_option("predictive", predictive, ("linearised", "draws"))
    chosen = chosen_scales(scales, prior)
    _check_validation(chosen, validation)
    own = copy_network(net) if output is None else with_output(copy_network(net), output)
    own.eval()
    tensors = network_tensors(own)
    weights = {name: tensors.pop(name) for name in names}
    bound = BoundPrior(gaussian, own, weights)
    check_own_prior(chosen, structure, bound)
    splits, device = make_split(split), next(iter(weights.values())).device

    def moved(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        return (splits(move_data_to_device(batch, device)) for batch in batches)

    def nll(covariance: Covariance) -> float:
        assert validation is not None
        posterior = LaplacePosterior(own, likelihood, weights, covariance, tensors, predictive)
        return mean_nll(posterior, moved(validation))

    found = approximate(
        own, weights, tensors, likelihood, bound, structure, moved(loader),
        _length(loader, num_data), rank, chosen, nll if chosen == "validation" else None,
    )  # fmt: skip
    tell_scales(chosen, names, found)
    if found.noise != 1.0:
        likelihood = likelihood.widened(found.noise)
    return LaplacePosterior(
        own, likelihood, weights, found.covariance, tensors, predictive, found.log_evidence
    )


def chosen_scales(scales: Scales | None, prior: Any) -> Scales:
    """What is done with the prior's scales, where nothing or something is asked for."""
    if scales is None:
        return "one" if prior is None else "given"
    check_option("scales", scales, _SCALES)
    return scales


def check_own_prior(scales: Scales, structure: Structure, prior: BoundPrior) -> None:
    """Raise where a posterior that is the prior does not go with the other options."""
    if scales != "given" and prior.weight_precisions() is not None:
        raise ConfigurationError(
            f"scales={scales!r} finds scales of a Normal prior, and a posterior that is the prior "
            "has its own. Leave scales= out; to count it less, pass PosteriorPrior(posterior, "
            "power=0.5)."
        )
    if structure == "low rank" and prior.coupling is not None:
        raise ConfigurationError(
            "structure='low rank' adds the curvature to a prior of independent weights, and this "
            "posterior has correlations. Pass prior=PosteriorPrior(posterior, "
            "covariance='diagonal'), or structure='full'."
        )


def mean_nll(
    posterior: LaplacePosterior,
    batches: Iterable[tuple[Any, Any]],
    draws: int | None = None,
    processes: Processes | None = None,
) -> float:
    """The mean NLL of inputs and targets under the posterior predictive."""
    totals = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in batches:
        log_prob = posterior.predict(inputs, draws).log_prob(targets)
        totals += torch.stack(
            [log_prob.double().sum(), log_prob.new_tensor(len(log_prob)).double()]
        ).cpu()
    if processes is not None:
        totals = processes.add_up(totals.to(posterior.device)).cpu()
    if not totals[1]:
        raise DataError("There is no validation NLL without data: the loader gave no batch.")
    return -float(totals[0] / totals[1])


def tell_scales(scales: Scales, names: Sequence[str], found: Approximation) -> None:
    """Say which scales of the prior were chosen, and by what."""
    if scales == "given":
        return
    chosen = (
        f"have the lowest validation NLL ({found.nll:.4g})"
        if scales == "validation"
        else "maximise the evidence"
    )
    each = [f"{precision**-0.5:.3g}" for precision in found.precisions]
    pairs = [f"{name} {scale}" for name, scale in zip(names, each, strict=True)]
    shown = f"{each[0]} for all" if len(set(each)) == 1 and len(each) > 1 else ", ".join(pairs)
    noise = f" Noise: {found.noise:.3g} times that of the fit." if found.noise != 1.0 else ""
    rank_zero_info(f"The scales of the prior that {chosen}: {shown}.{noise}")


def _check_validation(scales: Scales, validation: Any) -> None:
    if scales == "validation" and validation is None:
        raise ConfigurationError(
            "scales='validation' chooses the prior's scale by the NLL of other data than the "
            "loader's. Pass them as validation=, or scales='one', which needs none."
        )
    if scales != "validation" and validation is not None:
        raise ConfigurationError(
            f"validation= is for scales='validation'; got scales={scales!r} with it."
        )
    if isinstance(validation, Iterator):
        raise ConfigurationError(
            "validation= is read several times, and an iterator gives its batches once. Pass a "
            "DataLoader or a list of batches."
        )


def _length(loader: Any, num_data: int | None) -> int | None:
    if num_data is not None:
        return check_whole("num_data", num_data, 1)
    return count_examples(loader, None) if hasattr(loader, "dataset") else None
