r"""A natural-gradient step of a mean-field Gaussian: the update of IVON.

With :math:`q = \prod N(\mu_j, \sigma_j^2)`, :math:`\rho = \log\sigma`, L the bound that
:class:`~lightning_bnn.VariationalBNN` minimises, and :math:`\lambda = N/T`,

.. math::
    v &\leftarrow \beta_1 v + (1-\beta_1)\,\partial L/\partial\mu \\
    u &= (1-\beta_2)\,\lambda\,\partial L/\partial\rho, \qquad
    \rho \leftarrow \rho - \tfrac12\log(1 + u + \tfrac12 u^2) \\
    \mu &\leftarrow \mu - \eta\,\frac{\sigma^2}{\sigma_0^2}\,\frac{v}{1-\beta_1^t}

after t steps, from the standard deviation :math:`\sigma_0`. That is the improved variational
online Newton method (Shen et al., 2024, *Variational Learning is Effective for Large Deep
Networks*) in other symbols. For a prior :math:`N(m, s^2)` let
:math:`\delta = 1/(\lambda s^2)` and :math:`h + \delta = 1/(\lambda\sigma^2)`. One draw w with the
gradient ĝ of the data's part gives
:math:`\hat h = \lambda(h+\delta)(w-\mu)\,\hat g`, and
:math:`\lambda\,\partial L/\partial\rho = (\hat h - h)/(h+\delta)`. So the second line is

.. math::
    h \leftarrow \beta_2 h + (1-\beta_2)\,\hat h
        + \tfrac12(1-\beta_2)^2\,\frac{(h-\hat h)^2}{h+\delta},

and the third divides by :math:`h + \delta`, with the published code's rescaling: η is multiplied
by :math:`h_0 + \delta`, so that it is the rate of SGD as long as the scales are what they began
with. As published, the momentum is corrected for its start at 0, and h is not. What differs:

* the momentum averages the whole gradient, that of the prior included, which is published apart.
  So any prior serves, also one whose scale is learned; the fixed point is the same;
* u is held within −1 and 1, a change of a precision by ½ to 2.5 in a step. Below −1 the series
  rises again, and a precision that should fall would rise. It matters only while 1 − β₂ is large;
* no mean moves by more than η · ``radius`` in a step (none published; it has the option).

Point estimates are moved as if their σ stayed at :math:`\sigma_0`: SGD with momentum.

Gradients may be averages over draws, over accumulated batches and over processes: each enters L
linearly. On a CPU in float32 all is one compiled pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bnn.checks import check_number
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.native.library import load

__all__ = ["NaturalGradient", "check_rate", "natural_step_"]


def check_rate(name: str, value: Any) -> float:
    """The value of a β, raising unless it is at least 0 and below 1.

    Example:
        >>> check_rate("beta1", 1.0)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: beta1= is at least 0 and below 1; got 1.0.
    """
    if check_number(name, value, positive=False) >= 1:
        raise ConfigurationError(f"{name}= is at least 0 and below 1; got {value}.")
    return float(value)


@torch.no_grad()
def natural_step_(
    mean: Tensor,
    rho: Tensor,
    momentum: Tensor,
    by_mean: Tensor,
    by_rho: Tensor,
    keep: float,
    pull: float,
    rate: float,
    most: float = math.inf,
) -> None:
    """One step in place, in one pass where it is compiled.

    Args:
        mean: μ.
        rho: log σ.
        momentum: v.
        by_mean: ∂L/∂μ.
        by_rho: ∂L/∂ρ.
        keep: β₁.
        pull: (1 − β₂) λ.
        rate: η / (σ₀² (1 − β₁ᵗ)).
        most: How far a mean moves at most.

    Example:
        >>> mean, rho, momentum = torch.zeros(3, 1)
        >>> natural_step_(mean, rho, momentum, torch.ones(1), torch.zeros(1), 0.5, 0.1, 0.2)
        >>> mean, rho, momentum
        (tensor([-0.1000]), tensor([0.]), tensor([0.5000]))
    """
    flats = (mean, rho, momentum, by_mean, by_rho)
    native = None
    if all(
        f.device.type == "cpu" and f.dtype == torch.float32 and f.is_contiguous() for f in flats
    ):
        native = load()
    if native is not None:
        native.natural_step(*flats, keep, pull, rate, most)
        return
    momentum.lerp_(by_mean, 1 - keep)
    u = (by_rho * pull).clamp_(-1, 1)
    rho.sub_(torch.addcmul(u, u, u, value=0.5).log1p_(), alpha=0.5)
    step = torch.exp(2 * rho).mul_(momentum).mul_(rate)
    mean.sub_(step if math.isinf(most) else step.clamp_(-most, most))


class NaturalGradient(Optimizer):
    """Moves the means and log standard deviations of Gaussians by natural gradients.

    It is the optimizer of :class:`~lightning_bnn.IVONBNN`. The gradients are those of the whole
    bound, by μ and by ρ. For weights of a network themselves, see :class:`~lightning_bnn.IVON`.

    Args:
        mean: μ, flat.
        rho: log σ, flat.
        points: Parameters that are point estimates.
        lr: η.
        ess: λ = N/T.
        scale: σ₀.
        beta1: The momentum.
        beta2: How slowly precisions change.
        radius: No mean moves by more than η times it in a step.

    Example:
        >>> mean, rho = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        >>> optimizer = NaturalGradient(mean, rho, lr=0.1, ess=10.0, scale=1.0)
        >>> mean.grad, rho.grad = torch.ones(2), torch.zeros(2)
        >>> optimizer.step()
        >>> mean.detach()
        tensor([-0.1000, -0.1000])
    """

    def __init__(
        self,
        mean: Tensor,
        rho: Tensor,
        points: Iterable[Tensor] = (),
        lr: float = 0.1,
        ess: float = 1.0,
        scale: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        radius: float = math.inf,
    ) -> None:
        defaults = {
            "lr": check_number("lr", lr, positive=False),
            "ess": check_number("ess", ess),
            "scale": check_number("scale", scale),
            "beta1": check_rate("beta1", beta1),
            "beta2": check_rate("beta2", beta2),
            "radius": radius,
            "steps": 0,
        }
        groups: list[dict[str, Any]] = [{"params": [mean, rho], "gaussian": True}]
        if others := list(points):
            groups.append({"params": others, "gaussian": False})
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step from the gradients that are there, or that ``closure`` computes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if any(parameter.grad is not None for parameter in group["params"]):
                group["steps"] += 1
                self._move(group)
        return loss

    def _move(self, group: dict[str, Any]) -> None:
        rate = group["lr"] / (1 - group["beta1"] ** group["steps"])
        most = group["lr"] * group["radius"] if group["lr"] > 0 else 0.0
        if group["gaussian"]:
            mean, rho = group["params"]
            natural_step_(
                mean.data, rho.data, self._momentum(mean), mean.grad, rho.grad,
                group["beta1"], (1 - group["beta2"]) * group["ess"],
                rate / group["scale"] ** 2, most,
            )  # fmt: skip
            return
        for point in group["params"]:
            if point.grad is not None:
                momentum = self._momentum(point)
                momentum.lerp_(point.grad, 1 - group["beta1"])
                point.sub_((rate * momentum).clamp_(-most, most))

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum
