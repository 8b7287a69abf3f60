"""The finished report: words, files."""

from __future__ import annotations

import html
import json
from pathlib import Path

import fsspec
import numpy as np
import pytest

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.report import Report, report
from lightning_bnn.report.document import folder_problem


@pytest.fixture(scope="module")
def made() -> Report:
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet([1, 1, 1], size=200)
    targets = [generator.choice(3, p=row) for row in probabilities]
    return report(probabilities, targets, title="Three classes")


def test_summary_is_text(made: Report) -> None:
    assert made.summary
    assert all(isinstance(line, str) and line for line in made.summary)
    text = str(made)
    assert text.startswith("Three classes\n- ")
    assert all(f"- {line}" in text for line in made.summary)
    assert repr(made) == "Report(models=['model'], examples=200, task='classes')"


def test_save_writes_page_and_numbers(made: Report, tmp_path: Path) -> None:
    page = tmp_path / "new" / "deep" / "report.html"
    assert made.save(page) == str(page)
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json"]
    assert page.read_text(encoding="utf-8") == made.html()
    assert json.loads((page.parent / "report.json").read_text()) == made.numbers
    made.save(page)  # a second time takes the place of the first
    assert len(list(page.parent.iterdir())) == 2


def test_save_to_a_url(made: Report) -> None:
    made.save("memory://reports/first.html")
    with fsspec.open("memory://reports/first.json", "r") as file:
        assert json.load(file) == made.numbers
    with fsspec.open("memory://reports/first.html", "r") as file:
        assert file.read() == made.html()


def test_a_page_that_fails_leaves_nothing(tmp_path: Path) -> None:
    broken = Report({"format": 0, "summary": [], "title": "x"})
    with pytest.raises(ValueError, match="format"):
        broken.save(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_save_without_a_folder(
    made: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made.save("report.html")
    assert (tmp_path / "report.html").exists()


def test_save_wants_a_page(made: Report) -> None:
    with pytest.raises(ConfigurationError, match=r"'report\.json'"):
        made.save("report.json")


def test_notebook_shows_the_page_in_a_frame(made: Report) -> None:
    frame = made._repr_html_()
    inside = frame.split('srcdoc="')[1].split('"')[0]
    assert html.unescape(inside) == made.html()


def test_whether_a_folder_can_be_written_to(tmp_path: Path) -> None:
    assert folder_problem(str(tmp_path / "new" / "folder")) is None
    assert not (tmp_path / "new" / "folder").exists()
    assert folder_problem(str(tmp_path)) is None
    (tmp_path / "file").touch()
    assert "File exists" in (folder_problem(str(tmp_path / "file")) or "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]
