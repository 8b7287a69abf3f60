"""What pruning at several fractions gave: results, their table, their figure."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.pruning.histogram import SNRHistogram
from lightning_bnn.pruning.table import curve_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_bnn.pruning.masks import Scope, Unit

__all__ = ["PruneCurve", "PruningResult", "check_curve_name"]

_FIGURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class PruningResult:
    """What is left of a posterior at one fraction, and how well it predicts.

    Attributes:
        fraction: The share to remove, as it was asked for.
        removed: How many weights (or units) are removed.
        total: Of how many.
        threshold: The largest signal-to-noise ratio among those removed; None if there are none.
        scores: The scores of the likelihood's metrics, by name.
        layers: The share of each layer that is removed, by the name of its weight.

    Example:
        >>> PruningResult(0.5, removed=2, total=4, threshold=0.3, scores={"nll": 0.1}).remaining
        2
    """

    fraction: float
    removed: int
    total: int
    threshold: float | None
    scores: dict[str, float]
    layers: dict[str, float] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """How many are left."""
        return self.total - self.removed


@dataclass(frozen=True)
class PruneCurve:
    """The scores of a posterior at several shares removed, the smallest share first.

    Printed, it is a table. :func:`prune_curve` makes it.

    Attributes:
        results: One for each fraction.
        histogram: The signal-to-noise ratios that decided.
        unit: What was removed: ``"weight"`` or ``"channel"``.
        scope: Whether one threshold served for all layers (``"global"``) or one for each.
        protected: How many weights (or units) of the network could not be removed.
        single: With units, how many of all that could be removed are single weights instead, in
            layers whose units cannot be removed (``rest="weight"``).

    Example:
        >>> import torch
        >>> from lightning_bnn.pruning.histogram import snr_histogram
        >>> results = tuple(
        ...     PruningResult(fraction, removed, 4, threshold, {"nll": nll})
        ...     for fraction, removed, threshold, nll in [(0.0, 0, None, 0.5), (0.5, 2, 0.2, 0.53)]
        ... )
        >>> histogram = snr_histogram({"weight": torch.tensor([0.1, 0.2, 1.0, 3.0])})
        >>> curve = PruneCurve(results, histogram, "weight", "global", protected=1)
        >>> print(curve)  # doctest: +NORMALIZE_WHITESPACE
        4 weights by signal-to-noise ratio, one threshold for all layers; 1 more are protected
        removed  left  ratio up to     nll
            0 %     4            –  0.5000
           50 %     2          0.2  0.5300 +0.0300
        >>> curve.best(tolerance=0.05).fraction
        0.5
    """

    results: tuple[PruningResult, ...]
    histogram: SNRHistogram
    unit: Unit
    scope: Scope
    protected: int
    single: int = 0

    def __str__(self) -> str:
        return curve_table(self.to_dict())

    def best(self, tolerance: float) -> PruningResult:
        """The largest fraction whose mean NLL is at most ``tolerance`` above that of the first.

        Args:
            tolerance: How much NLL may be lost, in nats an example; 0 or more.

        Raises:
            ConfigurationError: The tolerance is negative, or the likelihood has no NLL.
        """
        if not tolerance >= 0:
            raise ConfigurationError(f"tolerance= is 0 or more; got {tolerance!r}.")
        first = self.results[0]
        if "nll" not in first.scores:
            raise ConfigurationError(
                f"best() compares the score 'nll'; the likelihood's metrics are "
                f"{sorted(first.scores)}. Compare curve.results by one of these."
            )
        limit = first.scores["nll"] + tolerance
        good = [result for result in self.results if result.scores["nll"] <= limit]
        return good[-1] if good else first

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, as JSON has them: what is not finite is None."""
        histogram = self.histogram.to_dict()
        for layer in histogram["layers"]:
            layer["removed"] = [result.layers.get(layer["name"]) for result in self.results]
        return {
            "unit": self.unit,
            "scope": self.scope,
            "total": self.results[0].total,
            "protected": self.protected,
            **({"single": self.single} if self.single else {}),
            "score_names": list(self.results[0].scores),
            "results": [
                {
                    "fraction": result.fraction,
                    "removed": result.removed,
                    "remaining": result.remaining,
                    "threshold": _finite(result.threshold),
                    "scores": {name: _finite(value) for name, value in result.scores.items()},
                }
                for result in self.results
            ],
            "histogram": histogram,
        }

    def figure(self) -> Figure:
        """The histogram of the ratios, and the scores against the share removed."""
        from lightning_bnn.pruning.figures import draw_all

        return draw_all(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure (``.png``, ``.svg``, ``.pdf``) or the numbers (``.json``).

        Args:
            path: The file; its ending says what is written. Folders on the way are made.

        Returns:
            The path.

        Raises:
            ConfigurationError: The ending is another one.
        """
        target = check_curve_name(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".json":
            text = json.dumps(self.to_dict(), allow_nan=False, indent=1)
            target.write_text(text, encoding="utf-8")
        else:
            self.figure().savefig(target, dpi=150)
        return target


def check_curve_name(path: str | os.PathLike[str]) -> Path:
    """The file of a curve.

    Raises:
        ConfigurationError: It is a URL, or its ending is none that a curve can be written as.

    Example:
        >>> check_curve_name("curve.png").suffix
        '.png'
    """
    target = Path(path)
    if "://" in str(path):
        raise ConfigurationError(
            f"A curve is saved to a local file; got the URL {str(path)!r}. Copy it there "
            "afterwards."
        )
    if target.suffix not in (*_FIGURES, ".json"):
        raise ConfigurationError(
            f"A curve is saved as {', '.join(_FIGURES)} (the figure) or .json (the numbers); got "
            f"{str(path)!r}."
        )
    return target


def _finite(value: float | None) -> float | None:
    """JSON knows no infinity."""
    return value if value is not None and math.isfinite(value) else None
