"""The whole document: its form, what cannot be reported, and its files."""

from __future__ import annotations

import html
import json
import math
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.predictive import CategoricalPredictive
from lightning_bnn.report import Report, report
from lightning_bnn.report.document import folder_problem
from lightning_bnn.report.statistics import Statistics
from tests.report.predictions import (
    class_data,
    class_statistics,
    document_of,
    outside_of,
    regression_data,
    regression_statistics,
)

COMMON = {"name", "draws", "verdict", "invalid", "scalars", "shift", "sections"}
CLASSES = COMMON | {
    "nll_decomposition", "brier_decomposition", "reliability", "risk_coverage", "confusion",
    "per_class", "temperature", "uncertain",
}  # fmt: skip
NUMBERS = COMMON | {"pit", "coverage", "error_sd", "uncertainty", "scatter", "fit"}


def test_a_document_of_classes_is_json():
    logits, targets = class_data(count=120)
    statistics = Statistics(bins=8)
    statistics.update(CategoricalPredictive(logits), targets, inputs=torch.rand(120, 3, 5, 5))
    outside = {"net": {"letters": outside_of(CategoricalPredictive(logits))}}
    numbers = document_of(
        {"net": statistics}, outside, title="T", source="validation", class_names="abcd"
    )
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    assert list(numbers) == [
        "format", "title", "library", "made", "task", "summary", "data", "models", "comparison",
        "method",
    ]  # fmt: skip
    assert numbers["format"] == 2
    assert numbers["library"].startswith("lightning_bnn ")
    assert numbers["data"] == {
        "source": "validation",
        "examples": 120,
        "rows": 120,
        "classes": 4,
        "class_names": ["a", "b", "c", "d"],
        "bins": 8,
        "sampled": None,
    }
    (block,) = numbers["models"]
    assert set(block) == CLASSES
    assert len(block["uncertain"]) == 24
    shown = block["sections"][-1]["figures"][0]["pictures"]
    assert shown[0]["image"].startswith("data:image/png;base64,")
    assert len(block["reliability"]["width"]["count"]) == 8


def test_a_document_of_numbers_is_json():
    numbers = document_of({"net": regression_statistics(*regression_data(count=100))})
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    assert set(numbers["models"][0]) == NUMBERS
    assert numbers["data"]["classes"] is None


def test_fewer_rows_than_bins():
    statistics = class_statistics(*class_data(count=9))
    with pytest.raises(
        DataError, match=r"in 10 bins needs at least 10 rows; 'net' has 9, and 0 .*bins="
    ):
        document_of({"net": statistics})
    logits, targets = class_data(count=30)
    logits[:] = math.nan
    with pytest.raises(DataError, match="has 0, and 30 predictions that are not finite"):
        document_of({"net": class_statistics(logits, targets)})
    with pytest.raises(DataError, match="'net' has 0"):
        document_of({"net": Statistics()})


@pytest.mark.parametrize(("count", "label"), [(40, "nothing found"), (2000, "calibrated")])
def test_calibrated_only_if_a_fault_could_have_shown(count, label):
    classes = document_of({"net": class_statistics(*class_data(count=count))})
    numbers = document_of({"net": regression_statistics(*regression_data(count=count))})
    for found in (classes["models"][0]["verdict"], numbers["models"][0]["verdict"]):
        assert found["label"] == label
        assert found["p_value"] > 0.01


def test_many_rows_of_few_examples_show_little():
    numbers = document_of({"net": regression_statistics(*regression_data(count=20, outputs=50))})
    assert numbers["models"][0]["verdict"]["label"] == "nothing found"
    assert "so few examples could not show much" in numbers["summary"][0]["text"]


def test_options_that_do_not_fit():
    statistics = class_statistics(*class_data(count=50))
    with pytest.raises(ConfigurationError, match="at least one model"):
        document_of({})
    with pytest.raises(ConfigurationError, match=r"risk strictly between 0 and 1, got 5"):
        document_of({"net": statistics}, risk=5)
    with pytest.raises(ConfigurationError, match="each of the 4 classes, got 2"):
        document_of({"net": statistics}, class_names=["a", "b"])
    with pytest.raises(ConfigurationError, match="of one task"):
        document_of({"a": statistics, "b": regression_statistics(*regression_data(count=50))})


def test_perfect_and_constant_predictions():
    sure = torch.full((1, 40, 2), -math.inf)
    targets = torch.arange(40) % 2
    sure[0, torch.arange(40), targets] = 0.0
    numbers = document_of({"net": class_statistics(sure, targets)})
    block = numbers["models"][0]
    assert block["scalars"]["nll"] == block["scalars"]["ece"] == block["scalars"]["aurc"] == 0
    assert block["verdict"]["label"] == "calibrated"
    numbers = document_of({"net": class_statistics(torch.zeros(1, 40, 2), targets)})
    assert numbers["models"][0]["scalars"]["nll"] == pytest.approx(math.log(2))
    json.dumps(numbers, allow_nan=False)


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
    assert repr(made) == "Report(models=['model'], examples=200, task='classification')"


def test_save_writes_page_and_numbers(made: Report, tmp_path: Path) -> None:
    page = tmp_path / "new" / "deep" / "report.html"
    assert made.save(page) == str(page)
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json"]
    assert page.read_text(encoding="utf-8") == made.html()
    assert json.loads((page.parent / "report.json").read_text()) == made.numbers
    made.save(page)  # a second time takes the place of the first
    assert len(list(page.parent.iterdir())) == 2


@pytest.mark.parametrize("fails", ["numbers", "page"])
def test_a_full_disk_leaves_the_report_that_was_there(
    made: Report, tmp_path: Path, fails: str
) -> None:
    """Files may grow to a size that one of the two, or neither, fits in."""
    page, numbers = tmp_path / "report.html", tmp_path / "report.json"
    page.write_text("an earlier page")
    numbers.write_text("earlier numbers")
    sizes = sorted([len(made.html()), len(json.dumps(made.numbers))])
    limit = 1000 if fails == "numbers" else sum(sizes) // 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            made.save(page)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(tmp_path.iterdir()) == [page, numbers]
    assert (page.read_text(), numbers.read_text()) == ("an earlier page", "earlier numbers")


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
