r"""Preconditioned SGLD with RMSprop's metric (Li, Chen, Carlson and Carin, 2016).

.. math::
    V &\leftarrow V + \beta_t\,(g^2 - V), \qquad
      \beta_t = \frac{1 - \alpha}{1 - \alpha^t}, \qquad G = \frac{1}{\lambda + \sqrt V} \\
    w &\leftarrow w - \eta\,(G g - \tfrac TN \Gamma) + \sqrt{2\eta T G/N}\,\xi

V is the running mean of g² with the memory α; :math:`\beta_t` tends to 1 − α and lets the first
gradients count in full, so that V starts at g² and not at zero.

**Γ.** A metric that depends on the weights needs the drift
:math:`\Gamma_i = \partial G_i/\partial w_i`. It is left out by default, and the chain then
samples a law that is wrong *however small η is*: V follows the weights much faster than they
move, so in one dimension the law is exp(−U/T)/G. How wrong depends on how much √V changes over the
posterior: little where the noise of minibatches makes up most of g, much with the gradient of all
examples (a Gaussian's variance then comes out up to twice as large). The same average as for V
gives Γ,

.. math:: D \leftarrow D + \beta_t\,(g\,H - D), \qquad \Gamma = -\frac{D\,G^2}{\sqrt V},

with H the diagonal of the mean energy's Hessian, because ∂V/∂w = 2D when the weights move little
within the memory. (Li et al. count the share 1 − α of the newest gradient only, which leaves most
of the error.) Where V = 0, Γ is 0. ``gamma=True`` estimates H by a second call of the closure, at
:math:`w + \delta z` with random signs z, as :math:`z_i\,[g(w + \delta z) - g(w)]_i/\delta`. A
smaller error stays, of order 1 − α: the newest minibatch gradient is itself part of its metric.

**Or hold the metric.** With ``freeze_after=n`` it adapts for n steps and is then held. Γ is then
zero and the sampler is exact as η → 0, at no cost: do this, with n well beyond the memory
1/(1 − α), lest a weight whose gradient was small by chance keep a step that is too long, and count
those steps as burn-in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.checks import check_number, check_whole
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.samplers.base import Closure, Group, Sampler

__all__ = ["PSGLD"]


class PSGLD(Sampler):
    """SGLD with its own step size for each weight.

    Args:
        params: Parameters, or groups of them.
        lr: η, the learning rate; steps have the size of RMSprop's, so it is smaller than SGLD's.
        num_data: N, the number of training examples.
        decay: α, the memory of the metric, at least 0 and below 1.
        damping: λ, above 0; it bounds the step of weights whose gradients are small.
        freeze_after: Number of steps after which the metric is held (recommended), or None.
        gamma: Whether to add Γ while the metric adapts; needs ``step(closure)`` and calls the
            closure twice, with the same random numbers (on a CPU and on CUDA devices) so that
            dropout is the same in both.
        temperature: T; 1 is the Bayes posterior.
        seed: Seed of the noise, or one for each stacked chain.

    Example:
        >>> weight = torch.zeros(3, requires_grad=True)
        >>> sampler = PSGLD([weight], lr=1e-3, num_data=100, freeze_after=1000, seed=0)
        >>> (0.5 * (weight - 1) ** 2).sum().backward()            # the mean energy
        >>> sampler.step()
        >>> bool((weight != 0).all())
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int | None = None,
        decay: float = 0.99,
        damping: float = 1e-5,
        freeze_after: int | None = None,
        gamma: bool = False,
        temperature: float = 1.0,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        options: Group = {"lr": lr, "decay": decay, "damping": damping}
        options.update(freeze_after=freeze_after, gamma=gamma, adapted=0)
        super().__init__(params, options, num_data, temperature, seed)

    def check_options(self, group: Group) -> None:
        """Raise on a decay outside [0, 1), a damping of 0 and an odd ``freeze_after``."""
        super().check_options(group)
        check_number("damping", group["damping"])
        if check_number("decay", group["decay"], positive=False) >= 1:
            raise ConfigurationError(f"decay= is at least 0 and below 1; got {group['decay']}.")
        if group["freeze_after"] is not None:
            check_whole("freeze_after", group["freeze_after"], 1)

    @property
    def calls_closure_again(self) -> bool:  # type: ignore[override]
        """Whether the next step needs the gradient at a second point."""
        return any(group["gamma"] and _adapts(group) for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step; while Γ is needed, from two calls of ``closure``."""
        corrected = [group for group in self.param_groups if group["gamma"] and _adapts(group)]
        if not corrected:
            return super().step(closure)
        if closure is None:
            raise ConfigurationError(
                "PSGLD with gamma=True needs the gradient at a second point: call step(closure), "
                "or hold the metric with freeze_after= and leave gamma out."
            )
        devices = {p.device for group in corrected for p in group["params"] if p.is_cuda}
        # leaving the fork puts the random state back, so that the second call sees it again
        with torch.enable_grad(), torch.random.fork_rng(devices=sorted(devices, key=str)):
            loss = closure()
        self._follow_slope(corrected, closure)
        super().step()
        return loss

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """One step of the rule above."""
        for weight, gradient in zip(weights, gradients, strict=True):
            if "square" not in self.state[weight]:
                self.state[weight]["square"] = gradient.square()
        squares = [self.state[weight]["square"] for weight in weights]
        adapts = _adapts(group)
        if adapts:
            share = _share(group)
            torch._foreach_mul_(squares, 1 - share)
            torch._foreach_addcmul_(squares, gradients, gradients, value=share)
            group["adapted"] += 1
        inverse = self.scratch(group, weights, "inverse")  # 1/G
        torch._foreach_copy_(inverse, squares)
        torch._foreach_sqrt_(inverse)
        torch._foreach_add_(inverse, group["damping"])
        torch._foreach_addcdiv_(weights, gradients, inverse, value=-group["lr"])
        scale = self.noise_scale(group, 2 * group["lr"])
        if scale == 0:
            return
        if adapts and group["gamma"]:
            for weight, square, root in zip(weights, squares, inverse, strict=True):
                drift = self.state[weight]["slope"] / (square.sqrt() * root.square())
                drift = torch.where(square > 0, drift, 0)
                weight.add_(drift, alpha=-(scale**2) / 2)  # scale²/2 = ηT/N
        torch._foreach_sqrt_(inverse)
        torch._foreach_addcdiv_(weights, self.noise(group, weights), inverse, value=scale)

    def _follow_slope(self, groups: list[Group], closure: Closure) -> None:
        """Update D, half the derivative of V, by a second call of the closure."""
        moved = []
        for group in groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if weights:
                signs = [z.sign_() for z in self.noise(group, weights, "signs")]
                before = [p.detach().clone() for p in weights]
                moved.append((group, weights, signs, before, [p.grad.clone() for p in weights]))
        try:
            for _, weights, signs, _, _ in moved:
                torch._foreach_add_(weights, signs, alpha=_probe_length(weights[0]))
            with torch.enable_grad():
                closure()
        finally:
            for _, weights, _, before, _ in moved:
                torch._foreach_copy_(weights, before)
        for group, weights, signs, _, gradients in moved:
            for weight, sign, gradient in zip(weights, signs, gradients, strict=True):
                curvature = (weight.grad - gradient) * sign / _probe_length(weights[0])
                slope = gradient * curvature
                kept = self.state[weight].setdefault("slope", slope)
                self.state[weight]["slope"] = kept + _share(group) * (slope - kept)
                weight.grad.copy_(gradient)


def _adapts(group: Group) -> bool:
    return group["freeze_after"] is None or group["adapted"] < group["freeze_after"]


def _share(group: Group) -> float:
    """The weight β of the newest gradient in the averages."""
    decay = group["decay"]
    return (1 - decay) / (1 - decay ** (group["adapted"] + 1))


def _probe_length(weight: Tensor) -> float:
    """δ: the square root of the rounding error balances it against the curvature's change."""
    return float(torch.finfo(weight.dtype).eps ** 0.5)
