"""What a report knows of every classification: exact sums, scores, the verdict, their replicates.

Confidence, ECE and the reliability diagram are about the most probable class, for yes-or-no labels
too: there they differ from the calibration error of the probability of a 1, which the classwise
error has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy.sparse import csr_array

from lightning_bnn.calibration import bins as binned
from lightning_bnn.calibration.bootstrap import mean_replicates
from lightning_bnn.calibration.clusters import ClusterSums, cluster_sums
from lightning_bnn.calibration.error import expected_calibration_error, expected_calibration_errors
from lightning_bnn.calibration.selective import aurc_replicates, coverage_at_risk, risk_coverage
from lightning_bnn.calibration.temperature import apply_temperature, cross_fitted
from lightning_bnn.calibration.verdict import CLASS_BAND_LEVEL, class_verdict
from lightning_bnn.report.rows import Array, Rows, Sums

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["PER_CLASS", "Classification", "classwise_replicates"]

PER_CLASS = ("correct", "confidence", "aleatoric", "epistemic")
# Multiplications that the classwise error of all replicates may take, and its fewest replicates.
CLASSWISE_WORK = 400_000_000
CLASSWISE_REPLICATES = 100
# The score test of the temperature sees a change of the inverse temperature by d in four of five
# data sets if d √V is this much: 2.81 for a false alarm in 200, and 0.84 for the four of five.
SEEN = 3.65
# Of 1 to 1.5. A test that would miss this sees only what is grave.
GRAVE = 1 / 3


class Classification(Sums):
    """Sums in fixed bins and by class.

    Args:
        bins: Number of bins of equal width.
        classes: Number of classes K.

    Attributes:
        clusters: Sums of powers of the examples' scores.
        confidence: Confidence against whether the top class was right.
        classwise: Each class's probability against whether it was observed.
        per_class: Rows of (count, *PER_CLASS) by the observed class, (5, K).
    """

    means = (
        "correct", "confidence", "nll", "brier", "entropy", "aleatoric", "epistemic",
        "score", "score_variance", "score_third", "which_class",
    )  # fmt: skip
    columns = (
        "target", "predicted", "confidence", "correct", "nll", "brier", "entropy", "epistemic",
    )  # fmt: skip
    scores = (
        ("accuracy", "Accuracy", "higher", None),
        ("nll", "NLL", "lower", None),
        ("brier", "Brier score", "lower", None),
        ("ece", "ECE", "lower", None),
        ("adaptive_ece", "Adaptive ECE", "lower", None),
        ("classwise_ece", "Classwise ECE", "lower", None),
        ("aurc", "AURC", "lower", None),
        ("scaled_nll", "NLL after temperature scaling", "lower", None),
        ("scaled_ece", "ECE after temperature scaling", "lower", None),
    )
    ood: ClassVar = {
        "entropy": "entropy", "mutual_information": "epistemic",
        "maximum_probability": "confidence",
    }  # fmt: skip

    def __init__(self, bins: int, classes: int) -> None:
        super().__init__()
        self.clusters = ClusterSums()
        self.confidence = binned.BinSums(binned.width_edges(bins))
        self.classwise = binned.BinSums(binned.width_edges(bins), classes)
        self.per_class = np.zeros((1 + len(PER_CLASS), classes))

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch."""
        columns, target = rows.columns, rows.columns["target"]
        self.add_columns(columns)
        # An example comes with all of its rows in one batch.
        self.clusters += cluster_sums(rows.example, columns["score"])
        self.confidence.add(columns["confidence"], columns["correct"])
        self.classwise.add_classes(np.exp(rows.log_probabilities), target)
        weights = [None, *(columns[name] for name in PER_CLASS)]
        classes = self.per_class.shape[1]
        self.per_class += np.stack([np.bincount(target, weight, classes) for weight in weights])

    def by_mass(self, model: Statistics) -> binned.BinSums:
        """Confidence against whether the top class was right, in bins with as many rows each."""
        confidence, correct = model.sample["confidence"], model.sample["correct"]
        return binned.bin_sums(confidence, correct, binned.mass_edges(confidence, model.bins))

    def block(self, model: Statistics, risk: float) -> dict[str, Any]:
        """Verdict and scores.

        Args:
            model: What was gathered of the model.
            risk: The largest share of errors that is acceptable among the answers given.
        """
        risks = risk_coverage(model.sample["confidence"], 1.0 - model.sample["correct"])
        verdict = class_verdict(
            binned.reliability_curve(self.confidence, level=CLASS_BAND_LEVEL),
            self.total("score"),
            self.total("score_variance"),
            self.total("score_third"),
            self.clusters if self.count > self.clusters.examples else None,
        )
        return {
            "verdict": asdict(verdict),
            "scalars": {
                **{name: self.mean(name) for name in ("nll", "brier", "entropy", *PER_CLASS[2:])},
                "accuracy": self.mean("correct"),
                "mean_confidence": self.mean("confidence"),
                "excess_nll": self.mean("nll") - self.mean("aleatoric") - self.mean("epistemic"),
                "ece": expected_calibration_error(self.confidence),
                "adaptive_ece": expected_calibration_error(self.by_mass(model)),
                "classwise_ece": expected_calibration_error(self.classwise),
                "aurc": float(risks.mean()),
                "coverage_at_risk": coverage_at_risk(risks, risk),
                "risk": risk,
            },
        }

    def shows_grave_faults(self) -> bool:
        """Whether the score test over all bins would show a temperature of 1.5.

        V is the variance of the score's sum
        (:func:`~lightning_bnn.calibration.verdict.class_verdict`).
        """
        return bool(GRAVE * math.sqrt(self.total("score_variance")) >= SEEN)

    def replicated(
        self, model: Statistics, block: Mapping[str, Any], rows: Any, weights: Array
    ) -> dict[str, Array]:
        """Each score in every replicate of the bootstrap.

        Args:
            model: What was gathered of the model.
            block: The model's numbers, of which the temperature is used.
            rows: The rows of the comparison.
            weights: How often each row was drawn, (R, n).

        Returns:
            Arrays of shape (R,) by the keys of ``scores``.
        """
        chosen = rows.chosen(model.sample)
        names = ("correct", "nll", "brier", "confidence")
        correct, nll, brier, confidence = (model.sample[name][chosen] for name in names)
        chosen = rows.chosen(model.kept)
        log_p, target = model.kept["log_probabilities"][chosen], model.kept["target"][chosen]
        temperature = block["temperature"]
        if temperature["fitted_on"] == "validation":
            each: Array = np.full(len(target), temperature["value"])
        else:
            each = cross_fitted(log_p, target, rows.example)
        scaled_nll = scaled_confidence = np.full(len(target), np.nan)
        if np.isfinite(each).all():  # there was something to fit a temperature on
            cooled = apply_temperature(log_p, each)
            scaled_nll = -np.take_along_axis(cooled, target[:, None], 1)[:, 0]
            scaled_confidence = np.exp(cooled.max(1))
        means = mean_replicates(np.stack([correct, brier], 1), weights)
        edges, by_mass = binned.width_edges(model.bins), binned.mass_edges(confidence, model.bins)
        return {
            "accuracy": means[:, 0],
            "nll": mean_replicates(nll, weights),
            "brier": means[:, 1],
            "ece": expected_calibration_errors(confidence, correct, edges, weights),
            "adaptive_ece": expected_calibration_errors(confidence, correct, by_mass, weights),
            "classwise_ece": classwise_replicates(np.exp(log_p), target, edges, weights),
            "aurc": aurc_replicates(confidence, 1.0 - correct, weights),
            "scaled_nll": mean_replicates(scaled_nll, weights),
            "scaled_ece": expected_calibration_errors(scaled_confidence, correct, edges, weights),
        }


def classwise_replicates(
    probabilities: Array, target: Array, edges: Array, weights: Array
) -> Array:
    """The mean over the classes of each one's calibration error, in every replicate.

    With many classes only the first replicates are computed and the others are NaN, so that the
    work is bounded.

    Example:
        >>> probabilities = np.array([[0.8, 0.2], [0.6, 0.4]])
        >>> weights = np.ones((1, 2))
        >>> classwise_replicates(probabilities, np.array([0, 1]), np.array([0.0, 1.0]), weights)
        array([0.2])
    """
    count, classes = probabilities.shape
    most = max(CLASSWISE_REPLICATES, CLASSWISE_WORK // probabilities.size)
    used = weights[:most]
    bins = len(edges) - 1
    gaps = probabilities.copy()
    gaps[np.arange(count), target] -= 1.0
    column = binned.bin_index(probabilities, edges) + np.arange(classes) * bins
    # One row of the sparse matrix a row of data: its gap in one bin of every class.
    start = np.arange(0, probabilities.size + 1, classes)
    sparse = csr_array((gaps.ravel(), column.ravel(), start), shape=(count, classes * bins))
    totals = np.abs(sparse.T @ used.T.astype(np.float64)).sum(0)
    errors = np.full(len(weights), np.nan)
    errors[: len(used)] = totals / used.sum(1, dtype=np.float64) / classes
    return errors
