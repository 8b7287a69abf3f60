"""Calibration reports: how far a model's uncertainty can be trusted, in numbers, words and figures.

``report`` takes plain arrays, ``report_posteriors`` posteriors or networks and their data; the
callback :class:`lightning_bnn.callbacks.CalibrationReport` writes the same pages in a run. All of
them take ``sections=[...]``, parts of the page of your own (:class:`Section`).
"""

from lightning_bnn.report.arrays import report
from lightning_bnn.report.document import Report
from lightning_bnn.report.posteriors import report_posteriors
from lightning_bnn.report.sections import Section

__all__ = ["Report", "Section", "report", "report_posteriors"]
