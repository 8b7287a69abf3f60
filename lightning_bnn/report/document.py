"""A report: its numbers, its words and figures as one document, and the page that shows it.

The document is one dictionary of plain Python values, the same that the JSON file holds; the page
draws nothing that is not in it.
"""

from __future__ import annotations

import html
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.report.comparison import comparison
from lightning_bnn.report.page import FORMAT, page
from lightning_bnn.report.statistics import Statistics, check_same_task
from lightning_bnn.report.words import COARSE, summary, unseen_gap
from lightning_bnn.storage.files import Files, LocalFiles, open_directory
from lightning_bnn.storage.manifest import package_versions

__all__ = ["Report", "check_page_name", "folder_problem", "make_report", "model_block", "plain"]

# Rows of one example depend on each other: of fewer examples nothing can be said.
FEW_CLUSTERS = 30


class Report:
    """How far the uncertainty of one or several models can be trusted.

    :func:`~lightning_bnn.report.report` and :func:`~lightning_bnn.report.report_posteriors` make
    it.

    Args:
        numbers: The whole report as plain Python values.

    Attributes:
        numbers: The same. ``numbers["models"]`` has a block for each model,
            ``numbers["comparison"]`` the table that sets them side by side. The figures are
            described in ``numbers["models"][i]["sections"]``.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.report import report
        >>> generator = np.random.default_rng(0)
        >>> probabilities = generator.dirichlet([1, 1, 1], size=500)
        >>> targets = [generator.choice(3, p=row) for row in probabilities]
        >>> made = report(probabilities, targets)
        >>> made.numbers["models"][0]["verdict"]["label"]
        'calibrated'
    """

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self.numbers: dict[str, Any] = dict(numbers)

    @property
    def summary(self) -> list[str]:
        """What the report says, most important first, one sentence or two in each."""
        return [
            line["text"] if line["model"] is None else f"{line['model']}: {line['text']}"
            for line in self.numbers["summary"]
        ]

    def __str__(self) -> str:
        return "\n".join([self.numbers["title"], *(f"- {line}" for line in self.summary)])

    def __repr__(self) -> str:
        models = [block["name"] for block in self.numbers["models"]]
        examples, task = self.numbers["data"]["examples"], self.numbers["task"]
        return f"Report(models={models}, examples={examples}, task={task!r})"

    def html(self) -> str:
        """The page: one HTML file that needs no network."""
        return page(self.numbers)

    def _repr_html_(self) -> str:
        """The page in a notebook, in a frame of its own so that styles do not mix."""
        return (
            f'<iframe srcdoc="{html.escape(self.html(), quote=True)}" '
            'style="width: 100%; height: 80vh; border: 0"></iframe>'
        )

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the page, and the numbers beside it as JSON.

        A reader sees all of each of the two or nothing. Folders on the way are made. On a local
        disk both are whole before either takes the place of an earlier one: where that fails, the
        earlier two stay.

        Args:
            path: The page, such as ``"reports/test.html"``, or an fsspec URL. The numbers go to the
                same name with ``.json``.

        Returns:
            The path of the page.

        Raises:
            ConfigurationError: The name does not end in ``.html``.
        """
        target = check_page_name(path)
        folder, name = os.path.split(target)
        page = self.html()
        files = open_directory(folder or ".")
        numbers = json.dumps(self.numbers, allow_nan=False)
        # The page comes last: where it is, its numbers are too.
        _put_all(files, {f"{os.path.splitext(name)[0]}.json": numbers.encode(),
                         name: page.encode()})  # fmt: skip
        return target


def _put_all(files: Files, contents: Mapping[str, bytes]) -> None:
    """Write files that belong together, in their order; on a local disk all of them or none."""
    if not isinstance(files, LocalFiles):
        for name, data in contents.items():
            files.put(name, data)
        return
    temporary = {name: f".tmp-{secrets.token_hex(8)}" for name in contents}
    try:
        for name, data in contents.items():
            files.put(temporary[name], data)
        for name in contents:
            os.replace(files.path / temporary[name], files.path / name)
    except BaseException:
        files.remove(*temporary.values())
        raise


def make_report(
    models: Mapping[str, Statistics],
    *,
    title: str = "Calibration report",
    source: str = "test",
    class_names: Sequence[str] | None = None,
    risk: float = 0.05,
) -> Report:
    """The report of what was gathered.

    Args:
        models: For each model's name, its predictions and the targets; all on the same examples.
        title: The heading.
        source: What the data are, such as "test".
        class_names: One for each class.
        risk: The largest share of errors that is acceptable among the answers given.

    Raises:
        DataError: There are fewer rows than bins, or the models saw different examples.
        ConfigurationError: The models are of different tasks, or an option does not fit them.

    Example:
        >>> import torch
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> statistics = Statistics(bins=5)
        >>> logits = torch.randn(1, 200, 3, generator=torch.Generator().manual_seed(0))
        >>> statistics.update(CategoricalPredictive(logits), torch.arange(200) % 3)
        >>> make_report({"net": statistics})
        Report(models=['net'], examples=200, task='classification')
    """
    _check(models, class_names, risk)
    blocks = [model_block(name, model, risk) for name, model in models.items()]
    first = next(iter(models.values()))
    kept = min(len(model.kept) for model in models.values())
    document: dict[str, Any] = plain(
        {
            "format": FORMAT,
            "title": title,
            "library": f"lightning_bnn {package_versions()['lightning_bnn']}",
            "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
            "task": first.task,
            "summary": [],
            "data": {
                "source": source,
                "examples": first.examples,
                "rows": max(model.rows for model in models.values()),
                "classes": first.classes,
                "class_names": None if class_names is None else [str(name) for name in class_names],
                "bins": first.bins,
                "sampled": kept if any(m.rows > len(m.kept) for m in models.values()) else None,
            },
            "models": blocks,
            "comparison": comparison(models, blocks),
        }
    )
    for model, block in zip(models.values(), document["models"], strict=True):
        if block["verdict"]["label"] == "calibrated" and not _could_show(model, block):
            block["verdict"]["label"] = "nothing found"
    said = [line for section in first.sections for line in section.words(document)]
    document["summary"] = summary(document, said)
    for model, block in zip(models.values(), document["models"], strict=True):
        parts = [section.described(block, document) for section in model.sections]
        block["sections"] = [part for part in parts if part is not None]
    shown = {part["id"] for block in document["models"] for part in block["sections"]}
    terms = [term for section in first.sections if section.key in shown for term in section.method]
    document["method"] = [list(term) for term in terms]
    return Report(document)


def model_block(name: str, model: Statistics, risk: float) -> dict[str, Any]:
    """The numbers of one model: its verdict and scores, and those of its sections.

    Raises:
        ConfigurationError: Two sections have numbers of the same name.
    """
    invalid = {"count": len(model.invalid), "examples": model.invalid[:20]}
    block = {
        "name": name,
        "draws": model.draws,
        "invalid": invalid | {"impossible": model.sums.impossible},
        **model.sums.block(model, risk),
    }
    for section in model.sections:
        numbers = section.numbers(model, block)
        taken = set(numbers) & {*block, "sections"}
        if taken:
            raise ConfigurationError(
                f"The section {section.key!r} gives numbers by the names {sorted(taken)}, which "
                "the report has already. Give them other names."
            )
        block |= numbers
    return block


def plain(value: Any) -> Any:
    """Arrays as lists, NumPy's numbers as Python's, and what is not finite as None.

    Example:
        >>> plain({"a": np.array([1.0, np.nan]), "b": np.int64(3), "c": float("inf")})
        {'a': [1.0, None], 'b': 3, 'c': None}
    """
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _could_show(model: Statistics, block: Mapping[str, Any]) -> bool:
    """Whether finding nothing says something.

    It does where the band shows gaps of ten points, or where another test shows what is grave.
    """
    if block["verdict"]["clustered"] and model.examples < FEW_CLUSTERS:
        return False
    return unseen_gap(block) <= COARSE or bool(model.sums.shows_grave_faults())


def _check(
    models: Mapping[str, Statistics], class_names: Sequence[str] | None, risk: float
) -> None:
    if not models:
        raise ConfigurationError("a report needs at least one model, got none.")
    if not 0 < risk < 1:
        raise ConfigurationError(
            f"expected risk strictly between 0 and 1, got {risk}. For 5 percent errors pass 0.05."
        )
    for name, model in models.items():
        if model.rows < model.bins:
            raise DataError(
                f"a report in {model.bins} bins needs at least {model.bins} rows; {name!r} has "
                f"{model.rows}, and {len(model.invalid)} predictions that are not finite. Give "
                "more examples or fewer bins=, or look for a training that diverged."
            )
        others: dict[str, Any] = {
            f"{name}, ood[{place!r}],": scores for place, scores in model.ood.items()
        }
        if model.validation is not None and model.validation.task is not None:
            others[f"{name} (validation)"] = model.validation
        check_same_task({name: model, **others})
    check_same_task(models)
    classes = next(iter(models.values())).classes
    if class_names is not None and len(class_names) != classes:
        raise ConfigurationError(
            f"expected one class name for each of the {classes} classes, got {len(class_names)}."
        )


def check_page_name(path: str | os.PathLike[str]) -> str:
    """The name of a page, as text.

    Raises:
        ConfigurationError: It does not end in ``.html``.
    """
    target = os.fspath(path)
    if PurePosixPath(target).suffix not in (".html", ".htm"):
        raise ConfigurationError(
            f"A report expected the name of a page, such as 'report.html'; got {target!r}. The "
            "numbers are written beside it as report.json."
        )
    return target


def folder_problem(folder: str) -> str | None:
    """Why nothing can be written to a folder or an fsspec URL; None if it can.

    A file is written and removed; a local folder that was made for it is removed as well.

    Example:
        >>> folder_problem("memory://reports") is None
        True
        >>> folder_problem("nothing://reports")
        "ConfigurationError: Cannot open 'nothing://reports': Protocol not known: nothing"
    """
    try:
        files = open_directory(folder)
        there = files.exists()
        files.put("can be written.part", b"")
        files.remove("can be written.part")
        if not there and isinstance(files, LocalFiles):
            files.path.rmdir()
    except Exception as error:  # what a file system of fsspec raises is its own
        return f"{type(error).__name__}: {error}"
    return None
