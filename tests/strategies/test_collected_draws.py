"""Draws that were collected are found again, or it is said that there are none."""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import SGMCMC, Posterior
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.samplers import SGLD
from tests.nets import make_data
from tests.trainers import quiet_trainer

DATA = make_data("mlp", "classification")
ROWS = DataLoader(DATA, batch_size=16)
SAID = "no collected draws: this posterior is the last state of the 2 chains alone"


def sampler() -> SGMCMC:
    torch.manual_seed(0)
    return SGMCMC(nn.Linear(4, 3), Categorical(), sampler=partial(SGLD, lr=1e-3), chains=2, seed=0)


@pytest.fixture
def fitted(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Posterior]:
    """A checkpoint of a fit with six draws, in memory or on the disk."""
    dirpath = tmp_path / "draws" if request.param == "disk" else None
    bnn = sampler()
    trainer = quiet_trainer(max_epochs=2, callbacks=[SampleCollector(every=2, dirpath=dirpath)])
    trainer.fit(bnn, ROWS)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert len(bnn.posterior()) == 6
    return tmp_path / "end.ckpt", bnn.posterior()


def same(one: Posterior, other: Posterior) -> bool:
    inputs = DATA.tensors[0]
    return torch.equal(one.predict(inputs).outputs, other.predict(inputs).outputs)


@pytest.mark.parametrize("fitted", ["memory", "disk"], indirect=True)
@pytest.mark.filterwarnings("error:SGMCMC has no")
def test_draws_are_found_again(fitted: Any) -> None:
    path, posterior = fitted
    assert same(SGMCMC.load_from_checkpoint(path).posterior(), posterior)
    tested, other = sampler(), sampler()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Be aware that when using")
        (found,) = quiet_trainer().test(tested, ROWS, ckpt_path=path, verbose=False)
        collector = SampleCollector(every=2, dirpath=posterior_place(posterior))
        with_collector = quiet_trainer(callbacks=[collector])
        (expected,) = with_collector.test(other, ROWS, ckpt_path=path, verbose=False)
    assert found == expected
    assert same(tested.posterior(), posterior)


@pytest.mark.parametrize("fitted", ["memory", "disk"], indirect=True)
@pytest.mark.filterwarnings("error:SGMCMC has no", "ignore:Be aware that when using")
def test_draws_outlive_a_second_saving(fitted: Any, tmp_path: Path) -> None:
    path, posterior = fitted
    trainer = quiet_trainer()
    trainer.validate(sampler(), ROWS, ckpt_path=path, verbose=False)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert same(SGMCMC.load_from_checkpoint(tmp_path / "again.ckpt").posterior(), posterior)


def posterior_place(posterior: Any) -> str | None:
    files = getattr(posterior._draws, "files", None)
    return None if files is None else str(files)


@pytest.mark.parametrize("fitted", ["disk"], indirect=True)
def test_draws_that_are_gone_are_missed(fitted: Any, tmp_path: Path) -> None:
    path, _ = fitted
    loaded = SGMCMC.load_from_checkpoint(path)
    shutil.move(tmp_path / "draws", tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=r"3 steps were collected in .*draws, but"):
        loaded.posterior()
    assert len(Posterior.load(tmp_path / "elsewhere")) == 6


def test_without_a_collector_a_posterior_says_what_it_is(tmp_path: Path) -> None:
    bnn = sampler()
    assert len(bnn.posterior()) == 2  # nothing has been collected before a fit
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, ROWS, ROWS)
    with pytest.warns(UserWarning, match=SAID):
        bnn.posterior()
    with pytest.warns(UserWarning, match=SAID):
        trainer.test(bnn, ROWS, verbose=False)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.warns(UserWarning, match=SAID):
        SGMCMC.load_from_checkpoint(tmp_path / "end.ckpt").posterior()


def test_draws_in_the_memory_of_other_processes_are_refused() -> None:
    trainer = quiet_trainer(max_epochs=1, strategy="ddp_fork", callbacks=[SampleCollector()])
    with pytest.raises(Exception, match=r"draws in their memory end with them. Pass dirpath="):
        trainer.fit(sampler(), ROWS)
