"""One sentence for each model: is its uncertainty right; if not, what is wrong and what helps.

The sentence follows the verdict (:mod:`lightning_bnn.calibration.verdict`); its figures come from
the bins that leave the band, from the temperature, and from the coverage of the intervals.

Nothing is praised that could not have failed: below :func:`unseen_gap` a gap goes unnoticed, and
where this is more than COARSE the sentence says so. Nothing is called a fault that is too small to
matter: with very many examples a gap of a tenth of a point is significant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["COARSE", "class_headline", "number_headline", "percent", "points", "unseen_gap"]

Numbers = Mapping[str, Any]
# A temperature or a factor this close to 1 changes nothing that could be seen.
NEAR_ONE = 0.02
# Ten points: with wider bands than this on either side, finding nothing says little.
COARSE = 0.1
# A fault is immaterial below a mean gap of one point, a temperature within 5 percent of 1, and
# no gap of 5 points in any bin that leaves the band.
IMMATERIAL_GAP, IMMATERIAL_TEMPERATURE, IMMATERIAL_BIN = 0.01, 0.05, 0.05
# The temperature is searched in [0.01, 100]: at the ends there is no best one.
COLDEST, HOTTEST = 0.011, 99.0


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


def unseen_gap(block: Numbers) -> float:
    """Half of the band's width: what a true gap must exceed to be noticed, by its own bin alone.

    Of classes the mean over predictions, of numbers that of the coverage of the 90% interval.

    Example:
        >>> width = {"count": [0, 10, 30], "lower": [None, 0.2, 0.8], "upper": [None, 0.8, 1.0]}
        >>> round(unseen_gap({"reliability": {"width": width}}), 3)
        0.15
    """
    if "reliability" in block:
        curve = block["reliability"]["width"]
        counts = curve["count"]
    else:
        curve = block["coverage"]
        counts = [float(abs(nominal - 0.9) < 1e-9) for nominal in curve["nominal"]]
    total = weight = 0.0
    for count, lower, upper in zip(counts, curve["lower"], curve["upper"], strict=True):
        if count and lower is not None and upper is not None:
            total += count * (upper - lower) / 2
            weight += count
    return total / weight if weight else 0.0


def class_headline(block: Numbers, said: str) -> tuple[str, str]:
    """Level and text for a model of classes.

    Args:
        block: The model's numbers.
        said: What they are about, such as "719 examples".
    """
    label = block["verdict"]["label"]
    curve = block["reliability"]["width"]
    over, under = _misses(curve, "over"), _misses(curve, "under")
    if label == "unknown":
        return "note", "nothing can be said without examples."
    if label == "nothing found" and block["verdict"].get("clustered"):
        return "note", "no miscalibration found, but so few examples could not show much."
    if label == "nothing found":
        gap = points(unseen_gap(block))
        shown = f"{said} would show only gaps above about {gap} in a bin"
        return "note", f"no miscalibration found, but {shown}."
    if label == "calibrated" and block["verdict"].get("clustered"):  # by the score alone
        return "good", f"neither over- nor under-confident on the whole, as far as {said} show."
    if label == "calibrated" and not (over or under):
        return "good", f"well calibrated: every bin lies within what {said} allow."
    if label == "calibrated":  # the band that is drawn is a little narrower than the verdict's
        return "good", f"well calibrated: no gap is clearly beyond chance in {said}."
    if label == "miscalibrated":
        parts = [part for part in (over, under) if part]
        return "bad", f"miscalibrated: {' and '.join(parts) or 'some bins leave the band'}."
    if _immaterial(block):
        value = f"temperature {block['temperature']['value']:.2f}"
        small = f"too small to matter for most uses ({value})"
        return "note", f"{label} by less than a point on average: {small}."
    found = over if label == "over-confident" else under
    text = found or f"{label} on the whole, though no single bin shows it"
    level = "bad" if label == "over-confident" else "warn"
    return level, f"{text}; {_remedy(block, label)}."


def _immaterial(block: Numbers) -> bool:
    """Whether a significant fault is too small to matter."""
    error, value = block["scalars"]["ece"], block["temperature"]["value"]
    if error is None or value is None or block["invalid"].get("impossible"):
        return False
    curve = block["reliability"]["width"]
    largest = max((_gap(curve, i) for i in _outside(curve)), default=0.0)
    near = abs(value - 1) <= IMMATERIAL_TEMPERATURE
    return bool(error < IMMATERIAL_GAP and near and largest < IMMATERIAL_BIN)


def _gap(curve: Numbers, index: int) -> float:
    return float(abs(curve["stated"][index] - curve["came"][index]))


def _outside(curve: Numbers, sides: tuple[str, ...] = ("over", "under")) -> list[int]:
    """The bins whose share of hits leaves the band: below it (over-confident), or above."""
    found = []
    for index, came in enumerate(curve["came"]):
        if came is None:
            continue
        below, above = came < curve["lower"][index], came > curve["upper"][index]
        if (below and "over" in sides) or (above and "under" in sides):
            found.append(index)
    return found


def _misses(curve: Numbers, side: str) -> str:
    """Where and how far what came misses what was stated, in the two heaviest runs of bins."""
    runs: list[list[int]] = []
    for index in _outside(curve, (side,)):
        # Empty bins do not end a run: nothing was stated there.
        if runs and not any(curve["count"][runs[-1][-1] + 1 : index]):
            runs[-1].append(index)
        else:
            runs.append([index])
    if not runs:
        return ""
    weights = [sum(curve["count"][index] for index in run) for run in runs]
    heaviest = sorted(range(len(runs)), key=lambda i: -weights[i])[:2]
    parts = []
    for i in sorted(heaviest):
        gap = sum(curve["count"][index] * _gap(curve, index) for index in runs[i]) / weights[i]
        parts.append(f"by {points(gap)} {_where(curve['edges'], runs[i])}")
    return f"{side}-confident {' and '.join(parts)}"


def _where(edges: list[float], run: list[int]) -> str:
    digits = 2 if len(edges) <= 51 else 3
    start, end = edges[run[0]], edges[run[-1] + 1]
    if start <= 0 and end >= 1:
        return "everywhere"
    if end >= 1:
        return f"above {start:.{digits}g}"
    if start <= 0:
        return f"below {end:.{digits}g}"
    return f"between {start:.{digits}g} and {end:.{digits}g}"


def _remedy(block: Numbers, label: str) -> str:
    """What a temperature would do: mend it if the scaled rows pass where a fault would show."""
    temperature = block["temperature"]
    value, before, after = temperature["value"], temperature["before"], temperature["after"]
    names = ("nll", "ece", "brier")
    useless = "no single temperature mends it"
    if value is None or any(before[name] is None or after[name] is None for name in names):
        return useless
    if not COLDEST < value < HOTTEST:
        return "the confidences carry almost no information"
    right = value > 1 + NEAR_ONE if label == "over-confident" else value < 1 - NEAR_ONE
    falls = [name for name in names if after[name] < before[name]]
    if not right or "nll" not in falls:
        return useless
    name = "ece" if "ece" in falls else "nll"
    change = f"{name.upper()} {before[name]:.3f} to {after[name]:.3f}"
    if temperature.get("verdict_after") == "calibrated" and unseen_gap(block) <= COARSE:
        return f"temperature {value:.2f} would mend it ({change})"
    return f"temperature {value:.2f} would help ({change})" if len(falls) == 3 else useless


def number_headline(block: Numbers, said: str) -> tuple[str, str]:
    """Level and text for a model of numbers.

    Args:
        block: The model's numbers.
        said: What they are about, such as "400 examples".
    """
    label, scalars = block["verdict"]["label"], block["scalars"]
    if label == "unknown":
        return "note", "nothing can be said without examples."
    holds, factor = scalars["coverage_90"], scalars["widening_90"]
    held = f"the 90% interval holds {percent(holds)}"
    groups = len(block["verdict"].get("spread_outside") or ())
    if label == "nothing found" and block["verdict"].get("clustered"):
        return "note", "no miscalibration found, but so few examples could not show much."
    if label == "nothing found":
        gap = points(unseen_gap(block))
        shown = f"{said} would show only gaps above about {gap} in the 90% interval"
        return "note", f"no miscalibration found, but {shown}."
    if label == "calibrated":
        return "good", f"well calibrated: {held}, and {said} show nothing amiss."
    if label == "biased":
        score = scalars["mean_score"]
        side = "low" if score > 0 else "high"
        size = f"{abs(score):.2g}" if abs(score) < 10 else f"{abs(score):,.0f}"
        return "bad", f"biased: predicts too {side} by {size} sd on average; {held}."
    if label in ("over-confident", "under-confident"):
        return _wrong_spread(block, label, held, holds, factor, groups)
    if groups and _pit_inside(block["pit"]):
        off = "the stated spread does not follow the errors"
        return "warn", f"calibrated on average, but {off}; {held}."
    return "bad", f"miscalibrated: the shape of the distribution is wrong; {held}."


def _wrong_spread(
    block: Numbers, label: str, held: str, holds: float, factor: float, groups: int
) -> tuple[str, str]:
    over = label == "over-confident"
    level, kind = ("bad", "narrow") if over else ("warn", "wide")
    ratio = _spread_ratio(block)
    if not groups and abs(ratio - 1) <= NEAR_ONE and abs(holds - 0.9) < IMMATERIAL_GAP:
        small = f"too small to matter for most uses ({held})"
        return "note", f"intervals too {kind} by about {percent(abs(ratio - 1))}: {small}."
    if (holds < 0.9 and factor > 1 + NEAR_ONE) if over else (holds > 0.9 and factor < 1 - NEAR_ONE):
        verb = "widening" if over else "narrowing"
        fix = f"{verb} by a factor {factor:.2f} would make the 90% interval hold 90%"
        return level, f"intervals too {kind}: {held}; {fix}."
    if groups:
        size = "larger" if over else "smaller"
        where = f"at some stated spreads the errors are {size} than stated"
        return level, f"intervals too {kind} for some: {held}, but {where}."
    if over:
        return level, f"intervals too narrow far out: {held}, but the largest errors go beyond."
    return level, f"intervals too wide: {held}, and large errors are rarer than stated."


def _spread_ratio(block: Numbers) -> float:
    """Errors in units of what was stated: z of the verdict is (Σz² − n) / √(2n)."""
    z, count = block["verdict"].get("z"), sum(block["pit"]["count"])
    if z is None or not count or block["verdict"].get("clustered"):
        return math.inf  # not known from z
    return math.sqrt(max(0.0, 1 + z * math.sqrt(2 / count)))


def _pit_inside(pit: Numbers) -> bool:
    bars = zip(pit["count"], pit["lower"], pit["upper"], strict=True)
    return all(lower <= count <= upper for count, lower, upper in bars)
