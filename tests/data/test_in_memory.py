"""What every data module promises, checked on each."""

import random
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchvision
from pytorch_lightning.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from lightning_bnn.data import Digits, InMemoryDataModule, TensorRows
from lightning_bnn.data.in_memory import Splits, data_folder, training_size
from lightning_bnn.errors import ConfigurationError
from tests.trainers import quiet_trainer

pytestmark = [
    # Lightning advises more workers on machines of many cores; these data are in memory already.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    # Lightning 2.6 asks torch about its trees in a way that torch has since renamed.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


class Recorder(pl.LightningModule):
    """Trains one number, and counts the examples of each stage."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = {"train": 0, "validation": 0, "test": 0}

    def _record(self, stage, batch):
        inputs, targets = batch
        assert inputs.dtype == torch.float32
        assert len(inputs) == len(targets)
        self.seen[stage] += len(targets)
        return self.weight * inputs.mean()

    def training_step(self, batch):
        return self._record("train", batch)

    def validation_step(self, batch):
        self._record("validation", batch)

    def test_step(self, batch):
        self._record("test", batch)

    def predict_step(self, batch):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tensors(data):
    parts = (data.splits.train, data.splits.validation, data.splits.test)
    return [tensor for part in parts for tensor in part.tensors]


def global_states():
    return torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002


def assert_untouched(before):
    after = global_states()
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2] == after[2]


def test_every_stage_of_a_trainer(make_data):
    data, model, trainer = (
        make_data(),
        Recorder(),
        quiet_trainer(max_epochs=1, num_sanity_val_steps=0),
    )
    trainer.fit(model, datamodule=data)
    assert model.seen["train"] == data.num_data == len(data.splits.train)
    assert model.seen["validation"] == len(data.splits.validation) > 0
    trainer.test(model, datamodule=data, verbose=False)
    assert model.seen["test"] == len(data.splits.test) > 0
    predicted = trainer.predict(model, datamodule=data)
    rows = data.splits.test if data.splits.predict is None else data.splits.predict
    inputs, targets = (torch.cat(parts) for parts in zip(*predicted, strict=True))
    assert torch.equal(targets, rows.tensors[1])
    assert inputs.shape[1:] == data.input_shape
    if hasattr(data, "num_classes"):
        assert (targets.shape, targets.dtype) == ((len(rows),), torch.int64)
        assert 0 <= targets.min() <= targets.max() < data.num_classes
    else:
        assert (targets.shape, targets.dtype) == ((len(rows), data.num_outputs), torch.float32)


def test_data_neither_use_nor_move_the_global_generators(make_data):
    pl.seed_everything(1, verbose=False)
    before = global_states()
    first = make_data()
    first.prepare_data()
    first.setup("fit")
    first.setup("test")
    for loader in (first.val_dataloader(), first.test_dataloader(), first.predict_dataloader()):
        list(loader)
    assert_untouched(before)

    pl.seed_everything(2, verbose=False)
    second = make_data()
    second.setup()
    for one, other in zip(tensors(first), tensors(second), strict=True):
        assert torch.equal(one, other)


def test_order_and_augmentation_follow_the_global_seed(make_data):
    data = make_data()
    data.setup()

    def epoch(seed):
        torch.manual_seed(seed)
        return [torch.cat(parts) for parts in zip(*data.train_dataloader(), strict=True)]

    first, again, other = epoch(3), epoch(3), epoch(4)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


class NoValidation(InMemoryDataModule):
    def load(self):
        rows = TensorRows(torch.zeros(6, 2), torch.zeros(6, 1))
        empty = TensorRows(torch.zeros(0, 2), torch.zeros(0, 1))
        return Splits(train=rows, validation=empty, test=rows)


def test_without_validation_rows_a_fit_runs_without_validation():
    data, model = NoValidation(batch_size=4), Recorder()
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(model, datamodule=data)  # a warning would be an error
    trainer.test(model, datamodule=data, verbose=False)
    assert model.seen == {"train": 6, "validation": 0, "test": 6}
    with pytest.raises(ConfigurationError, match=r"NoValidation has no .* Pass validation="):
        trainer.validate(model, datamodule=data, verbose=False)


def test_loaders_are_plain_and_shuffle_only_for_training():
    data = Digits()
    data.setup()
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    assert [type(loader) for loader in loaders] == [DataLoader] * 3
    assert [isinstance(loader.sampler, RandomSampler) for loader in loaders] == [True, False, False]


def test_lightning_can_share_the_rows_between_processes():
    # What a Trainer does to the loaders of a distributed run, here without the processes.
    data = Digits()
    data.setup()
    rows = data.splits.test
    shares = []
    for rank in range(2):
        sampler = DistributedSampler(rows, num_replicas=2, rank=rank, shuffle=False)
        loader = _update_dataloader(data.test_dataloader(), sampler)
        assert loader.sampler is sampler
        shares.append(torch.cat([targets for _, targets in loader]))
    together = torch.stack(shares, dim=1).flatten(0, 1)[: len(rows)]
    assert torch.equal(together, rows.tensors[1])


def test_before_setup_the_error_says_what_to_do():
    data = Digits()
    for read in (lambda: data.num_data, lambda: data.input_shape, data.train_dataloader):
        with pytest.raises(ConfigurationError, match=r"Digits has no data yet.*Call setup\(\)"):
            read()


@pytest.mark.parametrize("validation", [-1, 10, 11])
def test_training_size_leaves_something(validation):
    assert training_size(10, 9) == 1
    assert training_size(10, 0) == 10
    with pytest.raises(ConfigurationError, match=rf"10 training .*validation={validation}"):
        training_size(10, validation)


@pytest.mark.parametrize("make_data", ["UCIRegression", "MNIST", "CIFAR10"], indirect=True)
def test_the_environment_variable_gives_the_root_of_each_set(make_data, monkeypatch):
    made = make_data()
    made.setup()
    rows, root = made.num_data, made.data_dir.parent
    made = make_data()
    made.data_dir = None
    monkeypatch.setenv("LIGHTNING_BNN_DATA", str(root))
    made.setup()
    assert made.num_data == rows


def test_data_dir_wins_over_the_environment_and_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("LIGHTNING_BNN_DATA", "~/data")
    assert data_folder("~/sets", "uci/x") == Path("/home/someone/sets")
    assert data_folder(None, "uci/x") == Path("/home/someone/data/uci")
    monkeypatch.setenv("LIGHTNING_BNN_DATA", "")
    with pytest.raises(ConfigurationError, match=r"LIGHTNING_BNN_DATA.*uci/yacht/data\.txt"):
        data_folder(None, "uci/yacht/data.txt")


@pytest.mark.parametrize("make_data", ["MNIST", "CIFAR10"], indirect=True)
def test_download_only_when_asked_and_needed(make_data, tmp_path, monkeypatch):
    asked, there = [], make_data()
    monkeypatch.setattr(
        torchvision.datasets, type(there).__name__, lambda root, download: asked.append(root)
    )
    there.download = True
    there.prepare_data()
    type(there)(tmp_path / "empty").prepare_data()
    assert asked == []
    type(there)(tmp_path / "empty", download=True).prepare_data()
    assert asked == [tmp_path / "empty"]
