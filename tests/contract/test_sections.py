"""What a section of the report does: numbers, words and figures, over batches and processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import VariationalBNN
from lightning_bnn.callbacks import CalibrationReport
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.report import report
from tests.contract.cases import SECTIONS
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.parametrize("name", SECTIONS)


def test_it_is_on_the_page_and_in_the_numbers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    probabilities, targets = torch.rand(40, 3).softmax(1), torch.randint(3, (40,))
    section = SECTIONS[name]()
    made = report(probabilities, targets, sections=[section])
    block = made.numbers["models"][0]
    (shown,) = [part for part in block["sections"] if part["id"] == section.key]
    assert shown["title"] == section.title
    assert shown["figures"]
    json.dumps(made.numbers, allow_nan=False)
    page = Path(made.save(tmp_path / "report.html")).read_text()
    assert section.lead in page


def test_a_fit_reports_it(name: str, tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.randn(40, 4), torch.randint(3, (40,))), batch_size=8)
    bnn = VariationalBNN(nn.Linear(4, 3), Categorical(), predict_draws=2)
    section = SECTIONS[name]()
    callback = CalibrationReport(tmp_path, sections=[section])
    quiet_trainer(max_epochs=1, callbacks=[callback]).fit(bnn, data, data)
    (found,) = list(tmp_path.rglob("*.json"))
    block = json.loads(found.read_text())["models"][0]
    assert section.key in [part["id"] for part in block["sections"]]
