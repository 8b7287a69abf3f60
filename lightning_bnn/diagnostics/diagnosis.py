"""Have the chains converged, and how many independent draws are they worth?

The verdict is of function space: of predictions at given inputs, which do not depend on how the
hidden units are numbered. R-hat of weights is shown below it for those who ask; chains that
sit in permuted copies of one mode disagree on weights and are none the worse for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np

from lightning_bnn.checks import check_whole
from lightning_bnn.diagnostics.chains import Series, Watched, label_elements, watch
from lightning_bnn.diagnostics.examples import Examples, choose_examples
from lightning_bnn.diagnostics.statistics import (
    ESS_LIMIT,
    RHAT_LIMIT,
    Floats,
    Statistics,
    compute_statistics,
    reduce_known,
)
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.selection import Choice

__all__ = ["Diagnosis", "diagnose", "diagnose_watched"]

# With fewer draws of each chain, R-hat of independent draws may be anything.
_SHORT = 20
# R-hat of independent draws passes 1 by chance, at worst of many scalars by this over all draws.
_CHANCE = 20.0
# A chain of a lower ESS, if it has the draws for it, has moved too little to tell where it belongs.
_SLOW_ESS = 50
# Of the text: its width, and how many names it lists before "and more".
_WIDTH = 88
_SHOWN = 3


@dataclass(frozen=True)
class Diagnosis:
    """R-hat and effective sample sizes of chains; print it for a table.

    Attributes:
        chains: The number of chains.
        draws: The number of draws of each.
        function: Statistics of predictions and of the mean log likelihood, by name.
        weights: Statistics of chosen weights, by name.
        notes: What was left out.
    """

    chains: int
    draws: int
    function: Mapping[str, Statistics]
    weights: Mapping[str, Statistics]
    notes: tuple[str, ...] = ()

    @property
    def rhat(self) -> Floats:
        """R-hat of every scalar in function space."""
        return self._join("rhat")

    @property
    def ess_bulk(self) -> Floats:
        """Bulk ESS over all chains, of every scalar in function space."""
        return self._join("ess_bulk")

    @property
    def ess_tail(self) -> Floats:
        """Tail ESS over all chains, of every scalar in function space."""
        return self._join("ess_tail")

    @property
    def chain_ess(self) -> Floats:
        """Bulk ESS of each chain by itself, ``(chains, scalars)``, in function space."""
        return self._join("chain_ess")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the scalars in function space."""
        return tuple(self._join("labels").tolist())

    @property
    def max_rhat(self) -> float:
        """The worst R-hat in function space; NaN if nothing moves."""
        return reduce_known(np.max, self.rhat)

    @property
    def min_ess(self) -> float:
        """The smallest bulk or tail ESS in function space; NaN if nothing moves."""
        return reduce_known(np.min, np.concatenate([self.ess_bulk, self.ess_tail]))

    @property
    def converged(self) -> bool:
        """Whether R-hat is at most 1.01 for all that moves in function space."""
        return self.max_rhat <= RHAT_LIMIT

    @property
    def constant(self) -> tuple[str, ...]:
        """The scalars, of function space and of weights, that do not move."""
        return self._named("constant")

    @property
    def not_finite(self) -> tuple[str, ...]:
        """The scalars, of function space and of weights, that hold a NaN or an infinity."""
        return self._named("not_finite")

    @property
    def advice(self) -> str:
        """What to do, in a sentence or two."""
        if self.chains > 1:
            return _advise(self)
        return (
            f"{_advise(self)} One chain cannot disagree with another: R-hat compares its own parts "
            "only. Run four or more (chains=4)."
        )

    def _join(self, name: str) -> Any:
        """One number of every scalar that decides: of function space, or of weights alone."""
        group = self.function or self.weights
        return np.concatenate([getattr(each, name) for each in group.values()], -1)

    def _named(self, flag: str) -> tuple[str, ...]:
        return tuple(
            label
            for statistics in (*self.function.values(), *self.weights.values())
            for label, flagged in zip(statistics.labels, getattr(statistics, flag), strict=True)
            if flagged
        )

    def __str__(self) -> str:
        """A table with the worst scalar of each row, what was left out, and the advice."""
        chains, draws = self.chains, self.draws
        names = [*self.function, *self.weights]
        first = max([len("function space"), *(len(name) + 2 for name in names)])
        heads = " scalars   R-hat  bulk ESS  tail ESS  ESS of a chain  worst"
        lines = [f"{chains} chain{'s' * (chains > 1)} of {draws} draws", "", " " * first + heads]
        for title, group in (("function space", self.function), ("weights", self.weights)):
            lines += [title] * bool(group)
            for name, statistics in group.items():
                cells = f"  {name}".ljust(first)
                cells += f"{len(statistics.labels):>8}{statistics.max_rhat:>8.3f}"
                for ess, width in (("ess_bulk", 10), ("ess_tail", 10), ("chain_ess", 16)):
                    least = reduce_known(np.min, getattr(statistics, ess))
                    cells += f"{least:>{width}.0f}"
                lines.append(f"{cells}  {statistics.labels[statistics.worst(1)[0]]}")
        lines.append("")
        for title, labels in (("constant", self.constant), ("not finite", self.not_finite)):
            if labels:
                more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
                lines.append(f"{title}: {len(labels)} ({', '.join(labels[:_SHOWN])}{more})")
        lines += [f"note: {note}" for note in self.notes]
        verdict = "yes" if self.converged else "no"
        lines += [f"converged: {verdict} (R-hat at most {RHAT_LIMIT})", *wrap(self.advice, _WIDTH)]
        return "\n".join(lines)


def diagnose(
    posterior: WeightPosterior,
    inputs: Any,
    weights: Choice = None,
    examples: int = 64,
    elements: int = 200,
) -> Diagnosis:
    """R-hat and ESS of a posterior's chains: of its predictions, then of chosen weights.

    Args:
        posterior: Stored draws, or a mixture of posteriors of stored draws; in a mixture each
            component is a chain, or several.
        inputs: Where to watch predictions: a loader of (inputs, targets) pairs or of inputs, one
            such batch, or a tensor. With targets the mean log likelihood is watched too. None
            to look at weights only.
        weights: Which weights to look at, as for :func:`lightning_bnn.selection.select` (``"*"``
            for all); none by default.
        examples: At most how many of the inputs are used, evenly chosen.
        elements: At most how many numbers of each quantity and of each weight tensor are
            watched, a fixed choice.

    Raises:
        ConfigurationError: A chain has fewer than 4 draws (8 if it is the only one), the
            posterior does not hold draws, or ArviZ is not installed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import DrawsPosterior
        >>> torch.manual_seed(0)
        <torch._C.Generator object at ...>
        >>> draws = [{"weight": torch.randn(1, 2), "bias": torch.randn(1)} for _ in range(2000)]
        >>> posterior = DrawsPosterior(nn.Linear(2, 1), Gaussian(0.1), draws)
        >>> diagnosis = diagnose(posterior, torch.randn(20, 2))
        >>> diagnosis.converged, diagnosis.draws, diagnosis.min_ess > 400
        (True, 2000, True)
    """
    check_whole("elements", elements, 1)
    chosen = None if inputs is None else choose_examples(inputs, examples)
    return diagnose_watched(watch(posterior, chosen, weights, elements), chosen, elements)


def diagnose_watched(
    watched: Watched, examples: Examples | None, elements: int, by_chain: bool = True
) -> Diagnosis:
    """The diagnosis of what :func:`~lightning_bnn.diagnostics.chains.watch` recorded."""

    def summarise(
        group: Mapping[str, Series], first: Sequence[int] | None
    ) -> dict[str, Statistics]:
        return {
            name: compute_statistics(
                series.values, label_elements(name, series.shape, elements, first), by_chain
            )
            for name, series in group.items()
            if name != "log_likelihood"  # of each example: the predictions tell as much
        }

    function = summarise(watched.function, None if examples is None else examples.indices)
    weights = summarise(watched.weights, None)
    chains, draws = next(iter((watched.function or watched.weights).values())).values.shape[:2]
    return Diagnosis(chains, draws, function, weights, watched.notes)


def _advise(diagnosis: Diagnosis) -> str:
    """What to do about the worst of it."""
    if diagnosis.not_finite:
        return (
            "Some draws predict NaN or infinity, so a chain has diverged: lower the learning rate, "
            "or clip gradients, and leave such draws out."
        )
    if np.isnan(diagnosis.max_rhat):
        return (
            "Nothing moves: every watched quantity is the same in all draws. Check that the "
            "learning rate and the temperature are above 0 and that draws were taken at different "
            "steps."
        )
    shortest = _SHORT * (2 if diagnosis.chains == 1 else 1)  # the halves of one chain are compared
    total = diagnosis.chains * diagnosis.draws
    by_chance = RHAT_LIMIT < diagnosis.max_rhat < 1 + _CHANCE / total
    if diagnosis.draws < shortest or by_chance:
        return (
            f"R-hat reaches {diagnosis.max_rhat:.2f}, but {diagnosis.draws} draws per chain are "
            "too few to judge by it, even if they are independent: collect at least "
            f"{shortest} per chain, and {_CHANCE / (RHAT_LIMIT - 1):,.0f} in all."
        )
    if not diagnosis.converged:
        high = f"R-hat reaches {diagnosis.max_rhat:.2f}, above {RHAT_LIMIT}"
        bad = diagnosis.rhat > RHAT_LIMIT
        if np.nanmedian(diagnosis.chain_ess[:, bad]) < min(_SLOW_ESS, diagnosis.draws / 2):
            return (
                f"{high}: chains still drift or move slowly. Use a longer burn-in and longer "
                "chains, a larger learning rate if it stays stable, or another sampler."
            )
        return (
            f"{high}: each chain moves freely but about its own place, so they have found "
            "different modes, and how much each mode weighs is not known. Keep all chains, and "
            "report the R-hat with what they predict. Longer chains, a cyclical schedule or "
            "another sampler may carry them between modes; a lower learning rate helps where it is "
            "its error that sets them apart."
        )
    if diagnosis.min_ess < ESS_LIMIT:
        return (
            f"The chains agree, but the worst quantity is worth only {diagnosis.min_ess:.0f} "
            f"independent draws, and {ESS_LIMIT} are recommended: run longer."
        )
    return "The chains agree, and there are enough draws for means and 90% intervals."
