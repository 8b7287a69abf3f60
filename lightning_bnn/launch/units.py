"""What is launched: units, each of which trains one member or several stacked ones.

The numbers of the members decide everything random about them, so that a unit is the same wherever,
in whatever order and in however many attempts it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_bnn.checks import check_whole
from lightning_bnn.random import member_seed

__all__ = ["Unit", "plan_units", "unit_seed"]


@dataclass(frozen=True)
class Unit:
    """Members (or chains) that one task trains side by side.

    Attributes:
        members: Their numbers, one after another.

    Example:
        >>> Unit((5, 6, 7)).name
        '00005'
    """

    members: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of its folder: the number of its first member."""
        return f"{self.members[0]:05d}"

    def __str__(self) -> str:
        first, last = self.members[0], self.members[-1]
        return f"member {first}" if first == last else f"members {first} to {last}"


def plan_units(members: int, stack: int = 1) -> list[Unit]:
    """The units of ``members`` members, ``stack`` in each; the last may have fewer.

    Example:
        >>> [unit.members for unit in plan_units(5, stack=2)]
        [(0, 1), (2, 3), (4,)]
    """
    members, stack = check_whole("members", members, 1), check_whole("stack", stack, 1)
    return [
        Unit(tuple(range(first, min(first + stack, members)))) for first in range(0, members, stack)
    ]


def unit_seed(seed: int, members: Sequence[Any]) -> int:
    """The seed of the global generators of the process that trains these members, 32 bits.

    A member trained alone by hand is the same as the launched one if it begins with
    ``pl.seed_everything(unit_seed(seed, [member]), workers=True)``.

    Example:
        >>> unit_seed(0, [3]) == unit_seed(0, [3, 4]), unit_seed(0, [3]) == unit_seed(0, [4])
        (True, False)
    """
    return member_seed(seed, int(members[0]), "unit") % 2**32
