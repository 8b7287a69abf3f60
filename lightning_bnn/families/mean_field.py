r"""The mean-field Gaussian family on one flat vector.

A network's Bayesian weights are :math:`w = \mu + \sigma\varepsilon`, with :math:`\mu` and
:math:`\rho` two flat parameters and :math:`\sigma = e^\rho` (or softplus). One draw passes
through the network as ordinary views of the flat :math:`w`; no layer is converted. From
:math:`g = \partial L/\partial w` the gradients are formed by hand,

.. math::
    \partial L/\partial\mu = g + \lambda\,\partial E/\partial\mu, \qquad
    \partial L/\partial\sigma = g\,\varepsilon
        + \lambda\,(\partial E/\partial\sigma - 1/\sigma),

where :math:`E = \mathbb{E}_q[-\log p(w)]` and :math:`\lambda` weighs
:math:`\mathrm{KL}(q\|p) = E - \sum\log\sigma - \tfrac P2\log 2\pi e`, the sum over all weights
(Blundell et al., 2015, with the analytic KL where the prior has one). The usual case is compiled:
:mod:`lightning_bnn.families.fused`.

Pruned weights take no part: every draw has an exact zero there, both gradients are exactly zero,
and the KL is the sum over the weights that remain. Their μ and σ are parked at the location and
the scale of the prior, where a Gaussian prior has no KL, so that the compiled passes serve as they
are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_bnn.checks import check_option
from lightning_bnn.families.fused import can_fuse, fused_draw, fused_gradients
from lightning_bnn.families.gaussian import HALF_LOG_TWO_PI_E, GaussianFamily
from lightning_bnn.families.pruned import zero_pruned_
from lightning_bnn.families.workspace import Workspace
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import GaussianPosterior
from lightning_bnn.priors import BoundPrior
from lightning_bnn.random import NormalStream

__all__ = ["MeanField", "ScaleForm"]

ScaleForm = Literal["exp", "softplus"]


def inverse_scale(sd: float, form: ScaleForm) -> float:
    """The ρ at which the scale form gives ``sd``.

    Example:
        >>> round(inverse_scale(1.0, "softplus"), 4), inverse_scale(1.0, "exp")
        (0.5413, 0.0)
    """
    return math.log(sd) if form == "exp" else sd + math.log(-math.expm1(-sd))


class MeanField(GaussianFamily):
    """Independent Gaussians: a mean and a standard deviation for each weight.

    Args:
        scale_form: ``"exp"`` (σ = exp ρ) or ``"softplus"``; the first costs less, and for
            σ well below 1 the two are nearly the same function.

    Example:
        >>> family = MeanField().bind({"w": torch.zeros(3)}, initial_scale=0.5)
        >>> family.sd()
        tensor([0.5000, 0.5000, 0.5000], grad_fn=<ExpBackward0>)
    """

    factorised = True
    can_prune = True

    def __init__(self, scale_form: ScaleForm = "exp") -> None:
        super().__init__()
        check_option("scale_form", scale_form, ("exp", "softplus"))
        self.scale_form: ScaleForm = scale_form

    def setup(self, flat: Tensor, initial_scale: float) -> None:
        """Make μ and ρ."""
        self.mean = nn.Parameter(flat.clone())
        self._first = initial_scale
        self.rho = nn.Parameter(self._starting(flat))
        self._workspaces: list[Workspace] = []

    def _starting(self, like: Tensor) -> Tensor:
        """The flat ρ that q was made with."""
        return torch.full_like(like, inverse_scale(self._first, self.scale_form))

    @torch.no_grad()
    def begin(self, initial_scale: float) -> None:
        """Set ρ, if it is what q was made with.

        Example:
            >>> family = MeanField().bind({"w": torch.zeros(2)}, initial_scale=0.5)
            >>> family.begin(0.25)
            >>> family.sd().detach()
            tensor([0.2500, 0.2500])
        """
        if torch.equal(self.rho, self._starting(self.rho)):
            self._first = initial_scale
            self.rho.copy_(self._starting(self.rho))

    def sd(self) -> Tensor:
        """The flat vector of standard deviations, differentiable in ρ; parked where pruned."""
        return torch.exp(self.rho) if self.scale_form == "exp" else F.softplus(self.rho)

    def _inverse(self, sd: Tensor) -> Tensor:
        """The ρ at which the scale form gives ``sd``."""
        return sd.log() if self.scale_form == "exp" else sd + torch.log(-torch.expm1(-sd))

    def rsample(self, noise: Tensor) -> Tensor:
        """μ + σε, by ordinary autograd."""
        return torch.addcmul(self.mean, self.sd(), noise)

    def log_volume(self) -> Tensor:
        """Σ log σ of the weights that are not pruned."""
        sd = self.sd()
        return torch.log(sd if self.keep is None else sd[self.keep]).sum()

    def posterior(
        self, net: nn.Module, likelihood: Likelihood, fixed: Mapping[str, Tensor]
    ) -> GaussianPosterior:
        """The Gaussian as it stands; pruned weights are zero."""
        mean, sd = (
            self.layout.views(self.masked(flat.detach())) for flat in (self.mean, self.sd())
        )
        return GaussianPosterior(net, likelihood, mean, sd, fixed)

    # ---------------------------------------------------------------- a training step

    def draw(
        self, index: int, stream: NormalStream, prior: BoundPrior, fresh: bool = True
    ) -> tuple[dict[str, Tensor], Tensor]:
        """One draw by name, and the KL in nats, with gradients by hand."""
        space = self.workspace(index)
        if fresh or not space.filled:
            self.draw_noise(space, stream, prior)
        return self.draw_in(space, prior)

    def draw_in(self, space: Workspace, prior: BoundPrior) -> tuple[dict[str, Tensor], Tensor]:
        """The draw for the noise in a workspace, and the KL.

        Both are differentiable once in the mean and in ρ, as long as nothing else has used the
        workspace.
        """
        *weights, kl = _Draw.apply(self.mean, self.rho, self, space, prior)
        return dict(zip(self.layout.names, weights, strict=True)), kl

    def workspace(self, index: int = 0) -> Workspace:
        """Buffers for one draw, made once and kept: fresh memory each step would cost more."""
        mean = self.mean.detach()
        while len(self._workspaces) <= index:
            self._workspaces.append(Workspace(mean))
        weights = self._workspaces[index].weights
        if weights.device != mean.device or weights.dtype != mean.dtype:
            self._workspaces[index] = Workspace(mean)
        return self._workspaces[index]

    def draw_noise(self, space: Workspace, stream: NormalStream, prior: BoundPrior) -> None:
        """New noise for a draw: a key to it where the compiled draw serves, else the numbers."""
        space.key = None
        # a learned scale must not see what was pruned, which the compiled passes do
        apart = self.keep is None or prior.learned is None
        if self.scale_form == "exp" and apart and can_fuse(self.mean, self.rho, prior):
            space.key = stream.key()
        if space.key is None:
            stream.fill_(space.noise)
        space.filled = True

    @torch.no_grad()
    def widen(self, factors: Tensor) -> None:
        """Multiply the standard deviations by flat factors, in place."""
        rho = self._inverse(self.sd() * factors)
        self.rho.copy_(rho if self.keep is None else torch.where(self.keep, rho, self.rho))

    @torch.no_grad()
    def prune(self, keep: Tensor, prior: BoundPrior) -> None:
        """Take weights out for good: flat ``keep`` is False there. Those pruned before stay so.

        Args:
            keep: Which weights remain, a flat boolean vector.
            prior: Where the others are parked.
        """
        self.restrict(keep)
        assert self.keep is not None
        for start, stop, _, loc, scale in prior.segments():
            part = slice(start, stop)
            pruned = ~self.keep[part]
            sd = torch.as_tensor(scale, dtype=self.rho.dtype, device=self.rho.device)
            self.rho[part] = torch.where(pruned, self._inverse(sd), self.rho[part])
            self.mean[part] = torch.where(pruned, loc, self.mean[part])


class _Draw(torch.autograd.Function):
    """(μ, ρ) → (w by slices, KL), with the gradients of the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, rho: Tensor, family: MeanField, space: Workspace, prior: BoundPrior
    ) -> tuple[Tensor, ...]:
        ctx.table, keep = None, family.keep
        if space.key is not None:
            ctx.table, kl = fused_draw(mean, rho, space, prior, family.layout)
        else:
            kept = rho if keep is None else rho[keep]
            if family.scale_form == "exp":
                torch.exp(rho, out=space.sd)
                log_sd = kept.sum()
            else:
                space.sd.copy_(F.softplus(rho))
                log_sd = (space.sd if keep is None else space.sd[keep]).log().sum()
            torch.addcmul(mean, space.sd, space.noise, out=space.weights)
            energy = prior.expected_energy(mean, space.sd, space.weights, keep)
            kl = energy - log_sd - kept.numel() * HALF_LOG_TWO_PI_E
        ctx.family, ctx.space, ctx.prior, ctx.bits = family, space, prior, family.bits(mean)
        zero_pruned_(ctx.bits, space.weights)
        ctx.save_for_backward(mean, rho)
        ctx.set_materialize_grads(False)
        ctx.state = space.state()
        return *space.slices(family.layout), kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        mean, rho = ctx.saved_tensors
        family: MeanField = ctx.family
        space: Workspace = ctx.space
        space.check(ctx.state)
        *by_slices, by_kl = by_outputs
        space.warn_of_unused(family.layout.names, by_slices)
        by_mean, by_rho = space.memory.room(mean, count=2)
        if ctx.table is not None:
            fused_gradients(by_mean, by_rho, by_slices, by_kl, mean, rho, space, ctx.table)
        else:
            views = family.layout.views(by_mean).values()
            for view, gradient in zip(views, by_slices, strict=True):
                view.zero_() if gradient is None else view.copy_(gradient)
            torch.mul(by_mean, space.noise, out=by_rho)  # that of σ, until it is multiplied below
            if by_kl is not None:
                ctx.prior.add_energy_gradients(
                    by_mean, by_rho, by_kl, mean, space.sd, space.noise, family.keep
                )
            # times dσ/dρ, with the entropy's −1/σ
            if family.scale_form == "exp":
                by_rho.mul_(space.sd)
                if by_kl is not None:
                    by_rho.sub_(by_kl)
            else:
                if by_kl is not None:
                    by_rho.addcdiv_(-by_kl.expand_as(by_rho), space.sd)
                by_rho.mul_(torch.sigmoid(rho))
        zero_pruned_(ctx.bits, by_mean, by_rho)
        # New tensors on the kept memory: autograd takes them over instead of copying them.
        return by_mean.detach(), by_rho.detach(), None, None, None
