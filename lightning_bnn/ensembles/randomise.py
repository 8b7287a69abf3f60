r"""Randomised MAP: members that are draws of the posterior where the model is linear.

Each member minimises an energy with perturbations of its own,

.. math::
    \tfrac1n\sum_i\frac{(y_i + \sigma\xi_{mi} - f_w(x_i))^2}{2\sigma^2}
    + \tfrac1N\sum_j\frac{(w_j - a_{mj})^2}{2\tau_j^2},

with targets moved by noise :math:`\xi_{mi}\sim N(0,1)` of the likelihood's own size (with
``Gaussian(learn=True)`` found by a pilot: :mod:`lightning_bnn.ensembles.pilot`) and a Gaussian
prior centred at an anchor :math:`a_m` that is drawn from the prior (Bardsley, Solonen, Haario and
Laine, 2014, *Randomize-Then-Optimize*; for neural networks, Pearce et al., 2020, *Uncertainty in
Neural Networks: Approximately Bayesian Ensembling*).

On a linear model with posterior precision A the members then are independent draws of the exact
posterior: their mean is the posterior mean and their covariance :math:`A^{-1}`. With anchors alone,
as in Pearce et al., and one prior scale :math:`\tau` the covariance is :math:`\tau^{-2}A^{-2}`: the
mean is right and the spread is too small, the more so the more the data say. On other models both
are approximations.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_bnn.checks import check_option
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Gaussian, Likelihood
from lightning_bnn.priors import BoundPrior, Learned, Normal
from lightning_bnn.random.hashing import normals, stream_seeds

__all__ = ["AnchoredPrior", "Randomise", "check_randomise", "draw_offsets", "noisy_targets"]

Randomise = Literal["targets and anchors", "anchors"]

_TARGETS, _ANCHORS = 2, 3


def check_randomise(kind: str, likelihood: Likelihood, prior: BoundPrior) -> None:
    """Raise unless targets and prior can be randomised as asked.

    Example:
        >>> from lightning_bnn.likelihoods import Bernoulli
        >>> net = torch.nn.Linear(2, 1)
        >>> prior = BoundPrior(Normal(), net, dict(net.named_parameters()))
        >>> check_randomise("targets and anchors", Bernoulli(), prior)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: randomise='targets and anchors' moves each ...
    """
    check_option("randomise", kind, ("targets and anchors", "anchors"))
    for _, _, one, _, _ in prior.segments():
        if not isinstance(one, Normal):
            raise ConfigurationError(
                f"randomise={kind!r} centres a Normal prior at an anchor for each member; got the "
                f"prior {one!r}. Pass prior=Normal(...)."
            )
        if isinstance(one.scale, Learned):
            raise ConfigurationError(
                f"randomise={kind!r} draws the anchors from the prior, whose scale must be known; "
                f"got {one!r}. Give the scale, such as one that a first fit with it has found: "
                "prior=Normal(0.0, 0.3)."
            )
    if kind == "anchors":
        return
    if not isinstance(likelihood, Gaussian):
        raise ConfigurationError(
            "randomise='targets and anchors' moves each member's targets by noise of the "
            "likelihood's own size, which only Gaussian(scale) has the same for all examples; got "
            f"{type(likelihood).__name__}. Use randomise='anchors', or bootstrap=True, which takes "
            "any likelihood."
        )


@torch.no_grad()
def draw_offsets(prior: BoundPrior, seeds: Tensor, like: Tensor) -> Tensor:
    """The anchors of all members less the prior's own location, (M, P).

    Args:
        prior: A prior all of whose segments are Normal.
        seeds: One seed for each member, (M,) int64.
        like: The members' weights (M, P), for shape, dtype and device.

    Example:
        >>> net = torch.nn.Linear(2, 1)
        >>> prior = BoundPrior(Normal(0.0, 0.5), net, dict(net.named_parameters()))
        >>> draw_offsets(prior, torch.tensor([1, 2]), torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    offsets = torch.empty_like(like)
    noise = torch.empty(like.shape[1], dtype=torch.float64)
    for row, seed in zip(offsets, stream_seeds(seeds, _ANCHORS).tolist(), strict=True):
        row.copy_(noise.normal_(generator=torch.Generator().manual_seed(seed)))
    return prior.deviations(offsets)


def noisy_targets(
    scale: float | list[float] | Tensor, targets: Tensor, seeds: Tensor, indices: Tensor
) -> Tensor:
    """Every member's targets, each moved by noise of the likelihood's size, (M, B, ...).

    Args:
        scale: σ: one number, or one for each output; for each member its own as a tensor (M, 1),
            or (M, outputs).
        targets: (B, ...) where all members see one batch, else (M, B, ...).
        seeds: One seed for each member, (M,) int64.
        indices: The examples' indices in the data set: (B,) for all members, or (M, B).

    Example:
        >>> y = torch.zeros(3, 1)
        >>> noisy_targets(0.1, y, torch.tensor([1, 2]), torch.arange(3)).shape
        torch.Size([2, 3, 1])
    """
    event = targets.shape[indices.dim() :]
    if not targets.is_floating_point():
        raise DataError(
            f"randomise= adds noise to the targets and needs real numbers; got {targets.dtype}. "
            "Convert them, for example with targets.float()."
        )
    noise = normals(stream_seeds(seeds, _TARGETS), indices, event.numel())
    noise = noise.view(*noise.shape[:2], *event)
    scale = torch.as_tensor(scale, dtype=torch.float64, device=targets.device)
    if scale.dim() == 2:  # (M, D) beside (M, B, ..., D)
        scale = scale.view(len(scale), *[1] * max(1, len(event)), *scale.shape[1:][: len(event)])
    return targets + (scale * noise).to(targets.dtype)


class AnchoredPrior:
    """A bound prior that is centred, for each member, at an anchor of its own.

    It stands in for a :class:`~lightning_bnn.priors.BoundPrior` where members' weights (M, P) are
    split and their prior energy is taken: at w − offset.

    Args:
        prior: The prior as it is without anchors.
        offsets: Each member's anchor less the prior's location, (M, P).

    Example:
        >>> net = torch.nn.Linear(2, 1, bias=False)
        >>> prior = BoundPrior(Normal(), net, dict(net.named_parameters()))
        >>> offsets = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        >>> energies = AnchoredPrior(prior, offsets).energy(torch.zeros(2, 2))
        >>> energies[1] - energies[0]
        tensor(12.5000)
    """

    def __init__(self, prior: BoundPrior, offsets: Tensor) -> None:
        self.prior, self.offsets = prior, offsets

    def precisions(self, weights: Tensor) -> None:
        """None: the Gaussians are not around 0."""

    def energy(self, weights: Tensor) -> Tensor:
        """−log p(w − offset) of each member, (M,)."""
        return self.prior.energy(weights - self.offsets)

    def add_energy_gradient(self, gradient: Tensor, weight: Tensor, weights: Tensor) -> None:
        """Add ``weight`` times the gradient of :meth:`energy`, in place."""
        self.prior.add_energy_gradient(gradient, weight, weights - self.offsets)
