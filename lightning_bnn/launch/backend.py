"""The contract between the driver of a run and what runs its attempts.

The driver decides what runs, what is tried again and what has failed. A :class:`Backend` runs
single attempts: Ray is one (:mod:`lightning_bnn.launch.ray_backend`), the tests simulate another.
To write one, give it the four calls below. A worker runs
:func:`lightning_bnn.launch.member.attempt_outcome`, which writes everything that matters to the
storage and returns an :class:`Outcome`. A backend need not retry, nor notice by itself that a
worker is gone: the driver gives an attempt up that shows no sign of life, and what was cut off can
commit no more.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_bnn.errors import FencedError, LightningBNNError, NonFiniteError
from lightning_bnn.launch.units import Unit
from lightning_bnn.lightning import MisconfigurationException

if TYPE_CHECKING:
    from lightning_bnn.launch.recipe import Recipe

__all__ = ["Attempt", "Backend", "Handle", "Outcome"]

# What a backend calls an attempt that it was given.
Handle = Hashable

# Mistakes in a program, which come again however often it runs.
_MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(NotImplementedError, SyntaxError, TypeError, ValueError),
    *(LightningBNNError, MisconfigurationException),
)


@dataclass(frozen=True)
class Attempt:
    """What a worker has to know, besides the recipe.

    Attributes:
        storage: Where the run is stored.
        unit: What to train.
        number: The number of the attempt, from 1.
        seed: The root of all seeds.
        checkpoint_seconds: The least time between two checkpoints.
        progress_seconds: The time between two signs of life.
    """

    storage: str
    unit: Unit
    number: int
    seed: int = 0
    checkpoint_seconds: float = 60.0
    progress_seconds: float = 5.0


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: a few numbers and texts, which every driver can read.

    Attributes:
        result: What it has committed; None if it has failed.
        error: What went wrong.
        final: Whether another attempt would fail in the same way.
        early: Whether it failed before the first step of training.
        node: Where it failed, if it was no fault of the unit.
    """

    result: dict[str, Any] | None = None
    error: str | None = None
    final: bool = False
    early: bool = False
    node: str | None = None

    @classmethod
    def of_error(cls, error: BaseException, early: bool = False) -> Outcome:
        """The outcome of an attempt that raised.

        Example:
            >>> Outcome.of_error(TypeError("no such option")).final
            True
            >>> Outcome.of_error(OSError("the disk is full")).final
            False
        """
        text = "".join(traceback.format_exception_only(error)).strip()
        final = isinstance(error, _MISTAKES) and not isinstance(error, FencedError)
        # a member may diverge in its first step, and others not
        return cls(None, text, final, early and not isinstance(error, NonFiniteError))


class Backend(ABC):
    """Runs attempts somewhere. The driver calls it from one thread.

    Attributes:
        devices: On how many devices each attempt trains.

    Example:
        >>> class AtOnce(Backend):
        ...     '''Runs each attempt in the driver's own process, when it is submitted.'''
        ...     def submit(self, attempt, avoid):
        ...         from lightning_bnn.launch.member import attempt_outcome
        ...         self.ended = attempt_outcome(self.recipe, attempt)
        ...         return attempt
        ...     def wait(self, handles, seconds):
        ...         return {handle: self.ended for handle in handles}
        ...     def cancel(self, handle):
        ...         pass
        ...     def room(self):
        ...         return 1
    """

    devices: int = 1
    recipe: Recipe

    def open(self, recipe: Recipe) -> None:
        """Get ready to run attempts at this recipe; called once, before anything is written.

        Raises:
            LaunchError: They can never run here.
        """
        self.recipe = recipe

    def check_storage(self, storage: str) -> None:  # noqa: B027 - most have nothing to check
        """Look whether workers can use the storage; called once, before the first attempt.

        Raises:
            LaunchError: They cannot.
        """

    @abstractmethod
    def submit(self, attempt: Attempt, avoid: str | None) -> Handle:
        """Start an attempt or let it wait for its turn; if possible not on the node ``avoid``."""

    @abstractmethod
    def wait(self, handles: Sequence[Handle], seconds: float) -> dict[Handle, Outcome]:
        """Wait at most so long for the first of these to end; give the outcomes of all that have.

        There is at least one handle. An attempt whose worker died has an outcome with an ``error``.
        """

    @abstractmethod
    def cancel(self, handle: Handle) -> None:
        """End an attempt by force and free what it has; it may have ended already."""

    @abstractmethod
    def room(self) -> int:
        """How many attempts may be submitted at a time; the others wait in the driver."""
