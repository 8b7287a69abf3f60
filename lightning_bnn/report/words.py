"""The report in words: few, short and true sentences that need no training in statistics.

Each has a level: "good" (can be trusted), "bad" (must not be), "warn" (look at it) or "note".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_bnn.report.headlines import class_headline, number_headline, percent, points

__all__ = ["plural", "summary"]

Numbers = Mapping[str, Any]
Line = tuple[str | None, str, str]

# AUROC from which foreign inputs count as told apart, and below which as not seen.
TOLD_APART, NOT_SEEN = 0.9, 0.7
# Gaps above this many hundredths that would go unseen are worth a word.
COARSE = 0.05
SCORES = {
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "maximum_probability": "maximum probability",
    "sd": "predicted sd",
    "epistemic_sd": "epistemic sd",
}


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    Example:
        >>> plural(1, "example"), plural(1200, "class")
        ('1 example', '1,200 classes')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def _listed(names: Sequence[Any], most: int = 5) -> str:
    """Names in a row, of which the first are given."""
    shown = [str(name) for name in names[:most]]
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def summary(numbers: Numbers, notes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The sentences of a document.

    Args:
        numbers: The document, without its summary.
        notes: Further sentences, which come last.

    Returns:
        For each sentence ``"model"`` (None if about all), ``"level"`` and ``"text"``.
    """
    lines: list[Line] = []
    for block in numbers["models"]:
        lines += _about_model(block, numbers)
    lines += _about_shift(numbers["models"])
    lines += _about_parts(numbers)
    lines += _about_comparison(numbers["comparison"])
    lines += _about_data(numbers)
    lines += [(None, "note", note) for note in notes]
    return [{"model": model, "level": level, "text": text} for model, level, text in lines]


def _said(data: Numbers, task: str) -> str:
    if data["rows"] <= data["examples"]:
        return plural(data["rows"], "example")
    return plural(data["rows"], "statement" if task == "classes" else "output")


def _about_model(block: Numbers, numbers: Numbers) -> Iterator[Line]:
    name, invalid, task = block["name"], block["invalid"], numbers["task"]
    headline = class_headline if task == "classes" else number_headline
    yield name, *headline(block, _said(numbers["data"], task))
    if invalid["count"]:
        count, first = invalid["count"], _listed(invalid["examples"])
        if count > len(invalid["examples"]):
            first = f"{', '.join(map(str, invalid['examples'][:5]))}, ..."
        are = "prediction is" if count == 1 else "predictions are"
        which = "example" if count == 1 else "examples"
        yield name, "bad", f"{count:,} {are} not finite and left out: {which} {first}."
    impossible = invalid.get("impossible", 0)
    if impossible:
        had = plural(impossible, "target") + " had probability 0"
        yield name, "bad", f"{had}: what came was called impossible, and the NLL is infinite."
    if task == "classes":
        yield from _about_risk(block)


def _about_risk(block: Numbers) -> Iterator[Line]:
    scalars = block["scalars"]
    coverage, risk = scalars["coverage_at_risk"], scalars["risk"]
    if coverage is None or coverage >= 1:
        return
    if coverage <= 0:
        yield block["name"], "warn", f"no share of the answers has at most {percent(risk)} errors."
        return
    text = (
        f"answering only the {percent(coverage)} it is surest of keeps errors to {percent(risk)}."
    )
    yield block["name"], "note", text


def _best_score(block: Numbers, loader: str) -> tuple[float, str] | None:
    """The largest AUROC of a loader and the score that gives it."""
    found = block["shift"].get(loader)
    # With one draw nothing is epistemic, and what such a score says is chance.
    silent = ("mutual_information", "epistemic_sd") if block["draws"] == 1 else ()
    areas = [
        (by["auroc"], SCORES[score])
        for score, by in (found["by"] if found else {}).items()
        if score not in silent and by["auroc"] is not None
    ]
    return max(areas, key=lambda found: found[0]) if areas else None


def _about_shift(blocks: Sequence[Numbers]) -> Iterator[Line]:
    loaders = dict.fromkeys(loader for block in blocks for loader in block["shift"])
    for loader in loaders:
        for block in blocks:
            bad = block["shift"].get(loader, {}).get("invalid", 0)
            if bad:
                text = f"{loader}: {plural(bad, 'prediction')} not finite and left out."
                yield block["name"], "bad", text
        found = [(best, block["name"]) for block in blocks if (best := _best_score(block, loader))]
        if not found:
            continue
        found.sort(key=lambda entry: -entry[0][0])
        (area, score), name = found[0]
        if area >= TOLD_APART:
            level, text = "good", f"told apart with AUROC {area:.2f} by {score}"
        elif area >= NOT_SEEN:
            level, text = "warn", f"partly told apart: AUROC {area:.2f} by {score}"
        else:
            level, text = "bad", f"not seen as foreign: AUROC {area:.2f} at best, by {score}"
        if len(found) == 1:
            yield name, level, f"{loader}: {text}."
            continue
        (least, _), last = found[-1]
        yield None, level, f"{loader}: {text} ({name}); {last} reaches {least:.2f}."


def _about_parts(numbers: Numbers) -> Iterator[Line]:
    """What part of the uncertainty more data would remove, for the model of the best NLL."""
    blocks = [block for block in numbers["models"] if block["scalars"]["nll"] is not None]
    if not blocks:
        return
    block = min(blocks, key=lambda found: found["scalars"]["nll"])
    if block["draws"] == 1:
        if len(numbers["models"]) == 1:
            text = "one set of weights cannot tell what more training data would bring."
            yield block["name"], "note", text
        return
    scalars = block["scalars"]
    share = scalars.get("epistemic_share")
    if numbers["task"] == "classes" and scalars["entropy"]:
        share = scalars["epistemic"] / scalars["entropy"]
    if share is None:
        return
    if share >= 0.5:
        text = f"{percent(share)} of the uncertainty is epistemic: more training data would help."
    elif share <= 0.2:
        text = (
            f"{percent(1 - share)} of the uncertainty is in the data itself: more training data "
            "of the same kind would change little."
        )
    else:
        text = (
            f"{percent(share)} of the uncertainty is epistemic; more training data would help some."
        )
    yield block["name"], "note", text


def _about_comparison(table: Numbers) -> Iterator[Line]:
    columns = table["columns"]
    if len(columns) < 2:
        return
    judged = [row for row in table["rows"] if any(value["best"] for value in row["values"])]
    wins = [sum(bool(row["values"][i]["best"]) for row in judged) for i in range(len(columns))]
    if judged:
        most = max(wins)
        names = [name for name, won in zip(columns, wins, strict=True) if won == most]
        each = "is best" if len(names) == 1 else "are each best"
        text = f"{_listed(names)} {each} in {most} of {plural(len(judged), 'row')}"
        yield None, "note", text + _about_nll(judged, columns) + "."
    if not table["complete"]:
        used = plural(table["examples"], "example")
        yield None, "warn", f"the comparison uses only the {used} that every model could predict."


def _about_nll(judged: Sequence[Numbers], columns: Sequence[str]) -> str:
    for row in judged:
        if row["key"] == "nll":
            best = next(i for i, value in enumerate(row["values"]) if value["best"])
            rest = [i for i, value in enumerate(row["values"]) if i != best]
            clear = [columns[i] for i in rest if not row["values"][i]["tied"]]
            start = f"; the NLL of {columns[best]} is"
            if clear:
                return f"{start} clearly better than that of {_listed(clear)}"
            return f"{start} lowest, but not clearly"
    return ""


def _about_data(numbers: Numbers) -> Iterator[Line]:
    data, task = numbers["data"], numbers["task"]
    said = _said(data, task)
    unseen = _unseen_gap(numbers)
    if unseen > COARSE:
        yield None, "warn", f"with {said}, only gaps above about {points(unseen)} would be seen."
    if data["rows"] > data["examples"]:
        text = (
            f"each of the {plural(data['examples'], 'example')} has several rows; bands take them "
            "as independent, intervals of the comparison do not."
        )
        yield None, "note", text
    if data["sampled"] is not None:
        part = f"{data['sampled']:,} of {plural(data['rows'], 'row')}"
        text = f"what needs ranks or single rows is from a uniform sample of {part}."
        yield None, "note", text
    if task == "classes":
        yield from _about_missing(numbers)


def _about_missing(numbers: Numbers) -> Iterator[Line]:
    names = numbers["data"]["class_names"]
    counted = numbers["models"][0]["per_class"]
    missing = [entry["class"] for entry in counted if not entry["count"]]
    if missing:
        shown = _listed([names[k] if names else k for k in missing])
        one = len(missing) == 1
        which = f"{'class' if one else 'classes'} {shown} never {'occurs' if one else 'occur'}"
        yield None, "note", f"{which} in these data: nothing is said of {'it' if one else 'them'}."


def _unseen_gap(numbers: Numbers) -> float:
    """Half of the band's width: what a true gap must exceed to be noticed, on average."""
    total = weight = 0.0
    for block in numbers["models"]:
        if numbers["task"] == "classes":
            curve = block["reliability"]["width"]
            counts = curve["count"]
        else:
            curve = block["coverage"]
            counts = [float(abs(nominal - 0.9) < 1e-9) for nominal in curve["nominal"]]
        for count, lower, upper in zip(counts, curve["lower"], curve["upper"], strict=True):
            if count and lower is not None and upper is not None:
                total += count * (upper - lower) / 2
                weight += count
    return total / weight if weight else 0.0
