"""What pruning by signal to noise would cost a model, as a section of its report.

The curve is that of :func:`lightning_bnn.pruning.prune_curve`, on the data of the report and with
as many draws. A model whose weights have no variance (a plain network, a single draw) gets a
sentence that says so in place of a curve.

In words the measure is the report's own: the bootstrap interval of the whole model. A score above
its interval is worse by more than other examples of the same kind would show of the whole model.
That it is not above says only that these examples do not tell, and so the sentence gives the
numbers. The share f that is removed stands at -log10(1 - f): between 90 and 99 % lies as much room
as between 0 and 90 %, because what is left falls tenfold in both.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import Posterior, WeightPosterior
from lightning_bnn.pruning import PruneCurve, prune_curve, pruning_masks, signal_to_noise
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report import figure as fig
from lightning_bnn.report.figure import Mark
from lightning_bnn.report.sections import Section
from lightning_bnn.report.text import count, percent, short

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["Pruning", "pruning_sentence"]

Numbers = Mapping[str, Any]
# The scores that are said, by task; accuracy is said as the error rate.
SAID = {
    "classification": (("accuracy", "error"), ("nll", "NLL")),
    "regression": (("rmse", "RMSE"), ("nll", "NLL")),
}
# The scores that are drawn: label, row of the comparison, and whether it is a share.
SCORES = {
    "accuracy": ("error rate", "accuracy", True),
    "rmse": ("RMSE", "rmse", False),
    "nll": ("NLL", "nll", False),
    "ece": ("ECE", "ece", False),
    "crps": ("CRPS", "crps", False),
    "brier": ("Brier score", "brier", False),
    "coverage": ("90% interval holds", "coverage_90", True),
}


class Pruning(Section):
    """Which weights can go? Signal-to-noise ratios, and what removing the lowest costs.

    Args:
        fractions: The shares of weights to remove; or curves that were made before, by the names
            of their models.

    Raises:
        ConfigurationError: A fraction is not in [0, 1), or there is none.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn import DrawsPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(3, 1)
        >>> draws = [{n: torch.randn_like(p) for n, p in net.named_parameters()} for _ in range(4)]
        >>> section = Pruning([0.0, 0.5])
        >>> data = [(torch.randn(5, 3), torch.randn(5, 1))]
        >>> section.measure("net", DrawsPosterior(net, Gaussian(), draws), data, draws=None)
        >>> [(each["removed"], each["remaining"]) for each in section.curve["results"]]
        [(0, 3), (2, 1)]
    """

    key = "pruning"
    title = "Pruning"
    lead = (
        "Which weights can go? Those whose mean is small against their standard deviation tell "
        "least."
    )
    needs_posterior = True
    method = (
        (
            "Pruning",
            "The signal-to-noise ratio of a weight is |mean| / standard deviation under the "
            "posterior. The asked share of the weights is set to zero in every draw, the lowest "
            "ratios first; biases and normalisation stay, and so does the best weight of every "
            "layer. Each score is that of the pruned posterior on the data of this report, "
            "without training it again.",
        ),
    )

    def __init__(self, fractions: Sequence[float] | Mapping[str, PruneCurve]) -> None:
        self.curves = fractions if isinstance(fractions, Mapping) else None
        self.fractions: list[float] = []
        self.curve: dict[str, Any] | None = None
        if self.curves is None:
            if isinstance(fractions, str) or not len(fractions):
                raise ConfigurationError(
                    f"pruning= is a list of shares, such as (0, 0.5, 0.9), and not empty; got "
                    f"{fractions!r}."
                )
            wrong = [each for each in fractions if not 0 <= float(each) < 1]
            if wrong:
                raise ConfigurationError(f"pruning= has shares in [0, 1); got {wrong[0]}.")
            self.fractions = sorted(set(map(float, fractions)))

    def check(self, models: Mapping[str, Posterior]) -> None:
        """Try the largest share; whether it can be reached depends on the sizes of layers alone.

        A posterior that has no variances, or none yet, passes.
        """
        unknown = [name for name in self.curves or () if name not in models]
        if unknown:
            raise ConfigurationError(
                f"Pruning has a curve of {unknown[0]!r}, which is no model of this report. Its "
                f"models are {list(models)}."
            )
        for posterior in models.values() if self.fractions else ():
            if not isinstance(posterior, WeightPosterior):
                continue
            try:
                signal_to_noise(posterior)
            except ConfigurationError:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # which layers it saves is said when it is done
                pruning_masks(posterior, max(self.fractions))

    def measure(self, name: str, posterior: Posterior, batches: Any, draws: int | None) -> None:
        """Make the curve, or find out why there is none."""
        if self.curves is not None:
            self.curve = self.curves[name].to_dict() if name in self.curves else None
            return
        try:
            if not isinstance(posterior, WeightPosterior):
                raise ConfigurationError(f"A {type(posterior).__name__} has no weights to prune.")
            signal_to_noise(posterior)
        except ConfigurationError as error:
            self.unavailable = str(error)
            return
        with isolated_random_state(0):
            self.curve = prune_curve(posterior, batches, self.fractions, draws=draws).to_dict()

    def numbers(self, model: Statistics, block: Numbers) -> dict[str, Any]:
        """The curve, or why there is none."""
        if self.unavailable is not None:
            return {"pruning": {"unavailable": self.unavailable}}
        return {} if self.curve is None else {"pruning": self.curve}

    def words(self, document: Numbers) -> Iterator[tuple[str | None, str, str]]:
        """How much went before the scores left what chance allows."""
        for block in document["models"]:
            text = _sentence(block, document)
            if text:
                yield block["name"], "note", text

    def described(self, block: Numbers, document: Numbers) -> dict[str, Any] | None:
        """The section, led by its sentence; without a curve that is all."""
        text = _sentence(block, document) or ""
        text = text[:1].upper() + text[1:]
        made = super().described(block, document)
        if made is not None:
            return made | {"lead": f"{self.lead} {text}"}
        return {"id": self.key, "title": self.title, "lead": text, "figures": []} if text else None

    def figures(self, block: Numbers, document: Numbers) -> Iterator[fig.Figure]:
        """The histogram of the ratios, the scores against the share removed, and both as tables."""
        data = block.get("pruning", {})
        if "results" in data:
            results = sorted(data["results"], key=lambda each: each["fraction"])
            if len(data["histogram"]["log10_edges"]) > 1:
                yield _ratios(data, results)
            if len(results) > 1:
                yield _curves(data, results, block, document)
            yield _tables(data, results)


def _units(data: Numbers) -> str:
    single = data.get("single", 0)
    if data["unit"] == "weight" or (single and single == data["total"]):
        return "weights"
    return "units and weights" if single else "units"


def _power(place: float) -> str:
    return f"{10.0**place:.3g}"


def _place(fraction: float) -> float:
    return -math.log10(1 - fraction)


def _ratios(data: Numbers, results: Sequence[Numbers]) -> fig.Views:
    """The histogram of the ratios of all layers, and of each by itself."""
    histogram, noun = data["histogram"], _units(data)
    edges = fig.as_array(histogram["log10_edges"])
    # one threshold for all layers; with the same share of each layer there is none to draw, and
    # one far outside would leave no room for the bars
    lines = [
        (math.log10(each["threshold"]), each)
        for each in results
        if data["scope"] == "global" and each["threshold"] and each["threshold"] > 0
    ]
    lines = [(at, each) for at, each in lines if at >= edges[0] - 1]
    places = [at for at, _ in lines]
    limits = (min([edges[0], *places]), max([edges[-1], *places]))
    beyond = [
        f"{count(histogram[key])} {where}"
        for key, where in (
            ("below", "below the first bin"),
            ("above", "above the last one"),
            ("zero", "exactly zero, as those removed already"),
        )
        if histogram[key]
    ]
    middles = (edges[:-1] + edges[1:]) / 2
    gone = [next((_percent(each) for at, each in lines if at >= m), "none drawn") for m in middles]
    rules = Mark("rules", places, text=[_percent(each) for _, each in lines], key="thresholds",
                 label="share removed", colour="ink", style="dashed thin")  # fmt: skip
    read = f"Each {'weight' if noun == 'weights' else 'unit'} by |mean| / standard deviation, on a"
    how = "To remove a share, all to the left of its line go."
    if not lines:
        how = "The same share of every layer goes, so that each has a threshold of its own."

    def drawn(counts: Any, total: float) -> fig.Plot:
        values = fig.as_array(counts)
        rows = [
            [
                f"{_power(edges[i])} to {_power(edges[i + 1])}",
                count(each),
                percent(each / total if total else None, 2),
                f"{gone[i]} removed" if lines else "–",
            ]
            for i, each in enumerate(values)
        ]
        bars = fig.only(values, values > 0)
        return fig.Plot(
            "snr",
            "Signal-to-noise ratio of the weights",
            f"{read} logarithmic axis. {how}",
            f"Not shown: {', '.join(beyond)}." if beyond else "",
            wide=True,
            x=fig.Axis("signal-to-noise ratio (logarithmic)", limits, "power"),
            # room for the names of the lines
            y=fig.Axis(noun, (0.0, 1.16 * (float(values.max()) or 1.0)), "count"),
            marks=[
                Mark("bars", edges[:-1], 0 * values, edges[1:], bars, noun, "counts"),
                *([rules] if lines else []),
            ],
            table=fig.Table(["ratio", noun, "share of them", "go with"], rows),
            spans=(edges[:-1], edges[1:]),
            aspect=0.36,
        )

    views = {"all layers": drawn(histogram["counts"], data["total"])}
    if len(histogram["layers"]) > 1:
        views |= {
            each["name"]: drawn(each["counts"], each["total"]) for each in histogram["layers"]
        }
    return fig.Views("snr", "Signal-to-noise ratio of the weights", wide=True, switch="layer",
                 views=views)  # fmt: skip


def _drawn_scores(data: Numbers) -> dict[str, tuple[str, str | None, bool]]:
    """The scores of the curve, those that are known first."""
    names = data["score_names"]
    known = {name: SCORES[name] for name in SCORES if name in names}
    return known | {name: (name, None, False) for name in names if name not in known}


def _value(name: str, value: float | None) -> float:
    if value is None:
        return math.nan
    return 1 - value if name == "accuracy" else value


def _interval(row: str | None, name: str, block: Numbers, document: Numbers) -> list[float]:
    """The interval of the whole model, as the comparison has it."""
    at = document["comparison"]["columns"].index(block["name"])
    for each in document["comparison"]["rows"]:
        if each["key"] == row:
            return sorted(_value(name, each["values"][at][end]) for end in ("lower", "upper"))
    return [math.nan, math.nan]


def _curves(
    data: Numbers, results: Sequence[Numbers], block: Numbers, document: Numbers
) -> fig.Panels:
    noun, scores = _units(data), _drawn_scores(data)
    places = np.array([_place(each["fraction"]) for each in results])
    limits = fig.domain(places, air=0.03)
    level = percent(document["comparison"]["level"], 0)
    band = f"{level} interval of the whole model"
    panels = []
    for name, (label, row, share) in scores.items():
        values = fig.as_array(_value(name, each["scores"].get(name)) for each in results)
        low, high = _interval(row, name, block, document)

        def written(value: float, share: bool = share) -> str:
            return percent(value, 2) if share else short(value)

        rows = [
            [f"{_percent(each)}, {count(each['remaining'])} left", written(values[i]),
             f"{written(low)} to {written(high)}"]
            for i, each in enumerate(results)
        ]  # fmt: skip
        panels.append(
            fig.Plot(
                f"pruning-{name}",
                f"{label} against the share that is removed",
                x=fig.Axis(f"{noun} removed", limits, "removed", list(places)),
                y=fig.Axis(
                    label, fig.domain([*values, low, high], air=0.07), "percent" if share else None
                ),
                marks=[
                    Mark("boxes", [limits[0]], [low], [limits[1]], [high], band, "interval",
                         "band"),
                    Mark("line", places, values, key="model", colour="model", shared="models",
                         style="thick"),
                    Mark("dots", places, values, key="model", colour="model"),
                ],
                table=fig.Table(["removed", label, band], rows),
                spans=fig.spans_between(places, limits),
            )
        )  # fmt: skip
    return fig.Panels(
        "pruning-curve",
        "What removing them costs",
        f"The scores of the model when the {noun} of the lowest ratios are set to zero, without "
        "training again. The axis is stretched towards 100%, so that what is left falls tenfold "
        f"over equal distances. Grey: the {level} bootstrap interval of the whole model. A score "
        "inside of it could be that of the whole model on other examples of the same kind.",
        wide=True,
        panels=panels,
    )


def _tables(data: Numbers, results: Sequence[Numbers]) -> fig.Tables:
    noun, scores = _units(data), _drawn_scores(data)
    rows = []
    for each in results:
        values = {name: _value(name, each["scores"].get(name)) for name in scores}
        shown = [percent(v, 2) if scores[n][2] else short(v) for n, v in values.items()]
        rows.append([_percent(each), count(each["remaining"]), short(each["threshold"]), *shown])
    layers = [
        [
            layer["name"],
            count(layer["total"]),
            short(layer["median"]),
            *map(percent, layer["removed"]),
        ]
        for layer in data["histogram"]["layers"]
    ]
    return fig.Tables(
        "pruning-results",
        "The results",
        wide=True,
        table=fig.Table(
            ["removed", f"{noun} left", "largest ratio removed", *(s[0] for s in scores.values())],
            rows,
        ),
        more="By layer",
        further=fig.Table(
            ["layer", noun, "median ratio", *(f"of {_percent(each)}" for each in data["results"])],
            layers,
            "The columns on the right: the share of the layer that goes when so much of the whole "
            "is removed.",
        ),
    )


def _sentence(block: Numbers, document: Numbers) -> str | None:
    if "pruning" not in block:
        return None
    at = document["comparison"]["columns"].index(block["name"])
    intervals = {
        row["key"]: (row["values"][at]["lower"], row["values"][at]["upper"])
        for row in document["comparison"]["rows"]
    }
    return pruning_sentence(block["pruning"], document["task"], intervals)


def pruning_sentence(
    pruning: Numbers, task: str, intervals: Mapping[str, tuple[float | None, float | None]]
) -> str | None:
    """What the results say; None where nothing was removed.

    Args:
        pruning: The numbers of the curve, or the reason why there is none.
        task: "classification" or "regression".
        intervals: Of the whole model, by score.

    Example:
        >>> results = [
        ...     {"fraction": 0.0, "scores": {"accuracy": 0.9872, "nll": 0.049}},
        ...     {"fraction": 0.95, "scores": {"accuracy": 0.987, "nll": 0.051}}]
        >>> block = {"unit": "weight", "total": 2392800, "results": results}
        >>> intervals = {"accuracy": (0.985, 0.989), "nll": (0.042, 0.056)}
        >>> pruning_sentence(block, "classification", intervals)  # doctest: +NORMALIZE_WHITESPACE
        'with 95% of 2,392,800 weights removed, error 1.30% instead of 1.28% and NLL 0.0510 instead
        of 0.0490: none above the 95% interval of the whole model.'
    """
    if "unavailable" in pruning:
        return f"no pruning by signal to noise: {pruning['unavailable']}"
    ordered = sorted(pruning["results"], key=lambda each: each["fraction"])
    removed = [each for each in ordered if each["fraction"] > 0]
    if not removed:
        return None
    whole = ordered[0]["scores"] if ordered[0]["fraction"] == 0 else None
    noun = "weights" if pruning["unit"] == "weight" else "units"
    of_all = f"of {pruning['total']:,} {noun} removed"
    limits = {key: end for key, _ in SAID[task] if (end := _worst(key, intervals)) is not None}
    if len(limits) < len(SAID[task]):  # nothing to measure by
        return f"with {_percent(removed[-1])} {of_all}, {_scores(removed[-1], task, whole)}."
    kept = 0
    while kept < len(removed) and not _above(removed[kept], task, limits):
        kept += 1
    interval = "the 95% interval of the whole model"
    if not kept:
        first = removed[0]
        above = " and ".join(_above(first, task, limits))
        said = _scores(first, task, whole)
        return f"already with {_percent(first)} {of_all}, {said}: {above} above {interval}."
    last = removed[kept - 1]
    text = f"with {_percent(last)} {of_all}, {_scores(last, task, whole)}: none above {interval}"
    if kept < len(removed):
        following = removed[kept]
        above = " and ".join(_above(following, task, limits))
        text += f"; with {_percent(following)}, {_scores(following, task)}: {above} above it"
    return f"{text}."


def _worst(key: str, intervals: Mapping[str, tuple[float | None, float | None]]) -> float | None:
    """The worse end of an interval."""
    return intervals.get(key, (None, None))[0 if key == "accuracy" else 1]


def _above(result: Numbers, task: str, limits: Mapping[str, float]) -> list[str]:
    """The scores that are worse than their limits; one that is not finite is among them."""
    worse = []
    for key, name in SAID[task]:
        value, sign = result["scores"].get(key), -1 if key == "accuracy" else 1
        if value is None or sign * value > sign * limits[key]:
            worse.append(name)
    return worse


def _scores(result: Numbers, task: str, whole: Numbers | None = None) -> str:
    parts = []
    for key, name in SAID[task]:
        part = f"{name} {_number(key, result['scores'].get(key))}"
        if whole is not None:
            part += f" instead of {_number(key, whole.get(key))}"
        parts.append(part)
    return " and ".join(parts)


def _number(key: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    if key == "accuracy":
        return f"{100 * (1 - value):.2f}%"
    return f"{value:#.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _percent(result: Numbers) -> str:
    return f"{100 * result['fraction']:.6g}%"
