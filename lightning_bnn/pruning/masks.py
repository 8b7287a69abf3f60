"""Which weights stay when a fraction of the lowest signal-to-noise ratio is removed.

All prunable weights are put into one order (``scope="global"``), or those of each tensor
(``scope="layer"``): by the ratio, and where it is the same by their place in the network, earlier
ones first. Exactly ``round(fraction × total)`` are removed from the front. The best weight of each
tensor has no place in this order: a layer never vanishes. So the masks of a larger fraction lie
within those of a smaller one, and pruning twice is pruning once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.checks import check_option
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.pruning.removable import Removable, Rest, Unit, find_removable
from lightning_bnn.pruning.signal import separate
from lightning_bnn.selection import Choice

__all__ = [
    "Rest", "Scope", "Unit", "check_fraction", "check_options", "keep_masks", "keep_removable",
    "pruning_masks",
]  # fmt: skip

Scope = Literal["global", "layer"]


def check_fraction(fraction: float, name: str = "fraction") -> float:
    """The fraction as a float; it lies in [0, 1).

    Example:
        >>> check_fraction(0.5)
        0.5
    """
    if not isinstance(fraction, Real) or not 0 <= float(fraction) < 1:  # NaN fails this too
        raise ConfigurationError(
            f"{name}= is the share of weights to remove, from 0 up to but not including 1, such as "
            f"0.95; got {fraction!r}."
        )
    return float(fraction)


def check_options(fraction: float, unit: Unit, scope: Scope, rest: Rest) -> None:
    """Raise unless these are options of pruning."""
    check_fraction(fraction)
    for name, value, kinds in (("unit", unit, Unit), ("scope", scope, Scope), ("rest", rest, Rest)):
        check_option(name, value, get_args(kinds))


def pruning_masks(
    posterior: WeightPosterior,
    fraction: float,
    *,
    unit: Unit = "weight",
    scope: Scope = "global",
    protect: Choice = None,
    rest: Rest = "raise",
) -> dict[str, Tensor]:
    """What stays of a posterior when a fraction is pruned: True where a weight is kept.

    A mixture whose components all have variances of their own (MultiSWAG) has masks for each
    component: see :func:`~lightning_bnn.pruning.signal.separate`.

    Args:
        posterior: Any posterior with variances.
        fraction: The share of the prunable weights, or units, to remove, in [0, 1).
        unit: ``"weight"`` for single weights; ``"channel"`` for output channels and neurons, with
            their biases and BatchNorm entries; channels that are added go together. A
            ``BatchNorm1d`` after a ``Linear`` is taken as one of features, not of the steps of a
            sequence: protect such layers.
        scope: ``"global"`` for one threshold; ``"layer"`` for the same share of each tensor.
        protect: Weights to leave alone, besides biases and normalisation: see
            :func:`~lightning_bnn.pruning.removable.candidates`. For channels, a unit also stays
            if something protected would go with it: a bias, a BatchNorm, a depthwise convolution.
        rest: For channels, what to do where the network cannot be followed: ``"raise"``, ``"keep"``
            these layers as they are, or prune them by ``"weight"``.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn import GaussianPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> posterior = GaussianPosterior(
        ...     nn.Linear(2, 1, bias=False), Gaussian(0.1),
        ...     mean={"weight": torch.tensor([[-3.0, 1.0]])},
        ...     sd={"weight": torch.tensor([[1.0, 1.0]])})
        >>> pruning_masks(posterior, 0.5)
        {'weight': tensor([[ True, False]])}
    """
    check_options(fraction, unit, scope, rest)
    if len(components := separate(posterior)) > 1:
        raise ConfigurationError(
            f"Each of the {len(components)} components of this mixture is pruned by itself, so "
            "there is no one set of masks. Use prune(posterior, ...)."
        )
    removable = find_removable(posterior, unit, protect, rest)
    return removable.masks(posterior.net, keep_removable(removable, fraction, scope))


def keep_removable(removable: Removable, fraction: float, scope: Scope) -> dict[str, Tensor]:
    """What stays, by the names of the ratios; units and single weights are ranked apart."""
    return {
        **keep_masks(removable.weights, fraction, scope),
        **keep_masks(removable.units, fraction, scope),
    }


def keep_masks(
    snr: Mapping[str, Tensor], fraction: float, scope: Scope = "global"
) -> dict[str, Tensor]:
    """Remove the fraction with the lowest scores; True where a weight stays.

    Beside the scores and the masks, a global threshold needs two flat copies of the scores (eight
    bytes a weight in float32) in the memory of the host.

    Args:
        snr: The scores, by name: single weights, or one number for each unit.
        fraction: The share to remove, in [0, 1).
        scope: ``"global"`` over all tensors together, or ``"layer"`` for each by itself.

    Raises:
        ConfigurationError: A score is NaN, or so many cannot be removed when each tensor keeps one.

    Example:
        >>> scores = {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([2.0, 3.0])}
        >>> keep_masks(scores, 0.5)
        {'a': tensor([False,  True]), 'b': tensor([False,  True])}
    """
    for name, score in snr.items():
        if bool(score.isnan().any()):
            raise ConfigurationError(
                f"The signal-to-noise ratio of {name!r} is not a number in "
                f"{int(score.isnan().sum())} places: its mean or its variance is not finite. Train "
                "with a smaller learning rate."
            )
    removed: dict[str, Tensor] = {}
    saved: list[str] = []
    for names in [list(snr)] if scope == "global" else [[name] for name in snr]:
        flat = [_on_host(snr[name]) for name in names]
        total = sum(map(len, flat))
        count = round(fraction * total)
        most = total - len(flat)  # each tensor keeps one
        if scope == "global" and count > most:
            raise ConfigurationError(
                f"fraction={fraction!r} of {total} would remove {count}, but each of the "
                f"{len(flat)} pruned layers keeps at least one, so at most {most} can go. The "
                f"largest fraction is {math.floor(most / total * 1e6) / 1e6:g}."
            )
        masks = _lowest(flat, min(count, most))
        removed |= zip(names, masks, strict=True)
        if any(int((~mask).sum()) == 1 for mask in masks):
            unspared = _lowest(flat, count, spare_best=False)
            saved += [name for name, mask in zip(names, unspared, strict=True) if bool(mask.all())]
    if saved:
        other = "" if scope == "layer" else " use scope='layer',"
        warnings.warn(
            f"Removing {fraction!r} would have removed all of {', '.join(saved)}; the best of "
            f"each was kept. Prune less,{other} or protect these layers.",
            UserWarning,
            stacklevel=2,
        )
    return {
        name: removed[name].logical_not().view(score.shape).to(score.device)
        for name, score in snr.items()
    }


def _on_host(score: Tensor) -> Tensor:
    """A flat view (a copy where it must be), at least in float32."""
    flat = score.detach().reshape(-1).cpu()
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def _lowest(scores: Sequence[Tensor], count: int, spare_best: bool = True) -> Sequence[Tensor]:
    """True at the ``count`` lowest of flat scores; of equal ones, those that come first.

    With ``spare_best`` the last of the highest of each tensor is never one of them.
    """
    if not count:
        return [torch.zeros_like(score, dtype=torch.bool) for score in scores]
    flat, sizes = torch.cat(list(scores)), [len(score) for score in scores]
    free = torch.ones_like(flat, dtype=torch.bool)
    if spare_best:
        for score, view in zip(scores, free.split(sizes), strict=True):
            view[len(score) - 1 - int(score.flip(0).argmax())] = False
    ranked = flat.masked_fill(~free, math.inf).numpy()
    ranked.partition(count - 1)
    threshold = float(ranked[count - 1])
    removed = (flat < threshold) & free
    ties = ((flat == threshold) & free).nonzero().view(-1)
    removed[ties[: count - int(removed.sum())]] = True  # of equal scores the earlier ones go
    return removed.split(sizes)
