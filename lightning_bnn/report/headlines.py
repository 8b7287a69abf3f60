"""One sentence for each model: is its uncertainty right; if not, what is wrong and what mends it.

The sentence follows the verdict (:mod:`lightning_bnn.calibration.verdict`); its figures come from
the bins that leave the band, from the temperature, and from the coverage of the intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["class_headline", "number_headline", "percent", "points"]

Numbers = Mapping[str, Any]
# A temperature or a factor this close to 1 changes nothing that could be seen.
NEAR_ONE = 0.02


def percent(share: float) -> str:
    """A share in percent, with a digit more close to 0 and 1.

    Example:
        >>> percent(0.782), percent(0.9961), percent(1.0)
        ('78%', '99.6%', '100%')
    """
    near = 0 < share < 0.01 or 0.99 < share < 1
    return f"{100 * share:.1f}%" if near else f"{100 * share:.0f}%"


def points(gap: float) -> str:
    """A gap between two probabilities in percentage points.

    Example:
        >>> points(0.041), points(0.012), points(0.001)
        ('4 points', '1 point', 'less than 1 point')
    """
    rounded = round(100 * gap)
    if rounded < 1:
        return "less than 1 point"
    return "1 point" if rounded == 1 else f"{rounded} points"


def class_headline(block: Numbers, said: str) -> tuple[str, str]:
    """Level and text for a model of classes.

    Args:
        block: The model's numbers.
        said: What they are about, such as "719 examples".
    """
    label = block["verdict"]["label"]
    curve = block["reliability"]["width"]
    over, under = _misses(curve, "over"), _misses(curve, "under")
    if label == "calibrated" and not (over or under):
        return "good", f"well calibrated: every bin lies within what {said} allow."
    if label == "calibrated":  # the band that is drawn is a little narrower than the verdict's
        return "good", f"well calibrated: no gap is beyond chance in {said}."
    if label == "miscalibrated":
        parts = [part for part in (over, under) if part]
        return "bad", f"miscalibrated: {' and '.join(parts) or 'some bins leave the band'}."
    if label == "unknown":
        return "note", "nothing can be said without examples."
    found = over if label == "over-confident" else under
    text = found or f"{label} on the whole, though no single bin shows it"
    level = "bad" if label == "over-confident" else "warn"
    return level, f"{text}; {_remedy(block['temperature'], label)}."


def _misses(curve: Numbers, side: str) -> str:
    """Where and how far what came misses what was stated, on one side of the band."""
    outside = []
    for index, came in enumerate(curve["came"]):
        if came is None:
            continue
        below, above = came < curve["lower"][index], came > curve["upper"][index]
        if below if side == "over" else above:
            outside.append(index)
    if not outside:
        return ""
    weight = sum(curve["count"][index] for index in outside)
    gaps = (curve["count"][i] * abs(curve["stated"][i] - curve["came"][i]) for i in outside)
    start, end = curve["edges"][outside[0]], curve["edges"][outside[-1] + 1]
    if end >= 1:
        where = f"above {start:.2g}"
    elif start <= 0:
        where = f"below {end:.2g}"
    else:
        where = f"between {start:.2g} and {end:.2g}"
    return f"{side}-confident by {points(sum(gaps) / weight)} {where}"


def _remedy(temperature: Numbers, label: str) -> str:
    value, before, after = temperature["value"], temperature["before"], temperature["after"]
    known = value is not None and None not in (before["nll"], after["nll"])
    helps = known and after["nll"] < before["nll"]
    right = known and (value > 1 + NEAR_ONE if label == "over-confident" else value < 1 - NEAR_ONE)
    if not (helps and right):
        return "no single temperature mends it"
    name = "ece" if after["ece"] < before["ece"] else "nll"
    change = f"{name.upper()} {before[name]:.3f} to {after[name]:.3f}"
    return f"temperature {value:.2g} would mend it ({change})"


def number_headline(block: Numbers, said: str) -> tuple[str, str]:
    """Level and text for a model of numbers.

    Args:
        block: The model's numbers.
        said: What they are about, such as "400 examples".
    """
    label, scalars = block["verdict"]["label"], block["scalars"]
    holds, factor = scalars["coverage_90"], scalars["widening_90"]
    held = f"the 90% interval holds {percent(holds)}" if holds is not None else ""
    if label == "calibrated":
        return "good", f"well calibrated: {held}, and {said} show nothing amiss."
    if label == "biased":
        score = scalars["mean_score"]
        side = "low" if score > 0 else "high"
        return "bad", f"biased: predicts too {side} by {abs(score):.2g} sd on average; {held}."
    if label == "over-confident":
        if holds < 0.9 and factor > 1 + NEAR_ONE:
            fix = f"widening by a factor {factor:.2g} would mend it"
            return "bad", f"intervals too narrow: {held}; {fix}."
        return "bad", f"intervals too narrow far out: {held}, but the largest errors go beyond."
    if label == "under-confident":
        if holds > 0.9 and factor < 1 - NEAR_ONE:
            fix = f"narrowing by a factor {factor:.2g} would mend it"
            return "warn", f"intervals too wide: {held}; {fix}."
        return "warn", f"intervals too wide: {held}, and large errors are rarer than stated."
    if label == "unknown":
        return "note", "nothing can be said without examples."
    return "bad", f"miscalibrated: the shape of the distribution is wrong; {held}."
