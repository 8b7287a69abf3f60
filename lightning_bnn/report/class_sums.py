"""What a report sums up exactly over all rows of a classification, however many there are."""

from __future__ import annotations

import math

import numpy as np

from lightning_bnn.calibration.bins import BinSums, width_edges
from lightning_bnn.calibration.clusters import ClusterSums, cluster_sums
from lightning_bnn.report.rows import Array, Rows

__all__ = ["MEANS", "PER_CLASS", "ClassSums"]

MEANS = (
    "correct",
    "confidence",
    "nll",
    "brier",
    "entropy",
    "aleatoric",
    "epistemic",
    "score",
    "score_variance",
    "score_third",
    "which_class",
)
PER_CLASS = ("correct", "confidence", "aleatoric", "epistemic")


class ClassSums:
    """Sums in fixed bins and by class; those of two processes are added.

    Args:
        classes: Number of classes K.
        bins: Number of bins of equal width.

    Attributes:
        count: Number of rows.
        clusters: Sums of powers of the examples' scores.
        impossible: Number of rows whose target had probability 0.
        sums: The sum of each column of MEANS.
        confidence: Confidence against whether the top class was right.
        classwise: Each class's probability against whether it came.
        entropy: Entropy, in bins of [0, log K], against whether the top class was right.
        per_class: Rows of (count, *PER_CLASS) by the class that came, (5, K).
    """

    def __init__(self, classes: int, bins: int) -> None:
        self.count = 0
        self.clusters = ClusterSums()
        self.impossible = 0
        self.sums = dict.fromkeys(MEANS, 0.0)
        self.confidence = BinSums(width_edges(bins))
        self.classwise = BinSums(width_edges(bins), classes)
        self.entropy = BinSums(np.linspace(0.0, math.log(classes), bins + 1))
        self.per_class = np.zeros((1 + len(PER_CLASS), classes))

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch."""
        columns = rows.columns
        self.count += len(rows)
        # An example comes with all of its rows in one batch.
        self.clusters += cluster_sums(rows.example, columns["score"])
        self.impossible += int(np.isinf(columns["nll"]).sum())
        for name in MEANS:
            self.sums[name] += float(columns[name].sum())
        self.confidence.add(columns["confidence"], columns["correct"])
        assert rows.log_probabilities is not None
        self.classwise.add_classes(np.exp(rows.log_probabilities), columns["target"])
        self.entropy.add(columns["entropy"], columns["correct"])
        self.per_class += self._by_class(columns["target"], [columns[name] for name in PER_CLASS])

    def _by_class(self, target: Array, columns: list[Array]) -> Array:
        classes = self.per_class.shape[1]
        weights = [None, *columns]
        return np.stack([np.bincount(target, weight, classes) for weight in weights])

    def merge(self, other: ClassSums) -> None:
        """Add the sums of other rows."""
        self.count += other.count
        self.clusters += other.clusters
        self.impossible += other.impossible
        for name in MEANS:
            self.sums[name] += other.sums[name]
        self.confidence.merge(other.confidence)
        self.classwise.merge(other.classwise)
        self.entropy.merge(other.entropy)
        self.per_class += other.per_class

    def mean(self, name: str) -> float:
        """The mean of a column over all rows."""
        return self.sums[name] / self.count
