"""The whole document as numbers: every model, their comparison, and the summary in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.report.class_block import class_block
from lightning_bnn.report.common_rows import check_same_task
from lightning_bnn.report.comparison import comparison
from lightning_bnn.report.headlines import COARSE, unseen_gap
from lightning_bnn.report.number_block import number_block
from lightning_bnn.report.outside import Outside
from lightning_bnn.report.plain import plain
from lightning_bnn.report.pruning_words import pruning_sentence
from lightning_bnn.report.statistics import Statistics
from lightning_bnn.report.words import summary

__all__ = ["FORMAT", "report_numbers"]

# Raised when a reader of older documents would misunderstand a newer one.
FORMAT = 1
# The score test of the temperature sees a change of the inverse temperature by d in four of five
# data sets if d √V is this much: 2.81 for a false alarm in 200, and 0.84 for the four of five.
SEEN = 3.65
# Of 1 to 1.5. A test that would miss this sees only what is grave.
GRAVE = 1 / 3
# Rows of one example depend on each other: of fewer examples nothing can be said.
FEW_CLUSTERS = 30


def report_numbers(
    models: Mapping[str, Statistics],
    outside: Mapping[str, Mapping[str, Outside]] | None = None,
    validation: Mapping[str, Statistics] | None = None,
    title: str = "Calibration report",
    source: str = "test",
    class_names: Sequence[str] | None = None,
    risk: float = 0.05,
    notes: Sequence[str] = (),
    made: str | None = None,
    pruning: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The document, of plain Python values that JSON can hold.

    Args:
        models: For each model's name, what it said and what came; all on the same examples.
        outside: By model and by loader, the scores on foreign data.
        validation: By model, its predictions on other data, to fit the temperature on. A model
            without them is cross-fitted on its own.
        title: The heading.
        source: What the data are, such as "test".
        class_names: One for each class.
        risk: The largest share of errors that is acceptable among the answers given.
        notes: Further sentences of the summary.
        made: The time of making, ISO 8601; None: now, in UTC, to the minute.
        pruning: By model, the numbers of its pruning curve, or why there is none
            (:func:`~lightning_bnn.report.pruning.pruning_block`).

    Raises:
        DataError: There are fewer rows than bins, or the models saw different examples.
        ConfigurationError: The models are of different tasks, or an option does not fit them.

    Example:
        >>> import torch
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> statistics = Statistics(bins=5)
        >>> logits = torch.randn(1, 200, 3, generator=torch.Generator().manual_seed(0))
        >>> statistics.update(CategoricalPredictive(logits), torch.arange(200) % 3)
        >>> numbers = report_numbers({"net": statistics})
        >>> numbers["task"], numbers["data"]["rows"], numbers["models"][0]["name"]
        ('classes', 200, 'net')
    """
    outside, validation = outside or {}, validation or {}
    _check(models, class_names, risk)
    for name, statistics in validation.items():
        if name in models and statistics.task is not None:
            check_same_task({name: models[name], f"{name} (validation)": statistics})
    blocks = [
        class_block(name, model, outside.get(name, {}), validation.get(name), risk)
        if model.task == "classes"
        else number_block(name, model, outside.get(name, {}))
        for name, model in models.items()
    ]
    first = next(iter(models.values()))
    kept = min(len(model.kept) for model in models.values())
    rows = max(model.rows for model in models.values())
    document: dict[str, Any] = {
        "format": FORMAT,
        "title": title,
        "library": f"lightning_bnn {_version()}",
        "made": made or datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "task": first.task,
        "summary": [],
        "data": {
            "source": source,
            "examples": first.examples,
            "rows": rows,
            "classes": first.classes,
            "class_names": None if class_names is None else [str(name) for name in class_names],
            "bins": first.bins,
            "sampled": kept if any(m.rows > len(m.kept) for m in models.values()) else None,
        },
        "models": blocks,
        "comparison": comparison(models, blocks, outside),
    }
    document = plain(document)
    for model, block in zip(models.values(), document["models"], strict=True):
        if block["verdict"]["label"] == "calibrated" and not _could_show(model, block):
            block["verdict"]["label"] = "nothing found"
    for name, found in (pruning or {}).items():
        _attach_pruning(document, list(models).index(name), found)
    document["summary"] = summary(document, notes)
    return document


def _attach_pruning(document: dict[str, Any], index: int, pruning: Mapping[str, Any]) -> None:
    """Add the curve of a model, and what it says, to its block."""
    intervals = {
        row["key"]: (row["values"][index]["lower"], row["values"][index]["upper"])
        for row in document["comparison"]["rows"]
    }
    block = plain(dict(pruning))
    block["text"] = pruning_sentence(block, document["task"], intervals)
    document["models"][index]["pruning"] = block


def _could_show(model: Statistics, block: Mapping[str, Any]) -> bool:
    """Whether finding nothing says something.

    It does where the band shows gaps of ten points, or, of classes, where the score test over all
    bins shows a temperature of 1.5. V is the variance of the score's sum
    (:func:`~lightning_bnn.calibration.verdict.class_verdict`).
    """
    if block["verdict"].get("clustered") and model.examples < FEW_CLUSTERS:
        return False
    if unseen_gap(block) <= COARSE:
        return True
    if model.task != "classes":
        return False
    return bool(GRAVE * math.sqrt(model.sums.sums["score_variance"]) >= SEEN)


def _version() -> str:
    try:
        return version("lightning-bnn")
    except PackageNotFoundError:  # run from its source, not installed
        return "unknown"


def _check(
    models: Mapping[str, Statistics], class_names: Sequence[str] | None, risk: float
) -> None:
    if not models:
        raise ConfigurationError("a report needs at least one model, got none.")
    if not 0 < risk < 1:
        raise ConfigurationError(
            f"expected risk strictly between 0 and 1, got {risk}. For 5 percent errors pass 0.05."
        )
    for name, model in models.items():
        if not model.rows and len(model.invalid):
            raise DataError(
                f"no prediction of {name!r} is finite: all {len(model.invalid)} hold NaN or "
                "infinity, and nothing can be reported. Look for a training that diverged, or for "
                "inputs that are not finite."
            )
        if model.rows < model.bins:
            left_out = f" ({len(model.invalid)} predictions are not finite)" * bool(
                len(model.invalid)
            )
            raise DataError(
                f"a report in {model.bins} bins needs at least {model.bins} rows; {name!r} has "
                f"{model.rows}{left_out}. Give more examples, or fewer bins: bins="
                f"{max(2, model.rows)} or below."
            )
    check_same_task(models)
    classes = next(iter(models.values())).classes
    if class_names is not None and len(class_names) != classes:
        raise ConfigurationError(
            f"expected one class name for each of the {classes} classes, got {len(class_names)}."
        )
