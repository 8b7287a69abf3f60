"""A finished report: its numbers, its words, and the page and the file that hold them.

The numbers are one dictionary of plain Python values, the same that the JSON file holds; the page
draws nothing that is not in it.
"""

from __future__ import annotations

import html
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_bnn.errors import ConfigurationError

__all__ = ["Report", "check_page_name", "folder_problem"]


class Report:
    """How far the uncertainty of one or several models can be trusted.

    :func:`~lightning_bnn.report.report` and :func:`~lightning_bnn.report.report_posteriors` make
    it.

    Args:
        numbers: The whole report as plain Python values.

    Attributes:
        numbers: The same. ``numbers["models"]`` has a block for each model,
            ``numbers["comparison"]`` the table that sets them side by side.

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
        lines = self.numbers["summary"]
        return [
            line["text"] if line["model"] is None else f"{line['model']}: {line['text']}"
            for line in lines
        ]

    def __str__(self) -> str:
        return "\n".join([self.numbers["title"], *(f"- {line}" for line in self.summary)])

    def __repr__(self) -> str:
        models = [block["name"] for block in self.numbers["models"]]
        examples, task = self.numbers["data"]["examples"], self.numbers["task"]
        return f"Report(models={models}, examples={examples}, task={task!r})"

    def html(self) -> str:
        """The page: one HTML file that needs no network."""
        from lightning_bnn.report.page import page

        return page(self.numbers)

    def _repr_html_(self) -> str:
        """The page in a notebook, in a frame of its own so that styles do not mix."""
        return (
            f'<iframe srcdoc="{html.escape(self.html(), quote=True)}" '
            'style="width: 100%; height: 80vh; border: 0"></iframe>'
        )

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the page, and the numbers beside it as JSON.

        Each of the two is written under another name and gets its own when it is whole. Folders
        on the way are made.

        Args:
            path: The page, such as ``"reports/test.html"``, or an fsspec URL. The numbers go to the
                same name with ``.json``.

        Returns:
            The path of the page.

        Raises:
            ConfigurationError: The name does not end in ``.html``.
        """
        target = check_page_name(path)
        # The page comes last: where it is, its numbers are too.
        stem = target.removesuffix(PurePosixPath(target).suffix)
        numbers = json.dumps(self.numbers, allow_nan=False, indent=1)
        page = self.html()
        _write(f"{stem}.json", numbers)
        _write(target, page)
        return target


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
        'ValueError: Protocol not known: nothing'
    """
    try:
        filesystem, name = fsspec.core.url_to_fs(folder)
        there = filesystem.exists(name)
        filesystem.makedirs(name, exist_ok=True)
        probe = f"{name.rstrip('/')}/{uuid.uuid4().hex[:8]}.part"
        with filesystem.open(probe, "w", encoding="utf-8") as file:
            file.write("can be written")
        filesystem.rm(probe)
        if not there and isinstance(filesystem, LocalFileSystem):
            filesystem.rmdir(name)
    except Exception as error:  # what a file system of fsspec raises is its own
        return f"{type(error).__name__}: {error}"
    return None


def _write(path: str, text: str) -> None:
    """Write a text file so that a reader sees all of it or nothing."""
    filesystem, name = fsspec.core.url_to_fs(path)
    if parent := name.rpartition("/")[0]:
        filesystem.makedirs(parent, exist_ok=True)
    part = f"{name}.{uuid.uuid4().hex[:8]}.part"
    with filesystem.open(part, "w", encoding="utf-8") as file:
        file.write(text)
    filesystem.mv(part, name)
