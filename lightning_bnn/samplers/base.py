r"""What every sampler shares: noise from its own streams, N, T, and a reading of the temperature.

A sampler is a ``torch.optim.Optimizer`` that expects in ``.grad`` the gradient of the *mean
energy* :math:`\bar U = U/N` (see :mod:`lightning_bnn.target`), so that its learning rate η means
what it means in ordinary training, and leaves the weights distributed as
:math:`\exp(-U/T)`. The symbols of all docstrings: w weights, g the gradient of the mean energy, η
the learning rate, N the number of training examples, T the temperature, ξ standard normal
numbers, d the number of weights.

Several chains run as one: the parameters then have a leading axis of chains, and each chain has
its own stream of noise, so that it moves as it would alone.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bnn.checks import check_number, is_whole
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.random import NormalStream
from lightning_bnn.samplers.step_size import StepSizes

__all__ = ["MomentumSampler", "Sampler", "check_share"]

Group = dict[str, Any]
Rate = float | Tensor
Closure = Callable[[], Any]


def check_share(name: str, value: Any) -> None:
    """Raise unless the value of an option is above 0 and at most 1.

    Example:
        >>> check_share("friction", 1.5)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: friction= is above 0 and at most 1; got 1.5.
    """
    if check_number(name, value) > 1:
        raise ConfigurationError(f"{name}= is above 0 and at most 1; got {value}.")


class Sampler(Optimizer):
    """The base class of samplers; a subclass adds :meth:`update` for one group of parameters.

    Args:
        params: Parameters, or groups of them, as for any optimizer.
        defaults: The subclass's own options, ``lr`` among them.
        num_data: N, the number of training examples.
        temperature: T; 1 is the Bayes posterior, 0 leaves the noise out.
        seed: Seed of the noise; a sequence gives one to each chain, for parameters whose leading
            axis counts chains. By default PyTorch's global generator decides.

    Attributes:
        measure: Set it to have every step leave a reading in ``measured_temperature``.
        measured_temperature: The temperature at the last measured step, one for each chain:
            kinetic where there are momenta, else configurational. One step's reading is noisy:
            average over many.
        measure_positions: Set it to have every step leave one in ``configurational_temperature``.
        configurational_temperature: The configurational temperature at that step, by chain. It
            comes to T only when a chain has settled in all directions, while momenta settle soon.
    """

    full_batch = False  # whether the gradient must be that of all examples
    calls_closure_again = False  # whether a step needs the gradient at more than one point
    gradients_per_step = 1  # how many of them, about
    reads_after_step = False  # whether the temperature is that of what a step leaves
    adapt_steps = 0  # the first steps, which find a step size and give no draws
    plans_adaptation = False  # whether their number is left to a strategy, as a share of its fit
    acceptance: Tensor | None = None  # where moves are accepted or rejected: how likely, by chain

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        num_data: int | None,
        temperature: float = 1.0,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        check_number("num_data", num_data)
        self.num_data = _plain(num_data)
        self.stacked = isinstance(seed, Sequence)
        seeds: list[Any] = list(seed) if isinstance(seed, Sequence) else [seed]
        if not seeds or not all(one is None or is_whole(one) for one in seeds):
            raise ConfigurationError(
                f"seed= is a whole number, or a list of one for each chain; got {seed!r:.80}."
            )
        if len(set(seeds)) < len(seeds):
            raise ConfigurationError(
                f"Each chain needs its own seed, or chains share their noise; got seed={seeds}. "
                "lightning_bnn.random.member_seed makes them from one."
            )
        self.streams = [NormalStream(chain_seed) for chain_seed in seeds]
        self.measure = self.measure_positions = False
        self.measured_temperature: Tensor | None = None
        self.configurational_temperature: Tensor | None = None
        self.step_sizes: StepSizes | None = None  # where each chain finds its own rate
        self.active: Sequence[bool] | None = None  # which chains move; all by default
        self._scratch: dict[Any, tuple[Tensor, list[Tensor]]] = {}
        # "explore" is set by a schedule for steps without noise
        try:
            super().__init__(params, {**defaults, "temperature": temperature, "explore": False})
        except (TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"params= are parameters, such as net.parameters(); {error}."
            ) from error

    @property
    def chains(self) -> int:
        """The number of chains that run side by side."""
        return len(self.streams)

    @property
    def adapting(self) -> bool:
        """Whether the next step is one of those that find a step size and give no draws."""
        return self.step_sizes is not None and self.step_sizes.adapting

    @property
    def finds_rate(self) -> bool:
        """Whether its learning rate was left to it."""
        return self.step_sizes is not None

    @abstractmethod
    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Move the weights of a group by one step, in place."""

    def check_options(self, group: Group) -> None:
        """Raise on options of a group that cannot work; a subclass adds its own."""
        if group["lr"] is None:
            raise ConfigurationError(
                f"{type(self).__name__} needs a learning rate: pass lr=. SGHMC and BAOA find one "
                "by themselves, by the temperature of their momenta, in an SGMCMC strategy."
            )
        check_number("lr", group["lr"])
        check_number("temperature", group["temperature"], positive=False)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step from the gradients that are there, or that ``closure`` computes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        readings: list[tuple[Tensor, int]] = []
        positions: list[tuple[Tensor, int]] = []
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [p.grad for p in weights]
            reads = self.measure and group["lr"] > 0  # without a step there is nothing to read
            if reads and not self.reads_after_step:
                readings.append(self.read_temperature(group, weights, gradients))
            if self.measure_positions:
                positions.append(Sampler.read_temperature(self, group, weights, gradients))
            self.update(group, weights, gradients)
            if reads and self.reads_after_step:
                readings.append(self.read_temperature(group, weights, gradients))
        if readings:
            self.measured_temperature = _mean_reading(readings)
        if positions:
            self.configurational_temperature = _mean_reading(positions)
        return loss

    def readings(self) -> dict[str, Tensor]:
        """What a strategy logs of the last step, by name; a subclass adds its own."""
        return {}

    def found(self) -> str | None:
        """What a strategy says of its step sizes, where it accepts or rejects and found them."""
        return None

    def take_over(self, earlier: Sampler) -> None:
        """Go on with the step sizes that an earlier sampler of the same chains has found."""
        if self.step_sizes is not None and earlier.step_sizes is not None:
            self.step_sizes.load_state_dict(earlier.step_sizes.state_dict())

    # ---------------------------------------------------------------- for the subclasses

    def noise(self, group: Group, weights: list[Tensor], key: str = "noise") -> list[Tensor]:
        """Fresh standard normal numbers of the weights' shapes, in memory that is kept.

        A chain's numbers come from its own stream, one flat row for the whole group.
        """
        flat, parts = self._memory(group, weights, key)
        for row, stream, moving in zip(flat, self.streams, self._moves(), strict=True):
            if moving:  # the stream of a chain that waits stays where it is
                stream.fill_(row)
        return parts

    def _moves(self) -> Sequence[bool]:
        """Which chains take the step."""
        return [True] * self.chains if self.active is None else self.active

    def rate(self, group: Group) -> Rate:
        """η: a number for all chains, or where each has its own, (K,)."""
        return group["lr"] if self.step_sizes is None else group["lr"] * self.step_sizes.rates

    @overload
    def noise_scale(self, group: Group, variance: float) -> float: ...

    @overload
    def noise_scale(self, group: Group, variance: Tensor) -> Rate: ...

    def noise_scale(self, group: Group, variance: Rate) -> Rate:
        """√(variance · T / N), or 0 in a step of exploration."""
        if group["explore"] or group["temperature"] == 0:
            return 0.0
        square = variance * group["temperature"] / self.num_data
        return square.sqrt() if isinstance(square, Tensor) else math.sqrt(square)

    def add(self, targets: list[Tensor], others: list[Tensor], factor: Rate) -> None:
        """Add ``factor`` times other tensors in place: one factor, or one for each chain."""
        if not isinstance(factor, Tensor):
            torch._foreach_add_(targets, others, alpha=factor)
            return
        for target, other in zip(targets, others, strict=True):
            target.addcmul_(other, self.along(factor, target).to(target))

    def scratch(self, group: Group, weights: list[Tensor], key: str) -> list[Tensor]:
        """Tensors of the weights' shapes to work in, in memory that is kept but never saved."""
        return self._memory(group, weights, key)[1]

    def along(self, values: Tensor, weight: Tensor) -> Tensor:
        """One value for each chain, in a shape that broadcasts over its weights."""
        return values.reshape([self.chains] + [1] * (weight.dim() - 1) if self.stacked else [])

    def per_chain(self, tensors: Iterable[Tensor]) -> Tensor:
        """The sum of tensors' elements, one for each chain."""
        rows = [tensor.reshape(self.chains, -1).sum(1) for tensor in tensors]
        return torch.stack(rows).sum(0)

    def row_squares(self, tensors: list[Tensor]) -> Tensor:
        """The squared norm of each chain's row over all tensors, (K,).

        Chain by chain: the sum over a row of a matrix may differ in its last bit from that over a
        vector, and a chain must move as it would alone.
        """
        total = None
        for tensor in tensors:
            rows = tensor.reshape(self.chains, -1).unbind()
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            squares = torch.stack(torch._foreach_norm(rows, 2, dtype)).square()
            total = squares if total is None else total + squares
        assert total is not None
        return total

    def read_temperature(
        self, group: Group, weights: list[Tensor], gradients: list[Tensor]
    ) -> tuple[Tensor, int]:
        """N Σ w g for each chain, and the number of weights over which it is to be averaged.

        E[w · ∇U] = T for each weight by partial integration, whatever the posterior: the
        *configurational* temperature. Samplers with momenta override it.
        """
        products = torch._foreach_mul(weights, gradients)
        return self.per_chain(products) * self.num_data, self._size(weights)

    def _size(self, weights: list[Tensor]) -> int:
        return sum(weight.numel() for weight in weights) // self.chains

    def _memory(self, group: Group, weights: list[Tensor], key: str) -> tuple[Tensor, list[Tensor]]:
        """One flat row for each chain, and its parts in the weights' shapes; made once."""
        first, shapes = weights[0], [weight.shape for weight in weights]
        place = (id(group), key, first.device, first.dtype, *shapes)
        if place not in self._scratch:
            sizes = [weight.numel() // self.chains for weight in weights]
            flat = torch.empty(self.chains, sum(sizes), device=first.device, dtype=first.dtype)
            parts = zip(flat.split(sizes, dim=1), shapes, strict=True)
            self._scratch[place] = flat, [part.view(shape) for part, shape in parts]
        return self._scratch[place]

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with N and that of every stream of noise."""
        state = super().state_dict()
        state["num_data"] = self.num_data
        state["streams"] = [stream.state_dict() for stream in self.streams]
        if self.step_sizes is not None:
            state["step_sizes"] = self.step_sizes.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the saved sampler, to the last bit; N, T and lr are the saved ones."""
        streams = state_dict.get("streams", [])
        if len(streams) != self.chains:
            raise ConfigurationError(
                f"The saved state has {len(streams)} chains, this {type(self).__name__} "
                f"{self.chains}. Build it with the same number to resume; with 0, it was saved by "
                "another optimizer."
            )
        super().load_state_dict(state_dict)
        self.num_data = state_dict["num_data"]
        for stream, saved in zip(self.streams, streams, strict=True):
            stream.load_state_dict(saved)
        if self.step_sizes is not None:
            self.step_sizes.load_state_dict(state_dict["step_sizes"])

    def __getstate__(self) -> dict[str, Any]:
        # Optimizer keeps only three entries and so would lose N and the noise in a copy. What it
        # leaves out for a reason stays out: hooks, and the step that a schedule has wrapped.
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("step", "_scratch") and not name.startswith("_optimizer_")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._scratch = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its options and its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.check_options(group)
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise ConfigurationError(
                    f"{type(self).__name__} samples real weights; got a parameter of type "
                    f"{parameter.dtype}. Split a complex one in two real ones (view_as_real)."
                )
            if self.stacked and parameter.shape[:1] != (self.chains,):
                raise ConfigurationError(
                    f"{self.chains} seeds mean {self.chains} chains, so every parameter needs a "
                    f"leading axis of that length; got the shape {tuple(parameter.shape)}."
                )
        group.update({name: _plain(value) for name, value in group.items()})


class MomentumSampler(Sampler):
    """A sampler in which each weight has a velocity v, in units of a step: w moves by v.

    Velocities start at zero and reach their law, of variance ηT/N, within a few multiples of
    1/friction steps, far sooner than the weights reach theirs. When a schedule changes η they are
    scaled by the root of its ratio, which leaves the momenta of unit mass, v·√(N/η), as they are:
    a chain in balance stays so.

    The temperature that it reads is the *kinetic* one, N|v|²/(ηd) after the step. Without ``lr``
    each chain finds its own by it (see :mod:`lightning_bnn.samplers.step_size`).
    """

    reads_after_step = True
    can_find_rate = True  # whether its temperature tells if a rate is too large

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        num_data: int | None,
        temperature: float = 1.0,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        finds = defaults["lr"] is None and self.can_find_rate
        options = {**defaults, "lr": 1.0} if finds else defaults
        super().__init__(params, options, num_data, temperature, seed)
        if not finds:
            return
        groups = self.param_groups
        if len(groups) > 1 or groups[0]["temperature"] == 0:
            raise ConfigurationError(
                f"{type(self).__name__} finds a learning rate by the temperature of one group of "
                f"parameters, at a temperature above 0; got {len(groups)} group(s) and "
                f"temperature={groups[0]['temperature']}. Pass lr=."
            )
        weights = sum(weight.numel() for weight in groups[0]["params"]) // self.chains
        self.step_sizes = StepSizes(self.chains, weights, groups[0]["friction"])
        self.adapt_steps, self.plans_adaptation = 1000, True
        self._back: list[Tensor] = []  # where each chain's window began
        self._before: list[Tensor] = []  # the gradient that the next is compared with

    @property
    def adapt_steps(self) -> int:
        """The first steps of each chain, in which it finds its rate."""
        return 0 if self.step_sizes is None else self.step_sizes.steps

    @adapt_steps.setter
    def adapt_steps(self, steps: int) -> None:
        if self.step_sizes is not None:
            self.step_sizes.steps = steps

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step, with velocities in the units of the learning rate as it is now."""
        for group in self.param_groups:
            before = group.get("velocity_lr")
            if before is not None and before != group["lr"] and group["lr"] > 0:
                kept = [self.state[p]["velocity"] for p in group["params"] if self.state[p]]
                if kept:
                    torch._foreach_mul_(kept, math.sqrt(group["lr"] / before))
            if group["lr"] > 0:
                group["velocity_lr"] = group["lr"]
        if self.step_sizes is None:
            return super().step(closure)
        wanted, self.measure = self.measure, True
        loss = super().step(closure)
        self.measure = wanted
        self._tune(self.step_sizes)
        return loss

    def _tune(self, sizes: StepSizes) -> None:
        """Let every chain judge its rate by the step that it took."""
        (group,) = self.param_groups
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights or group["explore"] or self.measured_temperature is None:
            return
        noise = self._compare_gradients(weights, sizes)
        before, temperature = sizes.rates, group["temperature"]
        reading = self.measured_temperature / temperature
        squares = None
        if sizes.begins(self._moves()):
            squares = self.row_squares([weight.detach() for weight in weights]) / sizes.weights
        begins, lost = sizes.update(
            noise, reading, temperature, self.num_data, self._moves(), squares
        )
        before = before.to(sizes.rates)
        ratio = torch.where(before > 0, (sizes.rates / before).sqrt(), 0.0).masked_fill(lost, 0.0)
        for velocity in self.velocities(weights):
            velocity.mul_(self.along(ratio, velocity).to(velocity))
        if not sizes.adapting:
            self._back = []
            return
        if not self._back:
            self._back = [weight.detach().clone() for weight in weights]
        for weight, back in zip(weights, self._back, strict=True):
            weight.copy_(torch.where(self.along(lost, weight), back, weight))
            back.copy_(torch.where(self.along(begins, weight), weight, back))

    def _compare_gradients(self, weights: list[Tensor], sizes: StepSizes) -> Tensor:
        """Half of the mean squared difference to the gradient before, where that was kept, (K,)."""
        gradients = [weight.grad.detach() for weight in weights if weight.grad is not None]
        noise = torch.zeros(self.chains, dtype=torch.float64, device=gradients[0].device)
        for chain, moves in enumerate(self._moves()):
            keeps, compares = sizes.compares(chain)
            if moves and keeps and not self._before:
                self._before = [torch.zeros_like(gradient) for gradient in gradients]
            pairs = zip(gradients, self._before, strict=True) if moves and self._before else ()
            for gradient, before in pairs:
                if self.stacked:
                    gradient, before = gradient[chain], before[chain]
                if keeps:
                    before.copy_(gradient)
                elif compares:
                    noise[chain] += (gradient - before).square().sum() / (2 * sizes.weights)
        return noise

    def velocities(self, weights: list[Tensor]) -> list[Tensor]:
        """The velocities of weights, zero where a weight moves for the first time."""
        for weight in weights:
            if "velocity" not in self.state[weight]:
                self.state[weight]["velocity"] = torch.zeros_like(weight)
        return [self.state[weight]["velocity"] for weight in weights]

    def read_temperature(
        self, group: Group, weights: list[Tensor], gradients: list[Tensor]
    ) -> tuple[Tensor, int]:
        """N|v|²/η for each chain, and the number of weights."""
        rate, squares = self.rate(group), self.row_squares(self.velocities(weights))
        if isinstance(rate, Tensor):  # 0 before a chain's first step
            scale = torch.where(rate > 0, self.num_data / rate, 0.0).to(squares)
        else:
            scale = self.num_data / rate
        return squares * scale, self._size(weights)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, with where each chain's window began."""
        state = super().state_dict()
        if self.step_sizes is not None:
            state["kept"] = {"back": self._back, "before": self._before}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the saved sampler, to the last bit."""
        super().load_state_dict(state_dict)
        if self.step_sizes is not None:
            (group,) = self.param_groups
            kept = {
                name: [one.to(p) for one, p in zip(saved, group["params"], strict=False)]
                for name, saved in state_dict["kept"].items()
            }
            self._back, self._before = kept["back"], kept["before"]


def _mean_reading(readings: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The mean over all weights of what was read of each group, (K,)."""
    total = torch.stack([reading for reading, _ in readings]).sum(0)
    return total / sum(count for _, count in readings)


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's, because a safe load refuses the former."""
    return value.item() if isinstance(value, Real) and hasattr(value, "item") else value
