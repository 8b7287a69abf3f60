"""The pages of a run: when they are due, made by process 0, with an answer for all the others.

In a fit a page that fails is a warning, because training is worth more than its report; in a test
or a validation by itself it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_bnn.errors import ConfigurationError, LightningBNNError
from lightning_bnn.lightning import rank_zero_warn
from lightning_bnn.report.document import Report, folder_problem, make_report
from lightning_bnn.report.loggers import headlines, log_figures, shows_figures
from lightning_bnn.report.run import RunModels
from lightning_bnn.report.statistics import Collection

__all__ = ["ReportPages", "measure", "noting", "validation_page", "warn_of_failure"]


class ReportPages:
    """Makes the pages of a run, and keeps their reports.

    Args:
        risk: The share of errors to allow.
        class_names: Names of the classes.

    Attributes:
        folder: Where pages are written.
        reports: The last reports by file name; on process 0 alone.
        files: The pages that were written, in order.
        last: The names of the pages of the last validation data.

    Example:
        >>> pages = ReportPages(0.05, None)
        >>> pages.files
        []
    """

    def __init__(self, risk: float, class_names: Sequence[str] | None) -> None:
        self.risk, self.class_names = risk, class_names
        self.folder = ""
        self.reports: dict[str, Report] = {}
        self.files: list[str] = []
        self.last: list[str] = []

    def check_folder(self, trainer: Any) -> None:
        """Try to write in the folder.

        Raises:
            ConfigurationError: It cannot be written to.
        """
        reason = folder_problem(self.folder) if trainer.is_global_zero else None
        reason = trainer.strategy.broadcast(reason)  # so that no process waits for another
        if reason is not None:
            raise ConfigurationError(
                f"CalibrationReport cannot write to the folder {self.folder!r} ({reason}). Pass "
                "another directory=."
            )

    def write(
        self, trainer: Any, own: str, whole: Collection, name: str, stage: str
    ) -> dict[str, float]:
        """Make a report on process 0; the headlines of the model ``own``, on all of them."""
        scalars: dict[str, float] = {}
        failure: Exception | None = None
        if trainer.is_global_zero and whole.failure is None:
            try:
                scalars = self._make(trainer, own, whole, name, stage)
            except Exception as error:  # the other processes wait for an answer
                failure, whole.failure = error, _said(error)
        scalars, reason = trainer.strategy.broadcast((scalars, whole.failure))
        if reason is not None and trainer.state.fn != "fit":
            raise failure or LightningBNNError(f"The report {name} failed on process 0: {reason}")
        if reason is not None:
            warn_of_failure(name, reason)
        return scalars

    def save_as_fit(self) -> None:
        """Give the pages of the last epoch the name of those after the fit as well."""
        for name in list(self.last):  # process 0 alone has any
            if name.startswith("epoch-"):
                number = name.split("-")[2:]
                try:
                    self._save("-".join(["fit", *number]), self.reports[f"{name}.html"])
                except Exception as error:
                    warn_of_failure("fit", _said(error))

    def _make(
        self, trainer: Any, own: str, whole: Collection, name: str, stage: str
    ) -> dict[str, float]:
        source = "test" if stage == "test" else "validation"
        where = f"epoch {trainer.current_epoch}" if name.startswith("epoch") else source
        title = f"Calibration of {own}, {where}"
        made = make_report(
            whole.models, title=title, source=source, class_names=self.class_names, risk=self.risk
        )
        self._save(name, made)
        if stage == "val":
            self.last.append(name)
        shown = [logger for logger in trainer.loggers if shows_figures(logger)]
        if shown:
            # matplotlib is slow to import, and most runs have no logger that shows figures
            from lightning_bnn.report.figures import calibration_figures

            log_figures(shown, calibration_figures(made.numbers), stage, trainer.global_step)
        return headlines(made.numbers, own)

    def _save(self, name: str, made: Report) -> None:
        file = made.save(f"{self.folder.rstrip('/')}/{name}.html")
        self.reports[f"{name}.html"] = made
        if file not in self.files:
            self.files.append(file)


def measure(trainer: Any, models: RunModels, whole: Collection, loader: Any, limit: float) -> None:
    """Let sections ask the strategy's posterior, once all processes have gathered; all of them ask.

    One that fails in a fit is a sentence on the page, not the loss of it.

    Args:
        trainer: The trainer.
        models: The models of the run.
        whole: What was gathered.
        loader: The loader of the page.
        limit: How many of its batches the trainer lets through.
    """
    statistics = whole.models[models.own]
    asking = [section for section in statistics.sections if section.needs_posterior]
    if whole.failure is not None or not asking:
        return
    reason = None
    try:
        if whole.fewest == 0:  # its metrics would have nothing to add up
            reason = "a process has none of the data, and some are needed in each."
        else:
            models.measure(statistics, loader, limit)
    except Exception as error:
        if trainer.state.fn != "fit":
            raise
        reason = _said(error)
        names = ", ".join(section.key for section in asking)
        text = f"CalibrationReport could not make {names} ({reason})."
        rank_zero_warn(text, category=UserWarning)
    for section in asking if reason is not None else ():
        section.unavailable = reason


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def noting(trainer: Any, collection: Collection) -> Iterator[None]:
    """In a fit, note an error for the page's end instead of raising it.

    Example:
        >>> from types import SimpleNamespace
        >>> collection = Collection(["net"])
        >>> with noting(SimpleNamespace(state=SimpleNamespace(fn="fit")), collection):
        ...     raise ValueError("no")
        >>> collection.failure
        'ValueError: no'
    """
    try:
        yield
    except Exception as error:
        if trainer.state.fn != "fit":
            raise
        collection.failure = _said(error)


def warn_of_failure(name: str, reason: str) -> None:
    """Say that a fit continues without a page."""
    text = f"CalibrationReport could not make the page {name} ({reason}). Training continues."
    rank_zero_warn(text, category=UserWarning)


def validation_page(trainer: Any, every_n_epochs: int | None, after_fit: bool) -> str | None:
    """The name of the page that a validation makes; None if it makes none.

    Args:
        trainer: The trainer, at the start of the validation.
        every_n_epochs: After how many epochs of a fit a page is made.
        after_fit: Whether one is made at the end of a fit.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(sanity_checking=True, fast_dev_run=False)
        >>> validation_page(trainer, 1, after_fit=True) is None
        True
    """
    if trainer.sanity_checking or trainer.fast_dev_run:
        return None
    if trainer.state.fn != "fit":
        return "validation"
    loop, epoch = trainer.fit_loop.epoch_loop, trainer.current_epoch + 1
    last_batch = loop.batch_progress.is_last_batch
    if every_n_epochs is not None and epoch % every_n_epochs == 0:
        # made if no other validation comes in this epoch, also where that cannot be known
        interval, total = trainer.val_check_batch, trainer.num_training_batches
        unknown = interval is None or math.isinf(total)
        if last_batch or unknown or loop.batch_idx + 1 + interval > total:
            return f"epoch-{trainer.current_epoch:04d}"
    # The last validation serves for the page after the fit, if nothing is trained after it.
    ends = epoch == trainer.max_epochs and last_batch
    ends = ends or trainer.global_step >= trainer.max_steps >= 0
    return "fit" if after_fit and ends else None
