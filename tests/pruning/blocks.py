"""Numbers of a pruning curve made by hand, of known ratios and chosen scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
SIZES = {"0.weight": 3000, "2.weight": 1500, "4.weight": 100}


def hand_made(
    scores: Mapping[str, Sequence[float | None]], fractions: Sequence[float] = FRACTIONS
) -> dict[str, Any]:
    """The numbers of a curve with these scores, one for each fraction."""
    generator = np.random.default_rng(3)
    ratios = {
        name: 10 ** generator.normal(shift, 0.5, size)
        for (name, size), shift in zip(SIZES.items(), (-0.5, 0.0, 0.6), strict=True)
    }
    together = np.sort(np.concatenate(list(ratios.values())))
    edges = np.arange(-20, 21) / 10
    removed = [round(fraction * len(together)) for fraction in fractions]
    thresholds = [float(together[count - 1]) if count else None for count in removed]
    layers = [
        {
            "name": name,
            "total": len(values),
            "median": float(np.median(values)),
            "removed": [float((values <= (limit or 0)).mean()) for limit in thresholds],
            "counts": np.histogram(np.log10(values), edges)[0].tolist(),
        }
        for name, values in ratios.items()
    ]
    counts = np.histogram(np.log10(together), edges)[0]
    return {
        "unit": "weight",
        "scope": "global",
        "total": len(together),
        "score_names": list(scores),
        "results": [
            {
                "fraction": fraction,
                "removed": removed[i],
                "remaining": len(together) - removed[i],
                "threshold": thresholds[i],
                "scores": {name: values[i] for name, values in scores.items()},
            }
            for i, fraction in enumerate(fractions)
        ],
        "histogram": {
            "log10_edges": edges.tolist(),
            "counts": counts.tolist(),
            "below": int((np.log10(together) < edges[0]).sum()),
            "above": int((np.log10(together) > edges[-1]).sum()),
            "zero": 0,
            "layers": layers,
        },
    }


OF_CLASSES: dict[str, Sequence[float | None]] = {
    "accuracy": [0.622, 0.622, 0.621, 0.618, 0.612, 0.575, 0.5],
    "nll": [1.08, 1.08, 1.09, 1.1, 1.12, 1.3, 1.6],
    "ece": [0.008, 0.009, 0.01, 0.012, 0.02, 0.05, 0.11],
    "brier": [0.5, 0.5, 0.501, 0.505, 0.51, 0.56, 0.64],
}
OF_NUMBERS: dict[str, Sequence[float | None]] = {
    "rmse": [0.4, 0.4, 0.401, 0.405, 0.43, 0.55, 0.8],
    "nll": [-0.1, -0.1, -0.09, -0.05, 0.1, 0.8, 2.0],
    "crps": [0.2, 0.2, 0.2, 0.21, 0.23, 0.3, 0.5],
    "coverage": [0.9, 0.9, 0.9, 0.89, 0.87, 0.8, 0.6],
}
