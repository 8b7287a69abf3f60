"""The parts of the report. Each is a file; a user's own is passed as ``sections=[...]``."""

from lightning_bnn.report.sections.base import Section
from lightning_bnn.report.sections.class_errors import ClassErrors
from lightning_bnn.report.sections.class_uncertainty import ClassUncertainty
from lightning_bnn.report.sections.examples import Examples
from lightning_bnn.report.sections.intervals import Intervals
from lightning_bnn.report.sections.reliability import Reliability
from lightning_bnn.report.sections.shift import Shift
from lightning_bnn.report.sections.spread import Spread

__all__ = ["Section", "default_sections"]

SECTIONS: tuple[type[Section], ...] = (
    Reliability, Intervals, ClassErrors, Spread, ClassUncertainty, Shift, Examples,
)  # fmt: skip


def default_sections(task: str) -> list[Section]:
    """New sections of a task, without a user's own.

    Example:
        >>> [section.key for section in default_sections("regression")]
        ['calibration', 'errors', 'shift']
    """
    return [section() for section in SECTIONS if section.task in (None, task)]
