"""The verdict on rows of probabilities, as the report judges them."""

import numpy as np

from lightning_bnn.calibration.bins import bin_sums, reliability_curve, width_edges
from lightning_bnn.calibration.clusters import cluster_sums
from lightning_bnn.calibration.verdict import (
    CLASS_BAND_LEVEL,
    Verdict,
    class_verdict,
    score_moments,
)


def rows_verdict(log_probabilities: np.ndarray, targets: np.ndarray, examples=None) -> Verdict:
    """Judge in 15 bins; ``examples`` says which rows depend on each other."""
    probabilities = np.exp(log_probabilities)
    predicted = probabilities.argmax(1)
    confidence = np.minimum(probabilities.max(1), 1.0)
    sums = bin_sums(confidence, predicted == targets, width_edges(15))
    moments = score_moments(log_probabilities, probabilities, targets)
    clusters = None if examples is None else cluster_sums(examples, moments[0])
    curve = reliability_curve(sums, level=CLASS_BAND_LEVEL)
    return class_verdict(curve, *(float(moment.sum()) for moment in moments), clusters)
