"""A report from plain arrays, whatever library made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.mixtures import reshape_targets
from lightning_bnn.predictive import ClassPredictive, Predictive
from lightning_bnn.report.array_checks import (
    as_tensor,
    check_classes,
    class_predictive,
    number_predictive,
)
from lightning_bnn.report.document import Report
from lightning_bnn.report.numbers import report_numbers
from lightning_bnn.report.outside import Outside
from lightning_bnn.report.statistics import Statistics

__all__ = ["report"]

# Numbers of a predictive that are looked at together, so that memory stays bounded.
_CHUNK = 4_000_000
_ONE = "model"


def report(
    predictions: Any,
    targets: Any,
    *,
    scales: Any = None,
    ood: Mapping[str, Any] | None = None,
    validation: tuple[Any, Any] | None = None,
    inputs: Any = None,
    class_names: Sequence[str] | None = None,
    bins: int = 15,
    risk: float = 0.05,
    title: str = "Calibration report",
    source: str = "test",
) -> Report:
    """How far predictions can be trusted, from plain arrays (NumPy, torch or lists).

    *Classes*: probabilities of shape ``(N, K)``, of shape ``(N,)`` for yes or no, or ``(S, N, K)``
    with an axis of draws (members of an ensemble, Monte Carlo dropout), which also tells epistemic
    from aleatoric uncertainty. Targets are class indices ``(N,)``.

    *Numbers*: means in the shape of the targets, ``(N,)`` or ``(N, D)``, or with an axis of draws
    before it, and standard deviations in ``scales``.

    Each prediction may also be a :class:`~lightning_bnn.Predictive`.

    Args:
        predictions: Predictions of one model, or a mapping from names to those of several.
        targets: What came.
        scales: Standard deviations of numbers: one for all or of the shape of the means; with
            several models also a mapping by name.
        ood: Predictions on data from elsewhere by the name of the data, to see whether they are
            told apart. With several models each is a mapping by name of the model. For numbers
            each is a pair (means, scales).
        validation: Predictions and targets of other data, which the temperature is fitted on; with
            several models the predictions are a mapping by name.
        inputs: Images ``(N, 1 or 3, H, W)``, of which the most uncertain are shown; for numbers,
            inputs ``(N,)`` or ``(N, 1)``, over which the fit is drawn.
        class_names: Names of the classes.
        bins: Bins of the reliability diagram.
        risk: The share of errors to allow; the report tells how much can be answered with it.
        title: The heading of the page.
        source: What the data are.

    Returns:
        The report: ``.save("report.html")`` writes the page and its numbers.

    Raises:
        DataError: The arrays do not fit together, or hold something else.
        ConfigurationError: An argument does not go with the kind of prediction.

    Example:
        >>> import numpy as np
        >>> generator = np.random.default_rng(0)
        >>> true = generator.dirichlet([1, 1, 1], size=2000)
        >>> targets = [generator.choice(3, p=row) for row in true]
        >>> bold = true**2 / (true**2).sum(1, keepdims=True)  # over-confident
        >>> made = report({"true": true, "bold": bold}, targets)
        >>> [block["verdict"]["label"] for block in made.numbers["models"]]
        ['calibrated', 'over-confident']
    """
    given = predictions if isinstance(predictions, Mapping) else {_ONE: predictions}
    if not given:
        raise DataError("predictions holds no model: expected an array, or a mapping of them.")
    several = isinstance(predictions, Mapping)
    spread = _by_model(scales, given, several)
    numbers = scales is not None or not all(
        isinstance(one, ClassPredictive) or not isinstance(one, Predictive)
        for one in given.values()
    )
    if numbers and validation is not None:
        raise ConfigurationError(
            "validation= is what the temperature of class probabilities is fitted on; numbers have "
            "none. Leave it out."
        )
    found = as_tensor(targets, "targets")
    extra = None if inputs is None else as_tensor(inputs, "inputs")
    models, outside = {}, {}
    for name, one in given.items():
        what = f"predictions[{name!r}]" if several else "predictions"
        made, these = _prepare(one, found, spread[name], numbers, what)
        models[name] = _statistics(made, these, bins, extra)
        outside[name] = {
            loader: _outside(_of_model(values, name, several, loader), made, numbers, loader)
            for loader, values in (ood or {}).items()
        }
    return Report(
        report_numbers(
            models,
            outside=outside if ood else None,
            validation=_validation(validation, models, several, bins),
            title=title,
            source=source,
            class_names=class_names,
            risk=risk,
        )
    )


def _prepare(
    values: Any, targets: Tensor, scales: Any, numbers: bool, what: str
) -> tuple[Predictive, Tensor]:
    """The predictive of one model, and the targets as it needs them."""
    if isinstance(values, Predictive):
        if scales is not None:
            raise ConfigurationError(f"{what} is a {type(values).__name__}: it has scales already.")
        predictive: Predictive = values.to("cpu")
    elif numbers:
        if scales is None:
            raise ConfigurationError(
                f"{what} holds numbers and has no scales. Pass scales= with a standard deviation "
                "for each, by name if there are several models."
            )
        predictive = number_predictive(values, scales, tuple(targets.shape), False, what)
    else:
        predictive = class_predictive(values, what)
    if isinstance(predictive, ClassPredictive):
        if numbers:
            raise ConfigurationError(
                f"{what} predicts classes and another model numbers, or scales= is given: a report "
                "is of one kind."
            )
        return predictive, check_classes(targets, predictive, "targets")
    wanted = reshape_targets(targets.to(torch.float64), predictive.mean.shape)
    if not bool(wanted.isfinite().all()):
        place = (~wanted.isfinite()).nonzero()[0].tolist()
        raise DataError(
            f"targets is expected to hold finite numbers; example {place[0]} has "
            f"{float(wanted[tuple(place)])}. Leave out what was not observed."
        )
    return predictive, wanted


def _statistics(
    predictive: Predictive, targets: Tensor, bins: int, inputs: Tensor | None = None
) -> Statistics:
    """The statistics of one model, gathered in chunks."""
    if inputs is not None and len(inputs) != len(predictive):
        raise DataError(
            f"inputs has {len(inputs)} examples and the predictions have {len(predictive)}: pass "
            "the inputs that were predicted, in the same order."
        )
    statistics = Statistics(bins=bins)
    for part, place in _chunks(predictive):
        pictures = None if inputs is None else inputs[place]
        statistics.update(part, targets[place], torch.arange(place.start, place.stop), pictures)
    return statistics


def _chunks(predictive: Predictive) -> list[tuple[Predictive, slice]]:
    count = len(predictive)
    size = max(1, _CHUNK * count // max(1, predictive.outputs.numel()))
    places = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    if len(places) == 1:
        return [(predictive, places[0])]
    return [(predictive._map(lambda t, p=place: t[:, p]), place) for place in places]  # type: ignore[misc]


def _outside(values: Any, inside: Predictive, numbers: bool, loader: str) -> Outside:
    """The scores of one model on data from elsewhere."""
    what = f"ood[{loader!r}]"
    if isinstance(values, Predictive):
        predictive: Predictive = values.to("cpu")
    elif numbers:
        if not isinstance(values, tuple) or len(values) != 2:
            raise DataError(
                f"{what} is expected to be a pair (means, scales), as numbers are predicted; got "
                f"{type(values).__name__}."
            )
        # the axis of draws is there if the means have as many axes as those of the model
        means = as_tensor(values[0], what)
        predictive = number_predictive(means, values[1], None, means.ndim > inside.mean.ndim, what)
    else:
        predictive = class_predictive(values, what)
    expected, got = _outputs(inside), _outputs(predictive)
    if type(predictive) is not type(inside) or expected != got:
        raise DataError(
            f"{what} is a {type(predictive).__name__} with outputs {got} per example; the model "
            f"predicts a {type(inside).__name__} with {expected}. Predict both with the same model."
        )
    outside = Outside()
    for part, place in _chunks(predictive):
        outside.update(part, torch.arange(place.start, place.stop))
    return outside


def _outputs(predictive: Predictive) -> tuple[int, ...]:
    """The shape of what is predicted of one example, positions left out."""
    shape = tuple(predictive.mean.shape[1:])
    return shape[:1] if isinstance(predictive, ClassPredictive) else shape


def _validation(
    validation: Any, models: Mapping[str, Any], several: bool, bins: int
) -> dict[str, Statistics] | None:
    if validation is None:
        return None
    if not isinstance(validation, (tuple, list)) or len(validation) != 2:
        raise DataError(
            "validation= is expected to be a pair (predictions, targets); got "
            f"{type(validation).__name__}. The temperature is fitted on what came true."
        )
    predictions, targets = validation
    found = {}
    for name in models:
        values = _of_model(predictions, name, several, "validation")
        made, these = _prepare(
            values, as_tensor(targets, "validation targets"), None, False, "validation"
        )
        found[name] = _statistics(made, these, bins)
        if found[name].classes != models[name].classes:
            raise DataError(
                f"validation has {found[name].classes} classes and {name!r} has "
                f"{models[name].classes}. Predict both with the same model."
            )
    return found


def _of_model(values: Any, name: str, several: bool, what: str) -> Any:
    """What belongs to one model: the value itself, or that of its name."""
    if not several:
        return values
    if not isinstance(values, Mapping) or name not in values:
        got = sorted(values) if isinstance(values, Mapping) else type(values).__name__
        raise DataError(
            f"{what!r} is expected to be a mapping with predictions of each model, and {name!r} is "
            f"missing; got {got}."
        )
    return values[name]


def _by_model(scales: Any, given: Mapping[str, Any], several: bool) -> dict[str, Any]:
    if isinstance(scales, Mapping):
        if not several or set(scales) - set(given):
            raise ConfigurationError(
                f"scales= has the names {sorted(scales)}; predictions has "
                f"{sorted(given) if several else 'one model without a name'}."
            )
        return {name: scales.get(name) for name in given}
    # a predictive brings its own scales, one number serves the others
    return {
        name: None if several and isinstance(one, Predictive) else scales
        for name, one in given.items()
    }
