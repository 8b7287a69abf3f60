"""What every posterior can do about pruning: lose weights, shrink, become a plain network.

A pruned weight is exactly zero in every draw: its mean and its variance, its deviations, or its
value in each stored draw. There is no other state; which weights are pruned is read from the zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network, in_network_order, network_tensors
from lightning_bnn.selection import Choice

if TYPE_CHECKING:
    from lightning_bnn.posteriors.base import Blobs, Posterior
    from lightning_bnn.pruning.masks import Rest, Scope, Unit

__all__ = ["Change", "Prunable", "checked_masks", "mean_of"]

# from the name of a tensor and its values, which may have more axes in front, to new values
Change = Callable[[str, Tensor], Tensor]


class Prunable(ABC):
    """The part of a posterior that prunes it; see :class:`~lightning_bnn.posteriors.Posterior`."""

    net: nn.Module
    fixed: dict[str, Tensor]
    mode: Any  # a property of Posterior
    _compact: bool = False  # whether its network is a smaller one than it was made with
    _original: list[list[Any]] | None = None  # then, the names and shapes of the larger one

    # ---------------------------------------------------------------- what each kind adds

    @abstractmethod
    def _mapped(self, net: nn.Module, change: Change) -> Self:
        """The same kind of posterior of ``net``, with every stored tensor changed."""

    @abstractmethod
    def _mean_weights(self) -> dict[str, Tensor]:
        """The mean of each tensor that varies."""

    @abstractmethod
    def _own_blobs(self) -> Blobs: ...

    def _varying(self) -> list[str]:
        """The names of the parameters that are not the same in every draw."""
        return [name for name, _ in self.net.named_parameters() if name not in self.fixed]

    def _as_before(self, made: Self) -> Self:
        """Carry over what no constructor takes."""
        made._compact, made._original, made.mode = self._compact, self._original, self.mode
        return made

    def _pruned_from(self) -> list[list[Any]] | None:
        """The names and shapes of the network that a compact posterior was pruned from."""
        found = [self._original, *(part._pruned_from() for part in getattr(self, "components", []))]
        return next((one for one in found if one is not None), None)

    # ---------------------------------------------------------------- what users call

    def pruned(
        self,
        fraction: float,
        *,
        unit: Unit = "weight",
        scope: Scope = "global",
        protect: Choice = None,
        rest: Rest = "raise",
    ) -> Self:
        """A new posterior without the weights of the lowest signal-to-noise ratio.

        They are exactly zero in every draw of it; all other weights are as they were, draw by
        draw. What was pruned before counts: ``pruned(0.5).pruned(0.9)`` is ``pruned(0.9)``.

        Args:
            fraction: The share of the prunable weights, or units, to remove, in [0, 1).
            unit: ``"weight"`` for single weights; ``"channel"`` for output channels and neurons,
                after which :meth:`compact` gives a smaller network. A ``BatchNorm1d`` after a
                ``Linear`` is taken as one of features: where its inputs have three axes and it
                normalises the steps of a sequence, protect the ``Linear``.
            scope: ``"global"`` for one threshold; ``"layer"`` for the same share of each tensor.
            protect: Weights to leave alone, besides biases and normalisation: a pattern of names
                (``"head.*"``), a submodule of ``posterior.net``, a function or a list. A channel
                also stays if something protected would go with it, such as a BatchNorm.
            rest: For channels, what to do where the network cannot be followed: ``"raise"``,
                ``"keep"`` these layers as they are, or prune them by ``"weight"``.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> from lightning_bnn.posteriors import GaussianPosterior
            >>> posterior = GaussianPosterior(
            ...     nn.Linear(2, 1, bias=False), Gaussian(0.1),
            ...     mean={"weight": torch.tensor([[-3.0, 1.0]])},
            ...     sd={"weight": torch.tensor([[1.0, 1.0]])})
            >>> posterior.pruned(0.5).mean
            {'weight': tensor([[-3.,  0.]])}
        """
        from lightning_bnn.pruning.masks import pruning_masks

        masks = pruning_masks(
            cast("Posterior", self), fraction, unit=unit, scope=scope, protect=protect, rest=rest
        )
        return self.masked(masks)

    def masked(self, masks: Mapping[str, Tensor]) -> Self:
        """A new posterior that is exactly zero, in every draw, where a mask is.

        Args:
            masks: By the name of a parameter or saved buffer, in its shape: True or 1 where it
                stays, False or 0 where it goes. Tensors without a mask stay as they are.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> from lightning_bnn.posteriors import GaussianPosterior
            >>> one = {"weight": torch.ones(1, 2)}
            >>> posterior = GaussianPosterior(nn.Linear(2, 1, bias=False), Gaussian(0.1), one, one)
            >>> posterior.masked({"weight": torch.tensor([[True, False]])}).sd
            {'weight': tensor([[1., 0.]])}
        """
        return self._mapped(self.net, _Masked(checked_masks(self.net, masks)))

    def compact(self) -> Self:
        """A posterior of a smaller network, without the units that are zero in every draw.

        A ``BatchNorm1d`` after a ``Linear`` is taken as one of features, not of the steps of a
        sequence. See :func:`lightning_bnn.pruning.compact.compact`.
        """
        from lightning_bnn.pruning.compact import compact

        return cast("Self", compact(cast("Posterior", self)))

    def mean_network(self) -> nn.Module:
        """An ordinary copy of the network with the mean weights, frozen and in evaluation mode.

        One network instead of many predicts faster and without epistemic uncertainty. For a
        Gaussian it is the usual point estimate. The mean of draws from several modes, or of the
        members of an ensemble, may predict badly: there it is a rough summary. Buffers are
        averaged too; counters are those of the last draw.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> from lightning_bnn.posteriors import DrawsPosterior
            >>> draws = [{"weight": torch.full((1, 1), value)} for value in (1.0, 3.0)]
            >>> posterior = DrawsPosterior(nn.Linear(1, 1, bias=False), Gaussian(0.1), draws)
            >>> posterior.mean_network()(torch.ones(1, 1))
            tensor([[2.]])
        """
        net = copy_network(self.net)
        own = network_tensors(net)
        for name, value in {**self.fixed, **self._mean_weights()}.items():
            own[name].data = value.detach().clone()  # the dtype of the draws, if it is another
        return net

    @property
    def sparsity(self) -> float:
        """The share of the prunable weights that are zero in every draw.

        Prunable are the weights with two or more axes that vary, outside of normalisation layers.
        """
        from lightning_bnn.pruning.removable import candidates

        support = self.support()
        kept = [support[name] for name in candidates(self.net, self._varying())]
        total = sum(mask.numel() for mask in kept)
        return 1 - sum(int(mask.sum()) for mask in kept) / total if total else 0.0

    def support(self) -> dict[str, Tensor]:
        """For every tensor of the network, varying or fixed: False where it is zero in all draws.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> from lightning_bnn.posteriors import DrawsPosterior
            >>> draws = [{"weight": torch.tensor([[0.0, value]])} for value in (0.0, 1.0)]
            >>> DrawsPosterior(nn.Linear(2, 1, bias=False), Gaussian(0.1), draws).support()
            {'weight': tensor([[False,  True]])}
        """
        own = network_tensors(self.net)
        found = {name: tensor != 0 for name, tensor in self.fixed.items()}
        for blob in self._own_blobs().values():
            for name, tensor in blob.items():
                somewhere = tensor != 0
                if tensor.ndim > own[name].ndim:  # deviations have one more axis
                    somewhere = somewhere.any(0)
                found[name] = found[name] | somewhere if name in found else somewhere
        return {name: found[name] for name in own}


@dataclass(frozen=True)
class _Masked:
    """A change that can travel to another process: zero where a mask is False."""

    masks: dict[str, Tensor]

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.masks:
            return tensor
        # filled, not multiplied: NaN · 0 is NaN, and −1 · 0 is −0
        return tensor.masked_fill(~self.masks[name].to(tensor.device), 0)


def checked_masks(net: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks as booleans, if each is one of a tensor of the network."""
    for name, mask in masks.items():
        if not isinstance(mask, Tensor):
            raise ConfigurationError(
                f"The mask of {name!r} is a tensor of True and False; got {type(mask).__name__}."
            )
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise ConfigurationError(
                f"The mask of {name!r} holds other numbers than 0 and 1 ({mask.dtype}). A mask "
                "says which weights stay; pass scores to lightning_bnn.pruning.pruning_masks."
            )
    ordered = in_network_order(net, masks, "masks")
    return {name: mask.detach().bool().clone() for name, mask in ordered.items()}


def mean_of(sets: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over sets of tensors, summed in float64; of integers, those of the last set.

    Example:
        >>> mean_of([{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}])
        {'w': tensor([1.5000])}
    """
    mean: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for count, tensors in enumerate(sets, start=1):
        for name, tensor in tensors.items():
            dtypes[name] = tensor.dtype
            if not tensor.is_floating_point():
                mean[name] = tensor
            elif name not in mean:
                mean[name] = tensor.double()
            else:
                mean[name] = mean[name] + (tensor.double() - mean[name]) / count
    return {name: tensor.to(dtypes[name]) for name, tensor in mean.items()}
