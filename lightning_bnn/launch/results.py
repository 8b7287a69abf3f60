"""What a run says of a member, while it runs and at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit

__all__ = ["MemberResult", "Status", "member_results"]

Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True)
class MemberResult:
    """How a member ended.

    Attributes:
        member: Its number.
        status: ``"done"``; ``"diverged"``: it has no finite weights, though others of its stack
            may; ``"failed"``: no attempt came to an end.
        attempt: The attempt that ended it, from 1.
        metrics: What was logged last, by name; of a stack, of all its members together.
        node: The node of Ray that it ran on last.
        uri: Where its posterior is.
        error: What went wrong, if something did.
        seconds: How long its last attempt took.
        steps: Optimizer steps in all.

    Example:
        >>> MemberResult(3, "done", attempt=1, metrics={"train_loss": 0.2}).ok
        True
    """

    member: int
    status: Status
    attempt: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    node: str | None = None
    uri: str | None = None
    error: str | None = None
    seconds: float | None = None
    steps: int | None = None

    @property
    def ok(self) -> bool:
        """Whether it has a posterior."""
        return self.status == "done"


def member_results(
    records: RunRecords, unit: Unit, result: Mapping[str, Any]
) -> list[MemberResult]:
    """The results of the members of a unit that was committed."""
    places = result["members"]["posterior"]
    found = []
    for member in unit.members:
        place = places.get(str(member))
        found.append(
            MemberResult(
                member,
                "diverged" if place is None else "done",
                attempt=result["attempt"],
                metrics=result["metrics"],
                node=result.get("node"),
                uri=None if place is None else f"{records.folder(unit)}/{place['place']}",
                error="its weights are not finite" if place is None else None,
                seconds=result.get("seconds"),
                steps=result.get("steps"),
            )
        )
    return found
