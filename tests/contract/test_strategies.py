"""What every strategy does: fit, test, predict, save, load and resume, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bnn import Posterior
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.predictive import Predictive
from lightning_bnn.strategies import Strategy
from tests.contract.cases import STRATEGIES
from tests.nets import make_data
from tests.trainers import quiet_trainer

pytestmark = [
    pytest.mark.parametrize("name", STRATEGIES),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
DATA = make_data("mlp", "regression")
EPOCHS = 3


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))


def batches(name: str) -> DataLoader:
    return DataLoader(DATA, batch_size=len(DATA) if name == "HMC" else 8, shuffle=True)


def fit(name: str, ckpt_path: Path | None = None, **options: Any) -> tuple[Strategy, Any]:
    """A fit of three epochs, with a collector for strategies that need one."""
    bnn = STRATEGIES[name](network(), Gaussian(0.5))
    callbacks = [*options.pop("callbacks", []), *([SampleCollector()] if _samples(bnn) else [])]
    torch.manual_seed(11)
    trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=callbacks, **options)
    trainer.fit(bnn, batches(name), ckpt_path=ckpt_path)
    return bnn, trainer


def _samples(bnn: Strategy) -> bool:
    return hasattr(bnn, "collector")


def outputs_of(posterior: Posterior) -> Tensor:
    return posterior.predict(DATA.tensors[0][:7], draws=4, seed=1).outputs


def test_fit_test_and_predict(name: str) -> None:
    net = network()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    bnn, trainer = fit(name)
    (results,) = trainer.test(bnn, DataLoader(DATA, batch_size=16), verbose=False)
    assert {"test_rmse", "test_nll", "test_crps", "test_coverage"} <= set(results)
    assert all(torch.isfinite(torch.tensor(value)) for value in results.values())
    joined = Predictive.concatenate(trainer.predict(bnn, DataLoader(DATA, batch_size=16)))
    assert len(joined) == len(DATA)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


def test_a_posterior_predicts_the_same_from_disk(name: str, tmp_path: Path) -> None:
    bnn, _ = fit(name)
    posterior = bnn.posterior()
    expected = outputs_of(posterior)
    assert torch.equal(outputs_of(posterior), expected), "the seed decides"
    assert (posterior.predict(DATA.tensors[0][:7]).epistemic > 0).any()
    posterior.save(tmp_path)
    loaded = Posterior.load(tmp_path, network())
    assert type(loaded) is type(posterior)
    torch.testing.assert_close(outputs_of(loaded), expected, rtol=1e-5, atol=1e-6)


def test_a_posterior_is_not_changed_by_further_training(name: str) -> None:
    bnn, trainer = fit(name)
    posterior = bnn.posterior()
    expected = outputs_of(posterior)
    trainer.fit_loop.max_epochs = EPOCHS + 2
    trainer.fit(bnn, batches(name))
    assert torch.equal(outputs_of(posterior), expected)


@pytest.mark.parametrize("step", [1, 8])
def test_a_resumed_fit_is_the_undisturbed_one(name: str, step: int, tmp_path: Path) -> None:
    if name == "HMC":
        step = min(step, 2)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    bnn, _ = fit(name, callbacks=[saver], enable_checkpointing=True)
    again = ModelCheckpoint(tmp_path / "again", "{step}", every_n_train_steps=1, save_top_k=-1)
    path = tmp_path / f"step={step}.ckpt"
    resumed, _ = fit(name, path, callbacks=[again], enable_checkpointing=True)
    assert torch.equal(outputs_of(resumed.posterior()), outputs_of(bnn.posterior()))


def test_a_checkpoint_gives_the_posterior_back(name: str, tmp_path: Path) -> None:
    bnn, trainer = fit(name)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    other = STRATEGIES[name](network(), Gaussian(0.5))
    other.on_load_checkpoint(saved)
    other.load_state_dict(saved["state_dict"])
    if not _samples(bnn):  # draws are the collector's
        assert torch.equal(outputs_of(other.posterior()), outputs_of(bnn.posterior()))
    assert len(other.ids) == len(bnn.ids) == len(bnn.alive)
    assert set(bnn.member_posteriors()) == set(bnn.ids)
