r"""A report from plain arrays, whatever library made them, and what can be wrong with them.

Probabilities :math:`p` become logits :math:`\log p`, of which softmax gives them back; a yes-or-no
probability becomes :math:`\log p - \log(1 - p)`. Rows that are not finite stay in: the report
counts and names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    ClassPredictive,
    GaussianPredictive,
    Predictive,
)
from lightning_bnn.report.document import Report, make_report
from lightning_bnn.report.sections import Section
from lightning_bnn.report.statistics import Statistics

__all__ = ["report"]

# Numbers of a predictive that are looked at together, so that memory stays bounded.
_CHUNK = 4_000_000
# What rounding in half precision leaves of a sum of ten classes.
TOLERANCE = 1e-3
_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


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
    sections: Sequence[Section] = (),
) -> Report:
    """How far predictions can be trusted, from plain arrays (NumPy, torch or lists).

    *Classification*: probabilities of shape ``(N, K)``, of shape ``(N,)`` for yes or no, or
    ``(S, N, K)`` with an axis of draws (members of an ensemble, Monte Carlo dropout), which also
    tells epistemic from aleatoric uncertainty. Targets are class indices ``(N,)``.

    *Regression*: means in the shape of the targets, ``(N,)`` or ``(N, D)``, or with an axis of
    draws before it, and standard deviations in ``scales``.

    Each prediction may also be a :class:`~lightning_bnn.Predictive`.

    Args:
        predictions: Predictions of one model, or a mapping from names to those of several.
        targets: The observed targets.
        scales: Standard deviations of a regression: one for all or of the shape of the means; with
            several models also a mapping by name.
        ood: Predictions on out-of-distribution data by the name of the data, to see whether they
            are told apart. With several models each is a mapping by name of the model. For a
            regression each is a pair (means, scales).
        validation: Predictions and targets of other data, which the temperature is fitted on; with
            several models the predictions are a mapping by name.
        inputs: Images ``(N, 1 or 3, H, W)``, of which the most uncertain are shown; for a
            regression inputs ``(N,)`` or ``(N, 1)``, over which the fit is drawn.
        class_names: Names of the classes.
        bins: Bins of the reliability diagram.
        risk: The share of errors to allow; the report tells how much can be answered with it.
        title: The heading of the page.
        source: What the data are.
        sections: Further parts of the page, of your own.

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
    several = isinstance(predictions, Mapping)
    given = predictions if several else {"model": predictions}
    spread = scales if isinstance(scales, Mapping) else dict.fromkeys(given, scales)
    regression = scales is not None or any(
        isinstance(each, Predictive) and not isinstance(each, ClassPredictive)
        for each in given.values()
    )
    if regression and validation is not None:
        raise ConfigurationError(
            "validation= is what the temperature of class probabilities is fitted on; a regression "
            "has none. Leave it out."
        )
    observed = as_tensor(targets, "targets")
    extra = None if inputs is None else as_tensor(inputs, "inputs")
    models = {}
    for name, values in given.items():
        what = f"predictions[{name!r}]" if several else "predictions"
        if regression:
            predictive = gaussian_predictive(values, spread.get(name), tuple(observed.shape), what)
        else:
            predictive = class_predictive(values, what)
        model = models[name] = _statistics(predictive, observed, bins, extra, sections)
        for place, other in (ood or {}).items():
            what = f"ood[{place!r}]"
            other = _of_model(other, name, several, what)
            if regression and not isinstance(other, Predictive):
                means, sds = _pair(other, what, "(means, scales)")
                strange = gaussian_predictive(means, sds, predictive.mean.ndim, what)
            else:
                strange = class_predictive(other, what)
            model.ood[place] = _statistics(strange, None, bins)
        if validation is not None:
            other, seen = _pair(validation, "validation=", "(predictions, targets)")
            fitted = class_predictive(_of_model(other, name, several, "validation"), "validation")
            model.validation = _statistics(fitted, as_tensor(seen, "validation targets"), bins)
    return make_report(models, title=title, source=source, class_names=class_names, risk=risk)


def _statistics(
    predictive: Predictive,
    targets: Tensor | None,
    bins: int,
    inputs: Tensor | None = None,
    sections: Sequence[Section] = (),
) -> Statistics:
    """The statistics of one model, gathered in chunks."""
    for what, values in (("targets", targets), ("inputs", inputs)):
        if values is not None and len(values) != len(predictive):
            raise DataError(
                f"{what} has {len(values)} examples and the predictions have {len(predictive)}: "
                "pass those that were predicted, in the same order."
            )
    statistics = Statistics(bins=bins, sections=sections)
    for chunk in _chunks(predictive):
        observed, pictures = (None if t is None else t[chunk] for t in (targets, inputs))
        statistics.update(predictive[chunk], observed, None, pictures)
    return statistics


def _chunks(predictive: Predictive) -> list[slice]:
    count = len(predictive)
    size = max(1, _CHUNK * count // max(1, predictive.outputs.numel()))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _of_model(values: Any, name: str, several: bool, what: str) -> Any:
    """What belongs to one model: the value itself, or that of its name."""
    if not several:
        return values
    if not isinstance(values, Mapping) or name not in values:
        got = sorted(values) if isinstance(values, Mapping) else type(values).__name__
        raise DataError(
            f"{what} is expected to be a mapping with predictions of each model, and {name!r} is "
            f"missing; got {got}."
        )
    return values[name]


def _pair(values: Any, what: str, form: str) -> tuple[Any, Any]:
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise DataError(f"{what} is expected to be a pair {form}; got {type(values).__name__}.")
    return values[0], values[1]


# ------------------------------------------------------------------ arrays as predictives


def as_tensor(values: Any, what: str) -> Tensor:
    """Any array as a tensor on the CPU, without gradient.

    Args:
        values: A NumPy array, a tensor of any device, or a list.
        what: Its name, for the error.

    Example:
        >>> as_tensor([0.5, 0.25], "targets")
        tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        # copied where a tensor could not share the memory: read-only, or of negative strides
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what} is expected to be an array of numbers (NumPy, torch, or a list); got "
            f"{type(values).__name__}: {error}."
        ) from error


def class_predictive(probabilities: Any, what: str) -> Predictive:
    """The predictive of class probabilities ``(N, K)``, ``(N,)`` or ``(S, N, K)``.

    Args:
        probabilities: The array, or a predictive, which stays as it is.
        what: Its name, for errors.

    Raises:
        DataError: The array holds no probabilities, or has another shape.

    Example:
        >>> predictive = class_predictive([[0.8, 0.2], [0.5, 0.5]], "predictions")
        >>> predictive.mean
        tensor([[0.8000, 0.2000],
                [0.5000, 0.5000]], dtype=torch.float64)
    """
    if isinstance(probabilities, Predictive):
        return probabilities.to("cpu")
    values = as_tensor(probabilities, what)
    # float32 stays float32: it needs half of the memory, and tells how many digits are meant
    values = values.to(torch.float32 if values.dtype in _SINGLE else torch.float64)
    shape = tuple(values.shape)
    if len(shape) not in (1, 2, 3) or not values.numel() or (len(shape) > 1 and shape[-1] == 1):
        raise DataError(
            f"{what} is expected to hold probabilities of shape (N, K) with a column per class, "
            f"(N,) for yes or no, or (S, N, K) with an axis of draws; got shape {shape}."
        )
    wrong = ((values < 0) | (values > 1 + TOLERANCE)).nonzero()  # infinity is no probability either
    if len(wrong):
        place = wrong[0].tolist()
        fix = "1 / (1 + exp(-logits))" if values.ndim == 1 else "softmax(logits) over the classes"
        raise DataError(
            f"{what} is expected to hold probabilities between 0 and 1; it has "
            f"{values[tuple(place)].item():.4g} at {place}. They look like logits: pass {fix}."
        )
    if values.ndim == 1:
        values = values.clamp(0, 1)  # of rounding
        return BernoulliPredictive((values.log() - (-values).log1p())[None])
    sums = values.sum(-1, dtype=torch.float64)
    wrong = ((sums - 1).abs() > TOLERANCE).nonzero()  # NaN is not wrong here: it is counted later
    if len(wrong):
        *draw, row = wrong[0].tolist()
        of_draw = f" of draw {draw[0]}" if draw else ""
        raise DataError(
            f"{what} is expected to hold probabilities that sum to 1 over the classes; row {row}"
            f"{of_draw} sums to {sums[tuple(wrong[0])].item():.6g} ({len(wrong)} of {sums.numel()} "
            "rows do not). Divide each row by its sum if they are weights, pass the softmax if "
            "they are logits."
        )
    return CategoricalPredictive((values if values.ndim == 3 else values[None]).log())


def gaussian_predictive(
    means: Any, scales: Any, shape: tuple[int, ...] | int, what: str
) -> Predictive:
    """The predictive of Gaussians.

    Args:
        means: Means, of the shape of the targets, or with an axis of draws before it; or a
            predictive, which stays as it is.
        scales: Standard deviations: a number, or an array that broadcasts to the means.
        shape: The shape of the targets; where there are none, how many axes they would have.
        what: The name of the means, for errors.

    Raises:
        DataError: Shapes that do not go together, or scales that are not positive.
        ConfigurationError: There are no scales.

    Example:
        >>> gaussian_predictive([0.0, 1.0], 0.5, (2,), "predictions").scales
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    if isinstance(means, Predictive):
        return means.to("cpu")
    if scales is None:
        raise ConfigurationError(
            f"{what} is of a regression and has no scales. Pass scales= with a standard deviation "
            "for each, by name if there are several models."
        )
    values = as_tensor(means, what).to(torch.float64)
    axes = shape if isinstance(shape, int) else len(shape)
    fits = isinstance(shape, int) or tuple(values.shape[-axes:]) == shape
    if not fits or values.ndim not in (axes, axes + 1) or not values.numel():
        raise DataError(
            f"{what} is expected to hold means of the shape of the targets, {shape}, or with an "
            f"axis of draws before it; got {tuple(values.shape)}."
        )
    spread = as_tensor(scales, "scales").to(torch.float64)
    try:
        spread = spread.expand_as(values)
    except RuntimeError as error:
        raise DataError(
            f"scales is expected to be a number or to have the shape of {what}, "
            f"{tuple(values.shape)}; got {tuple(spread.shape)}."
        ) from error
    if bool((spread <= 0).any()):
        raise DataError(
            "scales is expected to hold positive standard deviations; the smallest is "
            f"{float(spread.nan_to_num(1.0).min()):.4g}. Variances need a square root, "
            "log-variances an exp(x / 2)."
        )
    return GaussianPredictive(*(t if values.ndim > axes else t[None] for t in (values, spread)))
