"""The whole document as numbers: every model, their comparison, and the summary in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.report.class_block import class_block
from lightning_bnn.report.common_rows import check_same_task
from lightning_bnn.report.comparison import comparison
from lightning_bnn.report.number_block import number_block
from lightning_bnn.report.outside import Outside
from lightning_bnn.report.plain import plain
from lightning_bnn.report.statistics import Statistics
from lightning_bnn.report.words import summary

__all__ = ["FORMAT", "report_numbers"]

# Raised when a reader of older documents would misunderstand a newer one.
FORMAT = 1


def report_numbers(
    models: Mapping[str, Statistics],
    outside: Mapping[str, Mapping[str, Outside]] | None = None,
    validation: Mapping[str, Statistics] | None = None,
    title: str = "Calibration report",
    source: str = "test",
    class_names: Sequence[str] | None = None,
    risk: float = 0.05,
    notes: Sequence[str] = (),
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
    document["summary"] = summary(document, notes)
    return document


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
