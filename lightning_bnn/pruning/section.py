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
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import Posterior, WeightPosterior
from lightning_bnn.pruning.curve import PruneCurve, check_fractions, prune_curve
from lightning_bnn.pruning.functions import prune
from lightning_bnn.pruning.signal import signal_to_noise
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report import figure as fig
from lightning_bnn.report.figure import Mark
from lightning_bnn.report.sections import Section
from lightning_bnn.report.text import count, percent, short

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["Pruning", "curve_figures", "pruning_sentence"]

Numbers = Mapping[str, Any]
Intervals = Mapping[str, tuple[float | None, float | None]]
# The scores that are known; accuracy is shown as the error rate.
LABELS = {
    "accuracy": "error rate",
    "rmse": "RMSE",
    "nll": "NLL",
    "ece": "ECE",
    "crps": "CRPS",
    "brier": "Brier score",
    "coverage": "90% interval holds",
}
SHARES = ("accuracy", "coverage")
BAND = "95% interval of the whole model"


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
        self.fractions = () if isinstance(fractions, Mapping) else check_fractions(fractions)
        self.curve: dict[str, Any] | None = None

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
            if isinstance(posterior, WeightPosterior) and _why_not(posterior) is None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # which layers it saves is said when it is done
                    prune(posterior, self.fractions[-1])

    def measure(self, name: str, posterior: Posterior, batches: Any, draws: int | None) -> None:
        """Make the curve, or find out why there is none."""
        if self.curves is not None:
            self.curve = self.curves[name].to_dict() if name in self.curves else None
            return
        self.unavailable = _why_not(posterior)
        if self.unavailable is None:
            assert isinstance(posterior, WeightPosterior)
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
        if "results" in block.get("pruning", {}):
            yield from curve_figures(block["pruning"], _intervals(block, document))


def _why_not(posterior: Posterior) -> str | None:
    """Why a posterior cannot be pruned by signal to noise, or None."""
    if not isinstance(posterior, WeightPosterior):
        return f"A {type(posterior).__name__} has no weights to prune."
    try:
        signal_to_noise(posterior)
    except ConfigurationError as error:
        return str(error)
    return None


def _intervals(block: Numbers, document: Numbers) -> Intervals:
    """The bootstrap intervals of the whole model, by the rows of the comparison."""
    at = document["comparison"]["columns"].index(block["name"])
    rows = document["comparison"]["rows"]
    return {r["key"]: (r["values"][at]["lower"], r["values"][at]["upper"]) for r in rows}


def _share(result: Numbers) -> str:
    return f"{100 * result['fraction']:.6g}%"


def _value(name: str, value: float | None) -> float:
    """A score as it is shown: accuracy as the error rate, and what is missing as NaN."""
    if value is None:
        return math.nan
    return 1 - value if name == "accuracy" else value


def _written(name: str, value: float) -> str:
    return percent(value, 2) if name in SHARES else short(value)


# ---------------------------------------------------------------------------------------- figures


def curve_figures(data: Numbers, intervals: Intervals | None = None) -> Iterator[fig.Figure]:
    """The histogram of the ratios, the scores against the share removed, and both as tables.

    Args:
        data: The numbers of a curve, as ``PruneCurve.to_dict`` gives them.
        intervals: Bootstrap intervals of the whole model, by the rows of the report's comparison.

    Example:
        >>> layer = {"name": "weight", "total": 4, "median": 1.0, "removed": [0.5],
        ...          "counts": [2, 2]}
        >>> made = curve_figures({
        ...     "unit": "weight", "scope": "global", "total": 4, "score_names": ["nll"],
        ...     "results": [{"fraction": 0.5, "remaining": 2, "threshold": 0.9,
        ...                  "scores": {"nll": 0.1}}],
        ...     "histogram": {"log10_edges": [-1.0, 0.0, 1.0], "counts": [2, 2], "below": 0,
        ...                   "above": 0, "zero": 0, "layers": [layer]}})
        >>> [figure.id for figure in made]
        ['snr', 'pruning-results']
    """
    noun = "weights" if data["unit"] == "weight" else "units"
    if data.get("single"):
        noun = "units and weights"
    yield _ratios(data, noun)
    if len(data["results"]) > 1:
        yield _curves(data, noun, intervals or {})
    yield _tables(data, noun)


def _ratios(data: Numbers, noun: str) -> fig.Views:
    """The histogram of the ratios of all layers, and of each by itself."""
    histogram = data["histogram"]
    edges = fig.as_array(histogram["log10_edges"])
    # with the same share of each layer there is no one threshold to draw, and one far outside
    # would leave no room for the bars
    lines = {
        math.log10(each["threshold"]): _share(each)
        for each in data["results"]
        if data["scope"] == "global" and each["threshold"]
    }
    lines = {at: share for at, share in lines.items() if at >= edges[0] - 1}
    how = "To remove a share, all to the left of its line go."
    if not lines:
        how = "The same share of every layer goes, so that each has a threshold of its own."
    outside = {
        "below": "below the first bin",
        "above": "above the last one",
        "zero": "exactly zero, as those removed already",
    }
    beyond = [f"{count(histogram[key])} {text}" for key, text in outside.items() if histogram[key]]
    rules = Mark("rules", list(lines), text=list(lines.values()), key="thresholds",
                 label="share removed", colour="ink", style="dashed thin")  # fmt: skip

    def drawn(counts: Sequence[int], total: int) -> fig.Plot:
        rows = []
        for low, high, each in zip(edges[:-1], edges[1:], counts, strict=True):
            right = [share for at, share in lines.items() if at >= (low + high) / 2]
            goes = f"{right[0]} removed" if right else "–"
            bin_ = f"{10.0**low:.3g} to {10.0**high:.3g}"
            rows.append([bin_, count(each), percent(each / total, 2), goes])
        values = fig.as_array(counts)
        bars = Mark("bars", edges[:-1], 0 * values, edges[1:], fig.only(values, values > 0), noun,
                    "counts")  # fmt: skip
        limits = (min([edges[0], *lines]), max([edges[-1], *lines]))
        return fig.Plot(
            "snr",
            "Signal-to-noise ratio of the weights",
            f"Each {'weight' if noun == 'weights' else 'unit'} by |mean| / standard deviation, on "
            f"a logarithmic axis. {how}",
            f"Not shown: {', '.join(beyond)}." if beyond else "",
            wide=True,
            x=fig.Axis("signal-to-noise ratio (logarithmic)", limits, "power"),
            y=fig.Axis(noun, (0.0, 1.16 * (max(counts) or 1)), "count"),  # room for names of lines
            marks=[bars, *([rules] if lines else [])],
            table=fig.Table(["ratio", noun, "share of them", "go with"], rows),
            spans=(edges[:-1], edges[1:]),
            aspect=0.36,
        )

    views = {"all layers": drawn(histogram["counts"], data["total"])}
    if len(histogram["layers"]) > 1:
        views |= {one["name"]: drawn(one["counts"], one["total"]) for one in histogram["layers"]}
    return fig.Views("snr", "Signal-to-noise ratio of the weights", wide=True, switch="layer",
                     views=views)  # fmt: skip


def _labels(data: Numbers) -> dict[str, str]:
    """The scores of the curve with their labels."""
    return {name: LABELS.get(name, name) for name in data["score_names"]}


def _curves(data: Numbers, noun: str, intervals: Intervals) -> fig.Panels:
    results = data["results"]
    places = fig.as_array(-math.log10(1 - each["fraction"]) for each in results)
    limits = fig.domain(places, air=0.03)
    panels = []
    for name, label in _labels(data).items():
        values = fig.as_array(_value(name, each["scores"].get(name)) for each in results)
        row = "coverage_90" if name == "coverage" else name  # of the comparison
        low, high = sorted(_value(name, end) for end in intervals.get(row, (None, None)))
        band = f"{_written(name, low)} to {_written(name, high)}"
        rows = [
            [f"{_share(each)}, {count(each['remaining'])} left", _written(name, value), band]
            for each, value in zip(results, values, strict=True)
        ]
        style = "percent" if name in SHARES else None
        panels.append(
            fig.Plot(
                f"pruning-{name}",
                f"{label} against the share that is removed",
                x=fig.Axis(f"{noun} removed", limits, "removed", list(places)),
                y=fig.Axis(label, fig.domain([*values, low, high], air=0.07), style),
                marks=[
                    Mark("boxes", [limits[0]], [low], [limits[1]], [high], BAND, "interval",
                         "band"),
                    Mark("line", places, values, key="model", colour="model", shared="models",
                         style="thick"),
                    Mark("dots", places, values, key="model", colour="model"),
                ],
                table=fig.Table(["removed", label, BAND], rows),
                spans=fig.spans_between(places, limits),
            )
        )  # fmt: skip
    return fig.Panels(
        "pruning-curve",
        "What removing them costs",
        f"The scores of the model when the {noun} of the lowest ratios are set to zero, without "
        "training again. The axis is stretched towards 100%, so that what is left falls tenfold "
        "over equal distances. Grey: the 95% bootstrap interval of the whole model. A score inside "
        "of it could be that of the whole model on other examples of the same kind.",
        wide=True,
        panels=panels,
    )


def _tables(data: Numbers, noun: str) -> fig.Tables:
    results, labels = data["results"], _labels(data)
    rows = [
        [
            *(_share(each), count(each["remaining"]), short(each["threshold"])),
            *(_written(name, _value(name, each["scores"].get(name))) for name in labels),
        ]
        for each in results
    ]
    layers = [
        [one["name"], count(one["total"]), short(one["median"]), *map(percent, one["removed"])]
        for one in data["histogram"]["layers"]
    ]
    return fig.Tables(
        "pruning-results",
        "The results",
        wide=True,
        table=fig.Table(
            ["removed", f"{noun} left", "largest ratio removed", *labels.values()], rows
        ),
        more="By layer",
        further=fig.Table(
            ["layer", noun, "median ratio", *(f"of {_share(each)}" for each in results)],
            layers,
            "The columns on the right: the share of the layer that goes when so much of the whole "
            "is removed.",
        ),
    )


# ------------------------------------------------------------------------------------------ words


def _sentence(block: Numbers, document: Numbers) -> str | None:
    if "pruning" not in block:
        return None
    return pruning_sentence(block["pruning"], document["task"], _intervals(block, document))


def pruning_sentence(pruning: Numbers, task: str, intervals: Intervals) -> str | None:
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
    removed = [each for each in pruning["results"] if each["fraction"] > 0]
    if not removed:
        return None
    first = "accuracy" if task == "classification" else "rmse"
    labels = {first: "error" if first == "accuracy" else "RMSE", "nll": "NLL"}
    limits = {n: max(_value(n, end) for end in intervals.get(n, (None, None))) for n in labels}
    whole = pruning["results"][0] if pruning["results"][0]["fraction"] == 0 else None
    of_all = f"of {pruning['total']:,} {'weights' if pruning['unit'] == 'weight' else 'units'}"

    def said(result: Numbers) -> str:
        texts = []
        for name, label in labels.items():
            values = [_value(name, each["scores"].get(name)) for each in (result, whole) if each]
            shown = [_written(name, v) if math.isfinite(v) else "not finite" for v in values]
            texts.append(f"{label} {' instead of '.join(shown)}")
        return f"with {_share(result)} {of_all} removed, {' and '.join(texts)}"

    def above(result: Numbers) -> str:
        """The scores that are worse than their limits; one that is not finite is among them."""
        worse = [n for n in labels if not _value(n, result["scores"].get(n)) <= limits[n]]
        return " and ".join(labels[name] for name in worse)

    if any(map(math.isnan, limits.values())):  # nothing to measure by
        return f"{said(removed[-1])}."
    kept = list(takewhile(lambda each: not above(each), removed))
    texts = [
        f"{said(each)}: {above(each) or 'none'} above the {BAND}"
        for each in (*kept[-1:], *removed[len(kept) :][:1])
    ]
    return f"{'; '.join(texts)}."
