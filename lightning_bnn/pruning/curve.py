"""How the scores of a posterior change as the weights with the least signal go.

Weights are removed in the order of their signal-to-noise ratio |μ|/σ, the smallest first, and the
rest predicts the same data with the same random numbers, so that two rows of the table differ by
what was removed and by nothing else (Blundell et al., 2015, *Weight Uncertainty in Neural
Networks*, table 2 and figure 3). One pruned posterior is held at a time.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bnn.checks import check_whole
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.lightning import sized_len
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.pruning.functions import prune
from lightning_bnn.pruning.histogram import SNRHistogram, snr_histogram
from lightning_bnn.pruning.masks import Scope, check_fraction, check_options, keep_removable
from lightning_bnn.pruning.removable import Removable, Rest, Unit, find_removable
from lightning_bnn.pruning.signal import separate
from lightning_bnn.selection import Choice
from lightning_bnn.target import split_batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FRACTIONS", "PruneCurve", "PruningResult", "align", "check_fractions", "prune_curve"]

FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
# Scores in the order of the table, the best known first; a collection of metrics sorts by name.
_ORDER = ("accuracy", "rmse", "nll", "ece", "crps", "brier", "coverage")
_ENDINGS = (".png", ".svg", ".pdf", ".json")


@dataclass(frozen=True)
class PruningResult:
    """What is left of a posterior at one fraction, and how well it predicts.

    Attributes:
        fraction: The share to remove, as it was asked for.
        removed: How many weights (or units) are removed.
        total: Of how many.
        threshold: The largest signal-to-noise ratio among those removed; None if there are none.
        scores: The scores of the likelihood's metrics, by name.
        layers: The share of each layer that is removed, by the name of its weight.

    Example:
        >>> PruningResult(0.5, removed=2, total=4, threshold=0.3, scores={"nll": 0.1}).remaining
        2
    """

    fraction: float
    removed: int
    total: int
    threshold: float | None
    scores: dict[str, float]
    layers: dict[str, float] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """How many are left."""
        return self.total - self.removed


@dataclass(frozen=True)
class PruneCurve:
    """The scores of a posterior at several shares removed, the smallest share first.

    Printed, it is a table. :func:`prune_curve` makes it.

    Attributes:
        results: One for each fraction.
        histogram: The signal-to-noise ratios that decided.
        unit: What was removed: ``"weight"`` or ``"channel"``.
        scope: Whether one threshold served for all layers (``"global"``) or one for each.
        single: With units, how many of all that could be removed are single weights instead, in
            layers whose units cannot be removed (``rest="weight"``).

    Example:
        >>> import torch
        >>> from lightning_bnn.pruning.histogram import snr_histogram
        >>> results = tuple(
        ...     PruningResult(fraction, removed, 4, threshold, {"nll": nll})
        ...     for fraction, removed, threshold, nll in [(0.0, 0, None, 0.5), (0.5, 2, 0.2, 0.53)]
        ... )
        >>> histogram = snr_histogram({"weight": torch.tensor([0.1, 0.2, 1.0, 3.0])})
        >>> curve = PruneCurve(results, histogram, "weight", "global")
        >>> print(curve)  # doctest: +NORMALIZE_WHITESPACE
        4 weights by signal-to-noise ratio, one threshold for all layers
        removed  left  ratio up to     nll
            0 %     4            –  0.5000
           50 %     2          0.2  0.5300 +0.0300
        >>> curve.best(tolerance=0.05).fraction
        0.5
    """

    results: tuple[PruningResult, ...]
    histogram: SNRHistogram
    unit: Unit
    scope: Scope
    single: int = 0

    def __str__(self) -> str:
        """A row for each fraction: what is left, each score, and its difference from the first."""
        results, total = self.results, self.results[0].total
        noun = "weights" if self.unit == "weight" else "units"
        counts = [(total - self.single, noun), (self.single, "single weights")]
        title = " and ".join(f"{count:,} {words}" for count, words in counts if count)
        each = {"global": "one threshold for all layers", "layer": "the same share of each layer"}
        columns = [
            ["removed", *(percent(result.fraction) for result in results)],
            ["left", *(f"{result.remaining:,}" for result in results)],
            ["ratio up to", *(_written(result.threshold, ".3g") for result in results)],
        ]
        for name in results[0].scores:
            values = [result.scores[name] for result in results]
            largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
            # about five digits, at most four of them after the point
            form = ".4g" if largest >= 1e6 else f".{max(0, 5 - len(str(int(largest))))}f"
            columns.append([name, *(_written(value, form) for value in values)])
            if len(values) > 1:
                rest = [_written(v - values[0], f"+{form}", missing="") for v in values[1:]]
                columns.append(["", "", *rest])
        return f"{title} by signal-to-noise ratio, {each[self.scope]}\n{align(columns)}"

    def best(self, tolerance: float) -> PruningResult:
        """The largest fraction whose mean NLL is at most ``tolerance`` above that of the first.

        Args:
            tolerance: How much NLL may be lost, in nats an example; 0 or more.
        """
        first = self.results[0]
        limit = first.scores["nll"] + tolerance
        good = [result for result in self.results if result.scores["nll"] <= limit]
        return good[-1] if good else first

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, as JSON has them: what is not finite is None."""
        from lightning_bnn.report.document import plain  # the code of reports is slow to import

        histogram = asdict(self.histogram)
        for layer in histogram["layers"]:
            layer["removed"] = [result.layers.get(layer["name"]) for result in self.results]
        names = ("fraction", "removed", "remaining", "threshold", "scores")
        return plain(
            {
                "unit": self.unit,
                "scope": self.scope,
                "total": self.results[0].total,
                **({"single": self.single} if self.single else {}),
                "score_names": list(self.results[0].scores),
                "results": [{n: getattr(result, n) for n in names} for result in self.results],
                "histogram": histogram,
            }
        )

    def figure(self) -> Figure:
        """The histogram of the ratios, and the scores against the share removed."""
        from lightning_bnn.pruning.section import curve_figures  # the code of reports is slow
        from lightning_bnn.report.figure import described  # to import, as is this
        from lightning_bnn.report.figures import calibration_figures  # and matplotlib

        drawn = [described(figure) for figure in curve_figures(self.to_dict())]
        section = {"id": "pruning", "figures": drawn}
        return calibration_figures({"models": [{"name": "", "sections": [section]}]})["pruning"]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the figure (``.png``, ``.svg``, ``.pdf``) or the numbers (``.json``).

        Args:
            path: The file; its ending says what is written. Folders on the way are made.

        Returns:
            The path.

        Raises:
            ConfigurationError: The ending is another one.
        """
        target = check_curve_name(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".json":
            text = json.dumps(self.to_dict(), allow_nan=False, indent=1)
            target.write_text(text, encoding="utf-8")
        else:
            self.figure().savefig(target, dpi=150)
        return target


def prune_curve(
    posterior: WeightPosterior,
    loader: Any,
    fractions: Sequence[float] = FRACTIONS,
    *,
    draws: int | None = None,
    unit: Unit = "weight",
    scope: Scope = "global",
    protect: Choice = None,
    rest: Rest = "raise",
    seed: int = 0,
) -> PruneCurve:
    """Scores of the predictive with more and more weights removed, as a table and a figure.

    Every fraction predicts the same data with the same seed. The data are read once for each. Of a
    mixture whose components are pruned by themselves, the weights of all components are counted.

    Args:
        posterior: A posterior with variances; it stays as it is.
        loader: A loader of (inputs, targets), or a data module, whose test data are taken.
        fractions: The shares to remove, each in [0, 1).
        draws: Draws of each prediction; by default what suits the posterior.
        unit: ``"weight"``, or ``"channel"`` for whole units of layers.
        scope: ``"global"``: one threshold; ``"layer"``: the same share of each layer.
        protect: Weights that stay, as in :func:`lightning_bnn.prune`.
        rest: What happens to layers whose units cannot be removed.
        seed: Decides the draws.

    Returns:
        The curve: ``print(curve)`` is the table, ``curve.save("curve.png")`` the figure.

    Raises:
        ConfigurationError: Something is wrong with the options, or a fraction cannot be reached.
        DataError: The loader is empty, or its data do not go through the network.

    Example:
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_bnn import GaussianPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(4, 1, bias=False)
        >>> mean = {"weight": torch.tensor([[1.0, 0.0, 2.0, 0.1]])}
        >>> posterior = GaussianPosterior(net, Gaussian(0.5), mean, {"weight": torch.ones(1, 4)})
        >>> inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
        >>> data = DataLoader(TensorDataset(inputs, inputs @ mean["weight"].T), batch_size=25)
        >>> curve = prune_curve(posterior, data, fractions=(0, 0.5))
        >>> [(result.fraction, result.remaining) for result in curve.results]
        [(0.0, 4), (0.5, 2)]
    """
    from lightning_bnn.report.posteriors import data_loader  # the code of reports is slow to import

    shares = check_fractions(fractions)
    check_options(shares[0], unit, scope, rest)
    if draws is not None:
        check_whole("draws", draws, 1)
    removable = [find_removable(leaf, unit, protect, rest) for leaf in separate(posterior)]
    joined = _joined([each.ratios for each in removable])
    sizes = {name: ratios.numel() for name, ratios in joined.items()}
    with warnings.catch_warnings():
        # prune says itself which layers only just stay
        warnings.simplefilter("ignore", UserWarning)
        gone = [_removed(removable, share, scope) for share in shares]
    loader = data_loader(loader, "loader")
    results: list[PruningResult] = []
    mode = posterior.mode
    for share, removed in zip(shares, gone, strict=True):
        pruned = prune(posterior, share, unit=unit, scope=scope, protect=protect, rest=rest)
        pruned.mode = mode
        scores = _scores(pruned, loader, draws, seed, f"prune: {percent(share)} removed")
        mode = pruned.mode  # measured by the first, if it was not known
        count = sum(ratios.numel() for ratios in removed.values())
        largest = [float(ratios.max()) for ratios in removed.values() if ratios.numel()]
        threshold = max(largest, default=None)
        layers = {name: ratios.numel() / sizes[name] for name, ratios in removed.items()}
        total = sum(sizes.values())
        results.append(PruningResult(share, count, total, threshold, scores, layers))
    weights = {name for each in removable for name in each.weights}
    single = sum(sizes[name] for name in weights) if unit == "channel" else 0
    return PruneCurve(tuple(results), snr_histogram(joined), unit, scope, single)


def check_fractions(fractions: Sequence[float]) -> tuple[float, ...]:
    """Fractions in order, each once.

    Raises:
        ConfigurationError: There is none, or one is outside of [0, 1).

    Example:
        >>> check_fractions([0.9, 0, 0.9])
        (0.0, 0.9)
    """
    if not isinstance(fractions, Iterable) or isinstance(fractions, str | bytes | Tensor):
        raise ConfigurationError(
            f"fractions= is a list of shares to remove, such as (0, 0.9); got {fractions!r:.80}."
        )
    checked = {check_fraction(fraction, "each of fractions") for fraction in fractions}
    if not checked:
        raise ConfigurationError("fractions= is empty; pass at least one share, such as (0, 0.9).")
    return tuple(sorted(checked))


def check_curve_name(path: str | os.PathLike[str]) -> Path:
    """The file of a curve.

    Raises:
        ConfigurationError: It is a URL, or its ending is none that a curve can be written as.

    Example:
        >>> check_curve_name("curve.png").suffix
        '.png'
    """
    if "://" in str(path) or Path(path).suffix not in _ENDINGS:
        raise ConfigurationError(
            f"A curve is saved to a local file that ends in {', '.join(_ENDINGS[:3])} (the figure) "
            f"or .json (the numbers); got {str(path)!r}."
        )
    return Path(path)


# ---------------------------------------------------------------------------- counts and scores


def _joined(groups: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Flat ratios of each name; other weights may vary in another component of a mixture."""
    names = dict.fromkeys(name for group in groups for name in group)
    return {
        name: torch.cat([group[name].flatten() for group in groups if name in group])
        for name in names
    }


def _removed(removable: Sequence[Removable], share: float, scope: Scope) -> dict[str, Tensor]:
    """The ratios of each name that a share removes."""
    return _joined(
        [
            {name: each.ratios[name][~keep] for name, keep in kept.items()}
            for each in removable
            for kept in [keep_removable(each, share, scope)]
        ]
    )


def _scores(
    posterior: WeightPosterior, loader: Any, draws: int | None, seed: int, what: str
) -> dict[str, float]:
    """The likelihood's metrics of the predictive on all batches."""
    # the code of reports is slow to import
    from lightning_bnn.report.gather import check_predicts, progress, undisturbed

    metrics = posterior.likelihood.metrics().to(posterior.device)
    read = 0
    with undisturbed(loader):
        for batch in progress(loader, what, sized_len(loader)):
            inputs, targets = split_batch(batch)
            targets = targets.to(posterior.device)
            if not read:
                fix = "Pass the data that the posterior was made for."
                check_predicts(lambda x: posterior.predict(x, 1, seed), inputs, "loader", fix)
            predictive = posterior.predict(inputs, draws, seed)
            posterior.likelihood.check(predictive.outputs[0], targets)
            metrics.update(predictive, targets)
            read += 1
    if not read:
        raise DataError("loader is empty: scores need at least one batch.")
    scores = metrics.compute()
    names = sorted(scores, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    return {name: float(scores[name]) for name in names}


# -------------------------------------------------------------------------------------- the table


def align(columns: Sequence[Sequence[str]]) -> str:
    """Columns side by side, each aligned to the right.

    Example:
        >>> print(align([("layer", "0.weight", "1.weight"), ("left", "5", "12")]))
           layer  left
        0.weight     5
        1.weight    12
    """
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return "\n".join("  ".join(map(str.rjust, cells, widths)).rstrip() for cells in rows)


def percent(fraction: float) -> str:
    """A share in percent, with as many digits as it takes.

    Example:
        >>> percent(0.5), percent(0.995), percent(0.99)
        ('50 %', '99.5 %', '99 %')
    """
    return f"{100 * fraction:.6g} %"


def _written(value: float | None, form: str, missing: str = "–") -> str:
    return missing if value is None or not math.isfinite(value) else format(value, form)
