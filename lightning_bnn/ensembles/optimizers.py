"""Optimizers and schedulers of a bank's members.

The weights of K members are one (K, P) parameter, so one optimizer that looks at each element by
itself steps all of them at once. Where members have optimizers of their own, or an optimizer looks
at whole tensors (Adafactor, Muon, LAMB), each member gets one over views of its row in the shapes
of the network's layers: what it does is then what it would do to the network trained alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_bnn.checks import check_factory
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import FlatLayout

__all__ = [
    "MemberOptimizers",
    "MemberSchedulers",
    "check_factories",
    "make_optimizer",
    "make_schedulers",
]

# What they do to an element depends on that element alone. An optimizer of your own may say so by
# an attribute ``elementwise = True``.
_ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad,
    optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
}  # fmt: skip


def check_factories(name: str, value: Any, members: int) -> None:
    """Raise unless an option is None, a function for all members, or a list of one for each.

    Args:
        name: ``"optimizer"`` or ``"scheduler"``.
        value: What was given.
        members: M.

    Example:
        >>> check_factories("scheduler", None, members=3)
    """
    if value is None:
        return
    several = list(value) if isinstance(value, Sequence) else [value]
    if isinstance(value, Sequence) and len(several) != members:
        raise ConfigurationError(
            f"{name}= has {len(several)} entries for {members} members; give one for each, or one "
            "for all."
        )
    for place, factory in enumerate(several):
        where = f" in place {place} of the list" if isinstance(value, Sequence) else ""
        check_factory(name, factory, where)


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
            optimizer.step(_once(loss, optimizer))
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


def _once(loss: Any, optimizer: Optimizer) -> Any:
    """A closure for one gradient: that of all members was computed already, and cannot be again."""
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigurationError(
                f"{type(optimizer).__name__} computes gradients several times in a step, and "
                "looks at whole tensors, so members cannot be kept apart. Choose an optimizer "
                "that needs one gradient, such as Adam."
            )
        return loss

    return closure


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
        default: Makes the optimizer where none is given.
        stacked: The stacked parameters, (K, ...), each with the layout of a row.
        one_each: Whether each member needs one of its own anyway.

    Example:
        >>> from functools import partial
        >>> stacked = [(nn.Parameter(torch.ones(4, 6)), FlatLayout({"weight": torch.ones(2, 3)}))]
        >>> type(make_optimizer(partial(optim.SGD, lr=0.1), None, stacked)).__name__
        'SGD'
        >>> type(make_optimizer(partial(optim.Adafactor, lr=0.1), None, stacked)).__name__
        'MemberOptimizers'
    """
    members = len(stacked[0][0])
    each = isinstance(factories, Sequence)
    if not each and not one_each:
        try:
            optimizer = _checked((factories or default)([parameter for parameter, _ in stacked]))
        except ConfigurationError:
            raise
        except Exception:  # it needs tensors of a layer's shape: given those it may well work
            optimizer = None
        if optimizer is not None and (members == 1 or _is_elementwise(optimizer)):
            return optimizer
    return MemberOptimizers(factories if each else [factories or default] * members, stacked)


def _is_elementwise(optimizer: Optimizer) -> bool:
    return type(optimizer) in _ELEMENTWISE or getattr(optimizer, "elementwise", False)


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
            factory(one) for factory, one in zip(factories, optimizer.members, strict=True)
        ]
        if any(isinstance(one, ReduceLROnPlateau) for one in self.members):
            raise ConfigurationError(
                "ReduceLROnPlateau waits for a metric, and metrics are those of all members. "
                "Choose a schedule that counts steps or epochs, such as CosineAnnealingLR, or one "
                "optimizer for all members."
            )

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
        made: LRScheduler = several[0](optimizer)
        return made
    if len(several) == 1:
        several *= len(optimizer.members)
    return MemberSchedulers(several, optimizer)
