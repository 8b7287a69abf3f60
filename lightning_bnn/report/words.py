"""The report in words: few, short and true sentences that need no training in statistics.

Each has a level: "bad" (must not be trusted), "warn" (look at it), "good" (can be) or "note"; they
come in this order. What holds for these data only is said of them ("here"), and what is the
model's own estimate is called so. Sections give most of the sentences; here are those that belong
to no section, and what all of them use. Nothing is praised that could not have failed: below
:func:`unseen_gap` a gap goes unnoticed, and where this is more than COARSE the sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_bnn.report.figure import as_array

__all__ = [
    "COARSE", "NEAR_ONE", "ONE_DRAW", "about_invalid", "class_name", "listed", "nothing_found",
    "plural", "points", "rounded_percent", "statements", "summary", "unseen_gap",
]  # fmt: skip

Numbers = Mapping[str, Any]
Line = tuple[str | None, str, str]

ONE_DRAW = "One draw cannot show disagreement."
LEVELS = ("bad", "warn", "good", "note")
# A temperature or a factor this close to 1 changes nothing that could be seen.
NEAR_ONE = 0.02
# Ten points: with wider bands than this on either side, finding nothing says little.
COARSE = 0.1
# Gaps above this that would go unseen are worth a word.
WORTH_SAYING = 0.05


def rounded_percent(share: float) -> str:
    """A share in percent, with a digit more close to 0 and 1.

    Example:
        >>> rounded_percent(0.782), rounded_percent(0.9961), rounded_percent(1.0)
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


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    Example:
        >>> plural(1, "example"), plural(1200, "class")
        ('1 example', '1,200 classes')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def listed(names: Sequence[Any], most: int = 5) -> str:
    """Names in a row, of which the first are given."""
    shown = [str(name) for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def unseen_gap(block: Numbers) -> float:
    """Half of the band's width: what a true gap must exceed to be noticed, by its own bin alone.

    For a classification the mean over predictions, for a regression that of the 90% interval.

    Example:
        >>> width = {"count": [0, 10, 30], "lower": [None, 0.2, 0.8], "upper": [None, 0.8, 1.0]}
        >>> round(unseen_gap({"reliability": {"width": width}}), 3)
        0.15
    """
    if "reliability" in block:
        curve = block["reliability"]["width"]
        counts = as_array(curve["count"])
    else:
        curve = block["coverage"]
        counts = np.isclose(curve["nominal"], 0.9).astype(float)
    half = (as_array(curve["upper"]) - as_array(curve["lower"])) / 2
    known = (counts > 0) & np.isfinite(half)
    return float(np.average(half[known], weights=counts[known])) if known.any() else 0.0


def nothing_found(block: Numbers, said: str, where: str) -> tuple[str, str]:
    """Level and text where no fault was found, nor could have been."""
    if block["verdict"]["clustered"]:
        return "note", "no miscalibration found, but so few examples could not show much."
    shown = f"{said} would show only gaps above about {points(unseen_gap(block))} in {where}"
    return "note", f"no miscalibration found, but {shown}."


def statements(document: Numbers) -> str:
    """How many predictions the report is about, such as "719 examples"."""
    data = document["data"]
    if data["rows"] <= data["examples"]:
        return plural(data["rows"], "example")
    one = "statement" if document["task"] == "classification" else "output"
    return plural(data["rows"], one)


def class_name(document: Numbers, index: int) -> str:
    """What a class is called: by its name, else by its number."""
    names = document["data"]["class_names"]
    return str(index) if names is None else str(names[index])


def summary(document: Numbers, of_sections: Iterable[Line]) -> list[dict[str, Any]]:
    """The sentences of a document.

    Args:
        document: The document, without its summary.
        of_sections: What the sections say.

    Returns:
        For each sentence ``"model"`` (None if about all), ``"level"`` and ``"text"``; the worst
        levels first.
    """
    lines: list[Line] = [*_about_collapse(document), *of_sections]
    lines += _about_parts(document)
    lines += _about_comparison(document["comparison"])
    lines += _about_data(document)
    lines.sort(key=lambda line: LEVELS.index(line[1]))
    return [{"model": model, "level": level, "text": text} for model, level, text in lines]


def _about_collapse(document: Numbers) -> Iterator[Line]:
    """Models that lost more than half of what the most accurate one knows above guessing.

    It comes first: of such a model no calibration makes up for what is lost, as after a pruning
    that went too far.
    """
    if document["task"] != "classification":
        return
    known = [b for b in document["models"] if b["scalars"]["accuracy"] is not None]
    if not known:
        return
    best = max(known, key=lambda block: float(block["scalars"]["accuracy"]))
    for block in known:
        accuracy, most = (b["scalars"]["accuracy"] for b in (block, best))
        if accuracy < (most + 1 / document["data"]["classes"]) / 2:
            text = (
                f"its accuracy has collapsed: {rounded_percent(accuracy)}, and "
                f"{rounded_percent(most)} with {best['name']}. How it is calibrated matters little."
            )
            yield block["name"], "bad", text


def about_invalid(block: Numbers) -> Iterator[Line]:
    """What of a model is not finite, or was called impossible."""
    number, first = block["invalid"]["count"], block["invalid"]["examples"]
    if number:
        which = ", ".join(map(str, first[:5])) + (", ..." if number > 5 else "")
        text = f"{plural(number, 'prediction')} not finite and left out: number {which}."
        yield block["name"], "bad", text
    if block["invalid"]["impossible"]:
        had = f"{plural(block['invalid']['impossible'], 'target')} had probability 0"
        text = f"{had}: what was observed was called impossible, and the NLL is infinite."
        yield block["name"], "bad", text


def _about_parts(document: Numbers) -> Iterator[Line]:
    """What part of the uncertainty more data would remove, for the model of the best NLL.

    Only a calibrated model of several draws can say: a wrong total has no right parts.
    """
    blocks = [block for block in document["models"] if block["scalars"]["nll"] is not None]
    block = min(blocks, key=lambda each: each["scalars"]["nll"], default=None)
    if block is None or block["draws"] == 1 or block["verdict"]["label"] != "calibrated":
        return
    scalars = block["scalars"]
    share = scalars.get("epistemic_share")
    if document["task"] == "classification" and scalars["entropy"]:
        share = scalars["epistemic"] / scalars["entropy"]
    if share is not None:
        part = f"{rounded_percent(share)} of its uncertainty is about its weights"
        help_ = "help" if share >= 0.5 else "help some" if share > 0.2 else "help little"
        text = f"by the model's own account {part}; more data of the same kind would {help_}."
        yield block["name"], "note", text


def _about_comparison(table: Numbers) -> Iterator[Line]:
    columns = table["columns"]
    judged = [row for row in table["rows"] if any(value["best"] for value in row["values"])]
    clear: dict[str, list[str]] = {}
    for row in judged:
        ahead = [value["best"] or value["tied"] for value in row["values"]]
        if sum(ahead) == 1:
            clear.setdefault(columns[ahead.index(True)], []).append(row["label"])
    won = [f"{name} in {len(rows)} ({listed(rows)})" for name, rows in clear.items()]
    if won:
        yield None, "note", f"clearly best of {plural(len(judged), 'row')}: {'; '.join(won)}."
    elif judged:
        yield None, "note", "no model is clearly best in any row of the comparison."
    if not table["complete"]:
        used = plural(table["examples"], "example")
        yield None, "warn", f"the comparison uses only the {used} that every model could predict."


def _about_data(document: Numbers) -> Iterator[Line]:
    data, task, blocks = document["data"], document["task"], document["models"]
    unseen = sum(unseen_gap(block) for block in blocks) / len(blocks)
    told = all(block["verdict"]["label"] == "nothing found" for block in blocks)
    if unseen > WORTH_SAYING and not told:
        where = "in a single bin" if task == "classification" else "in the 90% interval"
        level = "warn" if unseen > COARSE else "note"
        gaps = f"only gaps above about {points(unseen)} {where} would be seen"
        yield None, level, f"with {statements(document)}, {gaps}."
    if data["rows"] > data["examples"]:
        taken = "verdicts and intervals allow for their dependence, bands do not"
        examples = plural(data["examples"], "example")
        yield None, "note", f"the {examples} have several rows each: {taken}."
    if data["sampled"] is not None:
        part = f"{data['sampled']:,} of {plural(data['rows'], 'row')}"
        text = f"what needs ranks or single rows is from a uniform sample of {part}."
        yield None, "note", text
