r"""IVON: variational inference by an ordinary optimizer, at about the price of Adam.

The weights of a network are the means of independent Gaussians, whose standard deviations the
optimizer learns from the same gradients, taken at a draw. With N examples, a temperature T, a
prior :math:`N(0, s^2)`, :math:`\lambda = N/T`, :math:`\delta = 1/(\lambda s^2)` and
:math:`\sigma^2 = 1/(\lambda(h+\delta))`, a step is

.. math::
    w &= \mu + \sigma z, \qquad \hat g = \text{gradient of the mean loss at } w, \qquad
    \hat h = \lambda(h+\delta)(w-\mu)\,\hat g \\
    h &\leftarrow \beta_2 h + (1-\beta_2)\,\hat h
        + \tfrac12(1-\beta_2)^2\,\frac{(h-\hat h)^2}{h+\delta} \\
    v &\leftarrow \beta_1 v + (1-\beta_1)(\hat g + \delta\mu), \qquad
    \mu \leftarrow \mu - \eta\,(h_0+\delta)\,\frac{v/(1-\beta_1^t)}{h+\delta}.

(Shen et al., 2024, *Variational Learning is Effective for Large Deep Networks*.) What is taken
from the published code, and what differs from it, is said in
:mod:`lightning_bnn.optimizers.natural`. The weights lie in one flat vector, which the network's
parameters are views of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bnn.checks import check_number
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import MeanField
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import network_tensors
from lightning_bnn.optimizers.natural import check_rate, natural_step_
from lightning_bnn.posteriors import GaussianPosterior
from lightning_bnn.priors import BoundPrior, Normal
from lightning_bnn.random import NormalStream

__all__ = ["IVON"]


class IVON(Optimizer):
    """Natural-gradient variational inference on the weights of a network, in a plain loop.

    A loss is the mean over a batch of −log p(y | x, w), without the prior. It and its gradient are
    computed inside of :meth:`sampled_params`, where the weights are a draw. Several draws before
    one step are averaged. Outside, the weights are the means.

    Args:
        params: The network's parameters, of one dtype on one device. Those that are frozen stay.
        lr: η.
        num_data: N, the number of training examples.
        prior_scale: s, the standard deviation of the prior around 0.
        initial_scale: σ₀, that each weight starts with: h₀ + δ = 1/(λ σ₀²).
        beta1: The momentum.
        beta2: How slowly the precisions change.
        temperature: T; 1 is the Bayes posterior.
        radius: No mean moves by more than η times it in a step.
        seed: Seed of the noise; the same on all processes of a distributed fit, which average
            their gradients at one draw. By default PyTorch's global generator decides.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> optimizer = IVON(net.parameters(), lr=0.1, num_data=100, seed=0)
        >>> inputs, targets = torch.randn(8, 2), torch.randn(8, 1)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     with optimizer.sampled_params():
        ...         loss = 0.5 * (net(inputs) - targets).square().mean()
        ...         loss.backward()
        ...     optimizer.step()
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> optimizer.posterior(net, Gaussian(1.0)).predict(inputs).mean.shape
        torch.Size([8, 1])
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.1,
        num_data: int | None = None,
        prior_scale: float = 1.0,
        initial_scale: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        temperature: float = 1.0,
        radius: float = float("inf"),
        seed: int | None = None,
    ) -> None:
        if num_data is None:
            raise ConfigurationError(
                "IVON needs the number of training examples to weigh the prior. Pass num_data=."
            )
        given = list(params)
        weights = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
        if not weights or any(isinstance(one, dict) for one in given):
            raise ConfigurationError(
                "params= are parameters that are trained, in one group, such as net.parameters(); "
                f"got {type(given[0]).__name__ if given else 'none'}."
            )
        defaults = {
            "lr": check_number("lr", lr, positive=False),
            "num_data": check_number("num_data", num_data),
            "temperature": check_number("temperature", temperature),
            "beta1": check_rate("beta1", beta1),
            "beta2": check_rate("beta2", beta2),
            "radius": check_number("radius", radius) if radius != float("inf") else radius,
            "scale": check_number("initial_scale", initial_scale),
        }
        super().__init__(weights, defaults)
        named = {str(place): weight for place, weight in enumerate(weights)}
        self._family = MeanField().bind(named, initial_scale)
        self._prior = BoundPrior(Normal(0.0, prior_scale), nn.Module(), named)
        self._stream = NormalStream(seed)
        self._momentum = torch.zeros_like(self._family.mean)
        self._steps = 0
        # the draws since the last step: their values, the KL, and the gradients at them
        self._open: list[tuple[list[Tensor], Tensor, list[Tensor | None]]] = []
        self._inside = False
        self._show(self._family.mean)

    # ---------------------------------------------------------------- draws

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within it, the weights are a draw: compute the loss and its gradient there."""
        if self._inside:
            raise ConfigurationError("sampled_params() is in use already: it gives one draw.")
        self._set_aside()
        self._take_weights()
        draw, kl = self._family.draw(len(self._open), self._stream, self._prior)
        self._inside = True
        for weight, value in zip(self._weights, draw.values(), strict=True):
            weight.data = value.detach()
        try:
            yield
        finally:
            self._inside = False
            self._show(self._family.mean)
            gradients = [weight.grad for weight in self._weights]
            if any(gradient is not None for gradient in gradients):  # else it was for predictions
                self._open.append((list(draw.values()), kl, gradients))
            for weight, gradient in zip(self._weights, self._sums(), strict=True):
                weight.grad = gradient

    def _set_aside(self) -> None:
        """Let the weights have no gradient before a draw: those at earlier draws are kept."""
        given = [weight.grad for weight in self._weights if weight.grad is not None]
        if not given:
            self._open = []  # the network's own zero_grad cleared them
        elif not self._open and any(bool(gradient.any()) for gradient in given):
            raise ConfigurationError(
                "The weights have gradients that are not those at a draw. Compute all inside of "
                "'with optimizer.sampled_params():', or clear them with zero_grad() before it. To "
                "accumulate batches with Lightning's trainer, use IVONBNN."
            )
        for weight in self._weights:
            weight.grad = None

    def _sums(self) -> list[Tensor | None]:
        """The gradients at all draws since the last step, to be clipped or unscaled as one."""
        sums: list[Tensor | None] = []
        for place in range(len(self._weights)):
            given = [by for *_, each in self._open if (by := each[place]) is not None]
            sums.append(sum(given[1:], given[0]) if given else None)
        return sums

    def _collect(self) -> int:
        """Turn the gradients at the draws into those of means and standard deviations.

        What was done to their sums meanwhile, is done to each.

        Returns:
            The number of draws.
        """
        sums, now = self._sums(), [weight.grad for weight in self._weights]
        draws, self._open = self._open, []
        if not draws or all(by is None for by in now):
            return 0
        (group,) = self.param_groups
        for values, kl, gradients in draws:
            if len(draws) > 1:
                triples = zip(gradients, now, sums, strict=True)
                each = [
                    None
                    if by is None or after is None or before is None
                    else by * torch.where(before == 0, 1, after / before)  # 1 if nothing was done
                    for by, after, before in triples
                ]
            else:
                each = now
            used = [(value, by) for value, by in zip(values, each, strict=True) if by is not None]
            by_kl = kl.new_tensor(group["temperature"] / group["num_data"])
            roots, by_roots = zip(*used, (kl, by_kl), strict=True)
            torch.autograd.backward(roots, by_roots)
        for weight in self._weights:
            weight.grad = None
        return len(draws)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients: outside of a draw, also those of the step's earlier draws."""
        super().zero_grad(set_to_none)
        if not self._inside:
            self._open = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """There is one group, all of whose weights are drawn together."""
        if self.param_groups:
            raise ConfigurationError(
                "IVON takes no further group of parameters. Make a new one of all parameters that "
                "are to be trained; frozen ones stay as they are."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step from the gradients at the draws since the last one.

        Args:
            closure: Computes a loss and its gradient, at a draw that this method makes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad(), self.sampled_params():
                loss = closure()
        with torch.enable_grad():
            draws = self._collect()
        if not draws:
            raise ConfigurationError(
                "IVON has no gradient at a draw of the weights. Compute it inside of 'with "
                "optimizer.sampled_params():', the backward pass too, and call step() after it."
            )
        (group,), family = self.param_groups, self._family
        by_mean, by_rho = family.mean.grad, family.rho.grad
        assert by_mean is not None
        assert by_rho is not None
        self._steps += 1
        pull = (1 - group["beta2"]) * group["num_data"] / group["temperature"] / draws
        rate = group["lr"] / (group["scale"] ** 2 * (1 - group["beta1"] ** self._steps))
        if draws > 1:
            by_mean.div_(draws)
        natural_step_(
            family.mean.data, family.rho.data, self._momentum, by_mean, by_rho, group["beta1"],
            pull, rate, group["lr"] * group["radius"] if group["lr"] > 0 else 0.0,
        )  # fmt: skip
        family.zero_grad()
        return loss

    # ---------------------------------------------------------------- the weights

    @property
    def _weights(self) -> list[nn.Parameter]:
        weights: list[nn.Parameter] = self.param_groups[0]["params"]
        return weights

    def _show(self, flat: Tensor) -> None:
        """Let the network's parameters be views of a flat vector."""
        for weight, view in zip(
            self._weights, self._family.layout.views(flat.data).values(), strict=True
        ):
            weight.data = view

    def _take_weights(self) -> None:
        """Follow a network that was converted or given other tensors since the last draw."""
        views = self._family.layout.views(self._family.mean.data).values()
        pairs = list(zip(self._weights, views, strict=True))
        if any(weight.data_ptr() != view.data_ptr() for weight, view in pairs):
            first = self._weights[0]
            self._family.to(first.device, first.dtype)
            self._momentum = self._momentum.to(first)
            tensors = dict(zip(self._family.layout.names, self._weights, strict=True))
            self._family.mean.data = self._family.layout.flatten(tensors)
            self._show(self._family.mean)

    @torch.no_grad()
    def posterior(self, net: nn.Module, likelihood: Likelihood) -> GaussianPosterior:
        """The Gaussian as it stands.

        Args:
            net: The network whose parameters are optimized.
            likelihood: How its outputs give targets.
        """
        self._take_weights()
        sds = self._family.layout.views(self._family.sd()).values()
        by_id = {id(weight): sd for weight, sd in zip(self._weights, sds, strict=True)}
        own = {name: one for name, one in net.named_parameters() if id(one) in by_id}
        if len(own) < len(by_id):
            raise ConfigurationError("net= is not the network whose parameters IVON was given.")
        fixed = {name: one for name, one in network_tensors(net).items() if name not in own}
        sd = {name: by_id[id(one)] for name, one in own.items()}
        return GaussianPosterior(net, likelihood, own, sd, fixed)

    # ---------------------------------------------------------------- state

    def __getstate__(self) -> dict[str, Any]:
        """All of it, for copies; PyTorch's has the groups and their state alone."""
        own = ("_family", "_prior", "_stream", "_momentum", "_steps")
        new = {"_open": [], "_inside": False}
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}, **new}

    def state_dict(self) -> dict[str, Any]:
        """The state, from which a fit resumes to the last bit: means are those of the network."""
        own = {
            "rho": self._family.rho.detach(), "momentum": self._momentum, "steps": self._steps,
            "stream": self._stream.state_dict(),
        }  # fmt: skip
        return {**super().state_dict(), "ivon": own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the saved state; the network's weights are loaded by the network."""
        own = state_dict.get("ivon", {})
        size = len(own.get("rho", ()))
        if size != self._family.layout.size:
            raise ConfigurationError(
                f"The saved state is of {size} weights, this IVON of {self._family.layout.size}. "
                "Build it on the same network; with 0, it was saved by another optimizer."
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "ivon"})
        self._take_weights()  # in a precision that they were converted to
        self._family.rho.copy_(own["rho"])
        self._momentum.copy_(own["momentum"])
        self._steps = own["steps"]
        self._stream.load_state_dict(own["stream"])
