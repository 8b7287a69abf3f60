"""What a part of the report is: it adds rows, merges, and gives numbers, words and figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from lightning_bnn.report.figure import Figure, described

if TYPE_CHECKING:
    from lightning_bnn.report.rows import Rows
    from lightning_bnn.report.statistics import Statistics

__all__ = ["Line", "Numbers", "Section"]

Numbers = Mapping[str, Any]
# Of which model (None: of all), how grave ("bad", "warn", "good" or "note"), and the sentence.
Line = tuple[str | None, str, str]


class Section:
    """A part of the page about one model.

    A report makes a copy of each section for every model. Batches are added as they come, and what
    several processes have added is merged; then the section gives its numbers, which stand in the
    JSON file, sentences for the summary, and figures, which the page and the loggers draw. A
    section that needs only what every report gathers (``model.sums``, ``model.sample``) has nothing
    to add and to merge.

    Attributes:
        key: Its name in the page, unique.
        title: Its heading.
        lead: A sentence below the heading.
        order: Its place in the page: calibration is 10, errors 20, uncertainty 30, shift 60.
        task: "classification" or "regression", if it is for one of them alone.
        method: How its numbers are made: terms, and what they mean.
        needs_posterior: Whether :meth:`check` and :meth:`measure` are called.
        unavailable: Why it could not be measured; None if it could.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.report import report
        >>> class Guesses(Section):
        ...     key, title, lead = "guesses", "Guesses", "How often is each class predicted?"
        ...     task = "classification"
        ...     def __init__(self):
        ...         self.counts = 0
        ...     def add(self, rows):
        ...         classes = rows.log_probabilities.shape[1]
        ...         self.counts += np.bincount(rows.columns["predicted"], minlength=classes)
        ...     def merge(self, other):
        ...         self.counts += other.counts
        ...     def numbers(self, model, block):
        ...         return {"guesses": self.counts}
        >>> made = report([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1], bins=2,
        ...               sections=[Guesses()])
        >>> made.numbers["models"][0]["guesses"]
        [2, 1]
    """

    key: ClassVar[str]
    title: ClassVar[str]
    lead: ClassVar[str] = ""
    order: ClassVar[int] = 50
    task: ClassVar[str | None] = None
    method: ClassVar[Sequence[tuple[str, str]]] = ()
    needs_posterior: ClassVar[bool] = False
    unavailable: str | None = None

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch."""

    def merge(self, other: Self) -> None:
        """Add what another process has added, on other examples."""

    def check(self, models: Mapping[str, Any]) -> None:
        """Raise a ConfigurationError before any work if the section cannot be made.

        Args:
            models: The posteriors of the report, by name.
        """

    def measure(self, name: str, posterior: Any, batches: Any, draws: int | None) -> None:
        """Ask the posterior itself, after all batches; only where ``needs_posterior`` is set.

        Args:
            name: The model's.
            posterior: The model.
            batches: (inputs, targets) of the data of the report; can be iterated several times.
            draws: Draws of each prediction; None for what suits the posterior.
        """

    def numbers(self, model: Statistics, block: Numbers) -> Mapping[str, Any]:
        """What goes into the JSON file, by name.

        Args:
            model: Everything that was gathered of the model.
            block: The model's numbers so far: "scalars", "verdict" and those of sections before.

        Returns:
            Numbers, arrays, and lists and dictionaries of them.
        """
        return {}

    def words(self, document: Numbers) -> Iterable[Line]:
        """Sentences for the summary.

        Args:
            document: The whole report; ``document["models"]`` has the numbers of every model.
        """
        return ()

    def figures(self, block: Numbers, document: Numbers) -> Iterable[Figure]:
        """What is drawn of one model; arrays of ``block`` are lists here, and NaN is None."""
        return ()

    def described(self, block: Numbers, document: Numbers) -> dict[str, Any] | None:
        """The section of one model as the page reads it; None if there is nothing to show."""
        drawn = [described(figure) for figure in self.figures(block, document)]
        part = {"id": self.key, "title": self.title, "lead": self.lead, "figures": drawn}
        return part if drawn else None
