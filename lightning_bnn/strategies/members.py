"""Small parts of strategies with stacked members: their numbers, clipping, and optimizers.

The weights of M members are one (M, P) parameter, so one optimizer that looks at each element by
itself steps all of them at once. Where members have optimizers of their own, or an optimizer looks
at whole tensors (Adafactor, Muon, LAMB), each member gets one over views of its row in the shapes
of the network's layers: what it does is then what it would do to the network trained alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_bnn.ensembles.options import is_whole
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.random import isolated_random_state
from lightning_bnn.selection import FlatLayout

__all__ = [
    "MemberOptimizers",
    "MemberSchedulers",
    "Trial",
    "clip_by_row",
    "flatten_rows",
    "make_optimizer",
    "make_schedulers",
    "member_numbers",
    "try_optimizer",
]


def member_numbers(members: int | Sequence[int], noun: str = "members") -> list[int]:
    """The numbers of members (or chains): 0 to M − 1, or those that are given.

    Example:
        >>> member_numbers(3), member_numbers([5])
        ([0, 1, 2], [5])
    """
    given: Any = members
    several = range(int(given)) if is_whole(given) else given
    if not isinstance(several, Sequence) or isinstance(several, str):
        several = []
    numbers = [int(number) for number in several if is_whole(number)]
    if not numbers or len(set(numbers)) < len(several) or min(numbers) < 0:
        raise ConfigurationError(
            f"{noun}= is how many {noun} run, at least 1, or a list of their numbers, each once; "
            f"got {members!r}."
        )
    return numbers


def flatten_rows(stacked: Mapping[str, Tensor], layout: FlatLayout) -> Tensor:
    """Stacked tensors as one (M, P) tensor; all must have one floating dtype.

    Example:
        >>> stacked = {"a": torch.zeros(2, 3), "b": torch.ones(2, 1, 2)}
        >>> flatten_rows(stacked, FlatLayout({"a": torch.zeros(3), "b": torch.zeros(1, 2)}))
        tensor([[0., 0., 0., 1., 1.],
                [0., 0., 0., 1., 1.]])
    """
    kinds = {name: stacked[name].dtype for name in layout.names}
    odd = next((n for n, kind in kinds.items() if kind != kinds[layout.names[0]]), None)
    if odd is None and not kinds[layout.names[0]].is_floating_point:
        raise ConfigurationError(
            f"The weights must be real numbers; {layout.names[0]!r} is {kinds[layout.names[0]]}. "
            "Keep the real and the imaginary part as two parameters."
        )
    if odd is not None:
        raise ConfigurationError(
            "The stacked weights lie in one tensor and need one floating-point dtype; "
            f"{layout.names[0]!r} is {kinds[layout.names[0]]}, {odd!r} is {kinds[odd]}. Convert "
            "the network with net.float(), or freeze the odd ones with requires_grad_(False)."
        )
    return torch.cat([stacked[name].flatten(1) for name in layout.names], dim=1)


def clip_by_row(gradients: Sequence[Tensor], limit: float, algorithm: str | None) -> None:
    """Clip in place, by value or by the norm of each row over all tensors.

    Example:
        >>> gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> clip_by_row([gradient], 1.0, "norm")
        >>> gradient
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    if algorithm == "value":
        for gradient in gradients:
            gradient.clamp_(-limit, limit)
        return
    norms = torch.stack([gradient.norm(dim=1) for gradient in gradients]).norm(dim=0)
    scale = (limit / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale[:, None])


# -------------------------------------------------------------------- optimizers


class Trial:
    """What a trial of an optimizer on two tiny members showed.

    Attributes:
        mixes: Whether what one member does depends on the other.
        closures: How often it computed the gradient in one step.
    """

    def __init__(self, mixes: bool, closures: int) -> None:
        self.mixes, self.closures = mixes, closures


def try_optimizer(make: Any, like: Sequence[Tensor]) -> Trial:
    """Step two tiny members, again with the second in another place, and compare the first.

    An optimizer that cannot be tried counts as one that mixes.

    Args:
        make: Makes the optimizer from parameters.
        like: The stacked parameters that it is meant for: as many tiny ones are tried.

    Example:
        >>> from functools import partial
        >>> weights = torch.zeros(10, 50)
        >>> try_optimizer(partial(torch.optim.Adam, lr=0.1), [weights]).mixes
        False
        >>> try_optimizer(partial(torch.optim.Adafactor, lr=0.1), [weights]).mixes
        True
    """
    try:
        first, closures = _steps_of_the_first(make, like, other=1.0)
        again, _ = _steps_of_the_first(make, like, other=-30.0)
    except Exception:
        # it needs another shape, for one: given a single member's own layers it may well work
        return Trial(mixes=True, closures=1)
    same = all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    return Trial(not same, closures)


def _steps_of_the_first(
    make: Any, like: Sequence[Tensor], other: float
) -> tuple[list[Tensor], int]:
    """Where member 0 of two is after three steps downhill, and the most gradients of a step."""
    start = torch.tensor([[1.0, -2.0, 0.5], [other, 3.0 * other, other]])
    parameters = [nn.Parameter(start.to(one.device, one.dtype)) for one in like]
    most = calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        for parameter in parameters:
            parameter.grad = parameter.detach() + 0.1
        return float(sum((p.detach() + 0.1).square().sum() / 2 for p in parameters))

    with isolated_random_state(0):
        optimizer = make(parameters)
        for _ in range(3):
            calls = 0
            optimizer.step(closure)
            most = max(most, calls)
    return [parameter.detach()[0] for parameter in parameters], most


class MemberOptimizers(Optimizer):
    """One optimizer for each member, over views of its row in the shapes of its layers.

    Its groups are those of all members, one after the other.

    Args:
        factories: One for each member.
        stacked: The stacked parameters, (M, ...), each with the layout of a row.

    Example:
        >>> from functools import partial
        >>> weights = nn.Parameter(torch.ones(2, 3))
        >>> optimizer = MemberOptimizers(
        ...     [partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SGD, lr=0.5)],
        ...     [(weights, FlatLayout({"weight": torch.zeros(1, 3)}))])
        >>> weights.sum().backward()
        >>> optimizer.step()
        >>> weights.detach()[:, 0], [group["lr"] for group in optimizer.param_groups]
        (tensor([0.9000, 0.5000]), [0.1, 0.5])
    """

    def __init__(
        self, factories: Sequence[Any], stacked: Sequence[tuple[nn.Parameter, FlatLayout]]
    ) -> None:
        self._stacked = list(stacked)
        rows: list[list[nn.Parameter]] = [[] for _ in factories]
        for parameter, layout in stacked:
            for view in layout.views(parameter.detach()).values():
                for own, part in zip(rows, view.unbind(0), strict=True):
                    own.append(nn.Parameter(part))
        self._rows = rows
        self.members: list[Optimizer] = [
            _make(factory, own, index)
            for index, (factory, own) in enumerate(zip(factories, rows, strict=True))
        ]
        super().__init__([p for own in rows for p in own], self.members[0].defaults)
        self._share()

    def _share(self) -> None:
        """Show the members' own groups, so that a change of a learning rate reaches them."""
        self.param_groups = [group for one in self.members for group in one.param_groups]

    def step(self, closure: Any = None) -> Any:
        """One step of every member."""
        loss: Any = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.hand_out_gradients()
        for optimizer in self.members:
            optimizer.step(lambda: loss)
        return loss

    def hand_out_gradients(self) -> None:
        """Show each member's part of the gradients, in the same memory.

        A step does so by itself; what changes gradients before it must see them, too.
        """
        place = 0
        for parameter, layout in self._stacked:
            if parameter.grad is None:
                place += len(layout.names)
                continue
            for view in layout.views(parameter.grad).values():
                for own, part in zip(self._rows, view.unbind(0), strict=True):
                    own[place].grad = part
                place += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for parameter, _ in self._stacked:
            parameter.grad = None
        for own in self._rows:
            for part in own:
                part.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state of every member's optimizer."""
        states = [one.state_dict() for one in self.members]
        return {"state": {}, "param_groups": [], "members": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the saved ones were."""
        for one, state in zip(self.members, state_dict["members"], strict=True):
            one.load_state_dict(state)
        self._share()


def _make(factory: Any, parameters: list[nn.Parameter], index: int) -> Optimizer:
    try:
        made = factory(parameters)
    except Exception as error:
        raise ConfigurationError(
            f"The optimizer of member {index} could not be made for its layers: {error} One that "
            "looks at whole tensors, or at members by themselves, is given each layer in its own "
            "shape. Choose an optimizer that takes tensors of every shape, such as Adam."
        ) from error
    return _checked(made)


def _checked(made: Any) -> Optimizer:
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"optimizer= makes an optimizer, as partial(Adam, lr=1e-3) does; got {made!r:.80}."
        )
    return made


def make_optimizer(
    factories: Any,
    default: Any,
    stacked: Sequence[tuple[nn.Parameter, FlatLayout]],
    one_each: bool = False,
) -> Optimizer:
    """One optimizer on the stacked parameters where that keeps members apart, else one for each.

    Args:
        factories: Makes an optimizer from parameters; or a list of one for each member; or None.
        default: Makes the optimizer where none is given; it looks at each element by itself.
        stacked: The stacked parameters, (M, ...), each with the layout of a row.
        one_each: Whether each member needs one of its own anyway.

    Example:
        >>> from functools import partial
        >>> stacked = [(nn.Parameter(torch.ones(4, 6)), FlatLayout({"weight": torch.ones(2, 3)}))]
        >>> type(make_optimizer(partial(torch.optim.SGD, lr=0.1), None, stacked)).__name__
        'SGD'
        >>> type(make_optimizer(partial(torch.optim.Adafactor, lr=0.1), None, stacked)).__name__
        'MemberOptimizers'
    """
    parameters = [parameter for parameter, _ in stacked]
    members = len(parameters[0])
    each = isinstance(factories, Sequence)
    several = list(factories) if each else [factories or default]
    if factories is not None:
        trials = [try_optimizer(factory, parameters) for factory in several]
        one_each = one_each or each or trials[0].mixes
        again = next((f for f, t in zip(several, trials, strict=True) if t.closures > 1), None)
        if members == 1 and again is not None:
            one_each = False  # nothing to keep apart
        if one_each and again is not None:
            raise ConfigurationError(
                f"The optimizer of {again!r:.80} looks at all members together and computes "
                "gradients several times in a step, so members cannot be kept apart. Choose one "
                "that needs one gradient, such as Adam."
            )
    if not one_each:
        return _checked(several[0](parameters))
    return MemberOptimizers(several if each else several * members, stacked)


class MemberSchedulers(LRScheduler):
    """One learning-rate scheduler for each member's optimizer, stepped together.

    Example:
        >>> from functools import partial
        >>> weights = nn.Parameter(torch.ones(2, 3))
        >>> optimizer = MemberOptimizers([partial(torch.optim.SGD, lr=1.0)] * 2,
        ...                              [(weights, FlatLayout({"weight": torch.zeros(3)}))])
        >>> halve, third = (partial(torch.optim.lr_scheduler.ExponentialLR, gamma=g)
        ...                 for g in (0.5, 0.25))
        >>> schedulers = MemberSchedulers([halve, third], optimizer)
        >>> optimizer.step()
        >>> schedulers.step()
        >>> schedulers.get_last_lr()
        [0.5, 0.25]
    """

    def __init__(self, factories: Sequence[Any], optimizer: MemberOptimizers) -> None:
        self.optimizer: Optimizer = optimizer
        self.members: list[LRScheduler] = [
            _without_monitor(factory(one))
            for factory, one in zip(factories, optimizer.members, strict=True)
        ]

    def step(self, epoch: int | None = None) -> None:
        """One step of every member's schedule."""
        for one in self.members:
            one.step() if epoch is None else one.step(epoch)

    def get_last_lr(self) -> list[Any]:
        """The rates of all groups of all members."""
        return [rate for one in self.members for rate in one.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """The state of every member's schedule."""
        return {"members": [one.state_dict() for one in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the saved ones were."""
        for one, state in zip(self.members, state_dict["members"], strict=True):
            one.load_state_dict(state)


def make_schedulers(factories: Any, optimizer: Optimizer) -> LRScheduler:
    """The schedule of an optimizer, or of each member's own."""
    several = list(factories) if isinstance(factories, Sequence) else [factories]
    if not isinstance(optimizer, MemberOptimizers):
        return _without_monitor(several[0](optimizer))
    if len(several) == 1:
        several *= len(optimizer.members)
    return MemberSchedulers(several, optimizer)


def _without_monitor(schedule: Any) -> LRScheduler:
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigurationError(
            "scheduler= makes ReduceLROnPlateau, which waits for a metric to stop improving, and "
            "there is no option to name one. Choose a schedule that counts steps or epochs, such "
            "as CosineAnnealingLR."
        )
    made: LRScheduler = schedule
    return made
