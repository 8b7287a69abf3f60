"""The strategy around the natural-gradient step; its fixed point is in ``tests/truth``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import IVONBNN, Strategy
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import Laplace, Learned, Normal, StudentT
from tests.nets import make_data
from tests.trainers import quiet_trainer

DATA = make_data("mlp", "regression")


def make(likelihood: Any = None, **options: Any) -> IVONBNN:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
    return IVONBNN(net, likelihood or Gaussian(0.5, learn=True), seed=0, **options)


def fit(bnn: IVONBNN, size: int = 8, **options: Any) -> Any:
    trainer = quiet_trainer(**{"max_epochs": 2, **options})
    torch.manual_seed(4)
    trainer.fit(bnn, DataLoader(DATA, batch_size=size))
    return trainer


def test_accumulated_batches_are_one_large_batch() -> None:
    """One draw for the window, and the estimates averaged: the same fit to rounding."""
    fits = []
    for size, window in ((16, 1), (8, 2)):
        bnn = make()
        trainer = fit(bnn, size, accumulate_grad_batches=window, precision="64-true")
        assert trainer.global_step == 6
        fits.append(bnn)
    for one, other in zip(fits[0].parameters(), fits[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_what_is_left_out_follows_from_the_fit() -> None:
    bnn = make()
    trainer = fit(bnn)
    (optimizer,) = trainer.optimizers
    group = optimizer.param_groups[0]
    assert group["ess"] == len(DATA)
    assert group["scale"] == pytest.approx(0.01)
    assert group["beta2"] == pytest.approx(1 - 0.05)  # a short fit
    assert bnn.peak_lr == pytest.approx(0.2)
    assert group["lr"] < 0.05  # annealed
    assert group["radius"] == pytest.approx(0.005 / 0.2)


def test_options_are_those_of_the_optimizer() -> None:
    bnn = make(lr=0.3, beta1=0.8, beta2=0.7, radius=5.0, initial_scale=0.03, scheduler=None)
    trainer = fit(bnn)
    for group in trainer.optimizers[0].param_groups:
        assert group["lr"] == 0.3
        assert (group["beta1"], group["beta2"], group["radius"]) == (0.8, 0.7, 5.0)
        assert group["scale"] == pytest.approx(0.03)


def test_temperature_scales_the_number_of_examples() -> None:
    bnn = make(temperature=0.5, num_data=48)
    assert bnn.configure_optimizers()["optimizer"].param_groups[0]["ess"] == 96
    with pytest.raises(ConfigurationError, match="temperature=0"):
        make(temperature=0.0)
    with pytest.raises(ConfigurationError, match="beta2="):
        make(beta2=1.0)


@pytest.mark.parametrize("prior", [Laplace(), StudentT(), Normal(scale=Learned())])
def test_any_prior_serves(prior: Any) -> None:
    bnn = make(prior=prior)
    fit(bnn)
    assert all(p.isfinite().all() for p in bnn.parameters())


@pytest.mark.parametrize("options", [{"bayesian": "3.*"}, {"draws": 3}, {"temperature": 0.1}])
def test_what_vi_can_it_can(options: dict[str, Any]) -> None:
    bnn = make(**options)
    before = {name: value.clone() for name, value in bnn.named_parameters()}
    fit(bnn, gradient_clip_val=1.0)
    trained = {name for name, value in bnn.named_parameters() if value.requires_grad}
    after = dict(bnn.named_parameters())
    assert all((after[name] != before[name]).any() for name in trained)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision: str) -> None:
    bnn = make(Gaussian(0.5))
    fit(bnn, precision=precision)
    assert all(p.isfinite().all() for p in bnn.parameters())


def test_pruned_weights_stay_zero() -> None:
    bnn = make()
    fit(bnn)
    keep = torch.rand(6, 4) > 0.5
    bnn.prune({"0.weight": keep})
    fit(bnn)
    posterior = bnn.posterior()
    for pruned in (posterior.mean["0.weight"][~keep], posterior.sd["0.weight"][~keep]):
        assert not pruned.any()
    assert posterior.sd["0.weight"][keep].all()


def test_a_checkpoint_makes_it_again(tmp_path: Path) -> None:
    bnn = make(lr=0.1)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
    fit(bnn, callbacks=[saver], enable_checkpointing=True)
    again = IVONBNN.load_from_checkpoint(tmp_path / "step=5.ckpt")
    assert isinstance(again, Strategy)
    assert again.hparams["lr"] == 0.1
    assert again.family.layout.size == bnn.family.layout.size
