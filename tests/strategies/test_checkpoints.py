"""Checkpoint files of ordinary fits: whole or as before; damage is noticed when they are read."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import DeepEnsemble, VariationalBNN
from lightning_bnn.errors import CheckpointError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from lightning_bnn.strategies.checkpoints import WholeCheckpointIO, check_checkpoint
from tests.nets import make_data
from tests.processes import run_script
from tests.trainers import quiet_trainer

DATA = make_data("mlp", "classification")


def make_bnn() -> VariationalBNN:
    torch.manual_seed(1)
    return VariationalBNN(nn.Linear(4, 3), Categorical())


def fit(folder: Path | str, path: Any = None, bnn: Any = None, **options: Any) -> Any:
    seed_everything(2 if path is None else 3, verbose=False)
    bnn = make_bnn() if bnn is None else bnn
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=2, save_last=True)
    trainer = quiet_trainer(
        max_steps=6, max_epochs=-1, callbacks=[saver], enable_checkpointing=True, **options
    )
    trainer.fit(bnn, DataLoader(DATA, 8, shuffle=True), ckpt_path=path)
    return bnn


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("fitted")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mean = fit(folder).family.mean.detach().clone()
    now = folder.stat().st_mtime
    for number, name in enumerate(("step=2", "step=4", "step=6", "last")):
        os.utime(folder / f"{name}.ckpt", (now + number, now + number))
    return folder, mean


@pytest.fixture
def folder(fitted: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    return Path(shutil.copytree(fitted[0], tmp_path / "run"))


def cut(path: Path) -> None:
    """Cut a file in half, with the time at which it was written."""
    times = path.stat()
    os.truncate(path, times.st_size // 2)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def flip(path: Path, place: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def spoil(path: Path) -> None:
    """Change a bit of a tensor, which ``torch.load`` does not notice."""
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("archive/data/0").header_offset
    name, extra = struct.unpack("<HH", path.read_bytes()[start + 26 : start + 30])
    times = path.stat()
    flip(path, start + 30 + name + extra, 0)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(v, second[k]) for k, v in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def test_no_cut_and_no_changed_bit_is_read_as_something_else(folder: Path) -> None:
    path = folder / "last.ckpt"
    data, contents = path.read_bytes(), torch.load(path, weights_only=True)
    chance = random.Random(4)
    for length in (0, 1, len(data) - 1, *(chance.randrange(len(data)) for _ in range(50))):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            check_checkpoint(path)
    path.write_bytes(data)
    noticed = 0
    # most of the table of contents, which has no checksum, and some of the rest
    table = data.index(b"PK\x01\x02")
    places = [*chance.sample(range(table), 150), *chance.sample(range(table, len(data)), 250)]
    for place in places:
        bit = chance.randrange(8)
        flip(path, place, bit)
        try:
            check_checkpoint(path)
        except CheckpointError:
            noticed += 1
        else:
            assert equal(torch.load(path, weights_only=True), contents), (place, bit)
        flip(path, place, bit)
    assert noticed > 100


def test_a_flag_that_makes_torch_skip_a_tensor_is_noticed(folder: Path) -> None:
    path = folder / "last.ckpt"
    data = path.read_bytes()
    entry = [m.start() for m in re.finditer(rb"PK\x01\x02", data)][5]
    flip(path, entry + 38, 4)  # "is a folder": torch.load leaves its memory as it was
    with pytest.raises(CheckpointError, match="table of contents"):
        check_checkpoint(path)


@pytest.mark.filterwarnings("ignore:.*directory.*not empty")
@pytest.mark.parametrize("named", [True, False])
def test_a_fit_resumes_from_the_newest_whole_checkpoint_before(
    named: bool, folder: Path, fitted: tuple[Path, torch.Tensor]
) -> None:
    cut(folder / "last.ckpt")
    spoil(folder / "step=6.ckpt")
    torn, whole = re.escape(f"{folder / 'last.ckpt'}"), re.escape(f"{folder / 'step=4.ckpt'}")
    with pytest.warns(UserWarning, match=f"{torn} is damaged: .*resumes from {whole} instead"):
        resumed = fit(folder, folder / "last.ckpt" if named else "last")
    assert torch.equal(resumed.family.mean, fitted[1])


@pytest.mark.filterwarnings("ignore:.*directory.*not empty")
def test_later_checkpoints_do_not_take_the_place_of_a_damaged_one(folder: Path) -> None:
    cut(folder / "step=2.ckpt")
    with pytest.raises(CheckpointError, match=r"step=2.ckpt is damaged: .*Use another one"):
        fit(folder, folder / "step=2.ckpt")


@pytest.mark.filterwarnings("ignore:.*directory.*not empty")
def test_a_checkpoint_of_another_fit_does_not_take_the_place_of_a_damaged_one(
    folder: Path, fitted: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    other = VariationalBNN(nn.Linear(4, 3), Categorical(), Normal(0.0, 2.0))
    fit(tmp_path / "other", bnn=other)
    newest = shutil.copy(tmp_path / "other" / "step=6.ckpt", folder / "other.ckpt")
    shutil.copystat(folder / "step=6.ckpt", newest)
    (folder / "step=6.ckpt").unlink()
    (folder / "step=2.ckpt").unlink()
    spoil(folder / "last.ckpt")
    with pytest.warns(UserWarning, match=r"resumes from .*step=4.ckpt instead"):
        resumed = fit(tmp_path / "resumed", folder / "last.ckpt")
    assert torch.equal(resumed.family.mean, fitted[1])
    cut(folder / "last.ckpt")  # now nothing tells whose it was
    with pytest.raises(CheckpointError, match="checkpoints of 2 fits"):
        fit(folder, folder / "last.ckpt")


@pytest.mark.filterwarnings("ignore:.*directory.*not empty")
def test_weights_alone_do_not_take_the_place_of_a_damaged_checkpoint(
    folder: Path, fitted: tuple[Path, torch.Tensor]
) -> None:
    saved = torch.load(folder / "step=6.ckpt", weights_only=True)
    del saved["optimizer_states"], saved["lr_schedulers"], saved["loops"]
    torch.save(saved, folder / "weights.ckpt")
    shutil.copystat(folder / "step=6.ckpt", folder / "weights.ckpt")
    cut(folder / "last.ckpt")
    (folder / "step=6.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"resumes from .*step=4.ckpt instead"):
        resumed = fit(folder, folder / "last.ckpt")
    assert torch.equal(resumed.family.mean, fitted[1])


@pytest.mark.filterwarnings("ignore:.*directory.*not empty")
def test_files_that_another_process_takes_away_stop_nothing(folder: Path) -> None:
    os.symlink("gone", folder / ".tmp-0123456789abcdef")
    os.symlink("gone", folder / "gone.ckpt")
    cut(folder / "last.ckpt")
    (folder / "step=6.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"resumes from .*step=4.ckpt instead"):
        fit(folder, folder / "last.ckpt")
    check_checkpoint(folder / "step=6.ckpt")


def test_saving_needs_no_copy_in_memory(tmp_path: Path) -> None:
    tensor = torch.zeros(10**7)
    tracemalloc.start()
    WholeCheckpointIO(quiet_trainer()).save_checkpoint({"a": tensor}, tmp_path / "large.ckpt")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < tensor.nbytes / 10
    assert torch.equal(torch.load(tmp_path / "large.ckpt")["a"], tensor)


def test_only_a_fit_takes_another_checkpoint(folder: Path) -> None:
    path = folder / "step=6.ckpt"
    spoil(path)
    torch.load(path, weights_only=True)  # which sees nothing
    with pytest.raises(CheckpointError, match="does not have its checksum"):
        quiet_trainer().test(make_bnn(), DataLoader(DATA, 8), ckpt_path=path)
    with pytest.raises(CheckpointError, match="does not have its checksum"):
        VariationalBNN.load_from_checkpoint(path)
    VariationalBNN.load_from_checkpoint(folder / "last.ckpt")


def test_every_strategy_and_a_bare_save_are_protected(tmp_path: Path) -> None:
    bnn = DeepEnsemble(nn.Linear(4, 3), Categorical(), members=2)
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(bnn, DataLoader(DATA, 8))
    assert type(trainer.strategy.checkpoint_io) is WholeCheckpointIO
    trainer.save_checkpoint(tmp_path / "new" / "one.ckpt")
    check_checkpoint(tmp_path / "new" / "one.ckpt")
    assert os.listdir(tmp_path / "new") == ["one.ckpt"]


@pytest.mark.filterwarnings("ignore")
def test_a_plugin_of_the_users_own_stays() -> None:
    class Mine(TorchCheckpointIO):
        pass

    for plugin in (Mine(), AsyncCheckpointIO()):
        trainer = quiet_trainer(max_steps=1, plugins=[plugin])
        trainer.fit(make_bnn(), DataLoader(DATA, 8))
        assert trainer.strategy.checkpoint_io is plugin


@pytest.mark.filterwarnings("ignore:.*directory.*not empty")
def test_files_that_are_saved_in_the_background_are_checked_too(
    folder: Path, fitted: tuple[Path, torch.Tensor]
) -> None:
    (folder / "step=6.ckpt").unlink()
    spoil(folder / "last.ckpt")
    with pytest.warns(UserWarning, match=r"resumes from .*step=4.ckpt instead"):
        resumed = fit(folder, folder / "last.ckpt", plugins=[AsyncCheckpointIO()])
    assert torch.equal(resumed.family.mean, fitted[1])
    check_checkpoint(folder / "step=6.ckpt")


def test_a_strategy_of_lightning_that_is_used_again_belongs_to_its_new_trainer() -> None:
    shared = SingleDeviceStrategy(torch.device("cpu"))
    for _ in range(2):
        trainer = pl.Trainer(
            max_steps=1, strategy=shared, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(make_bnn(), DataLoader(DATA, 8))
        assert trainer.strategy.checkpoint_io._trainer is trainer


@pytest.mark.filterwarnings("ignore")
def test_remote_checkpoints_are_as_lightning_has_them(fitted: tuple[Path, torch.Tensor]) -> None:
    fit("memory://checkpoints")
    resumed = fit("memory://checkpoints", "memory://checkpoints/step=4.ckpt")
    assert torch.equal(resumed.family.mean, fitted[1])


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    plugin, path = WholeCheckpointIO(quiet_trainer()), tmp_path / "last.ckpt"
    plugin.save_checkpoint({"a": torch.zeros(9)}, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            plugin.save_checkpoint({"a": torch.ones(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert torch.equal(torch.load(path)["a"], torch.zeros(9))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_full_disk_and_kills_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    printed = run_script("tests.strategies.checkpoint_script", tmp_path, 10)
    found = json.loads(printed.splitlines()[-1])
    assert found["full"] == "File too large: last.ckpt"
    assert found["left"] == found["files"] == ["last.ckpt"]
    assert found["versions"][0] == -1
    assert len(set(found["versions"])) == 11  # each process had saved before it was killed
    assert found["torn"] > 0  # and some fell in the midst of one
