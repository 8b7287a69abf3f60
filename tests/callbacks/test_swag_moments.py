"""Snapshots at the right places, exact moments, exact resume, and posteriors that hold them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import DrawsPosterior, MixturePosterior, Posterior
from lightning_bnn.callbacks import SWAGMoments
from lightning_bnn.callbacks.running_moments import RunningMoments
from lightning_bnn.ensembles import MemberBatch
from lightning_bnn.errors import ConfigurationError, DataError, NonFiniteError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import LowRankPosterior
from lightning_bnn.strategies.ensemble import DeepEnsemble
from tests.callbacks import fits
from tests.callbacks.fits import (
    BATCH,
    EXAMPLES,
    Endless,
    Freeze,
    Recorder,
    data,
    loader,
    save,
    spoil,
)
from tests.trainers import quiet_trainer

chains = partial(fits.chains, False, chains=3)
network = partial(fits.network, False)
PLAIN = partial(fits.Plain, False)  # without BatchNorm
ENDLESS = partial(DataLoader, Endless(), BATCH)


def each_epoch(**options: Any) -> SWAGMoments:
    """With a snapshot after each epoch, where nothing else is said."""
    every = {} if "every_n_steps" in options else {"every_n_epochs": 1}
    return SWAGMoments(**{**every, **options})


def plain_swag(**options: Any) -> SWAGMoments:
    return each_epoch(**{"net": "body", "likelihood": Gaussian(0.5), **options})


def flat(weights: dict[str, Tensor]) -> np.ndarray:
    """(members, P), in the order of the network's parameters."""
    return torch.cat([tensor.flatten(1) for tensor in weights.values()], 1).double().numpy()


def fit(module: Any, swag: SWAGMoments, *others: Any, **options: Any) -> Recorder:
    recorder = Recorder()
    fits.fit(module, *others, swag, recorder, **{"max_epochs": 8, **options})
    return recorder


def parts_of(posterior: Any) -> list[Any]:
    """The components of a mixture, or the posterior of a single network."""
    return posterior.components if isinstance(posterior, MixturePosterior) else [posterior]


def assert_same(moments: RunningMoments, other: RunningMoments) -> None:
    assert moments.count == other.count
    assert torch.equal(moments.mean, other.mean)
    assert torch.equal(moments.squares, other.squares)
    for left, right in zip(moments.deviations, other.deviations, strict=True):
        assert torch.equal(left, right)


def assert_mean(swag: SWAGMoments, recorder: Recorder, steps: Any) -> None:
    """The snapshots are those of the given steps."""
    assert swag.snapshots == len(steps)
    mean = np.stack([flat(recorder.weights[step]) for step in steps]).mean(0)
    np.testing.assert_allclose(swag.moments.mean.numpy(), mean, rtol=1e-4, atol=1e-6)


# -------------------------------------------------------------------- moments


@pytest.mark.parametrize(
    ("kind", "unit"), [("strategy", "epochs"), ("ensemble", "steps"), ("plain", "steps")]
)
def test_moments_are_those_of_numpy(kind: str, unit: str) -> None:
    """Mean, second moment and deviations of the stored iterates, to 1e-12 in float64."""
    options = {f"every_n_{unit}": 2 if unit == "epochs" else 3, "rank": 4, "start": 0.25}
    module: Any = chains() if kind == "strategy" else PLAIN()
    if kind == "ensemble":
        module = DeepEnsemble(network, Gaussian(0.5), members=3, seed=3, mode="loop")
    swag = plain_swag(**options) if kind == "plain" else each_epoch(**options)
    recorder = fit(module, swag, precision="64-true", max_epochs=12)
    steps = (30, 42, 54, 66) if unit == "epochs" else range(21, 73, 3)
    moments = swag.moments
    assert swag.snapshots == len(steps)
    assert moments.mean.dtype == torch.float64
    assert len(moments.mean) == (1 if kind == "plain" else 3)
    iterates = np.stack([flat(recorder.weights[step]) for step in steps])
    close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    close(moments.mean.numpy(), iterates.mean(0))
    close(moments.variance.numpy(), iterates.var(0))
    running = np.cumsum(iterates, 0) / np.arange(1, len(iterates) + 1)[:, None, None]
    close(torch.stack(moments.deviations).numpy(), (iterates - running)[-4:])
    # what a draw is made of is what was computed
    posterior = swag.posterior()
    part = posterior if kind == "plain" else posterior.components[1]
    member = 0 if kind == "plain" else 1
    assert torch.equal(part.mean["0.weight"].flatten(), moments.mean[member, :12])
    assert torch.equal(part.variance["2.bias"], moments.variance[member, -1:])
    expected = torch.stack([one[member, 12:16] for one in moments.deviations])
    assert torch.equal(part.deviations["0.bias"], expected)


def test_moments_keep_their_digits_beside_a_large_mean() -> None:
    """In float32 with a mean of 1,000 and a spread of 0.01; squares less the mean's lose it all."""
    generator = torch.Generator().manual_seed(0)
    iterates = 1000 + 0.01 * torch.randn(500, 1, 20, generator=generator)
    moments = RunningMoments.of(iterates[0], 3)
    for one in iterates[1:]:
        moments = moments.add(one, 3)
    exact = iterates.double().var(0, correction=0)
    naive = iterates.square().mean(0) - iterates.mean(0).square()
    assert (moments.variance / exact - 1).abs().max() < 0.02
    assert (naive / exact - 1).abs().max() > 1


def test_moments_of_low_precision_weights_are_float32() -> None:
    swag = plain_swag(start=0.5)
    module = fits.Plain()
    fit(module, swag, precision="bf16-true")
    assert module.body[0].weight.dtype == torch.bfloat16
    assert swag.moments.mean.dtype == torch.float32
    for posterior in (swag.gaussian(), swag.posterior(), swag.average()):
        assert posterior.predict(torch.randn(5, 3)).mean.dtype == torch.float32


# -------------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("options", "trainer_options", "steps"),
    [
        ({"start": 5}, {"max_epochs": 8}, [36, 42, 48]),
        ({"start": 0.3, "every_n_epochs": 2}, {"max_epochs": 10}, [30, 42, 54]),
        ({"start": 0.5}, {"max_epochs": 40, "max_steps": 27}, [18, 24]),
        ({"start": 0.5, "every_n_steps": 5}, {}, [17, 22]),
        (
            {"start": 0.5, "every_n_steps": 4},
            {"max_epochs": -1, "max_steps": 20},
            [14, 18],
        ),
        ({}, {"accumulate_grad_batches": 4}, [6, 8]),  # two steps an epoch
        ({"start": 0.5}, {"limit_train_batches": 2}, [6, 8]),
        ({"start": 0.5}, {"reload_dataloaders_every_n_epochs": 1}, [18, 24]),
        ({}, {"module": partial(PLAIN, manual=True)}, [36, 48]),  # two steps a batch
        ({}, {"module": partial(PLAIN, skip=3)}, [9, 12]),  # a hook ends epochs early
        ({}, {"batches": ENDLESS()}, [18, 24]),  # data without a length
    ],
)
def test_when_snapshots_are_taken(options: Any, trainer_options: Any, steps: Any) -> None:
    swag, limits = plain_swag(**{"start": 2, **options}), {"max_epochs": 4, **trainer_options}
    module = limits.pop("module", PLAIN)()
    assert_mean(swag, fit(module, swag, **limits), steps)


# -------------------------------------------------------------------- learning rate

DECAY = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)


def test_the_learning_rate_of_the_averaging_phase() -> None:
    """Annealed over two epochs from what the scheduler left, then held; exact at every step."""
    swag = plain_swag(start=0.5, lr=0.02, anneal=2)
    rates = fit(fits.with_scheduler(PLAIN(), DECAY), swag).rates
    np.testing.assert_allclose([rates[s] for s in range(24)], 0.01 * 0.9 ** np.arange(24))
    first = 0.01 * 0.9**24
    weight = (1 - np.cos(np.pi * np.arange(12) / 12)) / 2
    np.testing.assert_allclose([rates[s] for s in range(24, 36)], first + (0.02 - first) * weight)
    assert {rates[s] for s in range(36, 48)} == {0.02}


@pytest.mark.parametrize(
    ("options", "at_once", "held_from"),
    [
        ({"every_n_steps": 4}, False, 28),  # by default before the first snapshot
        ({"every_n_steps": 4, "anneal": 0}, True, 24),
        ({}, False, 30),
    ],
)
def test_how_long_the_learning_rate_takes(options: Any, at_once: bool, held_from: int) -> None:
    rates = fit(PLAIN(), plain_swag(start=0.5, lr=0.02, **options)).rates
    assert {rates[s] for s in range(24)} == {0.01}
    assert (rates[24] == 0.02) == at_once
    assert all(rates[s] != 0.02 for s in range(24, held_from))
    assert {rates[s] for s in range(held_from, 48)} == {0.02}


def test_a_learning_rate_that_is_a_tensor_and_data_without_a_length() -> None:
    module = PLAIN()
    module.configure_optimizers = lambda: SGD(module.parameters(), lr=torch.tensor(0.01))
    rates = fit(module, plain_swag(start=2, lr=0.02), max_epochs=4, batches=ENDLESS()).rates
    assert [round(rates[s], 6) for s in range(24)] == [0.01] * 12 + [0.02] * 12


def with_cosine(steps: int) -> Any:
    """A module whose rate falls to 0 over so many steps, from 0.01, step by step."""
    module = PLAIN()

    def configure() -> Any:
        optimizer = SGD(module.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module.configure_optimizers = configure
    return module


@pytest.mark.parametrize(
    ("start", "held"),
    [
        (0.75, 0.005 * (1 + np.cos(0.75 * np.pi))),  # as it stands
        (0.9, 0.001),  # a tenth of the peak
        (0.0, 0.01),
    ],
)
def test_a_rate_that_falls_is_held(start: float, held: float) -> None:
    swag = SWAGMoments(start, net="body", likelihood=Gaussian(0.5), every_n_steps=1)
    rates = fit(with_cosine(480), swag, max_epochs=80).rates
    first = round(480 * start)
    falling = 0.005 * (1 + np.cos(np.pi * np.arange(480) / 480))
    np.testing.assert_allclose([rates[s] for s in range(first)], falling[:first])
    np.testing.assert_allclose([rates[s] for s in range(first + 1, 480)], held)


def test_a_rate_that_is_left_alone() -> None:
    """By lr=None; and always where a sampler moves, whose schedule has a meaning."""
    rates = fit(with_cosine(48), plain_swag(start=0.5, lr=None)).rates
    np.testing.assert_allclose([rates[s] for s in range(48)],
                               0.005 * (1 + np.cos(np.pi * np.arange(48) / 48)))  # fmt: skip
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    rates = fit(chains(scheduler=schedule), each_epoch(start=0.5)).rates
    assert len(set(rates.values())) == 48


def test_the_rate_that_was_found_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(with_cosine(48), plain_swag(start=0.5))
    assert "averages at the learning rate 0.005." in caplog.text


@pytest.mark.parametrize(
    ("epochs", "start", "snapshots", "first"),
    [
        (8, 0.75, 12, 37),  # 12 steps are left: each
        (40, 0.5, 30, 124),  # 120 steps: every fourth
        (40, 30, 30, 182),  # as a number of epochs
        (80, 0.5, 40, 246),  # 40 epochs: each
    ],
)
def test_snapshots_are_as_far_apart_as_the_length_allows(
    epochs: int, start: float, snapshots: int, first: int
) -> None:
    swag = SWAGMoments(start, net="body", likelihood=Gaussian(0.5))
    recorder = fit(PLAIN(), swag, max_epochs=epochs)
    every = (6 * epochs - first) // (snapshots - 1)
    assert swag.posterior().rank == min(20, snapshots)
    assert_mean(swag, recorder, range(first, first + every * snapshots, every))


@pytest.mark.parametrize("step", [20, 36, 41])
def test_what_was_found_is_resumed(tmp_path: Path, step: int) -> None:
    """The rate that is held and the spacing, from before and in the averaging phase."""

    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=48)
    make = partial(ensemble, scheduler=cosine, scheduler_interval="step")
    whole, resumed, path = SWAGMoments(), SWAGMoments(), tmp_path / "run.ckpt"
    first = fit(make(), whole, save(path, step))
    second = fit(make(), resumed, ckpt=path)
    assert resumed.snapshots == whole.snapshots == 12
    assert_same(whole.moments, resumed.moments)
    assert all(first.rates[s] == rate for s, rate in second.rates.items())


# -------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("unit", "order", "step"),
    [
        ("epochs", "before", 11),
        ("epochs", "before", 30),
        ("epochs", "after", 30),
        ("epochs", "after", 33),
        ("steps", "before", 27),
        ("steps", "after", 27),
    ],
)
def test_resume_is_bit_equal(tmp_path: Path, unit: str, order: str, step: int) -> None:
    """From checkpoints before and in the averaging phase, in the middle and at the end of epochs.

    One is saved by a callback that comes before SWAGMoments, whose snapshot is then still to come.
    """
    every = {"every_n_epochs": 1} if unit == "epochs" else {"every_n_steps": 3}

    def make() -> SWAGMoments:
        return each_epoch(start=0.5, rank=3, lr=0.02, **every)

    whole, resumed, path = make(), make(), tmp_path / "run.ckpt"
    saver, recorder = save(path, step), Recorder()
    swag_and_saver = [saver, whole] if order == "before" else [whole, saver]
    fits.fit(chains(), *swag_and_saver, recorder, max_epochs=8)
    second = fit(chains(), resumed, ckpt=path)
    assert resumed.snapshots == whole.snapshots == (4 if unit == "epochs" else 8)
    assert_same(whole.moments, resumed.moments)
    assert all(recorder.rates[s] == rate for s, rate in second.rates.items())


@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_resume_from_a_model_checkpoint(tmp_path: Path, at_epoch_end: bool) -> None:
    """ModelCheckpoint saves after the snapshot of its epoch, or at the end of its validation."""

    def run(ckpt: Any = None) -> tuple[SWAGMoments, list[Path]]:
        swag = each_epoch(start=0.5, rank=4)
        folder = tmp_path / ("whole" if ckpt is None else ckpt.stem)
        saver = ModelCheckpoint(
            folder, "{step}", save_top_k=-1, save_on_train_epoch_end=at_epoch_end
        )
        limits = {"max_epochs": 8, "enable_checkpointing": True}
        trainer = quiet_trainer(callbacks=[saver, swag], **limits)
        torch.manual_seed(5)
        trainer.fit(chains(), loader(), DataLoader(data(), BATCH), ckpt_path=ckpt)
        return swag, sorted(folder.glob("*.ckpt"), key=lambda p: int(p.stem.split("=")[1]))

    whole, checkpoints = run()
    assert whole.snapshots == 4
    assert_same(whole.moments, run(checkpoints[-2])[0].moments)


def test_averaging_that_is_new_in_a_resumed_fit(tmp_path: Path) -> None:
    """It takes the snapshots that are due from there on, and no others."""
    fits.fit(chains(), save(tmp_path / "run.ckpt", 30), max_epochs=8)
    swag = each_epoch(start=2, every_n_epochs=3)
    recorder = fit(chains(), swag, ckpt=tmp_path / "run.ckpt", max_epochs=12)
    assert_mean(swag, recorder, [48, 66])


def test_a_test_of_an_earlier_checkpoint_loses_nothing(tmp_path: Path) -> None:
    swag, module = each_epoch(start=0.5), chains()
    trainer = fits.fit(module, swag, save(tmp_path / "run.ckpt", 36), max_epochs=8)
    before = swag.moments
    trainer.test(module, loader(shuffle=False), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert swag.moments is before
    assert swag.snapshots == 4
    # a new process takes what the checkpoint has
    fresh = each_epoch(start=0.5)
    trainer = quiet_trainer(callbacks=[fresh])
    trainer.test(chains(), loader(shuffle=False), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert fresh.snapshots == 2
    assert len(fresh.posterior().components) == 3


def test_a_new_fit_starts_anew_and_the_same_trainer_continues() -> None:
    swag, module = each_epoch(start=4), chains()
    trainer = fits.fit(module, swag, max_epochs=8)
    trainer.fit_loop.max_epochs = 10
    trainer.fit(module, loader())
    assert swag.snapshots == 6
    with pytest.warns(UserWarning, match="drops the 6 snapshots of an earlier fit"):
        fit(module, swag)
    assert swag.snapshots == 4


# -------------------------------------------------------------------- posteriors


def test_a_plain_module_gives_a_gaussian(tmp_path: Path) -> None:
    module, swag = PLAIN(), plain_swag(start=0.5, scale=0.5)
    fit(module, swag)
    posterior = swag.posterior()
    assert type(posterior) is LowRankPosterior
    assert (posterior.rank, posterior.scale) == (4, 0.5)
    posterior.save(tmp_path)
    loaded = Posterior.load(tmp_path, network())
    inputs = torch.randn(5, 3)
    torch.testing.assert_close(loaded.predict(inputs).mean, posterior.predict(inputs).mean)
    stored = swag.posterior(draws=7)
    assert type(stored) is DrawsPosterior
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(stored.sample(7)["2.bias"], posterior.sample(7, generator)["2.bias"])


def test_the_average_is_the_mean_and_deterministic() -> None:
    swag = each_epoch(start=0.5)
    fit(chains(), swag)
    average = swag.average()
    assert [len(part) for part in average.components] == [1, 1, 1]
    draws = average.sample(3)
    flat = torch.cat([draws[name].flatten(1) for name, _ in network().named_parameters()], 1)
    assert torch.equal(flat, swag.moments.mean)
    inputs = torch.randn(5, 3)
    one, other = (average.predict(inputs, seed=seed) for seed in (0, 1))
    torch.testing.assert_close(one.mean, other.mean)


def learned(likelihood: Any) -> float:
    return next(likelihood.parameters()).item()


def ensemble(middle: Any = None, **options: Any) -> DeepEnsemble:
    def net() -> nn.Module:
        layers = [nn.ReLU()] if middle is None else middle()
        return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 1))

    defaults = {"members": 3, "seed": 3, "mode": "loop", "optimizer": partial(SGD, lr=0.01)}
    return DeepEnsemble(net, Gaussian(0.5, learn=True), **{**defaults, **options})


def test_a_deep_ensemble_gives_multiswag(tmp_path: Path) -> None:
    """Each member has a Gaussian and the noise that it learned; alone it would have the same."""
    module, swag = ensemble(), each_epoch(start=0.5)
    recorder = fit(module, swag, save(tmp_path / "run.ckpt", 33))
    assert_mean(swag, recorder, (30, 36, 42, 48))
    posterior = swag.posterior()
    assert isinstance(posterior, MixturePosterior)
    assert [type(part) for part in posterior.components] == [LowRankPosterior] * 3
    noise = [learned(part.likelihood) for part in posterior.components]
    assert len(set(noise)) == 3
    assert noise == [learned(module.likelihood_of(row)) for row in range(3)]
    posterior.save(tmp_path / "posterior")
    loaded = Posterior.load(tmp_path / "posterior", network())
    inputs = torch.randn(5, 3)
    torch.testing.assert_close(loaded.predict(inputs).variance, posterior.predict(inputs).variance)
    resumed, alone = each_epoch(start=0.5), each_epoch(start=0.5)
    fit(ensemble(), resumed, ckpt=tmp_path / "run.ckpt")
    assert_same(swag.moments, resumed.moments)
    fit(ensemble(members=[2]), alone)
    torch.testing.assert_close(alone.moments.mean[0], swag.moments.mean[2])
    assert type(alone.posterior()) is LowRankPosterior


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (42, {"start": 0.5}),  # at the step of a snapshot
        (48, {"start": 0.5}),  # in the last step, before it is noticed
        (45, {"start": 4, "every_n_steps": 10}),  # after the last, of step 44
    ],
)
def test_members_that_diverge_are_left_out(step: int, options: Any) -> None:
    whole, swag = each_epoch(**options), each_epoch(**options)
    fit(ensemble(), whole)
    if step == 48:
        fit(ensemble(), swag, spoil(48, row=1, column=13))
    else:
        with pytest.warns(UserWarning, match="member 1 is not finite .* dropped"):
            fit(ensemble(), swag, spoil(step, row=1, column=13))
    assert swag.snapshots == whole.snapshots == 4
    parts = swag.posterior().components
    assert len(parts) == len(swag.average().components) == 2
    for part, row in zip(parts, (0, 2), strict=True):
        assert torch.equal(part.mean["0.weight"].flatten(), whole.moments.mean[row, :12])


# -------------------------------------------------------------------- BatchNorm


def with_batch_norm(kind: str, **options: Any) -> tuple[Any, SWAGMoments]:
    """A module whose network has BatchNorm, and its SWAG."""
    if kind == "plain":
        return fits.Plain(), plain_swag(start=0.5, **options)
    return fits.chains(chains=3), each_epoch(start=0.5, **options)


@pytest.mark.parametrize("kind", ["strategy", "plain"])
def test_batch_norm_is_recomputed_for_each_draw(kind: str, tmp_path: Path) -> None:
    """After the fit has ended, from the trainer's own data; exact where the batch is all data."""
    module, swag = with_batch_norm(kind, refresh_batch_norm=1)
    fit(module, swag, batches=loader(batch_size=EXAMPLES))
    random = torch.get_rng_state()
    posterior = swag.posterior(draws=4)
    assert torch.equal(random, torch.get_rng_state())
    parts = parts_of(posterior)
    assert [type(part) for part in parts] == [DrawsPosterior] * (3 if kind == "strategy" else 1)
    inputs = data().tensors[0]
    for part in [*parts, *parts_of(swag.average())]:
        draws = part.sample(len(part))
        for index in range(len(part)):
            hidden = inputs @ draws["0.weight"][index].T + draws["0.bias"][index]
            torch.testing.assert_close(draws["1.running_mean"][index], hidden.mean(0))
            torch.testing.assert_close(draws["1.running_var"][index], hidden.var(0))
    assert len(swag.posterior().sample(5)["0.weight"]) == 5
    assert swag.posterior().default_draws == (90 if kind == "strategy" else 30)
    # the Gaussian itself has the statistics of the training
    current = module.body[1].running_mean if kind == "plain" else None
    statistics = module.current_draws()["1.running_mean"][0] if current is None else current
    assert torch.equal(parts_of(swag.gaussian())[0].fixed["1.running_mean"], statistics)
    posterior.save(tmp_path)
    loaded = Posterior.load(tmp_path, fits.network())
    draws, again = posterior.sample(4 * len(parts)), loaded.sample(4 * len(parts))
    assert torch.equal(again["1.running_var"], draws["1.running_var"])


class OwnData:
    """A loader of one batch, in which every member has other examples."""

    def __init__(self) -> None:
        self.inputs = torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        yield MemberBatch((self.inputs, self.inputs.sum(2, keepdim=True)))


def test_batch_norm_of_an_ensemble_with_other_examples_for_each_member() -> None:
    """Members are refreshed with what they see."""
    swag, batches = each_epoch(start=0.5, refresh_batch_norm=1), OwnData()
    module = ensemble(lambda: [nn.BatchNorm1d(4)], num_data=24, independent_batches=True)
    fit(module, swag, max_epochs=4, batches=batches)
    for row, part in enumerate(swag.posterior(draws=2).components):
        draws = part.sample(2)
        for index in range(2):
            hidden = batches.inputs[row] @ draws["0.weight"][index].T + draws["0.bias"][index]
            torch.testing.assert_close(draws["1.running_mean"][index], hidden.mean(0))


def test_batch_norm_without_training_data(tmp_path: Path) -> None:
    """Asked for in a new process: what was asked for before the checkpoint was made is in it."""
    path, late = tmp_path / "run.ckpt", tmp_path / "late.ckpt"
    swag = plain_swag(start=2)
    trainer = fits.fit(fits.Plain(), swag, save(path, 24), max_epochs=4)
    expected = [swag.posterior().sample(30), swag.average().sample(1)]
    trainer.save_checkpoint(late)

    def load(checkpoint: Path) -> SWAGMoments:
        fresh = plain_swag(start=2)
        trainer = quiet_trainer(callbacks=[fresh])
        batches = loader(shuffle=False)
        trainer.validate(fits.Plain(), batches, ckpt_path=checkpoint, verbose=False)
        return fresh

    fresh = load(late)
    for draws, again in zip(expected, (fresh.posterior(), fresh.average()), strict=True):
        for name, tensor in again.sample(len(again)).items():
            assert torch.equal(tensor, draws[name])
    for ask in (load(path).posterior, partial(fresh.posterior, draws=4, seed=1)):
        with pytest.raises(ConfigurationError, match=r"Ask after a fit .* or take gaussian\(\)"):
            ask()
    assert fresh.gaussian().rank == 2
    # a fit of what is finished loads the data
    fit(fits.Plain(), fresh, max_epochs=4, ckpt=path)
    assert len(fresh.posterior()) == 30
    # further snapshots are of another Gaussian
    fit(fits.Plain(), fresh, max_epochs=6, ckpt=late)
    assert fresh.state_dict()["statistics"] == {}


def test_batch_norm_with_data_of_unknown_length() -> None:
    """Refused at the first batch, unless the number of batches is given."""
    refused = Recorder()
    with pytest.raises(ConfigurationError, match=r"have no length\. Pass refresh_batch_norm="):
        fits.fit(fits.Plain(), plain_swag(start=2), refused, max_epochs=4, batches=ENDLESS())
    assert refused.weights == {}
    swag = plain_swag(start=2, refresh_batch_norm=3)
    fit(fits.Plain(), swag, max_epochs=4, batches=ENDLESS())
    assert swag.average().sample(1)["1.num_batches_tracked"].tolist() == [3]


class Triples(fits.Plain):
    """Batches with weights of the examples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (batch[2] * (self.body(batch[0]) - batch[1]).square()).mean()


def test_batch_norm_with_batches_that_are_no_pairs() -> None:
    triples = DataLoader(TensorDataset(*data().tensors, torch.ones(EXAMPLES, 1)), BATCH)
    refused = Recorder()
    with pytest.raises(DataError, match=r"got list of length 3.* split="):
        fits.fit(Triples(), plain_swag(start=2), refused, max_epochs=4, batches=triples)
    assert refused.weights == {}
    split = Triples()
    split.split = lambda batch: (batch[0], batch[1])  # type: ignore[assignment]
    swag = plain_swag(start=2)
    fit(split, swag, max_epochs=4, batches=triples)
    assert len(swag.posterior(draws=2)) == 2


def test_frozen_batch_norm_stays_as_it_is() -> None:
    """In fine-tuning the layers are in evaluation mode, and there is nothing to recompute."""
    module = fits.Plain()
    module.body[1].running_mean.fill_(1.5)
    around = DeepEnsemble(
        module.body, Gaussian(0.5), members=2, start="around", mode="loop", seed=1
    )
    for fitted, swag in ((module, plain_swag(start=0.5)), (around, each_epoch(start=0.5))):
        fit(fitted, swag, Freeze(1))
        gaussian, average = parts_of(swag.posterior())[0], parts_of(swag.average())[0]
        assert isinstance(gaussian, LowRankPosterior)
        for posterior in (gaussian, average):
            assert (posterior.fixed["1.running_mean"] == 1.5).all()


def test_a_prior_function_is_neither_averaged_nor_refreshed() -> None:
    swag = each_epoch(start=0.5)
    module = ensemble(lambda: [nn.BatchNorm1d(4)], members=2, prior_function=1.0)
    fit(module, swag, max_epochs=4)
    assert swag.moments.mean.shape == module.weights.shape
    current = module.current_draws()
    for row, part in enumerate(swag.posterior(draws=2).components):
        draws = part.sample(2)
        assert "prior_net.0.weight" not in draws
        values = {**part.fixed, **{name: tensor[1] for name, tensor in draws.items()}}
        for name, tensor in current.items():
            if name.startswith("prior_net"):
                assert torch.equal(values[name], tensor[row]), name


def test_the_training_data_are_there_after_a_validation() -> None:
    module, swag = with_batch_norm("strategy")
    trainer = fits.fit(module, swag, max_epochs=4, limit_train_batches=5)
    before = parts_of(swag.average())[0].sample(1)
    swag._state.statistics = {}  # to be computed again
    trainer.validate(module, DataLoader(data(), EXAMPLES), verbose=False)
    after = parts_of(swag.average())[0].sample(1)
    assert before["1.num_batches_tracked"].tolist() == [5]
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


class Tenfold(DataLoader):
    """Its batches are not those of its data set."""

    def __iter__(self) -> Any:
        return ((10 * inputs, targets) for inputs, targets in super().__iter__())


@pytest.mark.parametrize("where", ["hook", "loader"])
def test_the_refresh_sees_data_as_training_does(where: str) -> None:
    class Augmented(fits.Plain):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [10 * batch[0], batch[1]] if self.trainer.training else batch

    swag = plain_swag(start=0.5)
    module = Augmented() if where == "hook" else fits.Plain()
    kind = DataLoader if where == "hook" else Tenfold
    batches = kind(data(), batch_size=EXAMPLES)
    trainer = fits.fit(module, swag, max_epochs=4, batches=batches)
    stage = trainer.state.stage
    draw = swag.average().sample(1)
    assert trainer.state.stage is stage
    hidden = 10 * data().tensors[0] @ draw["0.weight"][0].T + draw["0.bias"][0]
    torch.testing.assert_close(draw["1.running_mean"][0], hidden.mean(0), rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------- beside the weights


def test_the_rest_is_that_of_the_last_snapshot(tmp_path: Path) -> None:
    """A test of an earlier checkpoint changes the module, and nothing of the posterior."""
    swag = each_epoch(start=0.5)
    adam = partial(torch.optim.Adam, lr=0.05)
    module = ensemble(lambda: [nn.BatchNorm1d(4)], members=2, optimizer=adam)
    trainer = fits.fit(module, swag, save(tmp_path / "run.ckpt", 3), max_epochs=4)

    def rest() -> list[Tensor]:
        parts = swag.gaussian().components
        return [t for part in parts for t in (*part.likelihood.parameters(), *part.fixed.values())]

    before, state = rest(), swag.state_dict()
    learned = module.bank.learned.detach().clone()
    trainer.test(module, DataLoader(data(), BATCH), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert not torch.equal(module.bank.learned, learned)
    assert all(torch.equal(one, other) for one, other in zip(before, rest(), strict=True))
    swag.load_state_dict(state)
    assert all(torch.equal(one, other) for one, other in zip(before, rest(), strict=True))


def test_a_module_that_is_the_network_itself() -> None:
    swag = plain_swag(start=0.5, net="self")
    fit(PLAIN(), swag, max_epochs=4)
    posterior = swag.posterior()
    assert list(posterior.mean) == [f"body.{name}" for name, _ in network().named_parameters()]
    assert posterior.net._trainer is None
    assert posterior.predict(data().tensors[0]).mean.shape == (EXAMPLES, 1)


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 1.0}, "from 0.0 to less than 1.0, or a whole number .* got 1.0"),
        ({"start": -1}, "got -1"),
        ({"every_n_epochs": 1, "every_n_steps": 5}, "every_n_steps=, not both"),
        ({"every_n_epochs": 0}, "every_n_epochs= is a whole number, at least 1; got 0"),
        ({"rank": 1}, "rank= is at least 2, or 0 for the diagonal alone; got 1"),
        ({"scale": 0.0}, "scale= is a number greater than 0; got 0.0"),
        ({"lr": "0.1"}, "lr= is a number greater than 0; got '0.1'"),
        ({"anneal": 3, "lr": None}, "anneal=3 says how to get to lr=, which is not given"),
        ({"anneal": 3}, "anneal=3 says how to get to lr=, which is not given"),
        ({"refresh_batch_norm": 0}, "refresh_batch_norm= is a whole number, at least 1; got 0"),
    ],
)
def test_options_that_make_no_sense(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SWAGMoments(**options)


@pytest.mark.parametrize(
    ("swag_options", "trainer_options", "message"),
    [
        ({"start": 0.5, "every_n_epochs": 4}, {"max_epochs": 8}, "would take 1 snapshots"),
        (
            {"start": 40, "every_n_steps": 5, "rank": 3},
            {"max_epochs": 8},
            "would take 1 snapshots in the 48 steps .* expected at least 3",
        ),
        ({"start": 0.5}, {"max_epochs": -1}, "start=0.5 is a share .* number of epochs .* not"),
        (
            {"start": 0.5, "every_n_steps": 2},
            {"max_epochs": 4, "more": [GradientAccumulationScheduler({0: 2, 2: 3})]},
            "the number of steps of this fit is not known",
        ),
        (
            {"start": 0.5, "every_n_steps": 2},
            {"max_epochs": 4, "batches": ENDLESS()},
            "the number of steps of this fit is not known",
        ),
        (
            {"start": 0.5, "every_n_steps": 2},
            {"max_epochs": 4, "manual": True},
            "the number of steps of this fit is not known",
        ),
    ],
)
def test_a_fit_that_cannot_work_is_refused(
    swag_options: Any, trainer_options: Any, message: str
) -> None:
    options, refused = {**trainer_options}, Recorder()
    module, more = PLAIN(manual=options.pop("manual", False)), options.pop("more", [])
    with pytest.raises(ConfigurationError, match=message):
        fits.fit(module, plain_swag(**swag_options), refused, *more, **options)
    assert refused.weights == {}


def test_fewer_snapshots_than_the_rank() -> None:
    """Said before training, with the numbers; what there is is used."""
    swag = plain_swag(start=0.75, every_n_epochs=1, rank=20)
    message = "would take 2 snapshots in the 8 epochs .* the first 6; expected at least 20"
    with pytest.warns(UserWarning, match=message):
        fit(PLAIN(), swag)
    assert (swag.snapshots, swag.posterior().rank) == (2, 2)


@pytest.mark.parametrize("options", [{"likelihood": Gaussian(0.1)}, {"net": "body"}])
def test_a_module_needs_what_a_strategy_has(options: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"SWAGMoments of Plain, .* needs net="):
        fit(PLAIN(), SWAGMoments(**options))


def test_asking_too_early() -> None:
    """Before a fit, and after one that took nothing."""
    swag = plain_swag()
    message = "no snapshot yet: the first is taken 1 epochs after start=0.75"
    for _ in range(2):
        for ask in (swag.posterior, swag.average, swag.gaussian):
            with pytest.raises(ConfigurationError, match=message):
                ask()
        fit(PLAIN(), swag, fast_dev_run=True)


class StopAfter(Callback):
    """An early stop."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 == self.epochs


def test_training_that_stopped_early() -> None:
    swag = plain_swag(start=4, rank=4)
    fit(PLAIN(), swag, StopAfter(7))
    assert swag.posterior().rank == 3
    single = plain_swag(start=4)
    fit(PLAIN(), single, StopAfter(5))
    with pytest.raises(ConfigurationError, match="at least 2 snapshots, and 1 was taken"):
        single.posterior()
    assert len(single.average()) == 1
    with pytest.warns(UserWarning, match="took no snapshot: averaging begins after 4 epochs"):
        fit(PLAIN(), plain_swag(start=4), StopAfter(2))


def test_a_snapshot_that_is_not_finite() -> None:
    swag = each_epoch(start=0.5)
    message = "'0.bias' of member 7 is not finite after step 42"
    with pytest.raises(NonFiniteError, match=message):
        fit(chains(chains=[0, 7]), swag, spoil(42, row=1, column=13))
    assert swag.snapshots == 2
    assert swag.moments.mean.isfinite().all()


# -------------------------------------------------------------------- members that overfit


class Kept(Callback):
    """Note the weights with which each epoch begins."""

    def __init__(self) -> None:
        self.starts: list[Tensor] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.starts.append(module.weights.detach().clone())


def overfit(
    folder: Path, ckpt: Path | None = None, lr: float = 1e-9, **options: Any
) -> tuple[SWAGMoments, Kept]:
    """Two epochs, and three of averaging; validation is best after the first."""
    inputs = torch.linspace(-1, 1, 8)[:, None]
    rows, opposite = TensorDataset(inputs, 3 * inputs), TensorDataset(inputs, -3 * inputs)
    torch.manual_seed(0)
    bnn = DeepEnsemble(nn.Linear(1, 1), Gaussian(0.5), members=2, seed=3, **options)
    swag, kept = each_epoch(start=2, lr=lr, anneal=0), Kept()
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = quiet_trainer(max_epochs=5, callbacks=[swag, kept, saver], enable_checkpointing=True)
    trainer.fit(bnn, DataLoader(rows, 4), DataLoader(opposite, 8), ckpt_path=ckpt)
    return swag, kept


def test_averaging_begins_at_the_best_weights_by_validation(tmp_path: Path) -> None:
    swag, kept = overfit(tmp_path)
    best, last = kept.starts[1], kept.starts[2]
    assert not torch.allclose(best, last, atol=1e-3)
    torch.testing.assert_close(swag.moments.mean, best, rtol=0, atol=1e-6)
    for epoch in (1, 2):  # before averaging begins, and after
        resumed, _ = overfit(tmp_path / f"after {epoch}", tmp_path / f"epoch={epoch}.ckpt")
        assert torch.equal(resumed.moments.mean, swag.moments.mean)
    swag, kept = overfit(tmp_path / "last", restore_best=False)
    torch.testing.assert_close(swag.moments.mean, kept.starts[2], rtol=0, atol=1e-6)


def test_each_epoch_of_averaging_begins_at_the_best_weights(tmp_path: Path) -> None:
    swag, kept = overfit(tmp_path, lr=0.01)
    best = kept.starts[1]
    # Adam moves a weight by about its rate in a step, and an epoch has two
    assert (swag.moments.mean - best).abs().amax() < 0.03
    assert (kept.starts[4] - best).abs().amax() < 0.03  # it does not add up
    resumed, _ = overfit(tmp_path / "resumed", tmp_path / "epoch=2.ckpt", lr=0.01)
    assert torch.equal(resumed.moments.mean, swag.moments.mean)
    assert torch.equal(resumed.moments.variance, swag.moments.variance)
