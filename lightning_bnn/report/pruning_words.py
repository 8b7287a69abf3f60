"""The cost of pruning in words: how much went before the scores left what chance allows.

The measure is the report's own: the bootstrap interval of the whole model. A score above its
interval is worse by more than other examples of the same kind would show of the whole model. That
it is not above says only that these examples do not tell, and so the sentence gives the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["about_pruning", "pruning_sentence"]

Numbers = Mapping[str, Any]
# The scores that are said, by task; accuracy is said as the error rate.
SAID = {
    "classes": (("accuracy", "error"), ("nll", "NLL")),
    "numbers": (("rmse", "RMSE"), ("nll", "NLL")),
}


def about_pruning(blocks: Sequence[Numbers]) -> Iterator[tuple[str | None, str, str]]:
    """The line of each model that was asked for a curve: its name, the level and the text.

    Example:
        >>> list(about_pruning([{"name": "net", "pruning": {"text": "can shrink."}}, {}]))
        [('net', 'note', 'can shrink.')]
    """
    for block in blocks:
        text = (block.get("pruning") or {}).get("text")
        if text:
            yield block["name"], "note", text


def pruning_sentence(
    pruning: Numbers, task: str, intervals: Mapping[str, tuple[float | None, float | None]]
) -> str | None:
    """What the results say; None where nothing was removed.

    Args:
        pruning: The numbers of the curve, or the reason why there is none.
        task: "classes" or "numbers".
        intervals: Of the whole model, by score.

    Example:
        >>> results = [
        ...     {"fraction": 0.0, "scores": {"accuracy": 0.9872, "nll": 0.049}},
        ...     {"fraction": 0.95, "scores": {"accuracy": 0.987, "nll": 0.051}}]
        >>> block = {"unit": "weight", "total": 2392800, "results": results}
        >>> intervals = {"accuracy": (0.985, 0.989), "nll": (0.042, 0.056)}
        >>> pruning_sentence(block, "classes", intervals)  # doctest: +NORMALIZE_WHITESPACE
        'with 95% of 2,392,800 weights removed, error 1.30% instead of 1.28% and NLL 0.0510 instead
        of 0.0490: none above the 95% interval of the whole model.'
    """
    if "unavailable" in pruning:
        return f"no pruning by signal to noise: {pruning['unavailable']}"
    ordered = sorted(pruning["results"], key=lambda one: one["fraction"])
    removed = [one for one in ordered if one["fraction"] > 0]
    if not removed:
        return None
    whole = ordered[0]["scores"] if ordered[0]["fraction"] == 0 else None
    noun = "weights" if pruning["unit"] == "weight" else "units"
    of_all = f"of {pruning['total']:,} {noun} removed"
    limits = {key: end for key, _ in SAID[task] if (end := _worst(key, intervals)) is not None}
    if len(limits) < len(SAID[task]):  # nothing to measure by
        return f"with {_share(removed[-1])} {of_all}, {_scores(removed[-1], task, whole)}."
    kept = 0
    while kept < len(removed) and not _above(removed[kept], task, limits):
        kept += 1
    interval = "the 95% interval of the whole model"
    if not kept:
        first = removed[0]
        above = " and ".join(_above(first, task, limits))
        said = _scores(first, task, whole)
        return f"already with {_share(first)} {of_all}, {said}: {above} above {interval}."
    last = removed[kept - 1]
    text = f"with {_share(last)} {of_all}, {_scores(last, task, whole)}: none above {interval}"
    if kept < len(removed):
        following = removed[kept]
        above = " and ".join(_above(following, task, limits))
        text += f"; with {_share(following)}, {_scores(following, task)}: {above} above it"
    return f"{text}."


def _worst(key: str, intervals: Mapping[str, tuple[float | None, float | None]]) -> float | None:
    """The worse end of an interval."""
    return intervals.get(key, (None, None))[0 if key == "accuracy" else 1]


def _above(result: Numbers, task: str, limits: Mapping[str, float]) -> list[str]:
    """The scores that are worse than their limits; one that is not finite is among them."""
    found = []
    for key, name in SAID[task]:
        value, sign = result["scores"].get(key), -1 if key == "accuracy" else 1
        if value is None or sign * value > sign * limits[key]:
            found.append(name)
    return found


def _scores(result: Numbers, task: str, whole: Numbers | None = None) -> str:
    parts = []
    for key, name in SAID[task]:
        part = f"{name} {_number(key, result['scores'].get(key))}"
        if whole is not None:
            part += f" instead of {_number(key, whole.get(key))}"
        parts.append(part)
    return " and ".join(parts)


def _number(key: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    if key == "accuracy":
        return f"{100 * (1 - value):.2f}%"
    return f"{value:#.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _share(result: Numbers) -> str:
    return f"{100 * result['fraction']:.6g}%"
