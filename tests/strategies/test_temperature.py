"""A temperature that is chosen on validation data, in the course of one fit."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC, VariationalBNN
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import MeanField
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import BoundPrior, Normal
from lightning_bnn.strategies.temperature import TemperatureSearch
from tests.trainers import quiet_trainer

EPOCHS = 12


def search(nlls: list[float], total: int = 100) -> TemperatureSearch:
    """One round of validation in each tenth of a fit."""
    made = TemperatureSearch()
    for index, nll in enumerate(nlls):
        made.score(10 * (index + 1), nll, total)
    return made


@pytest.mark.parametrize(
    ("late", "tried", "chosen"),
    [
        ([3.0, 4.0], 2, 1.0),
        ([3.0, 2.0, 2.5], 3, 0.3),
        ([3.0, 2.0, 1.999], 3, 0.3),
        ([3.0, 2.0, 1.0, 0.5, 0.4], 5, 0.01),
        ([3.0, float("nan")], 2, 1.0),
        ([3.0, 2.0], 2, None),
    ],
)
def test_it_goes_down_as_long_as_it_helps(
    late: list[float], tried: int, chosen: float | None
) -> None:
    """The first half of the fit is at T = 1, whatever its scores."""
    made = search([9.0, 0.1, 0.1, 0.1, *late])
    assert (len(made.scores), made.chosen) == (tried, chosen)
    assert made.temperature == (0.1 if chosen is None else chosen)


def test_the_last_round_of_a_fit_ends_it() -> None:
    assert search([5.0, 4.0], total=20).chosen == 0.3
    assert search([5.0, 4.0], total=25).scores == {1.0: 4.0}  # and so no choice
    assert search([5.0, 4.0], total=30).chosen is None


def test_a_stage_takes_its_share_of_the_fit_however_often_it_is_validated() -> None:
    made = TemperatureSearch()
    seen = {}
    for step in range(1, 101):
        made.score(step, -step, 100)
        seen.setdefault(made.temperature, step)
    assert seen == {1.0: 1, 0.3: 50, 0.1: 58, 0.03: 66, 0.01: 74}
    assert made.chosen == 0.01


# -------------------------------------------------------------------- in a fit


def overfit() -> tuple[TensorDataset, TensorDataset]:
    """Little noise under a likelihood that expects much: a colder posterior predicts better."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(80, 3, generator=generator)
    targets = inputs.sum(1, keepdim=True) + 0.02 * torch.randn(80, 1, generator=generator)
    return TensorDataset(inputs[:40], targets[:40]), TensorDataset(inputs[40:], targets[40:])


def fit(
    trainer: Any = None, ckpt_path: Any = None, validate: bool = True, **options: Any
) -> VariationalBNN:
    torch.manual_seed(1)
    bnn = VariationalBNN(
        nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        Gaussian(0.3),
        optimizer=partial(Adam, lr=0.02),
        **{"temperature": "validation", "initial_scale": 0.1, "seed": 2, **options},
    )
    train, held_out = (DataLoader(data, batch_size=10) for data in overfit())
    trainer = trainer or quiet_trainer(max_epochs=EPOCHS)
    trainer.fit(bnn, train, held_out if validate else None, ckpt_path=ckpt_path)
    return bnn


@pytest.mark.parametrize("tempers", ["likelihood", "posterior"])
def test_a_fit_chooses_reports_and_resumes_exactly(
    tempers: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(trainer: Any, bnn: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    def save_in_the_middle(trainer: Any, bnn: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 0 and trainer.current_epoch == 6:
            trainer.save_checkpoint(tmp_path / "middle.ckpt")

    trainer = quiet_trainer(
        max_epochs=EPOCHS, logger=CSVLogger(tmp_path / "log"), log_every_n_steps=1,
        callbacks=[
            LambdaCallback(on_train_epoch_end=save, on_train_batch_end=save_in_the_middle)
        ],
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        whole = fit(trainer, tempers=tempers)
    found = whole.temperature_search
    assert found is not None
    assert found.chosen is not None
    assert found.chosen < 1
    assert whole.target.temperature == found.chosen
    assert whole.prior.power == (1 / found.chosen if tempers == "posterior" else 1)
    assert f"T = {found.chosen:g} was chosen on the validation data" in caplog.text
    assert "it is not the Bayes posterior" in caplog.text
    assert trainer.logger.experiment.hparams["chosen_temperature"] == found.chosen
    assert trainer.callback_metrics["temperature"] == pytest.approx(found.chosen)
    for epoch in (4, 6, "middle", 8):  # before the search, in the middle of it, after it
        resumed = fit(ckpt_path=tmp_path / f"{epoch}.ckpt", tempers=tempers, seed=99)
        assert resumed.temperature_search.scores == found.scores
        for name, tensor in whole.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(resumed.state_dict()[name], tensor), (epoch, name)
    loaded = VariationalBNN.load_from_checkpoint(tmp_path / f"{EPOCHS - 1}.ckpt")
    assert loaded.target.temperature == found.chosen
    assert loaded.temperature_search.scores == found.scores


def test_a_worse_stage_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation NLL that rises with each round: T is 1 again, at the weights of its stage.

    What a checkpoint of a round holds is what was scored in it, before a new stage begins.
    """
    score = TemperatureSearch.score
    monkeypatch.setattr(
        TemperatureSearch,
        "score",
        lambda self, step, nll, total: score(self, step, float(step), total),
    )
    seen: list[tuple[float, torch.Tensor]] = []

    def look(trainer: Any, bnn: VariationalBNN) -> None:
        seen.append((bnn.target.temperature, bnn.family.mean.detach().clone()))

    callbacks = [LambdaCallback(on_validation_start=look, on_validation_end=look)]
    bnn = fit(quiet_trainer(max_epochs=7, callbacks=callbacks, num_sanity_val_steps=0))
    assert [temperature for temperature, _ in seen] == [1.0] * 8 + [0.3] + [1.0] * 5
    before, after = seen[0::2], seen[1::2]  # each round
    same = [torch.equal(old[1], new[1]) for old, new in zip(before, after, strict=True)]
    assert same == [True] * 4 + [False] + [True] * 2
    assert torch.equal(after[4][1], after[3][1])
    assert bnn.target.temperature == 1


def test_what_it_needs_is_said_before_the_first_step() -> None:
    with pytest.raises(ConfigurationError, match="or 'validation'; got 'auto'"):
        fit(temperature="auto")
    with pytest.raises(ConfigurationError, match="no validation data"):
        fit(validate=False)
    with pytest.raises(ConfigurationError, match="no known length"):
        fit(quiet_trainer(max_epochs=-1, max_time="00:00:00:01"))
    with pytest.warns(UserWarning, match="nothing to choose from"):
        fit(quiet_trainer(max_epochs=1))
    with pytest.raises(ConfigurationError, match="temperature= is a number"):
        SGMCMC(nn.Linear(1, 1), Gaussian(1.0), temperature="validation")  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["exp", "softplus"])
def test_sharpened_scales_are_those_of_a_gaussian_posterior(form: Any) -> None:
    """1/σ² = h/T + 1/s² of a curvature h, with the prior as it is or at the same temperature."""
    net = nn.Linear(3, 1, bias=False).double()
    prior = BoundPrior(Normal(0.0, 0.5), net, dict(net.named_parameters()))
    curvature = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64)
    for bound in (prior, None):
        family = MeanField(form).bind(dict(net.named_parameters()))
        sd = (curvature + 4).rsqrt()
        rho = sd.log() if form == "exp" else sd.expm1().log()
        family.rho.data.copy_(rho)
        family.sharpen(10.0, bound)
        expected = 10 * curvature + (4 if bound is not None else 40)
        torch.testing.assert_close(family.sd().detach(), expected.rsqrt())
