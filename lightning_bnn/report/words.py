"""The report in words: few, short and true sentences that need no training in statistics.

Each has a level: "bad" (must not be trusted), "warn" (look at it), "good" (can be) or "note"; they
come in this order. What holds for these data only is said of them ("here"), and what is the
model's own estimate is called so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scipy.special import betaincinv

from lightning_bnn.report.headlines import (
    COARSE,
    class_headline,
    number_headline,
    percent,
    points,
    unseen_gap,
)
from lightning_bnn.report.pruning_words import about_pruning

__all__ = ["plural", "summary"]

Numbers = Mapping[str, Any]
Line = tuple[str | None, str, str]

LEVELS = ("bad", "warn", "good", "note")
# AUROC from which foreign inputs count as told apart, below which as not seen, and below which
# the model is surer of them than of its own data: a little below chance, which is 0.5.
TOLD_APART, NOT_SEEN, SURER = 0.9, 0.7, 0.45
# Of fewer foreign examples an AUROC says little.
FEW_FOREIGN = 30
# Gaps above this that would go unseen are worth a word.
WORTH_SAYING = 0.05
# What the surest answers cost is said of at most so many models.
FEW_MODELS = 4
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
        For each sentence ``"model"`` (None if about all), ``"level"`` and ``"text"``; the worst
        levels first.
    """
    lines: list[Line] = []
    for block in numbers["models"]:
        lines += _about_model(block, numbers)
    lines += _about_shift(numbers["models"])
    lines += _about_parts(numbers)
    lines += about_pruning(numbers["models"])
    lines += _about_comparison(numbers["comparison"])
    lines += _about_data(numbers)
    lines += [(None, "note", note) for note in notes]
    lines.sort(key=lambda line: LEVELS.index(line[1]))
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
    left_out = block.get("temperature", {}).get("invalid", 0)
    if left_out:
        are = "validation prediction is" if left_out == 1 else "validation predictions are"
        yield name, "bad", f"{left_out:,} {are} not finite; the temperature is fitted without."
    if task == "classes" and len(numbers["models"]) <= FEW_MODELS:
        yield from _about_risk(block)


def _about_risk(block: Numbers) -> Iterator[Line]:
    """What the surest answers cost, where there are enough of them to say."""
    scalars = block["scalars"]
    coverage, risk = scalars["coverage_at_risk"], scalars["risk"]
    if coverage is None or coverage >= 1:
        return
    if coverage <= 0:
        text = f"even the answers it is surest of had more than {percent(risk)} errors here."
        yield block["name"], "warn", text
        return
    answered, errors = scalars.get("answered_at_risk"), scalars.get("errors_at_risk")
    if not answered or errors is None:
        return
    # Clopper and Pearson's upper end, at 95 percent. It cannot be below the risk, since the
    # coverage is the largest one at that risk; twice as much would be of no use.
    upper = float(betaincinv(errors + 1, max(answered - errors, 0.5), 0.95))
    if upper > 2 * risk:
        return
    had = f"{percent(errors / answered)} errors" if errors else "no errors"
    chance = f"up to {percent(upper)} allowing for chance"
    text = f"the {percent(coverage)} it is surest of had {had} here ({chance})."
    yield block["name"], "note", text


def _best_score(block: Numbers, loader: str) -> tuple[float, str] | None:
    """The largest AUROC of a loader and the score that gives it."""
    found = block["shift"].get(loader)
    # With one draw nothing is epistemic, and what such a score says is chance.
    silent = ("mutual_information", "epistemic_sd") if block["draws"] == 1 else ()
    areas = [
        (by["auroc"], SCORES[score])
        for score, by in (found["by"] if found else {}).items()
        if score not in silent and by and by["auroc"] is not None
    ]
    return max(areas, key=lambda found: found[0]) if areas else None


def _about_shift(blocks: Sequence[Numbers]) -> Iterator[Line]:
    """Of each loader, who tells it apart and who does not; the level is that of the worst."""
    loaders = dict.fromkeys(loader for block in blocks for loader in block["shift"])
    for loader in loaders:
        for block in blocks:
            bad = block["shift"].get(loader, {}).get("invalid", 0)
            if bad:
                text = f"{loader}: {plural(bad, 'prediction')} not finite and left out."
                yield block["name"], "bad", text
        judged = [(best, block) for block in blocks if (best := _best_score(block, loader))]
        if not judged:
            continue
        found = [(*best, block["name"]) for best, block in judged]
        worst = min(area for area, _, _ in found)
        level = "good" if worst >= TOLD_APART else "warn" if worst >= NOT_SEEN else "bad"
        text = _told_apart(found) if len(blocks) > 1 else _seen(*found[0][:2])
        foreign = min(block["shift"][loader]["examples"] for _, block in judged)
        if foreign < FEW_FOREIGN:
            level, text = "note", f"{text}; {plural(foreign, 'example')} cannot say much"
        yield blocks[0]["name"] if len(blocks) == 1 else None, level, f"{loader}: {text}."


def _seen(area: float, score: str) -> str:
    if area >= TOLD_APART:
        return f"told apart with AUROC {area:.2f} by {score}"
    if area >= NOT_SEEN:
        return f"partly told apart: AUROC {area:.2f} by {score}"
    if area >= SURER:
        return f"not seen as foreign: AUROC {area:.2f} at best, by {score}"
    return f"surer there than on its own data: AUROC {area:.2f} at best, by {score}"


# How well a group does: from which AUROC, and what one model and what several do; then the same
# where no better group was named before, to which the short form could refer.
KINDS = (
    (TOLD_APART, "tells it apart", "tell it apart", "tells it apart", "tell it apart"),
    (NOT_SEEN, "does in part", "do in part", "partly tells it apart", "partly tell it apart"),
    (SURER, "does not", "do not", "does not tell it apart", "do not tell it apart"),
    (-1.0, *2 * ("is surer there than on its own data", "are surer there than on their own data")),
)


def _told_apart(found: Sequence[tuple[float, str, str]]) -> str:
    """Several models, grouped by how well they do, with the range of their AUROC."""
    parts: list[str] = []
    left = list(found)
    for lowest, *verbs in KINDS:
        group = [entry for entry in left if entry[0] >= lowest]
        left = [entry for entry in left if entry[0] < lowest]
        if not group:
            continue
        verb = verbs[(len(group) > 1) + 2 * (not parts)]
        areas = sorted({f"{area:.2f}" for area, _, _ in group})
        shown = areas[0] if len(areas) == 1 else f"{areas[0]} to {areas[-1]}"
        scores = {score for _, score, _ in group}
        by = f" by {scores.pop()}" if len(scores) == 1 else ""
        names = _listed([name for _, _, name in group])
        parts.append(f"{names} {verb} ({'' if parts else 'AUROC '}{shown}{by})")
    return "; ".join(parts)


def _about_parts(numbers: Numbers) -> Iterator[Line]:
    """What part of the uncertainty more data would remove, for the model of the best NLL.

    Only a calibrated model of several draws can say: a wrong total has no right parts.
    """
    blocks = [block for block in numbers["models"] if block["scalars"]["nll"] is not None]
    if not blocks:
        return
    block = min(blocks, key=lambda found: found["scalars"]["nll"])
    if block["draws"] == 1:
        if len(numbers["models"]) == 1:
            text = "one draw cannot tell noise in the data from what more data would settle."
            yield block["name"], "note", text
        return
    scalars = block["scalars"]
    share = scalars.get("epistemic_share")
    if numbers["task"] == "classes" and scalars["entropy"]:
        share = scalars["epistemic"] / scalars["entropy"]
    if share is None or block["verdict"]["label"] != "calibrated":
        return
    if share <= 0.2:
        part = f"{percent(1 - share)} of its uncertainty is noise in the data"
        help_ = "would help little"
    else:
        part = f"{percent(share)} of its uncertainty is about its weights"
        help_ = "would help" if share >= 0.5 else "would help some"
    text = f"by the model's own account {part}; more data of the same kind {help_}."
    yield block["name"], "note", text


def _about_comparison(table: Numbers) -> Iterator[Line]:
    columns = table["columns"]
    if len(columns) < 2:
        return
    judged = [row for row in table["rows"] if any(value["best"] for value in row["values"])]
    if judged:
        clear: dict[str, list[str]] = {}
        for row in judged:
            ahead = [value["best"] or value["tied"] for value in row["values"]]
            if sum(ahead) == 1:
                clear.setdefault(columns[ahead.index(True)], []).append(row["label"])
        yield None, "note", _clearly_best(clear, len(judged))
    if not table["complete"]:
        used = plural(table["examples"], "example")
        yield None, "warn", f"the comparison uses only the {used} that every model could predict."


def _clearly_best(clear: Mapping[str, Sequence[str]], rows: int) -> str:
    if not clear:
        return "no model is clearly best in any row of the comparison."
    ranked = sorted(clear.items(), key=lambda entry: -len(entry[1]))[:3]
    parts = [f"{name} in {len(won)} ({_listed(won)})" for name, won in ranked[1:]]
    name, won = ranked[0]
    first = f"{name} is clearly best in {len(won)} of {plural(rows, 'row')} ({_listed(won)})"
    return "; ".join([first, *parts]) + "."


def _about_data(numbers: Numbers) -> Iterator[Line]:
    data, task, blocks = numbers["data"], numbers["task"], numbers["models"]
    unseen = sum(unseen_gap(block) for block in blocks) / len(blocks)
    told = all(block["verdict"]["label"] == "nothing found" for block in blocks)
    if unseen > WORTH_SAYING and not told:
        where = "in a single bin" if task == "classes" else "in the 90% interval"
        level = "warn" if unseen > COARSE else "note"
        gaps = f"only gaps above about {points(unseen)} {where} would be seen"
        yield None, level, f"with {_said(data, task)}, {gaps}."
    if data["rows"] > data["examples"]:
        if all(block["verdict"].get("clustered") for block in blocks):
            taken = "verdicts and intervals allow for their dependence, bands do not"
        else:
            taken = "verdicts and bands take them as independent, intervals do not"
        examples = plural(data["examples"], "example")
        yield None, "note", f"the {examples} have several rows each: {taken}."
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
        it, its = ("it", "its") if one else ("them", "their")
        known = f"{its} accuracy is unknown, and the classwise ECE counts {it} with frequency 0"
        yield None, "note", f"{which} in these data: {known}."
