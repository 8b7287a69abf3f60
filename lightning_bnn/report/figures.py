"""Figures drawn with matplotlib: of predictions, and of a calibration report's numbers.

The figures of predictions draw on axes that the caller made, so that they can stand alone or side
by side. Those of a report are whole figures, made without pyplot, so that a logger can take them
from any thread and none stays behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import Posterior
from lightning_bnn.predictive import OrderedPredictive
from lightning_bnn.report.figure_style import plain
from lightning_bnn.report.figures_of_classes import class_figures
from lightning_bnn.report.figures_of_numbers import number_figures

__all__ = ["calibration_figures", "draw_regression", "draw_shift"]

_BLUE, _ORANGE, _GREY = "#2f6db5", "#d9762b", "#6b7280"


def calibration_figures(numbers: Mapping[str, Any]) -> dict[str, Figure]:
    """The main figures of a calibration report, for loggers and papers.

    ``"calibration"``: reliability and confidence of a classifier, PIT and coverage of a
    regression. ``"selection"``: what the uncertainty is worth for choosing, by risk and coverage
    or by error against predicted standard deviation. ``"shift"``, where the report has data from
    elsewhere: how far the uncertainty tells them apart. ``"fit"``, where the input is one number.
    All models of the report are in each. ``"pruning_histogram"`` and ``"pruning_curve"``, where
    the report has pruned: signal-to-noise ratios, and what removing weights costs. These are of one
    model each; where several have them, their number among the models comes after the name.

    Args:
        numbers: The numbers of a report, such as ``Report.numbers`` or its JSON file.

    Returns:
        The figures by name.

    Raises:
        ConfigurationError: If these are not the numbers of a report.

    Example:
        >>> reliability = {"edges": [0, 0.5, 1], "count": [0, 8], "stated": [None, 0.8],
        ...                "came": [None, 0.75], "lower": [None, 0.4], "upper": [None, 1.0]}
        >>> block = {"name": "net", "verdict": {"label": "calibrated"}, "scalars": {"ece": 0.05},
        ...          "reliability": {"width": reliability, "mass": reliability},
        ...          "confidence": {"edges": [0, 0.5, 1], "right": [0, 6], "wrong": [0, 2]}}
        >>> sorted(calibration_figures({"task": "classes", "models": [block]}))
        ['calibration']
    """
    drawn = {"classes": class_figures, "numbers": number_figures}
    task = numbers.get("task")
    if task not in drawn or not numbers.get("models"):
        raise ConfigurationError(
            "calibration_figures expected the numbers of a report, with a task of 'classes' or "
            f"'numbers' and its models; got task={task!r} and the keys {sorted(numbers)}. Pass "
            "Report.numbers."
        )
    return drawn[task](numbers["models"]) | _pruning_figures(numbers["models"])


def _pruning_figures(models: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    from lightning_bnn.pruning.figures import draw_curve, draw_histogram

    numbered = {
        at: block for at, block in enumerate(models, 1) if "results" in (block.get("pruning") or {})
    }
    figures = {}
    for at, block in numbered.items():
        ending = f"_{at}" if len(numbered) > 1 else ""
        for name, draw in (("histogram", draw_histogram), ("curve", draw_curve)):
            figure = draw(block["pruning"])
            if len(models) > 1:
                figure.suptitle(plain(block["name"]), fontsize=10)
            figures[f"pruning_{name}{ending}"] = figure
    return figures


def draw_regression(
    axes: Axes,
    inputs: Tensor,
    predictive: OrderedPredictive,
    observed: Sequence[Tensor] | None = None,
    truth: Tensor | None = None,
) -> None:
    """Draw a one-dimensional regression: its mean, its interval, and where that comes from.

    The outer band is the central 95 % interval of the mixture; the inner one is ±2 standard
    deviations of the mean alone, which more data would narrow.

    Args:
        axes: Where to draw.
        inputs: A sorted grid of shape (points,) or (points, 1).
        predictive: The prediction on the grid.
        observed: Training inputs and targets.
        truth: The noise-free curve on the grid.
    """
    grid = inputs.flatten().cpu()
    mean = predictive.mean.flatten().cpu()
    lower, upper = (edge.flatten().cpu() for edge in predictive.interval(0.95))
    spread = 2 * predictive.epistemic.flatten().sqrt().cpu()
    axes.fill_between(grid, lower, upper, color=_BLUE, alpha=0.18, lw=0, label="95% interval")
    axes.fill_between(
        grid, mean - spread, mean + spread, color=_BLUE, alpha=0.3, lw=0, label="epistemic part"
    )
    axes.plot(grid, mean, color=_BLUE, lw=1.8, label="mean")
    if truth is not None:
        axes.plot(grid, truth.flatten().cpu(), color=_GREY, lw=1, ls="--", label="truth")
    if observed is not None:
        points, values = (part.flatten().cpu() for part in observed)
        axes.scatter(points, values, s=5, color="black", alpha=0.35, lw=0, label="data", zorder=3)
    axes.set_xlim(float(grid[0]), float(grid[-1]))
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def draw_shift(
    axes: Axes,
    posteriors: Mapping[str, Posterior],
    shifted: Mapping[float, Tensor],
    targets: Tensor,
    draws: int = 32,
) -> None:
    """Draw mean confidence and accuracy of classifiers as their inputs move away.

    A model that knows when it errs keeps its confidence (solid) near its accuracy (dashed).

    Args:
        axes: Where to draw.
        posteriors: Posteriors of classifiers, by name.
        shifted: The inputs, by the size of the shift.
        targets: Their classes, which the shift does not change.
        draws: Draws of the weights in each prediction.
    """
    for (name, posterior), colour in zip(posteriors.items(), (_BLUE, _ORANGE), strict=False):
        confidence, accuracy = [], []
        for inputs in shifted.values():
            predictive = posterior.predict(inputs, draws)
            confidence.append(float(predictive.mean.max(1).values.mean()))
            accuracy.append(
                float((predictive.mean.argmax(1).cpu() == targets.cpu()).float().mean())
            )
        levels = list(shifted)
        axes.plot(levels, confidence, color=colour, lw=1.8, label=f"{name}: confidence")
        axes.plot(levels, accuracy, color=colour, lw=1.4, ls="--", label=f"{name}: accuracy")
    axes.set_ylim(0, 1.03)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
