"""Published results on the UCI regression sets, to stand beside what is measured here.

Test log-likelihood and root mean squared error in the unit of the target, one hidden layer of 50
units (100 for the protein set), the 20 standard splits (5 for protein). Each is a mean over the
splits and what its source gives for the spread: a standard error, or a standard deviation over the
splits, which is sqrt(20) times as large.

* PBP: Hernández-Lobato and Adams, "Probabilistic Backpropagation for Scalable Learning of Bayesian
  Neural Networks", ICML 2015. Standard errors.
* MC dropout 2016: Gal and Ghahramani, "Dropout as a Bayesian Approximation", ICML 2016, as given by
  Lakshminarayanan et al. (2017), Table 1. Standard deviations.
* MC dropout 2018: Gal's search of hyper-parameters on validation data with ten times the epochs,
  from the read-me of the experiments' repository. Standard errors.
* deep ensemble: Lakshminarayanan, Pritzel and Blundell, "Simple and Scalable Predictive Uncertainty
  Estimation using Deep Ensembles", NeurIPS 2017, Table 1: five networks. Standard deviations.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["DEEP_ENSEMBLE", "SOURCES", "Figure", "Source", "published"]

Metric = Literal["log_likelihood", "rmse"]


class Figure(NamedTuple):
    """A mean over the splits, and its spread if the source gives one."""

    mean: float
    spread: float | None = None


class Source(NamedTuple):
    """A published method: its name, what its spread is, and its figures by set."""

    name: str
    spread: Literal["se", "sd"]
    log_likelihood: dict[str, Figure]
    rmse: dict[str, Figure]


_SETS = (
    "boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht",
)  # fmt: skip


def _figures(*values: tuple[float, float] | float) -> dict[str, Figure]:
    pairs = [Figure(*v) if isinstance(v, tuple) else Figure(v) for v in values]
    return dict(zip(_SETS, pairs, strict=True))


DEEP_ENSEMBLE = "deep ensemble 2017"

SOURCES = (
    Source(
        "PBP 2015",
        "se",
        _figures(
            (-2.57, 0.09), (-3.16, 0.02), (-2.04, 0.02), (0.90, 0.01), (3.73, 0.01),
            (-2.84, 0.01), (-2.97, 0.00), (-0.97, 0.01), (-1.63, 0.02),
        ),
        _figures(
            (3.01, 0.18), (5.67, 0.09), (1.80, 0.05), 0.10, 0.01,
            (4.12, 0.03), (4.73, 0.01), (0.64, 0.01), (1.02, 0.05),
        ),
    ),
    Source(
        "MC dropout 2016",
        "sd",
        _figures(
            (-2.46, 0.25), (-3.04, 0.09), (-1.99, 0.09), (0.95, 0.03), (3.80, 0.05),
            (-2.80, 0.05), (-2.89, 0.01), (-0.93, 0.06), (-1.55, 0.12),
        ),
        _figures(
            (2.97, 0.85), (5.23, 0.53), (1.66, 0.19), 0.10, 0.01,
            (4.02, 0.18), (4.36, 0.04), (0.62, 0.04), (1.11, 0.38),
        ),
    ),
    Source(
        "MC dropout 2018",
        "se",
        _figures(
            (-2.40, 0.04), (-2.93, 0.02), (-1.21, 0.01), (1.14, 0.01), (4.45, 0.00),
            (-2.80, 0.01), (-2.87, 0.00), (-0.93, 0.01), (-1.25, 0.01),
        ),
        _figures(
            (2.90, 0.18), (4.82, 0.16), (0.54, 0.01), 0.08, 0.00,
            (4.01, 0.04), (4.27, 0.02), (0.62, 0.01), (0.67, 0.05),
        ),
    ),
    Source(
        DEEP_ENSEMBLE,
        "sd",
        _figures(
            (-2.41, 0.25), (-3.06, 0.18), (-1.38, 0.22), (1.20, 0.02), (5.63, 0.05),
            (-2.79, 0.04), (-2.83, 0.02), (-0.94, 0.12), (-1.18, 0.21),
        ),
        _figures(
            (3.28, 1.00), (6.03, 0.58), (2.09, 0.29), 0.09, 0.00,
            (4.11, 0.17), (4.71, 0.06), (0.64, 0.04), (1.58, 0.48),
        ),
    ),
)  # fmt: skip


def published(source: str, metric: Metric, name: str) -> Figure:
    """One figure, such as ``published(DEEP_ENSEMBLE, "log_likelihood", "boston")``.

    >>> published("PBP 2015", "rmse", "yacht")
    Figure(mean=1.02, spread=0.05)
    """
    rows = {row.name: row for row in SOURCES}
    figures: dict[str, Figure] = getattr(rows[source], metric)
    return figures[name]
