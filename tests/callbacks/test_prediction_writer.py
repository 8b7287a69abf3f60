from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bnn import VariationalBNN
from lightning_bnn.callbacks import PredictionWriter
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lightning_bnn.predictive import Predictive
from tests.trainers import quiet_trainer

INPUTS = torch.randn(7, 2, generator=torch.Generator().manual_seed(1))
CLASSES = ["class", "probability", "entropy", "aleatoric", "mutual_information"]
LABELS = ["label", "probability", "entropy", "aleatoric", "mutual_information"]
NUMBERS = ["mean", "standard_deviation", "aleatoric", "epistemic", "lower_90", "upper_90"]


def read(path: str | Path) -> tuple[list[str], dict[str, Tensor]]:
    """The header of a CSV file, and its columns as tensors."""
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    numbers = [[float(value) for value in row] for row in rows]
    columns = torch.tensor(numbers).reshape(-1, len(header)).T
    return header, dict(zip(header, columns, strict=True))


def strategy(likelihood: Likelihood, outputs: int) -> VariationalBNN:
    torch.manual_seed(0)
    net = nn.Linear(2, outputs)
    return VariationalBNN(net, likelihood, num_data=10, initial_scale=0.5, predict_draws=4)


def predict(
    bnn: VariationalBNN, loaders: Any, path: Path | None, **options: Any
) -> PredictionWriter:
    writer = PredictionWriter(path)
    trainer = quiet_trainer(callbacks=[writer], **options)
    assert trainer.predict(bnn, loaders, return_predictions=False) is None
    return writer


def whole(bnn: VariationalBNN, inputs: Tensor) -> Predictive:
    return bnn.posterior().predict(inputs, draws=4)


def several(names: list[str], count: int) -> list[str]:
    return [f"{name}_{index}" for index in range(count) for name in names]


@pytest.mark.parametrize(
    ("likelihood", "outputs", "header"),
    [
        (Categorical(), 3, CLASSES),
        (Bernoulli(), 1, LABELS),
        (Bernoulli(), 2, several(LABELS, 2)),
        (Gaussian(0.3), 1, NUMBERS),
        (Gaussian([0.3, 2.0]), 2, several(NUMBERS, 2)),
        (HeteroscedasticGaussian(), 4, several(NUMBERS, 2)),
        (Poisson(), 1, NUMBERS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Likelihood) else None,
)
def test_every_kind_in_batches_equals_one_prediction(
    likelihood: Likelihood, outputs: int, header: list[str], tmp_path: Path
) -> None:
    bnn = strategy(likelihood, outputs)
    path = tmp_path / "deep" / "er" / "predictions.csv"
    writer = predict(bnn, DataLoader(INPUTS, batch_size=3), path)
    assert writer.files == [str(path)]
    found, columns = read(path)
    assert found == ["index", *header]
    assert columns["index"].tolist() == list(range(7))
    expected = whole(bnn, INPUTS).columns()
    for name in header:
        torch.testing.assert_close(columns[name], expected[name].float(), rtol=2e-5, atol=2e-6)


def test_classes_at_positions_have_a_row_each(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 12), nn.Unflatten(1, (3, 2, 2)))
    bnn = VariationalBNN(net, Categorical(), num_data=10, predict_draws=4)
    path = tmp_path / "predictions.csv"
    predict(bnn, DataLoader(INPUTS, batch_size=3), path)
    header, columns = read(path)
    assert header == ["index", "position", *CLASSES]
    assert columns["index"].tolist() == [i for i in range(7) for _ in range(4)]
    assert columns["position"].tolist() == [0, 1, 2, 3] * 7
    mode = whole(bnn, INPUTS).mode
    assert columns["class"].tolist() == mode.flatten().tolist()


def test_index_is_the_place_in_the_data_set(tmp_path: Path) -> None:
    bnn = strategy(Gaussian(), 1)
    path = tmp_path / "predictions.csv"
    order = [4, 1, 6, 0]
    loader = DataLoader(TensorDataset(INPUTS, INPUTS[:, 0]), batch_size=3, sampler=order)
    predict(bnn, loader, path)
    _, columns = read(path)
    assert columns["index"].tolist() == order
    torch.testing.assert_close(columns["mean"], whole(bnn, INPUTS[order]).mean.squeeze(1))


class Stream(IterableDataset):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.rows


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
def test_a_stream_is_counted_and_each_loader_has_its_file(tmp_path: Path) -> None:
    bnn = strategy(Gaussian(), 1)
    rows: Any = INPUTS
    loaders = [
        DataLoader(rows, batch_size=2, sampler=[6, 5, 4, 3]),
        DataLoader(Stream(INPUTS), batch_size=2),
    ]
    writer = predict(bnn, loaders, tmp_path / "out.csv")
    files = [tmp_path / "out-loader0.csv", tmp_path / "out-loader1.csv"]
    assert writer.files == [str(file) for file in files]
    assert read(files[0])[1]["index"].tolist() == [6, 5, 4, 3]
    assert read(files[1])[1]["index"].tolist() == list(range(7))


def test_ranks_have_files_of_their_own() -> None:
    trainer: Any = SimpleNamespace(num_predict_batches=[3], world_size=2, global_rank=1)
    assert PredictionWriter("a.b/out.csv").file(trainer) == "a.b/out-rank1.csv"
    trainer.num_predict_batches = [3, 3]
    assert PredictionWriter("a.b/out").file(trainer, 1) == "a.b/out-loader1-rank1"


def test_default_file_is_in_the_folder_of_the_run(tmp_path: Path) -> None:
    writer = predict(
        strategy(Gaussian(), 1), DataLoader(INPUTS, batch_size=3), None, default_root_dir=tmp_path
    )
    assert writer.files == [str(tmp_path / "predictions.csv")]
    assert len(read(writer.files[0])[1]["index"]) == 7


class Broken(nn.Module):
    """Fails in its third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.shape[0] == 1:
            raise RuntimeError("out of order")
        return self.layer(inputs)


def test_a_prediction_that_fails_leaves_a_part(tmp_path: Path) -> None:
    bnn = VariationalBNN(Broken(), Gaussian(), num_data=10)
    path = tmp_path / "predictions.csv"
    path.write_text("of an earlier run")
    with pytest.raises(RuntimeError, match="out of order"):
        predict(bnn, DataLoader(INPUTS, batch_size=3), path)
    assert path.read_text() == "of an earlier run"
    assert len(read(tmp_path / "predictions.csv.part")[1]["index"]) == 6


class Plain(VariationalBNN):
    def predict_step(self, batch: Tensor, *place: Any) -> Tensor:  # type: ignore[override]
        return batch


def test_only_predictives_have_columns(tmp_path: Path) -> None:
    bnn = Plain(nn.Linear(2, 1), Gaussian(), num_data=10)
    with pytest.raises(ConfigurationError, match="got Tensor"):
        predict(bnn, DataLoader(INPUTS, batch_size=3), tmp_path / "predictions.csv")
