"""A resumed fit equals an uninterrupted one to the last bit, also from the middle of an epoch."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_bnn import VariationalBNN
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from lightning_bnn.strategies.resume import ResumableLoader
from tests.contract.toys.neighbours import Neighbours
from tests.nets import make_data
from tests.trainers import quiet_trainer

# a resumed fit keeps its own checkpoints apart here
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


class Augmented(Dataset):
    """Data whose augmentation draws from torch's global generator."""

    def __init__(self) -> None:
        self.data = make_data("mlp", "classification")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = self.data[index]
        return inputs + 0.1 * torch.randn(4), target


class Stream(IterableDataset):
    """Data without a length."""

    def __iter__(self) -> Any:
        return iter(make_data("mlp", "classification"))


def make_bnn(**options: Any) -> VariationalBNN:
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)
    )
    return VariationalBNN(
        net,
        Categorical(),
        Normal(0.0, 1.0),
        kl_warmup=10,
        optimizer=lambda parameters: Adam(parameters, lr=0.01),
        scheduler=lambda optimizer: StepLR(optimizer, 1, 0.8),
        predict_draws=2,
        **options,
    )


def fit(directory: Path, loader: Any, ckpt: Path | None = None, **options: Any) -> VariationalBNN:
    """Fit 3 epochs of 6 batches and keep a checkpoint of every step."""
    trainer_options = {"accumulate_grad_batches": options.pop("accumulate", 1)}
    if "limit" in options:
        trainer_options["limit_train_batches"] = options.pop("limit")
    bnn = make_bnn(**options)
    saver = every_step(directory / ckpt.stem if ckpt else directory)
    trainer_options |= {"callbacks": [saver], "enable_checkpointing": True}
    if ckpt is not None:
        torch.manual_seed(12345)  # a fresh process would not stand where the first one stood
    val = DataLoader(make_data("mlp", "classification"), batch_size=16)
    trainer = quiet_trainer(max_epochs=3, **trainer_options)
    trainer.fit(bnn, loader(), val, ckpt_path=ckpt)
    return bnn


def every_step(directory: Path) -> ModelCheckpoint:
    return ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)


def shuffled(workers: int = 0) -> DataLoader:
    return DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=workers)


def equal(first: VariationalBNN, second: VariationalBNN) -> bool:
    a, b = first.state_dict(), second.state_dict()
    noise = a.pop("noise._extra_state"), b.pop("noise._extra_state")
    return torch.equal(noise[0]["state"], noise[1]["state"]) and all(
        torch.equal(a[key], b[key]) for key in a
    )


def seeded() -> DataLoader:
    generator = torch.Generator().manual_seed(8)
    return DataLoader(Augmented(), batch_size=8, shuffle=True, generator=generator)


def stream() -> DataLoader:
    """Lightning fetches one batch ahead of such data."""
    return DataLoader(Stream(), batch_size=8)


@pytest.mark.parametrize(
    ("load", "options", "steps"),
    [
        (shuffled, {}, [4, 6, 17]),  # step 6 is the end of an epoch
        (shuffled, {"accumulate": 2}, [2, 3]),
        (shuffled, {"limit": 4}, [4, 5]),
        (shuffled, {"estimator": "flipout"}, [5]),
        (partial(shuffled, 2), {}, [8]),
        (stream, {"num_data": 48}, [9]),
        (seeded, {}, [8]),
    ],
    ids=["plain", "accumulated", "limited", "flipout", "workers", "no length", "generator"],
)
def test_resume_is_bit_equal(load: Any, options: Any, steps: list[int], tmp_path: Path) -> None:
    whole = fit(tmp_path, load, **options)
    for step in steps:
        assert equal(whole, fit(tmp_path, load, tmp_path / f"step={step}.ckpt", **options)), step


@pytest.mark.parametrize(
    ("saving", "validating", "name"),
    [
        ({}, {}, "epoch=1-step=12"),  # Lightning's default, whose loader states are not given back
        ({"save_on_train_epoch_end": False}, {"val_check_interval": 2}, "epoch=0-step=4"),
    ],
    ids=["end of an epoch", "after a validation"],
)
def test_resume_is_bit_equal_from(saving: Any, validating: Any, name: str, tmp_path: Path) -> None:
    """With a validation set that draws random numbers."""

    def run(folder: str, ckpt: Path | None) -> VariationalBNN:
        bnn = make_bnn()
        torch.manual_seed(3 if ckpt is None else 4)
        saver = ModelCheckpoint(tmp_path / folder, monitor="val_nll", save_top_k=-1, **saving)
        options = {"callbacks": [saver], "enable_checkpointing": True, **validating}
        trainer = quiet_trainer(max_epochs=3, **options)
        trainer.fit(bnn, shuffled(), DataLoader(Augmented(), batch_size=8), ckpt_path=ckpt)
        return bnn

    whole = run("whole", None)
    assert equal(whole, run("resumed", tmp_path / "whole" / f"{name}.ckpt"))


def test_resume_inside_of_an_accumulation_window_draws_noise_first(tmp_path: Path) -> None:
    """The gradients of its first half are gone, as in any Lightning fit; the noise is not."""
    val = DataLoader(make_data("mlp", "classification"), batch_size=16)
    saver = ModelCheckpoint(
        tmp_path, "{step}", monitor="val_nll", save_top_k=-1, save_on_train_epoch_end=False
    )
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "enable_checkpointing": True}
    quiet_trainer(max_epochs=1, callbacks=[saver], **options).fit(make_bnn(), shuffled(), val)
    bnn = make_bnn()
    space = bnn.family.workspace()
    space.noise.fill_(torch.nan)  # as fresh memory may be
    again = ModelCheckpoint(
        tmp_path / "again",
        "{step}",
        monitor="val_nll",
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    trainer = quiet_trainer(max_epochs=1, callbacks=[again], **options)
    with pytest.warns(UserWarning, match="after 3 batches of an epoch, in the middle of the 2"):
        trainer.fit(bnn, shuffled(), val, ckpt_path=tmp_path / "step=1.ckpt")
    assert bnn.family.mean.isfinite().all()
    assert space.key is not None or space.noise.isfinite().all()


def test_layers_that_lost_per_example_noise_stay_without_it(tmp_path: Path) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.body(inputs)

    def make() -> VariationalBNN:
        return VariationalBNN(Unused(), Categorical(), Normal(), estimator="flipout")

    bnn = make()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, shuffled())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    other = make()
    quiet_trainer(max_epochs=1).fit(other, shuffled(), ckpt_path=tmp_path / "last.ckpt")
    assert other._per_example.layers == ["body"]


def test_a_tested_checkpoint_does_not_turn_back_a_later_fit(tmp_path: Path) -> None:
    fit(tmp_path, shuffled)
    bnn = make_bnn()
    data = DataLoader(make_data("mlp", "classification"), batch_size=16)
    trainer = quiet_trainer(callbacks=[every_step(tmp_path)], enable_checkpointing=True)
    trainer.test(bnn, data, ckpt_path=tmp_path / "step=4.ckpt", verbose=False)
    assert bnn._random_state is None
    assert bnn._restored_order is None


def test_validation_does_not_change_training() -> None:
    torch.manual_seed(0)
    first = make_bnn()
    torch.manual_seed(0)
    quiet_trainer(max_epochs=2).fit(first, shuffled(), DataLoader(Augmented(), batch_size=8))
    second = make_bnn()
    torch.manual_seed(0)
    quiet_trainer(max_epochs=2).fit(second, shuffled())
    assert equal(first, second)


def test_seed_decides_the_order_of_the_data() -> None:
    orders = []
    for seed in (1, 1, 2):
        loader = ResumableLoader(DataLoader(range(20), shuffle=True), seed)
        orders.append([int(batch) for _ in range(2) for batch in loader])
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:20] != orders[0][20:], "each epoch has an order of its own"


def test_resume_from_a_fit_of_another_length(tmp_path: Path) -> None:
    """A finished fit goes on when more epochs are asked for, as one long fit would."""
    fit(tmp_path, shuffled)
    bnn = make_bnn()
    trainer = quiet_trainer(
        max_epochs=4, callbacks=[every_step(tmp_path / "more")], enable_checkpointing=True
    )
    trainer.fit(bnn, shuffled(), ckpt_path=tmp_path / "step=18.ckpt")
    assert trainer.global_step == 24


@pytest.mark.parametrize(
    ("saving", "monitor"),
    [
        ({}, "val_nll"),
        ({"save_on_train_epoch_end": True}, "train_loss"),
        ({"every_n_train_steps": 6}, "val_nll"),
        ({"every_n_train_steps": 6}, "train_loss"),
        ({"every_n_train_steps": 4}, "train_loss"),
    ],
)
def test_a_plateau_is_seen_in_the_epoch_resumed_in(
    saving: Any, monitor: str, tmp_path: Path
) -> None:
    def rate(path: Path | None) -> float:
        torch.manual_seed(1)
        # nothing is an improvement, so that each epoch halves the learning rate
        plateau = partial(ReduceLROnPlateau, patience=0, factor=0.5, threshold=1e6)
        bnn = VariationalBNN(nn.Linear(4, 3), Categorical(), monitor=monitor, scheduler=plateau)
        saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **saving)
        trainer = quiet_trainer(max_epochs=4, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(bnn, shuffled(), shuffled(), ckpt_path=path)
        return trainer.optimizers[0].param_groups[0]["lr"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = rate(None)
        assert whole == 1e-3 / 16
        for step in (4, 8) if saving.get("every_n_train_steps") == 4 else (6, 12):
            assert rate(tmp_path / f"step={step}.ckpt") == whole


def test_a_fit_resumed_with_no_step_left_is_finished(tmp_path: Path) -> None:
    def fit(path: Path | None) -> Neighbours:
        bnn = Neighbours(nn.Linear(4, 3), Categorical())
        saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=6)
        trainer = quiet_trainer(
            max_steps=6, max_epochs=-1, callbacks=[saver], enable_checkpointing=True
        )
        trainer.fit(bnn, shuffled(), ckpt_path=path)
        return bnn

    whole = fit(None)
    path = tmp_path / "step=6.ckpt"
    assert not torch.load(path, weights_only=True)["lightning_bnn"]["finished"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the folder is not empty
        resumed = fit(path)
    assert resumed.target.num_data == whole.target.num_data
    for name, tensor in whole.finished.items():
        assert torch.equal(resumed.finished[name], tensor)
