"""R-hat and effective sample sizes of scalars watched along chains, computed by ArviZ.

R-hat is the rank-normalised split one, the larger of its plain and its folded form; the bulk and
the tail effective sample size (ESS) say how many independent draws would tell as much of the
centre and of the 5% and 95% quantiles. See Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021),
"Rank-normalization, folding, and localization: an improved R-hat".

Three kinds of values have no such statistics, and get what is true of them:

* a scalar that does not move (an output behind dead units): NaN, and counted as constant;
* a scalar that is not finite in some draw: an R-hat of infinity and an ESS of 0;
* a single chain, which R-hat cannot compare with another: its two halves are given to ArviZ as
  two chains, so that a drift is still seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_bnn.errors import ConfigurationError

__all__ = [
    "ESS_LIMIT",
    "RHAT_LIMIT",
    "Statistics",
    "compute_statistics",
    "reduce_known",
    "require_arviz",
]

# Above this R-hat chains do not agree, and with a smaller ESS neither R-hat nor quantiles can be
# relied on: what Vehtari et al. recommend.
RHAT_LIMIT = 1.01
ESS_LIMIT = 400

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# A range below this part of a scalar's size is rounding of float32, not movement.
_ROUNDING = 1e-6
_TAILS = (0.05, 0.95)


def require_arviz() -> Any:
    """The module ``arviz``, or an error that says how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # versions before 1 announce the next one on import
            import arviz  # optional
    except ImportError as error:
        raise ConfigurationError(
            "R-hat and effective sample sizes come from ArviZ, which is not installed. Install it "
            "with: pip install 'lightning-bnn[diagnostics]'."
        ) from error
    return arviz


def reduce_known(function: Callable[[Floats], Any], values: Floats) -> float:
    """A number of the values that are not NaN, such as their largest; NaN if there are none.

    Example:
        >>> reduce_known(np.max, np.array([1.0, np.nan, 2.0]))
        2.0
    """
    known = values[~np.isnan(values)]
    return float(function(known)) if known.size else float("nan")


@dataclass(frozen=True)
class Statistics:
    """What ArviZ says of E scalars watched along C chains.

    Attributes:
        labels: The name of each scalar.
        rhat: R-hat of each scalar, ``(E,)``; NaN where it is constant.
        ess_bulk: Effective sample size for the centre, over all chains.
        ess_tail: The same for the 5% and 95% quantiles, whichever is smaller.
        chain_ess: Bulk ESS of each chain by itself, ``(C, E)``.
        constant: Which scalars do not move.
        not_finite: Which scalars hold a NaN or an infinity.
    """

    labels: tuple[str, ...]
    rhat: Floats
    ess_bulk: Floats
    ess_tail: Floats
    chain_ess: Floats
    constant: Flags
    not_finite: Flags

    @property
    def max_rhat(self) -> float:
        """The worst R-hat; NaN if every scalar is constant."""
        return reduce_known(np.max, self.rhat)

    def worst(self, count: int) -> list[int]:
        """The scalars of the largest R-hat, worst first; constant ones come last.

        Example:
            >>> values = np.random.default_rng(0).normal(size=(2, 50, 3))
            >>> values[0, :, 1] += 5
            >>> compute_statistics(values, ["a", "b", "c"]).worst(1)
            [1]
        """
        order = np.argsort(-np.where(np.isnan(self.rhat), -np.inf, self.rhat), kind="stable")
        return [int(index) for index in order[:count]]


def compute_statistics(values: Floats, labels: Sequence[str], by_chain: bool = True) -> Statistics:
    """R-hat and ESS of scalars watched along chains.

    Args:
        values: Of shape ``(chains, draws, scalars)``.
        labels: A name for each scalar.
        by_chain: Whether to find the ESS of each chain too, which is half of the work; else
            they are NaN.

    Raises:
        ConfigurationError: There are too few draws, or ArviZ is not installed.

    Example:
        >>> values = np.random.default_rng(0).normal(size=(4, 500, 1))
        >>> statistics = compute_statistics(values, ["x"])
        >>> bool(statistics.max_rhat < RHAT_LIMIT), statistics.chain_ess.shape
        (True, (4, 1))
        >>> values[0] += 3                               # one chain sits elsewhere
        >>> bool(compute_statistics(values, ["x"]).max_rhat > RHAT_LIMIT)
        True
    """
    arviz = require_arviz()
    chains, draws, count = values.shape
    least = 4 if chains > 1 else 8
    if draws < least:
        raise ConfigurationError(
            f"R-hat and ESS need at least {least} draws per chain with {chains} "
            f"chain{'s' * (chains > 1)}; got {draws}. Sample longer, or thin less."
        )
    not_finite: Flags = np.asarray(~np.isfinite(values).all((0, 1)))
    values = np.where(not_finite, 0.0, values)
    still = np.ptp(values, axis=1) <= _ROUNDING * np.abs(values).max(1)  # (chains, scalars)
    constant = np.ptp(values, axis=(0, 1)) <= _ROUNDING * np.abs(values).max((0, 1))
    constant &= ~not_finite
    moving = ~(constant | not_finite)

    def ask(function: Callable[..., Any], series: Floats, bad: float, **options: Any) -> Floats:
        """What ArviZ says of each scalar that moves, ``bad`` of one that is not finite."""
        answers = np.where(not_finite, bad, np.nan)
        for index in np.flatnonzero(moving):
            answers[index] = function(np.ascontiguousarray(series[:, :, index]), **options)
        return answers

    half = draws // 2
    compared = values if chains > 1 else np.concatenate([values[:, :half], values[:, -half:]])
    chain_ess = np.full((chains, count), np.nan)
    with np.errstate(all="ignore"):  # chains that stand still divide by zero
        rhat = ask(arviz.rhat, compared, np.inf, method="rank")
        bulk = ask(arviz.ess, values, 0.0, method="bulk")
        tail = ask(arviz.ess, values, 0.0, method="tail", prob=_TAILS)
        if by_chain:
            alone = [ask(arviz.ess, chain[None], 0.0, method="bulk") for chain in values]
            # a chain that stands still is worth one draw; ArviZ counts all of its draws
            chain_ess = np.where(still & moving, 1.0, np.stack(alone))
    return Statistics(tuple(labels), rhat, bulk, tail, chain_ess, constant, not_finite)
