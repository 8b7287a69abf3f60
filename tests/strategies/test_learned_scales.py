"""Learned prior scales in the strategies: shown, logged, kept with the draws, and pruned."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC, DeepEnsemble, VariationalBNN
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import prior_scales
from lightning_bnn.priors import Learned, Normal
from lightning_bnn.samplers import SGLD
from lightning_bnn.strategies.base import Strategy, logged_scales
from tests.trainers import quiet_trainer

LEARNED = Normal(scale=Learned())
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
STRATEGIES: dict[str, Any] = {
    "VI": VariationalBNN,
    "ensemble": partial(DeepEnsemble, members=3),
    "chains": partial(SGMCMC, chains=3, sampler=partial(SGLD, lr=1e-4), warm_up=0),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(
            torch.randn(20, 3, generator=generator), torch.randn(20, 1, generator=generator)
        ),
        batch_size=10,
    )


def make(name: str, **options: Any) -> Strategy:
    strategy: Strategy = STRATEGIES[name](network(), Gaussian(0.5), LEARNED, seed=1, **options)
    return strategy


@pytest.mark.parametrize("name", STRATEGIES)
def test_fitted_scales_are_logged_and_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    callbacks = [SampleCollector(burn_in=0, every=1)] if name == "chains" else []
    trainer = quiet_trainer(max_epochs=2, callbacks=callbacks)
    strategy = make(name)
    with caplog.at_level(logging.INFO):
        trainer.fit(strategy, loader())
    logged = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("prior_scale/")}
    assert list(logged) == [f"prior_scale/{key}" for key in NAMES]
    assert "The scales of the prior were learned: 0.weight 0." in caplog.text
    scales = strategy.prior_scales()
    assert list(scales) == NAMES
    draws = {"VI": 1, "ensemble": 3, "chains": 12}[name]
    assert all(scale.shape == (draws,) for scale in scales.values())
    if name != "chains":
        torch.testing.assert_close(scales["0.weight"].mean(), logged["prior_scale/0.weight"])


def test_a_fixed_prior_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    trainer, bnn = quiet_trainer(max_epochs=1), VariationalBNN(network(), Gaussian(0.5), Normal())
    with caplog.at_level(logging.INFO):
        trainer.fit(bnn, loader())
    assert not any(key.startswith("prior_scale") for key in trainer.callback_metrics)
    assert "were learned" not in caplog.text
    assert bnn.prior_scales() == {}


def test_many_scales_are_logged_in_three_numbers() -> None:
    scales = {f"layer{i}": torch.tensor([float(i)]) for i in range(41)}
    assert logged_scales(scales) == {
        "prior_scale/smallest": 0.0, "prior_scale/median": 20.0, "prior_scale/largest": 40.0
    }  # fmt: skip


def test_the_scales_of_collected_draws(tmp_path: Path) -> None:
    """One to each draw, the same by seed, from memory, from the disk and from a checkpoint."""
    collector = SampleCollector(burn_in=1, every=1, dirpath=tmp_path / "draws")
    chains = make("chains")
    trainer = quiet_trainer(max_epochs=3, callbacks=[collector])
    trainer.fit(chains, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    scales = chains.prior_scales(seed=4)  # type: ignore[call-arg]
    assert scales["2.bias"].shape == (15,)
    loaded = SGMCMC.load_from_checkpoint(tmp_path / "last.ckpt")
    assert repr(loaded.hparams["prior"]) == repr(repr(LEARNED))
    for again in (
        prior_scales(collector.posterior(), LEARNED, seed=4),
        loaded.prior_scales(seed=4),
    ):
        assert all(torch.equal(scales[key], again[key]) for key in NAMES)
    other = chains.prior_scales(seed=5)  # type: ignore[call-arg]
    assert not torch.equal(other["2.bias"], scales["2.bias"])


def test_point_estimates_have_scales_too() -> None:
    bnn = VariationalBNN(network(), Gaussian(0.5), LEARNED, bayesian="2.*", num_data=20)
    assert list(bnn.prior_scales()) == [*NAMES[2:], *NAMES[:2]]
    bnn.loss(next(iter(loader()))).backward()
    weight = bnn.net[0].weight
    data = torch.autograd.grad(
        bnn.target.data_energy(bnn(next(iter(loader()))[0])[None], torch.zeros(10, 1)), weight
    )
    assert weight.grad is not None
    assert data[0].shape == weight.shape
    with_prior = bnn.point_prior.fitted_scales(torch.zeros(32))
    assert with_prior["0.weight"] < bnn.prior_scales()["0.weight"]


def test_what_was_pruned_has_no_part_in_a_scale() -> None:
    """A step of VI with half of a tensor pruned is that of a prior over the rest alone."""
    bnn = VariationalBNN(network(), Gaussian(0.5), LEARNED, num_data=20, seed=0)
    mask = torch.zeros(8, 3, dtype=torch.bool)
    mask[:4] = True
    kept = bnn.family.layout.views(bnn.family.mean.detach())["0.weight"][:4].clone()
    bnn.prune({"0.weight": mask})
    expected = 1e-4 * 12 + kept.square().sum().item()
    scale = bnn.prior_scales()["0.weight"].item()
    assert scale == pytest.approx(((0.1 + expected / 2) / (1 + 6)) ** 0.5, rel=1e-4)
    bnn.loss(next(iter(loader()))).backward()
    mean, rho = (
        bnn.family.layout.views(p.grad)["0.weight"] for p in (bnn.family.mean, bnn.family.rho)
    )
    assert (mean[4:] == 0).all()
    assert (rho[4:] == 0).all()
    assert (rho[:4] != 0).all()


@pytest.mark.parametrize("kind", ["anchors", "targets and anchors"])
def test_randomised_map_needs_a_known_scale(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"whose scale must be known; .*Normal\(0.0, 0.3"):
        DeepEnsemble(network(), Gaussian(0.5), LEARNED, randomise=kind)
