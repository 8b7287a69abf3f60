"""How the scores of a posterior change as the weights with the least signal go.

Weights are removed in the order of their signal-to-noise ratio |μ|/σ, the smallest first, and the
rest predicts the same data with the same random numbers, so that two rows of the table differ by
what was removed and by nothing else (Blundell et al., 2015, *Weight Uncertainty in Neural
Networks*, table 2 and figure 3). One pruned posterior is held at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.pruning.functions import prune
from lightning_bnn.pruning.histogram import snr_histogram
from lightning_bnn.pruning.masks import (
    Rest,
    Scope,
    Unit,
    check_fraction,
    keep_masks,
    pruning_masks,
)
from lightning_bnn.pruning.removable import candidates, find_removable
from lightning_bnn.pruning.result import PruneCurve, PruningResult
from lightning_bnn.pruning.signal import separate
from lightning_bnn.selection import Choice
from lightning_bnn.target import split_batch

if TYPE_CHECKING:
    from lightning_bnn.posteriors import WeightPosterior

__all__ = ["FRACTIONS", "PruneCurve", "PruningResult", "check_fractions", "prune_curve"]

FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)
# Scores in the order of the table, the best known first; a collection of metrics sorts by name.
_ORDER = ("accuracy", "rmse", "nll", "brier", "crps", "ece", "coverage")

Ratios = dict[str, Tensor]


def check_fractions(fractions: Sequence[float]) -> tuple[float, ...]:
    """Fractions in order, each once.

    Raises:
        ConfigurationError: There is none, or one is outside of [0, 1).

    Example:
        >>> check_fractions([0.9, 0, 0.9])
        (0.0, 0.9)
    """
    if isinstance(fractions, (str, bytes, Mapping)) or not hasattr(fractions, "__iter__"):
        raise ConfigurationError(
            f"fractions= is a list of shares to remove, such as (0, 0.5, 0.9); got {fractions!r}."
        )
    checked = {check_fraction(one, "each of fractions") for one in fractions}
    if not checked:
        raise ConfigurationError("fractions= is empty; pass at least one share, such as (0, 0.9).")
    return tuple(sorted(checked))


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
    from lightning_bnn.report.posteriors import data_loader

    shares = check_fractions(fractions)
    if draws is not None and draws < 1:
        raise ConfigurationError(f"draws= is at least 1; got {draws}.")
    parts = _separate(posterior)
    found = [_ratios(part, unit, scope, protect, rest) for part in parts]
    groups = [group for pair in found for group in pair if group]
    total = sum(ratios.numel() for group in groups for ratios in group.values())
    single = sum(ratios.numel() for _, weights in found for ratios in weights.values())
    with warnings.catch_warnings():
        # prune says itself which layers only just stay
        warnings.simplefilter("ignore", UserWarning)
        counted = [_count(groups, share, scope) for share in shares]
    loader = data_loader(loader, "loader")
    results: list[PruningResult] = []
    mode = posterior.mode
    for share, (removed, threshold, layers) in zip(shares, counted, strict=True):
        pruned = prune(posterior, share, unit=unit, scope=scope, protect=protect, rest=rest)
        pruned.mode = mode
        if not results:
            _check_data(pruned, loader, seed)
        scores = _scores(pruned, loader, draws, seed)
        mode = pruned.mode  # measured by the first, if it was not known
        results.append(PruningResult(share, removed, total, threshold, scores, layers))
    joined = {
        name: torch.cat([group[name].flatten() for group in groups if name in group])
        for name in _names(groups)
    }
    sizes = [_size(part, unit, pair[1]) for part, pair in zip(parts, found, strict=True)]
    single = single if unit == "channel" else 0
    protected = sum(sizes) - total
    return PruneCurve(tuple(results), snr_histogram(joined), unit, scope, protected, single)


def _separate(posterior: WeightPosterior) -> Sequence[WeightPosterior]:
    """The posteriors within it that are pruned by ratios of their own."""
    parts = separate(posterior)
    return parts if len(parts) == 1 else [leaf for part in parts for leaf in _separate(part)]


def _ratios(
    posterior: WeightPosterior, unit: Unit, scope: Scope, protect: Choice, rest: Rest
) -> tuple[Ratios, Ratios]:
    """The ratios of all units that may be removed, and of all single weights, by name."""
    # removes nothing, and finds what is wrong with the options or with the posterior
    pruning_masks(posterior, 0.0, unit=unit, scope=scope, protect=protect, rest=rest)
    removable = find_removable(posterior, unit, protect, rest)
    return removable.units, removable.weights


def _names(groups: Sequence[Ratios]) -> list[str]:
    """All names, each once; other weights may vary in another component of a mixture."""
    return list(dict.fromkeys(name for group in groups for name in group))


def _count(
    groups: Sequence[Ratios], share: float, scope: Scope
) -> tuple[int, float | None, dict[str, float]]:
    """How many go, the largest ratio among them, and the share of each layer that goes."""
    removed, sizes = dict.fromkeys(_names(groups), 0), dict.fromkeys(_names(groups), 0)
    threshold: float | None = None
    for ratios in groups:
        for name, keep in keep_masks(ratios, share, scope).items():
            gone = ratios[name][~keep]
            removed[name] += gone.numel()
            sizes[name] += keep.numel()
            if gone.numel():
                threshold = max(float(gone.max()), threshold or 0.0)
    layers = {name: count / sizes[name] for name, count in removed.items()}
    return sum(removed.values()), threshold, layers


def _size(posterior: WeightPosterior, unit: Unit, single: Ratios) -> int:
    """All parameters of the network, or all units of the layers whose weights vary.

    Layers that are pruned by single weights (``single``) count by their weights.
    """
    own = dict(posterior.net.named_parameters())
    if unit == "weight":
        return sum(parameter.numel() for parameter in own.values())
    names = candidates(posterior.net, posterior.varying)
    return sum(own[name].numel() if name in single else len(own[name]) for name in names)


def _check_data(posterior: WeightPosterior, loader: Any, seed: int) -> None:
    """Try the network on the first batch, before the work."""
    from lightning_bnn.report.gather import check_predicts, inputs_for, undisturbed

    with undisturbed(loader):
        for batch in loader:
            check_predicts(
                lambda inputs: posterior.predict(inputs_for(posterior, inputs), 1, seed),
                split_batch(batch)[0],
                "loader",
                "Pass the data that the posterior was made for.",
            )
            return
    raise DataError("loader is empty: it gives no batch. Scores need at least one.")


def _scores(
    posterior: WeightPosterior, loader: Any, draws: int | None, seed: int
) -> dict[str, float]:
    """The likelihood's metrics of the predictive on all batches."""
    from lightning_bnn.report.gather import inputs_for, undisturbed

    metrics = posterior.likelihood.metrics().to(posterior.device)
    with undisturbed(loader):
        for batch in loader:
            inputs, targets = split_batch(batch)
            targets = targets.to(posterior.device)
            predictive = posterior.predict(inputs_for(posterior, inputs), draws, seed)
            posterior.likelihood.check(predictive.outputs[0], targets)
            metrics.update(predictive, targets)
    found = metrics.compute()
    names = sorted(found, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    return {name: float(found[name]) for name in names}
