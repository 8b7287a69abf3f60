"""What pruning does with a posterior over weights: prune it, read its zeros, make it one network.

A pruned weight is exactly zero in every draw: its mean and its variance, its deviations, or its
value in each stored draw. There is no other state; which weights are pruned is read from the zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_bnn.network import checked_masks, copy_network, network_tensors
from lightning_bnn.posteriors import MixturePosterior, WeightPosterior
from lightning_bnn.pruning.masks import Rest, Scope, Unit, pruning_masks
from lightning_bnn.pruning.removable import candidates
from lightning_bnn.pruning.signal import check_posterior, separate
from lightning_bnn.selection import Choice

__all__ = ["masked", "mean_network", "prune", "sparsity", "support"]

AnyPosterior = TypeVar("AnyPosterior", bound=WeightPosterior)


def prune(
    posterior: AnyPosterior,
    fraction: float,
    *,
    unit: Unit = "weight",
    scope: Scope = "global",
    protect: Choice = None,
    rest: Rest = "raise",
) -> AnyPosterior:
    """A new posterior without the weights of the lowest signal-to-noise ratio.

    They are exactly zero in every draw of it; all other weights are as they were, draw by draw.
    What was pruned before counts: pruning 0.5 and then 0.9 is pruning 0.9.

    Where every component of a mixture has variances of its own (MultiSWAG), each is pruned by
    itself; else (the members of an ensemble, each a single draw) one ratio of the whole mixture
    decides for all.

    Args:
        posterior: Any posterior with variances.
        fraction: The share of the prunable weights, or units, to remove, in [0, 1).
        unit: ``"weight"`` for single weights; ``"channel"`` for output channels and neurons,
            after which :func:`~lightning_bnn.pruning.compact` gives a smaller network. A
            ``BatchNorm1d`` after a ``Linear`` is taken as one of features: where its inputs have
            three axes and it normalises the steps of a sequence, protect the ``Linear``.
        scope: ``"global"`` for one threshold; ``"layer"`` for the same share of each tensor.
        protect: Weights to leave alone, besides biases and normalisation: a pattern of names
            (``"head.*"``), a submodule of ``posterior.net``, a function or a list. A channel
            also stays if something protected would go with it, such as a BatchNorm.
        rest: For channels, what to do where the network cannot be followed: ``"raise"``,
            ``"keep"`` these layers as they are, or prune them by ``"weight"``.

    Example:
        >>> import torch
        >>> from lightning_bnn import GaussianPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> posterior = GaussianPosterior(
        ...     nn.Linear(2, 1, bias=False), Gaussian(0.1),
        ...     mean={"weight": torch.tensor([[-3.0, 1.0]])},
        ...     sd={"weight": torch.tensor([[1.0, 1.0]])})
        >>> prune(posterior, 0.5).mean
        {'weight': tensor([[-3.,  0.]])}
    """
    options: Any = {"unit": unit, "scope": scope, "protect": protect, "rest": rest}
    if len(separate(posterior)) > 1:
        assert isinstance(posterior, MixturePosterior)
        pruned = [prune(component, fraction, **options) for component in posterior.components]
        return type(posterior)(pruned)
    return masked(posterior, pruning_masks(posterior, fraction, **options))


def masked(posterior: AnyPosterior, masks: Mapping[str, Tensor]) -> AnyPosterior:
    """A new posterior that is exactly zero, in every draw, where a mask is.

    Args:
        posterior: Any posterior over weights.
        masks: By the name of a parameter or saved buffer, in its shape: True or 1 where it
            stays, False or 0 where it goes. Tensors without a mask stay as they are.

    Example:
        >>> import torch
        >>> from lightning_bnn import GaussianPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> one = {"weight": torch.ones(1, 2)}
        >>> posterior = GaussianPosterior(nn.Linear(2, 1, bias=False), Gaussian(0.1), one, one)
        >>> masked(posterior, {"weight": torch.tensor([[True, False]])}).sd
        {'weight': tensor([[1., 0.]])}
    """
    check_posterior(posterior)
    checked = checked_masks(posterior.net, masks)
    return posterior.map(partial(_masked, checked))  # which can travel to another process


def _masked(masks: Mapping[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    """Zero where a mask is False."""
    if name not in masks:
        return tensor
    # filled, not multiplied: NaN · 0 is NaN, and −1 · 0 is −0
    return tensor.masked_fill(~masks[name].to(tensor.device), 0)


def mean_network(posterior: WeightPosterior) -> nn.Module:
    """An ordinary copy of the network with the mean weights, frozen and in evaluation mode.

    One network instead of many predicts faster and without epistemic uncertainty. For a Gaussian
    it is the usual point estimate. The mean of draws from several modes, or of the members of an
    ensemble, may predict badly: there it is a rough summary. Buffers are averaged too; counters
    are those of the last draw.

    Example:
        >>> import torch
        >>> from lightning_bnn import DrawsPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> draws = [{"weight": torch.full((1, 1), value)} for value in (1.0, 3.0)]
        >>> posterior = DrawsPosterior(nn.Linear(1, 1, bias=False), Gaussian(0.1), draws)
        >>> mean_network(posterior)(torch.ones(1, 1))
        tensor([[2.]])
    """
    check_posterior(posterior)
    net = copy_network(posterior.net)
    tensors = network_tensors(net)
    for name, value in {**posterior.fixed, **posterior.mean}.items():
        tensors[name].data = value.detach().clone()  # the dtype of the draws, if it is another
    return net


def sparsity(posterior: WeightPosterior) -> float:
    """The share of the prunable weights that are zero in every draw.

    Prunable are the weights with two or more axes that vary, outside of normalisation layers. For
    a mixture it is the mean over the components, which may have lost different weights.

    Example:
        >>> import torch
        >>> from lightning_bnn import DrawsPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> draws = [{"weight": torch.tensor([[0.0, value]])} for value in (0.0, 1.0)]
        >>> sparsity(DrawsPosterior(nn.Linear(2, 1, bias=False), Gaussian(0.1), draws))
        0.5
    """
    check_posterior(posterior)
    components = posterior.components
    if components[0] is not posterior:
        return sum(map(sparsity, components)) / len(components)
    somewhere = support(posterior)
    kept = [somewhere[name] for name in candidates(posterior.net, posterior.varying)]
    total = sum(mask.numel() for mask in kept)
    return 1 - sum(int(mask.sum()) for mask in kept) / total if total else 0.0


def support(posterior: WeightPosterior) -> dict[str, Tensor]:
    """For every tensor of the network, varying or fixed: False where it is zero in all draws.

    Example:
        >>> import torch
        >>> from lightning_bnn import DrawsPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> draws = [{"weight": torch.tensor([[0.0, value]])} for value in (0.0, 1.0)]
        >>> support(DrawsPosterior(nn.Linear(2, 1, bias=False), Gaussian(0.1), draws))
        {'weight': tensor([[False,  True]])}
    """
    check_posterior(posterior)
    tensors = network_tensors(posterior.net)
    somewhere: dict[str, Tensor] = {}

    def add(name: str, nonzero: Tensor) -> None:
        somewhere[name] = somewhere[name] | nonzero if name in somewhere else nonzero

    for component in posterior.components:
        if component is not posterior:
            for name, mask in support(component).items():
                add(name, mask)
            continue
        for blob in component.weight_blobs():
            for name in blob.keys() & tensors.keys():  # not what correlations are made of
                tensor = blob[name]
                nonzero = tensor != 0  # deviations have one more axis
                add(name, nonzero.any(0) if tensor.ndim > tensors[name].ndim else nonzero)
    return {name: somewhere[name] for name in tensors}
