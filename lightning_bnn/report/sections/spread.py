"""Errors of a regression: against the stated spread, where the variance comes from, and the fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.calibration.bins import bin_index, mass_edges, outside_band
from lightning_bnn.calibration.pit import error_by_sd
from lightning_bnn.report import figure as fig
from lightning_bnn.report.figure import Mark
from lightning_bnn.report.regression import SD_BINS
from lightning_bnn.report.rows import Array, Rows
from lightning_bnn.report.sample import Sample
from lightning_bnn.report.sections.base import Numbers, Section
from lightning_bnn.report.sections.class_uncertainty import two_kinds
from lightning_bnn.report.text import count, percent, ranges, short
from lightning_bnn.report.words import ONE_DRAW

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["Spread"]

SCATTER_ROWS = 1000
# Examples of a one-dimensional input whose fit is drawn, and the level of its interval.
KEEP_FIT = 400
FIT_LEVEL = 0.9
FIT = ("x", "y", "mean", "lower", "upper", "epistemic_lower", "epistemic_upper")


class Spread(Section):
    """How large are the errors, and does the stated spread foresee them?"""

    key, order = "errors", 20
    title = "Sharpness and errors"
    lead = "How large are the errors, and does the stated spread foresee them?"
    task = "regression"

    def __init__(self) -> None:
        self.fit = Sample(KEEP_FIT)

    def add(self, rows: Rows) -> None:
        """Keep the fit of some examples, where the input and the output are one number each."""
        inputs, size = rows.inputs, len(rows.predictive)
        line = isinstance(inputs, Tensor) and tuple(inputs.shape) in ((size,), (size, 1))
        if not line or len(rows) + len(rows.invalid) != size:
            return
        chosen = self.fit.admits(rows.example, rows.position)
        if not chosen.any():
            return
        places = torch.from_numpy(rows.place[chosen])
        drawn = rows.predictive[places]
        tails = torch.tensor([(1 - FIT_LEVEL) / 2, (1 + FIT_LEVEL) / 2], dtype=torch.float64)
        columns = (
            inputs.detach().cpu().double().reshape(-1)[places],
            torch.from_numpy(rows.columns["target"][chosen]),
            drawn.mean,
            *drawn.interval(FIT_LEVEL),
            *_quantiles_of_draws(drawn, tails),
        )
        kept = {name: each.reshape(-1).numpy() for name, each in zip(FIT, columns, strict=True)}
        self.fit.add(rows.example[chosen], rows.position[chosen], kept)

    def merge(self, other: Spread) -> None:
        """Add the fit of another process."""
        self.fit.merge(other.fit)

    def numbers(self, model: Statistics, block: Numbers) -> dict[str, Any]:
        """Error by predicted sd, its variances, single rows, and the fit."""
        sample = model.sample
        sd, error = sample["sd"], sample["mean"] - sample["target"]
        index = np.unique(bin_index(sd, mass_edges(sd, SD_BINS)), return_inverse=True)[1]
        counts = np.bincount(index)
        names = ("sd", "aleatoric", "epistemic")
        means = {name: np.bincount(index, sample[name]) / counts for name in names}
        scattered = np.sort(np.argsort(sample["priority"])[:SCATTER_ROWS])
        fit = None
        if len(self.fit):
            order = np.argsort(self.fit["x"], kind="stable")
            fit = {name: _short(self.fit[name][order]) for name in FIT} | {"level": FIT_LEVEL}
        rate = sample["aleatoric"] if model.counts else None
        return {
            "error_sd": error_by_sd(sd, error, SD_BINS, rate=rate),
            "uncertainty": {**means, "count": counts},
            "scatter": {"sd": _short(sd[scattered]), "error": _short(error[scattered])},
            "fit": fit,
        }

    def figures(self, block: Numbers, document: Numbers) -> Iterator[fig.Figure]:
        """Error against stated spread, where the variance comes from, and the fit."""
        yield _error(block["error_sd"], block["scatter"])
        yield _variance(block)
        if block["fit"] is not None:
            yield _fit(block["fit"], block["draws"] == 1)


def _quantiles_of_draws(drawn: Any, tails: Tensor) -> Tensor:
    """Of the means over the draws, which need not weigh the same."""
    means = drawn.component_means
    if drawn.weights is None:
        return means.quantile(tails, dim=0)
    sorted_means, order = means.sort(0)
    below = drawn.weights.to(means.device)[order].cumsum(0)
    places = [(below < tail).sum(0).clamp(max=len(means) - 1) for tail in tails]
    return torch.stack([sorted_means.gather(0, place[None])[0] for place in places])


def _short(values: Array) -> list[float]:
    """Numbers to six digits: these are only drawn, and a page stays light."""
    return [float(f"{value:.6g}") for value in values]


def _error(data: Numbers, scatter: Numbers) -> fig.Plot:
    sd, rmse, lower, upper = fig.arrays(data, "sd", "rmse", "lower", "upper")
    cloud, sizes = fig.as_array(scatter["sd"]), np.abs(fig.as_array(scatter["error"]))
    outside = outside_band(rmse, lower, upper)
    # a few wild errors must not squeeze the rest: the frame ends at three times the largest bin
    largest = fig.domain([*rmse, *sd, *upper], zero=True, air=0)[1]
    top = min(3 * largest, fig.domain([*sizes, *rmse, *upper], zero=True, air=0)[1])
    above = int((sizes > top).sum())
    places = fig.domain([*sd, *cloud], air=0.06)
    low = max(0.0, places[0])
    return fig.Plot(
        "error-sd",
        "Error against stated spread",
        "Predictions in bins of their standard deviation, and the observed error. Dots on the "
        "dashed line keep the promise; above it errors are larger than stated. The bars are where "
        "a calibrated model would lie.",
        f"{count(above)} of the {count(len(sizes))} points lie above the frame." if above else "",
        x=fig.Axis("predicted standard deviation", places),
        y=fig.Axis("size of the error", (0.0, top * 1.04)),
        marks=[
            Mark("dots", cloud, fig.only(sizes, sizes <= top), label="single predictions",
                 key="points", colour="muted", style="pale"),
            Mark("ranges", sd, lower, y2=upper, label="range if calibrated", key="band",
                 colour="band"),
            Mark("line", [low, places[1]], [low, places[1]], key="diagonal", colour="ink",
                 style="dashed"),
            Mark("line", sd, rmse, key="bins"),
            Mark("dots", sd, rmse, label="root mean squared error", key="bins"),
            Mark("rings", sd, fig.only(rmse, outside), label="outside of the range", key="outside",
                 colour="bad"),
        ],
        table=fig.table({
            "standard deviation": map(short, sd),
            "error (RMSE)": map(short, rmse),
            "if calibrated": ranges(lower, upper, short, outside),
            "predictions": map(count, data["count"]),
        }),
        spans=fig.spans_between(sd, places),
    )  # fmt: skip


def _variance(block: Numbers) -> fig.Bars:
    alone, data = block["draws"] == 1, block["uncertainty"]
    aleatoric, epistemic = fig.arrays(data, "aleatoric", "epistemic")
    rows, table = [], []
    for i, sd in enumerate(data["sd"]):
        title = f"Mean standard deviation {short(sd)}: {count(data['count'][i])} predictions"
        between = None if alone else epistemic[i]
        rows.append(two_kinds(f"sd {short(sd)}", title, aleatoric[i], between, " variance"))
        table.append([short(sd), *(part.text for part in rows[-1].parts), count(data["count"][i])])
    share = percent(block["scalars"]["epistemic_share"])
    doubt = "; epistemic variance is disagreement among the draws, which more data would shrink."
    names = ["aleatoric variance"] if alone else ["aleatoric variance", "epistemic variance"]
    return fig.Bars(
        "uncertainty-sd", "Where the variance comes from",
        "Predictions from the surest tenth (top) to the least sure. Aleatoric variance is noise"
        f"{'. ' + ONE_DRAW if alone else f'{doubt} Epistemic share over all: {share}.'}",
        logged=False, rows=rows, step=25,
        domain=(0.0, fig.domain(aleatoric + epistemic, zero=True, air=0)[1]),
        table=fig.Table(["standard deviation", *names, "predictions"], table),
    )  # fmt: skip


def _fit(data: Numbers, alone: bool) -> fig.Plot:
    x, y, mean, lower, upper, inner, outer = fig.arrays(data, *FIT)
    level, places = percent(data["level"], 0), fig.domain(x, air=0.01)
    told = np.arange(0, len(x), -(-len(x) // 60))
    note = f"{count(len(told))} of {count(len(x))} points; the JSON file has all of them."
    knows = " (pale), with the part of it that comes from not knowing the function (strong)"
    epistemic = Mark("area", x, inner, y2=outer, label="epistemic part", key="epistemic",
                     colour="epistemic", style="strong")  # fmt: skip
    return fig.Plot(
        "fit",
        "The fit with its intervals",
        f"The mean and the central {level} interval of the prediction{'' if alone else knows}, and "
        f"the observed values.{' ' + ONE_DRAW if alone else ''}",
        wide=True,
        x=fig.Axis("input", places),
        y=fig.Axis("target", fig.domain([*lower, *upper, *y])),
        marks=[
            Mark("area", x, lower, y2=upper, label=f"{level} interval", key="interval"),
            *([] if alone else [epistemic]),
            Mark("dots", x, y, label="observed", key="observed", colour="ink", style="pale"),
            Mark("line", x, mean, label="mean", key="mean", style="thick"),
        ],
        table=fig.table(
            {
                "input": map(short, x[told]),
                "mean": map(short, mean[told]),
                f"{level} interval": ranges(lower[told], upper[told]),
                "observed": map(short, y[told]),
            },
            note if len(told) < len(x) else "",
        ),
        spans=fig.spans_between(x[told], places),
        aspect=0.42,
    )  # fmt: skip
