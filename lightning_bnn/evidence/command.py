"""Weigh saved posteriors of different models: by evidence, and by stacking on held-out data.

``lightning-bnn compare --posterior runs/order1 --posterior runs/order2 --out compare.png`` prints a
table of log p(D|M), p(M|D) and, with ``--data``, of stacking weights, and draws them: against the
order of polynomials, where the models have one, and by their names elsewhere.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.checks import printable
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.evidence.averaging import log_scores, model_probabilities, stacking_weights
from lightning_bnn.lightning import is_overridden
from lightning_bnn.nets import Polynomial
from lightning_bnn.posteriors import AveragePosterior, Posterior
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.document import folder_problem
from lightning_bnn.report.figure import COLOURS
from lightning_bnn.report.networks import (
    instantiate,
    load_configured,
    path_names,
    read_configuration,
)
from lightning_bnn.report.posteriors import data_loader, validation_loader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["compare", "comparison_figure", "main", "table"]

_FORMATS = (".png", ".svg", ".pdf")
_NO_NUMBER = (float("nan"), float("nan"))


def compare(
    posteriors: Mapping[str, Posterior], data: Any = None, draws: int | None = None
) -> list[dict[str, Any]]:
    """A row for each model, with its name, its order if it is a polynomial, and what it weighs.

    Args:
        posteriors: By name, at least one.
        data: A loader of data that no model was trained on, for stacking weights.
        draws: Of each posterior, for stacking; by default what suits it.

    Returns:
        Rows with ``name``, ``order``, ``evidence`` (or None), and pairs of a number and its
        standard error, NaN where it is not known: ``probability``, p(M|D) among the models whose
        evidence is known, and ``stacking``.

    Example:
        >>> from lightning_bnn import PolynomialRegression
        >>> from lightning_bnn.posteriors import Evidence
        >>> models = {}
        >>> for order, value in ((1, -12.0), (2, -10.0)):
        ...     models[f"order {order}"] = PolynomialRegression(order).posterior()
        ...     models[f"order {order}"].evidence = Evidence(value)
        >>> print(table(compare(models)))
        model    log p(D|M)      p(M|D)  stacking
        order 1  -12.00 (given)  0.119   -
        order 2  -10.00 (given)  0.881   -
    """
    parts = AveragePosterior(list(posteriors.values())).components  # of one task
    known = [i for i, one in enumerate(parts) if one.evidence is not None]
    probability = dict.fromkeys(range(len(parts)), _NO_NUMBER)
    if known:
        found = model_probabilities([e for one in parts if (e := one.evidence) is not None])
        probability |= dict(zip(known, zip(*found, strict=True), strict=True))
    stacking = [_NO_NUMBER] * len(parts)
    if data is not None:
        stacking = list(zip(*stacking_weights(log_scores(parts, data, draws)), strict=True))
    return [
        {
            "name": name,
            "order": _order(one),
            "evidence": one.evidence,
            "probability": probability[index],
            "stacking": stacking[index],
        }
        for index, (name, one) in enumerate(posteriors.items())
    ]


def _order(posterior: Posterior) -> int | None:
    """The order of the polynomial in a posterior's network."""
    net = getattr(posterior, "net", None)
    modules = [] if net is None else [one for one in net.modules() if isinstance(one, Polynomial)]
    return modules[0].arguments["order"] if len(modules) == 1 else None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    cells = [["model", "log p(D|M)", "p(M|D)", "stacking"]]
    for row in rows:
        evidence = "-" if row["evidence"] is None else str(row["evidence"])
        shown = [_shown(*row[name]) for name in ("probability", "stacking")]
        cells.append([printable(row["name"]), evidence, *shown])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
    return "\n".join(lines)


def _shown(value: float, error: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:.3f}" + (f" ± {error:.3f}" if error >= 5e-4 else "")


def comparison_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Log evidence, and the weights of the models, against their order or by name."""
    # a slow import that most users of this module do not need
    from matplotlib.figure import Figure

    # plain() keeps names from being read as formulas; it comes with matplotlib
    from lightning_bnn.report.figures import plain

    orders = [row["order"] for row in rows]
    ordered = None not in orders and len(set(orders)) == len(orders)
    if ordered:
        rows = sorted(rows, key=lambda row: row["order"])
    places = np.array([row["order"] for row in rows]) if ordered else np.arange(len(rows))
    labels = [str(row["order"]) if ordered else plain(row["name"], 20) for row in rows]
    figure = Figure(figsize=(min(max(8.0, len(rows) + 4), 14.0), 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {name: COLOURS[name][0] for name in ("blue", "orange", "grey")}
    known = np.array([row["evidence"] is not None for row in rows])
    if known.any():
        found = [row["evidence"] for row in rows if row["evidence"] is not None]
        values, errors = np.array([(one.value, one.error) for one in found]).T
        where, bound = places[known], np.array([one.is_bound for one in found])
        if ordered:
            left.plot(where, values, color=colours["blue"], lw=1.2)
        for chosen, mark, colour, label in (
            (~bound, "o", "blue", None),
            (bound, "^", "orange", "a lower bound (ELBO)"),
        ):
            if chosen.any():
                left.errorbar(
                    where[chosen], values[chosen], _visible(errors[chosen]), fmt=mark,
                    color=colours[colour], capsize=3, label=label,
                )  # fmt: skip
        if bound.any():
            left.legend(frameon=False, fontsize=8)
        best = int(np.argmax(values))
        left.annotate(
            "largest", (where[best], values[best]), (0, 8), ha="center", fontsize=8,
            textcoords="offset points",
        )  # fmt: skip
        left.margins(y=0.15)
    else:
        left.text(0.5, 0.5, "not known", ha="center", transform=left.transAxes)
    left.set_ylabel("log p(D|M)  [nats]")
    left.set_title("Evidence", fontsize=10)
    bars = [("probability", "p(M|D)", colours["blue"]), ("stacking", "stacking", colours["grey"])]
    bars = [bar for bar in bars if not all(np.isnan(row[bar[0]][0]) for row in rows)]
    for index, (name, label, colour) in enumerate(bars):
        heights, errors = np.array([row[name] for row in rows]).T
        shift = 0.4 * (index - (len(bars) - 1) / 2)
        ends = np.stack([np.minimum(errors, heights), np.minimum(errors, 1 - heights)])
        right.bar(places + shift, heights, 0.36, color=colour, label=label)
        right.errorbar(
            places + shift, heights, _visible(ends), fmt="none", ecolor=COLOURS["ink"][0], capsize=2
        )
    right.set(ylim=(0, 1.05))
    right.set_ylabel("weight")
    right.set_title("Weights of the models", fontsize=10)
    if bars:
        right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("order of the polynomial" if ordered else "model")
        turned = {} if ordered else {"rotation": 20, "ha": "right"}
        axes.set_xticks(places, labels, fontsize=8, **turned)
    return figure


def _visible(errors: Any) -> Any:
    """Error bars without those of no length, which would be a dash."""
    return np.where(errors > 1e-3, errors, np.nan)


def main(
    arguments: Sequence[str] | None = None, load: Callable[..., Posterior] = Posterior.load
) -> int:
    """Run the command and return the exit code.

    Args:
        arguments: The words after ``lightning-bnn compare``.
        load: Reads a posterior from its folder.

    Raises:
        ConfigurationError: A folder, a file or a name is wrong.
    """
    options = _parser().parse_args(arguments)
    names = options.name or path_names(options.posterior)
    if len(names) != len(options.posterior) or len(set(names)) != len(names) or "" in names:
        raise ConfigurationError(
            "--name is given once for each --posterior, each different: there are "
            f"{len(options.posterior)} posteriors and the names {names}."
        )
    if options.out is not None:
        if os.path.splitext(options.out)[1] not in _FORMATS:
            raise ConfigurationError(
                f"--out is a picture, whose name ends in one of {_FORMATS}; got {options.out!r}."
            )
        folder = os.path.dirname(options.out) or "."
        if (reason := folder_problem(folder)) is not None:  # before any work
            raise ConfigurationError(f"--out cannot be written to {folder!r} ({reason}).")
    posteriors = {
        name: load_configured(path, options.config, load)
        for name, path in zip(names, options.posterior, strict=True)
    }
    rows = compare(posteriors, None if options.data is None else _held_out(options.data),
                   options.draws)  # fmt: skip
    print(table(rows))
    if missing := [row["name"] for row in rows if row["evidence"] is None]:
        print(
            f"Not known is the evidence of {', '.join(map(printable, missing))}: see "
            "lightning_bnn.evidence."
        )
    if options.out is not None:
        comparison_figure(rows).savefig(options.out, dpi=150)
        print(f"The figure is in {options.out}")
    return 0


def _held_out(file: str) -> Any:
    """The validation data of a data module, if it has some, or its test data."""
    data = instantiate(read_configuration(file), "data", file)
    with isolated_random_state(0):
        loader = None
        if is_overridden("val_dataloader", data):
            data.prepare_data()
            loader = validation_loader(data)
        return data_loader(data) if loader is None else loader


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-bnn compare",
        usage="lightning-bnn compare --posterior FOLDER [--posterior FOLDER ...] [options]",
        description="Print log p(D|M) and p(M|D) of saved posteriors of different models that were "
        "trained on the same data, and the weights that predict held-out data best.",
    )
    add = parser.add_argument
    # fmt: off
    add("--posterior", action="append", required=True, metavar="FOLDER",
        help="folder or URL of a posterior, or of the run that holds it; once for each model")
    add("--data", metavar="FILE",
        help="for stacking weights: YAML file with class_path and init_args of a data module, or "
        "the configuration of a fit; its validation data are used (test data if it has none), "
        "which should have chosen nothing in the fits")
    add("--out", metavar="FILE", help="a figure of it: a name that ends in .png, .svg or .pdf")
    add("--name", action="append", metavar="NAME",
        help="name of a model in the table, once for each; by default the folder's")
    add("--config", metavar="FILE",
        help="configuration of the fit: its network is taken for every posterior that it fits")
    add("--draws", type=int, metavar="N", help="draws of each posterior, for stacking weights")
    # fmt: on
    return parser
