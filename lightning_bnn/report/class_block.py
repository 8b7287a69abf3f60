"""The numbers of one model in a report of classes.

Confidence, ECE and the reliability diagram are about the most probable class, for yes-or-no labels
too: there they differ from the calibration error of the probability of a 1, which the classwise
error has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_bnn.calibration.bins import ReliabilityCurve, bin_sums, mass_edges, reliability_curve
from lightning_bnn.calibration.decomposition import brier_decomposition, nll_decomposition
from lightning_bnn.calibration.error import (
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
)
from lightning_bnn.calibration.selective import coverage_at_risk, risk_coverage
from lightning_bnn.calibration.temperature import scaled
from lightning_bnn.calibration.verdict import CLASS_BAND_LEVEL, class_verdict
from lightning_bnn.report.class_sums import PER_CLASS, ClassSums
from lightning_bnn.report.outside import Outside
from lightning_bnn.report.sample import Sample
from lightning_bnn.report.shift import shift_numbers
from lightning_bnn.report.statistics import Statistics

__all__ = ["class_block"]

# The share of rows that are called the most uncertain, and how many classes and pairs are shown.
UNCERTAIN_SHARE = 0.1
CONFUSION_CLASSES = 20
CONFUSION_PAIRS = 10
CURVE_POINTS = 200


def class_block(
    name: str,
    statistics: Statistics,
    outside: Mapping[str, Outside],
    validation: Statistics | None,
    risk: float,
) -> dict[str, Any]:
    """The numbers of one model.

    Args:
        name: The model's.
        statistics: What it said and what came.
        outside: Its scores on each out-of-distribution loader.
        validation: Its predictions on other data, to fit the temperature on; None cross-fits.
        risk: The largest share of errors that is acceptable among the answers given.
    """
    sums: ClassSums = statistics.sums
    sample = statistics.sample
    confidence, correct = sample["confidence"], sample["correct"]
    # A yes-or-no label's Brier score is that of its 1 alone, half of the sum over both values.
    brier_scale = 0.5 if statistics.yes_no else 1.0
    by_mass = bin_sums(confidence, correct, mass_edges(confidence, statistics.bins))
    curve = risk_coverage(confidence, 1.0 - correct)
    shown = np.unique(np.linspace(0, len(curve.risk) - 1, CURVE_POINTS).round().astype(int))
    verdict = class_verdict(
        reliability_curve(sums.confidence, level=CLASS_BAND_LEVEL),
        sums.sums["score"],
        sums.sums["score_variance"],
        sums.sums["score_third"],
        sums.clusters if sums.count > sums.clusters.examples else None,
    )
    coverage = coverage_at_risk(curve, risk)
    answered = round(coverage * len(curve.risk))
    count, right = sums.confidence.count[0], sums.confidence.observed[0]
    entropy_count = sums.entropy.count[0]
    return {
        "name": name,
        "draws": statistics.draws,
        "verdict": {
            "label": verdict.label,
            "z": verdict.z,
            "p_value": verdict.p_value,
            "clustered": verdict.clustered,
        },
        "invalid": {
            "count": len(statistics.invalid),
            "examples": statistics.invalid[:20],
            "impossible": sums.impossible,
        },
        "scalars": {
            "accuracy": sums.mean("correct"),
            "nll": sums.mean("nll"),
            "brier": sums.mean("brier"),
            "ece": expected_calibration_error(sums.confidence),
            "adaptive_ece": expected_calibration_error(by_mass),
            "classwise_ece": classwise_calibration_error(sums.classwise),
            "max_calibration_error": maximum_calibration_error(sums.confidence),
            "aurc": curve.aurc,
            "coverage_at_risk": coverage,
            "answered_at_risk": answered,
            "errors_at_risk": round(answered * curve.risk[answered - 1]) if answered else 0,
            "risk": risk,
            "mean_confidence": sums.mean("confidence"),
            "entropy": sums.mean("entropy"),
            "aleatoric": sums.mean("aleatoric"),
            "epistemic": sums.mean("epistemic"),
        },
        "nll_parts": {
            "aleatoric": sums.mean("aleatoric"),
            "epistemic": sums.mean("epistemic"),
            "excess": sums.mean("nll") - sums.mean("aleatoric") - sums.mean("epistemic"),
        },
        "nll_decomposition": nll_decomposition(
            sums.confidence, sums.mean("nll"), sums.mean("which_class")
        ),
        "brier_decomposition": {
            part: brier_scale * value for part, value in brier_decomposition(sums.classwise).items()
        },
        "reliability": {
            "width": _curve(reliability_curve(sums.confidence)),
            "mass": _curve(reliability_curve(by_mass)),
        },
        "confidence": {"edges": sums.confidence.edges, "right": right, "wrong": count - right},
        "risk_coverage": {"coverage": curve.coverage[shown], "risk": curve.risk[shown]},
        "entropy_accuracy": {
            "edges": sums.entropy.edges,
            "count": entropy_count,
            "accuracy": _ratio(sums.entropy.observed[0], entropy_count),
        },
        "confusion": _confusion(sample, sums.per_class.shape[1]),
        "per_class": _per_class(sums),
        "temperature": _temperature(statistics, validation, brier_scale),
        "uncertain": statistics.uncertain.numbers(),
        "shift": shift_numbers(statistics, outside),
    }


def _curve(curve: ReliabilityCurve) -> dict[str, Any]:
    names = ("edges", "count", "stated", "lower", "upper")
    return {name: getattr(curve, name) for name in names} | {"came": curve.observed}


def _ratio(part: Any, whole: Any) -> Any:
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=np.asarray(whole) > 0)


def _per_class(sums: ClassSums) -> list[dict[str, Any]]:
    count = sums.per_class[0]
    means = _ratio(sums.per_class[1:], np.broadcast_to(count, sums.per_class[1:].shape))
    names = ["accuracy" if name == "correct" else name for name in PER_CLASS]
    return [
        {"class": k, "count": int(count[k])} | dict(zip(names, means[:, k].tolist(), strict=True))
        for k in range(len(count))
    ]


def _confusion(sample: Sample, classes: int) -> dict[str, Any]:
    """What the most uncertain rows are taken for."""
    entropy = sample["entropy"]
    count = max(1, math.ceil(UNCERTAIN_SHARE * len(entropy)))
    chosen = np.argsort(-entropy, kind="stable")[:count]
    target, predicted = sample["target"][chosen], sample["predicted"][chosen]
    # By codes, since a full matrix of many classes would be mostly zeros.
    codes, counts = np.unique(target * classes + predicted, return_counts=True)
    targets, predictions = np.divmod(codes, classes)
    seen = np.bincount(target, minlength=classes) + np.bincount(predicted, minlength=classes)
    shown = np.sort(np.argsort(-seen, kind="stable")[:CONFUSION_CLASSES])
    place = np.full(classes, -1)
    place[shown] = np.arange(len(shown))
    matrix = np.zeros((len(shown), len(shown)), np.int64)
    inside = (place[targets] >= 0) & (place[predictions] >= 0)
    matrix[place[targets[inside]], place[predictions[inside]]] = counts[inside]
    wrong = np.flatnonzero(targets != predictions)
    largest = wrong[np.argsort(-counts[wrong], kind="stable")][:CONFUSION_PAIRS]
    return {
        "share": UNCERTAIN_SHARE,
        "count": count,
        "classes": shown,
        "matrix": matrix,
        "pairs": [
            {"target": int(targets[i]), "predicted": int(predictions[i]), "count": int(counts[i])}
            for i in largest
        ],
    }


def _temperature(
    statistics: Statistics, validation: Statistics | None, brier_scale: float
) -> dict[str, Any]:
    matrix = statistics.matrix
    assert matrix is not None
    other = None
    if validation is not None and validation.matrix is not None and len(validation.matrix):
        other = validation.matrix["log_probabilities"], validation.matrix["target"]
    result = scaled(
        matrix["log_probabilities"], matrix["target"], other, matrix.example, statistics.bins
    )
    for when in ("before", "after"):
        result[when]["brier"] *= brier_scale
    result["invalid"] = 0 if validation is None else len(validation.invalid)
    return result
