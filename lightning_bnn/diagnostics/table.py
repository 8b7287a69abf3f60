"""A diagnosis as a table of plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from lightning_bnn.diagnostics.statistics import RHAT_LIMIT, Floats, Statistics

if TYPE_CHECKING:
    from lightning_bnn.diagnostics.diagnosis import Diagnosis

__all__ = ["format_diagnosis"]

_WIDTH = 88
_SHOWN = 3


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """The table, what is worst, what was left out, and the advice.

    Example:
        >>> from lightning_bnn.diagnostics import Diagnosis
        >>> from lightning_bnn.diagnostics.statistics import compute_statistics
        >>> values = np.random.default_rng(0).normal(size=(2, 200, 1))
        >>> statistics = compute_statistics(values, ["prediction[0]"])
        >>> print(format_diagnosis(Diagnosis(2, 200, {"prediction": statistics}, {})))
        2 chains of 200 draws ...
    """
    chains, draws = diagnosis.chains, diagnosis.draws
    lines = [f"{chains} chain{'s' * (chains > 1)} of {draws} draws"]
    names = [*diagnosis.function, *diagnosis.weights]
    first = max([len("function space"), *(len(name) + 2 for name in names)])
    lines += ["", *_header(first)]
    for title, group in (("function space", diagnosis.function), ("weights", diagnosis.weights)):
        if group:
            lines.append(title)
            lines += [_row(f"  {name}", group[name], first) for name in group]
    lines.append("")
    lines += _worst(diagnosis)
    for title, labels in (
        ("constant:", diagnosis.constant),
        ("not finite:", diagnosis.not_finite),
    ):
        if labels:
            lines += wrap(f"{title} {_shorten(labels)}", _WIDTH)
    lines += [line for note in diagnosis.notes for line in wrap(f"note: {note}", _WIDTH)]
    verdict = "yes" if diagnosis.converged else "no"
    lines.append(f"converged: {verdict} (R-hat at most {RHAT_LIMIT})")
    lines += wrap(diagnosis.advice, _WIDTH)
    return "\n".join(lines)


def _header(first: int) -> list[str]:
    top = f"{'':<{first}}{'':>8}" + "".join(
        f"{head:>16}" for head in ("R-hat", "bulk ESS", "tail ESS", "ESS of a chain")
    )
    below = f"{'':<{first}}{'scalars':>8}" + f"{'median':>9}{'worst':>7}" * 4
    return [top.rstrip(), below]


def _row(name: str, statistics: Statistics, first: int) -> str:
    cells = [f"{name:<{first}}{len(statistics.labels):>8}"]
    cells += _pair(statistics.rhat, np.max, ".3f")
    cells += _pair(statistics.ess_bulk, np.min, ".0f")
    cells += _pair(statistics.ess_tail, np.min, ".0f")
    cells += _pair(statistics.chain_ess, np.min, ".0f")
    return "".join(cells)


def _pair(values: Floats, worst: Callable[[Floats], float], form: str) -> list[str]:
    known = values[~np.isnan(values)]
    if not known.size:
        return [f"{'-':>9}", f"{'-':>7}"]
    return [f"{np.median(known):>9{form}}", f"{worst(known):>7{form}}"]


def _worst(diagnosis: Diagnosis) -> list[str]:
    """The scalar of the largest R-hat, in function space and among the weights."""
    lines = []
    for title, group in (("function space", diagnosis.function), ("weights", diagnosis.weights)):
        known = [statistics for statistics in group.values() if not np.isnan(statistics.max_rhat)]
        if known:
            worst = max(known, key=lambda statistics: statistics.max_rhat)
            label = worst.labels[worst.worst(1)[0]]
            lines.append(f"worst in {title}: {label}, R-hat {worst.max_rhat:.3f}")
    return lines


def _shorten(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return f"{len(labels)} ({', '.join(labels[:_SHOWN])}{more})"
