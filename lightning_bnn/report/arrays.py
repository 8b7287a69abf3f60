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
from lightning_bnn.mixtures import reshape_targets
from lightning_bnn.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    ClassPredictive,
    GaussianPredictive,
    Predictive,
)
from lightning_bnn.report.document import Report, make_report
from lightning_bnn.report.sections import Section
from lightning_bnn.report.statistics import OodScores, Statistics

__all__ = ["report"]

# Numbers of a predictive that are looked at together, so that memory stays bounded.
_CHUNK = 4_000_000
_ONE = "model"
# What rounding in half precision leaves of a sum of ten classes.
TOLERANCE = 1e-3
_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = "(N, K) with a column per class, (N,) for yes or no, or (S, N, K) with an axis of draws"


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
    given = predictions if several else {_ONE: predictions}
    if not given:
        raise DataError("predictions holds no model: expected an array, or a mapping of them.")
    spread = _by_model(scales, given, several)
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
        predictive, these = _prepare(values, observed, spread[name], regression, what)
        model = models[name] = _statistics(predictive, these, bins, extra, sections)
        for loader, other in (ood or {}).items():
            other = _of_model(other, name, several, loader)
            model.ood[loader] = _ood_scores(other, predictive, regression, loader)
        if validation is not None:
            model.validation = _validation(validation, model, name, several)
    return make_report(models, title=title, source=source, class_names=class_names, risk=risk)


def _prepare(
    values: Any, targets: Tensor, scales: Any, regression: bool, what: str
) -> tuple[Predictive, Tensor]:
    """The predictive of one model, and the targets as it needs them."""
    if isinstance(values, Predictive):
        if scales is not None:
            raise ConfigurationError(f"{what} is a {type(values).__name__}: it has scales already.")
        predictive: Predictive = values.to("cpu")
    elif regression:
        if scales is None:
            raise ConfigurationError(
                f"{what} is of a regression and has no scales. Pass scales= with a standard "
                "deviation for each, by name if there are several models."
            )
        predictive = gaussian_predictive(values, scales, tuple(targets.shape), False, what)
    else:
        predictive = class_predictive(values, what)
    if isinstance(predictive, ClassPredictive):
        if regression:
            raise ConfigurationError(
                f"{what} is a classification and another model a regression, or scales= is given: "
                "a report is of one task."
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
    predictive: Predictive,
    targets: Tensor,
    bins: int,
    inputs: Tensor | None = None,
    sections: Sequence[Section] = (),
) -> Statistics:
    """The statistics of one model, gathered in chunks."""
    if inputs is not None and len(inputs) != len(predictive):
        raise DataError(
            f"inputs has {len(inputs)} examples and the predictions have {len(predictive)}: pass "
            "the inputs that were predicted, in the same order."
        )
    statistics = Statistics(bins=bins, sections=sections)
    for place in _chunks(predictive):
        pictures = None if inputs is None else inputs[place]
        examples = torch.arange(place.start, place.stop)
        statistics.update(predictive[place], targets[place], examples, pictures)
    return statistics


def _chunks(predictive: Predictive) -> list[slice]:
    count = len(predictive)
    size = max(1, _CHUNK * count // max(1, predictive.outputs.numel()))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _ood_scores(values: Any, inside: Predictive, regression: bool, loader: str) -> OodScores:
    what = f"ood[{loader!r}]"
    if isinstance(values, Predictive):
        predictive: Predictive = values.to("cpu")
    elif regression:
        if not isinstance(values, tuple) or len(values) != 2:
            raise DataError(
                f"{what} is expected to be a pair (means, scales), as in a regression; got "
                f"{type(values).__name__}."
            )
        # the axis of draws is there if the means have as many axes as those of the model
        means = as_tensor(values[0], what)
        predictive = gaussian_predictive(
            means, values[1], None, means.ndim > inside.mean.ndim, what
        )
    else:
        predictive = class_predictive(values, what)
    expected, got = _outputs(inside), _outputs(predictive)
    if type(predictive) is not type(inside) or expected != got:
        raise DataError(
            f"{what} is a {type(predictive).__name__} with outputs {got} per example; the model "
            f"predicts a {type(inside).__name__} with {expected}. Predict both with the same model."
        )
    scores = OodScores()
    for place in _chunks(predictive):
        scores.update(predictive[place], torch.arange(place.start, place.stop))
    return scores


def _outputs(predictive: Predictive) -> tuple[int, ...]:
    """The shape of what is predicted of one example, positions left out."""
    shape = tuple(predictive.mean.shape[1:])
    return shape[:1] if isinstance(predictive, ClassPredictive) else shape


def _validation(validation: Any, model: Statistics, name: str, several: bool) -> Statistics:
    """What the temperature of a model is fitted on."""
    if not isinstance(validation, (tuple, list)) or len(validation) != 2:
        raise DataError(
            "validation= is expected to be a pair (predictions, targets); got "
            f"{type(validation).__name__}. The temperature is fitted on observed targets."
        )
    values = _of_model(validation[0], name, several, "validation")
    targets = as_tensor(validation[1], "validation targets")
    made = _statistics(*_prepare(values, targets, None, False, "validation"), model.bins)
    if made.classes != model.classes:
        raise DataError(
            f"validation has {made.classes} classes and {name!r} has {model.classes}. Predict both "
            "with the same model."
        )
    return made


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
        name: None if several and isinstance(values, Predictive) else scales
        for name, values in given.items()
    }


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
            f"{type(values).__name__}, which is none: {error}."
        ) from error


def class_predictive(probabilities: Any, what: str) -> ClassPredictive:
    """The predictive of class probabilities ``(N, K)``, ``(N,)`` or ``(S, N, K)``.

    Args:
        probabilities: The array.
        what: Its name, for errors.

    Raises:
        DataError: The array holds no probabilities, or has another shape.

    Example:
        >>> predictive = class_predictive([[0.8, 0.2], [0.5, 0.5]], "predictions")
        >>> predictive.mean
        tensor([[0.8000, 0.2000],
                [0.5000, 0.5000]], dtype=torch.float64)
    """
    values = as_tensor(probabilities, what)
    # float32 stays float32: it needs half of the memory, and tells how many digits are meant
    values = values.to(torch.float32 if values.dtype in _SINGLE else torch.float64)
    if values.ndim not in (1, 2, 3) or values.numel() == 0:
        raise DataError(
            f"{what} is expected to hold probabilities of shape {SHAPES}; got shape "
            f"{tuple(values.shape)}."
        )
    if values.ndim == 1:
        _check_range(values, what)
        values = values.clamp(0, 1)  # of rounding
        return BernoulliPredictive((values.log() - (-values).log1p())[None])
    if values.shape[-1] == 1:
        raise DataError(
            f"{what} has one column (shape {tuple(values.shape)}), and classes need two or more. "
            "For the probability of a yes pass the column itself, of shape (N,); for draws of it "
            "stack 1 - p and p on the last axis."
        )
    stacked = values[None] if values.ndim == 2 else values
    _check_range(stacked, what)
    _check_sums(stacked, what)
    return CategoricalPredictive(stacked.log())


def _check_range(values: Tensor, what: str) -> None:
    """Raise unless everything finite lies in [0, 1]; infinity is no probability either."""
    wrong = (values < 0) | (values > 1 + TOLERANCE)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        where = place[1:] if values.ndim == 3 and values.shape[0] == 1 else place
        fix = (
            "They look like logits: pass 1 / (1 + exp(-logits))."
            if values.ndim == 1
            else "They look like logits: pass softmax(logits) over the classes."
        )
        raise DataError(
            f"{what} is expected to hold probabilities between 0 and 1; it has "
            f"{values[place].item():.4g} at {list(where)}. {fix}"
        )


def _check_sums(values: Tensor, what: str) -> None:
    sums = values.sum(-1, dtype=torch.float64)
    wrong = (sums - 1).abs() > TOLERANCE  # NaN is not wrong here: it is counted later
    if bool(wrong.any()):
        draw, row = wrong.nonzero()[0].tolist()
        of_draw = f" of draw {draw}" if values.shape[0] > 1 else ""
        raise DataError(
            f"{what} is expected to hold probabilities that sum to 1 over the classes; row {row}"
            f"{of_draw} sums to {sums[draw, row].item():.6g} ({int(wrong.sum())} of "
            f"{wrong.numel()} rows do not). Divide each row by its sum if they are weights; pass "
            "the softmax if they are logits; for labels that do not exclude each other make a "
            "report of each."
        )


def check_classes(targets: Any, predictive: ClassPredictive, what: str) -> Tensor:
    """Targets as class indices that fit the predictive.

    Args:
        targets: Class indices, one for each example.
        predictive: What was predicted.
        what: Their name, for errors.

    Raises:
        DataError: They have another shape, dtype or range.

    Example:
        >>> check_classes([1, 0], class_predictive([[0.8, 0.2], [0.5, 0.5]], "p"), "targets")
        tensor([1, 0])
    """
    indices = as_tensor(targets, what)
    yes_no = isinstance(predictive, BernoulliPredictive)
    shape = tuple(predictive.mode.shape)
    classes = 2 if yes_no else predictive.outputs.shape[2]
    if tuple(indices.shape) == (*shape[:1], classes, *shape[1:]):
        raise DataError(
            f"{what} is expected to hold one class index per example, shape {shape}; got "
            f"{tuple(indices.shape)}, which looks one-hot. Pass {what}.argmax(1)."
        )
    if tuple(indices.shape) != shape:
        raise DataError(
            f"{what} is expected to hold one class index per prediction, shape {shape}; got "
            f"{tuple(indices.shape)}. Predictions and targets are of the same examples, in the "
            "same order."
        )
    if indices.dtype == torch.bool:
        indices = indices.long()
    if indices.is_floating_point() or indices.is_complex():
        raise DataError(
            f"{what} is expected to hold class indices of an integer type; got {indices.dtype}. "
            "Convert them with .astype(int) or .long(); a regression needs scales=."
        )
    wrong = (indices < 0) | (indices >= classes)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise DataError(
            f"{what} is expected to hold classes from 0 to {classes - 1}, as there are {classes} "
            f"of them; example {place[0]} has {int(indices[tuple(place)])}. Number the classes "
            "from 0."
        )
    return indices.long()


def gaussian_predictive(
    means: Any, scales: Any, shape: tuple[int, ...] | None, draws: bool, what: str
) -> GaussianPredictive:
    """The predictive of Gaussians.

    Args:
        means: Means, of the shape of the targets, or with an axis of draws before it.
        scales: Standard deviations: a number, or an array that broadcasts to the means.
        shape: The shape of the targets; None where there are none.
        draws: Where there are no targets, whether the first axis is that of draws.
        what: The name of the means, for errors.

    Raises:
        DataError: Shapes that do not go together, or scales that are not positive.

    Example:
        >>> gaussian_predictive([0.0, 1.0], 0.5, (2,), False, "predictions").scales
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    values = as_tensor(means, what).to(torch.float64)
    if shape is not None:
        if tuple(values.shape) not in (shape, (*values.shape[:1], *shape)):
            raise DataError(
                f"{what} is expected to hold means of the shape of the targets, {shape}, or with "
                f"an axis of draws before it, {('S', *shape)}; got {tuple(values.shape)}."
            )
        draws = tuple(values.shape) != shape
    if values.numel() == 0 or values.ndim < 1 + draws:
        raise DataError(f"{what} holds no means: its shape is {tuple(values.shape)}.")
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
    return GaussianPredictive(*((values, spread) if draws else (values[None], spread[None])))
