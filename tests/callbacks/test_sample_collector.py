"""Draws are taken at the right steps, kept whole, and the same after a crash and a resume."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bnn import SGMCMC, DrawsPosterior, Posterior, VariationalBNN
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.errors import ConfigurationError, NonFiniteError, PosteriorFormatError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors.batch_norm import recompute_batch_norm
from lightning_bnn.samplers import HMC, SGLD, Cyclical
from lightning_bnn.storage import files
from lightning_bnn.storage.stream import DrawStream
from tests.trainers import quiet_trainer

EXAMPLES, BATCH = 24, 4  # six steps an epoch


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(EXAMPLES, 3, generator=generator), torch.randn(EXAMPLES, 1, generator=generator)
    )


def loader(**options: Any) -> DataLoader:
    return DataLoader(data(), **{"batch_size": BATCH, "shuffle": True, **options})


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def sampler(**options: Any) -> SGMCMC:
    defaults = {"chains": 2, "sampler": partial(SGLD, lr=0.01), "seed": 3, "mode": "loop"}
    return SGMCMC(network(), Gaussian(0.5), **{**defaults, **options})


class Plain(pl.LightningModule):
    """A LightningModule that knows nothing of this package."""

    def __init__(self, cycle: int | None = None, manual: bool = False) -> None:
        super().__init__()
        self.body = network()
        self.cycle = cycle
        self.automatic_optimization = not manual

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self(batch[0]) - batch[1]).square().mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        for _ in range(2):
            self.optimizers().step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if self.cycle is None:
            return optimizer
        schedule = Cyclical(optimizer, self.cycle)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(Callback):
    """The weights right after every step, for comparison."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step in self.weights:
            return  # a batch that is accumulated moves BatchNorm's statistics only
        if isinstance(pl_module, Plain):
            current = {k: v[None] for k, v in pl_module.state_dict().items()}
        else:
            current = pl_module.current_draws()
        self.weights[trainer.global_step] = {k: v.detach().clone() for k, v in current.items()}


class Save(Callback):
    """A checkpoint after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Stop(Callback):
    """A crash after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise InterruptedError


def fit(
    module: Any, *callbacks: Callback, epochs: int = 2, ckpt: Any = None, **options: Any
) -> Any:
    trainer = quiet_trainer(max_epochs=epochs, callbacks=list(callbacks), **options)
    torch.manual_seed(5)
    trainer.fit(module, loader(), ckpt_path=ckpt)
    return trainer


def assert_draws(posterior: Posterior, recorded: dict[int, dict[str, Tensor]], steps: Any) -> None:
    """Step after step, and in it chain after chain, bit for bit."""
    expected = {
        name: torch.cat([recorded[step][name] for step in steps])
        for name in recorded[min(recorded)]
    }
    found = posterior.sample(len(posterior))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def hashes(directory: Path) -> dict[int, str]:
    return DrawStream.open(directory).hashes()


# -------------------------------------------------------------------- which steps


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, list(range(1, 13))),
        ({"burn_in": 4}, [5, 6, 7, 8, 9, 10, 11, 12]),
        ({"burn_in": 3, "every": 4}, [7, 11]),
        ({"every": 12}, [12]),
        ({"every": 2, "max_draws": 3}, [2, 4, 6]),
    ],
)
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_steps(tmp_path: Path, options: Any, steps: Any, place: str) -> None:
    recorder = Recorder()
    dirpath = tmp_path / "draws" if place == "disk" else None
    collector = SampleCollector(**options, dirpath=dirpath)
    bnn = sampler()
    assert bnn.collector is None
    fit(bnn, recorder, collector)
    assert bnn.collector is collector
    assert collector.steps == steps
    assert len(collector) == 2 * len(steps)
    posterior = collector.posterior()
    assert type(posterior) is DrawsPosterior
    assert posterior.chains == 2
    assert_draws(posterior, recorder.weights, steps)
    assert_draws(bnn.posterior(), recorder.weights, steps)
    if dirpath is not None:
        loaded = Posterior.load(dirpath, network())
        assert loaded.chains == 2
        assert_draws(loaded, recorder.weights, steps)
        assert DrawStream.open(dirpath).fields(steps[0]) == {"epoch": (steps[0] - 1) // 6}


def test_a_draw_belongs_to_a_step_not_to_a_batch() -> None:
    recorder, collector = Recorder(), SampleCollector(every=2)
    fit(sampler(), recorder, collector, epochs=4, accumulate_grad_batches=4)
    # six batches an epoch: steps after the fourth and the last
    assert collector.steps == [2, 4, 6, 8]
    assert_draws(collector.posterior(), recorder.weights, collector.steps)


def test_several_steps_in_a_batch() -> None:
    """Manual optimization: 12 batches of two steps; what is due in a batch is taken at its end."""
    collector = SampleCollector(burn_in=1, every=3)
    fit(Plain(manual=True), collector)
    assert collector.steps == [4, 8, 10, 14, 16, 20, 22]


def test_warm_up_is_not_sampled() -> None:
    collector = SampleCollector(burn_in=2, every=2)
    fit(sampler(warm_up=6), collector)
    assert collector.steps == [8, 10, 12]


@pytest.mark.parametrize("warm_up", [0, 2])
def test_cycles(warm_up: int) -> None:
    schedule = partial(Cyclical, cycle_length=4, exploration=0.5)
    at_end, often = SampleCollector(every="cycle"), SampleCollector(every=1)
    bnn = sampler(scheduler=schedule, warm_up=warm_up)
    fit(bnn, at_end, often)
    assert bnn.collector is at_end
    assert at_end.steps == [step + warm_up for step in (4, 8, 12) if step + warm_up <= 12]
    # the first half of each cycle explores
    sampled = [step + warm_up for step in (3, 4, 7, 8, 11, 12)]
    assert often.steps == [step for step in sampled if step <= 12]


def test_cycles_after_a_burn_in() -> None:
    collector = SampleCollector(burn_in=4, every="cycle")
    fit(sampler(scheduler=partial(Cyclical, cycle_length=4)), collector)
    assert collector.steps == [8, 12]


def test_cycles_of_a_plain_module() -> None:
    at_end, often = SampleCollector(every="cycle"), SampleCollector()
    fit(Plain(cycle=5), at_end, often)
    assert at_end.steps == [5, 10]
    assert often.steps == [3, 4, 5, 8, 9, 10]  # round(2.5) = 2 steps of each cycle explore


@pytest.mark.parametrize("every", ["cycle", 1])
def test_cycles_are_counted_in_steps(every: Any) -> None:
    class Otherwise(Plain):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            made["lr_scheduler"].update(self.options)
            return made

    module = Otherwise(cycle=5)
    module.options = {"interval": "epoch"}
    with pytest.raises(ConfigurationError, match=r"counted in steps.*interval='epoch'.*'step'"):
        fit(module, SampleCollector(every=every))
    module.options = {"frequency": 2}
    with pytest.raises(ConfigurationError, match=r"interval='step', frequency=2"):
        fit(module, SampleCollector(every=every))


# -------------------------------------------------------------------- what is collected


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_plain_module(tmp_path: Path, place: str) -> None:
    module, recorder = Plain(), Recorder()
    collector = SampleCollector(every=4, dirpath=tmp_path / "d" if place == "disk" else None)
    fit(module, recorder, collector)
    with pytest.raises(ConfigurationError, match="Plain has no likelihood"):
        collector.posterior()
    posterior = collector.posterior(Gaussian(0.3))
    assert posterior.chains == 1
    assert_draws(posterior, recorder.weights, [4, 8, 12])
    assert posterior.net is not module
    assert posterior.net._trainer is None
    inputs = torch.randn(5, 3)
    module.eval()
    torch.testing.assert_close(posterior.predict(inputs).outputs[-1], module(inputs))
    if place == "disk":
        loaded = Posterior.load(tmp_path / "d", Plain(), Gaussian(0.3))
        assert_draws(loaded, recorder.weights, [4, 8, 12])


def test_a_variational_strategy() -> None:
    collector = SampleCollector(every=4)
    bnn = VariationalBNN(network(), Gaussian(0.5), seed=1)
    fit(bnn, collector)
    posterior = collector.posterior()
    assert len(posterior) == 3
    assert posterior.sample(3)["0.weight"].std(0).min() > 0
    assert posterior.predict(torch.randn(2, 3)).mean.shape == (2, 1)


def test_what_is_fixed_and_what_the_likelihood_learned(tmp_path: Path) -> None:
    net = network()
    net[0].requires_grad_(False)
    bnn = SGMCMC(
        net,
        Gaussian(0.5, learn=True),
        sampler=partial(SGLD, lr=0.01),
        bayesian="3.*",
        warm_up=4,
        warm_up_optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    held, streamed = SampleCollector(every=4), SampleCollector(every=4, dirpath=tmp_path / "d")
    fit(bnn, held, streamed)
    scale = bnn.likelihood.log_scale.item()
    assert scale != pytest.approx(torch.tensor(0.5).log().item(), abs=1e-4)
    for posterior in (held.posterior(), Posterior.load(tmp_path / "d", network())):
        assert posterior.likelihood.log_scale.item() == scale
        assert torch.equal(posterior.fixed["0.weight"], net[0].weight)
        assert posterior.sample(2)["1.weight"].shape == (2, 4)


def test_a_plain_module_may_have_attributes_of_any_name() -> None:
    module = Plain()
    module.collector, module.sampling, module.warm_up = "mine", False, "slow"
    module.split, module.ended_cycle, module.chain_numbers = 0.8, "no", "all"
    collector = SampleCollector(every=6, refresh_batch_norm=1)
    fit(module, collector)
    assert collector.steps == [6, 12]
    assert module.collector == "mine"


@pytest.mark.parametrize("kind", ["sampler", "plain"])
def test_an_infinite_buffer_is_no_divergence(kind: str) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.body(inputs) * self.mask.exp()[0]

    collector, module = SampleCollector(every=6), Plain()
    module.body = Masked()
    if kind == "sampler":
        module = SGMCMC(Masked(), Gaussian(0.5), sampler=partial(SGLD, lr=0.01))
    fit(module, collector)
    assert collector.steps == [6, 12]
    assert collector.posterior(Gaussian(0.5)).predict(torch.randn(2, 3)).mean.isfinite().all()


def test_running_statistics_that_are_not_finite() -> None:
    class Spoil(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.body[1].running_var[2] = float("inf")

    with pytest.raises(NonFiniteError, match=r"'body.1.running_var' of chain 0 is not finite"):
        fit(Plain(), Spoil(), SampleCollector())


def test_no_draws_yet() -> None:
    collector = SampleCollector(burn_in=7)
    with pytest.raises(ConfigurationError, match=r"No draws.*burn_in=7 steps.*has taken 0"):
        collector.posterior()
    bnn = sampler()
    with pytest.raises(InterruptedError):
        fit(bnn, collector, Stop(5))
    with pytest.raises(ConfigurationError, match="has taken 5"):
        collector.posterior()
    assert len(bnn.posterior()) == 2  # the chains as they stand


def test_validation_sees_the_draws_so_far(tmp_path: Path) -> None:
    class Count(Callback):
        seen: list[int] = []  # noqa: RUF012

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.seen.append(len(pl_module.posterior()))

    trainer = quiet_trainer(
        max_epochs=2,
        callbacks=[Count(), SampleCollector(every=3, dirpath=tmp_path / "d")],
        num_sanity_val_steps=1,
    )
    trainer.fit(sampler(), loader(), loader(shuffle=False))
    assert Count.seen == [2, 4, 8]


def test_memory_does_not_grow_with_draws_on_disk(tmp_path: Path) -> None:
    collector = SampleCollector(dirpath=tmp_path / "d")
    fit(sampler(), collector)
    assert collector._draws == []
    assert collector.state_dict()["draws"] == []
    assert len(collector.posterior()) == 24


def test_a_diverged_chain_is_named_and_earlier_draws_are_safe(tmp_path: Path) -> None:
    class Spoil(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                pl_module.weights.data[1, 3] = float("nan")

    with pytest.raises(NonFiniteError, match=r"'0.weight' of chain 7 is not finite after step 5"):
        fit(sampler(chains=[4, 7]), Spoil(), SampleCollector(dirpath=tmp_path / "d"))
    assert DrawStream.open(tmp_path / "d").steps() == [1, 2, 3, 4]
    assert Posterior.load(tmp_path / "d", network()).sample(8)["0.weight"].isfinite().all()


def test_a_full_disk_stops_in_that_step(tmp_path: Path, monkeypatch: Any) -> None:
    recorder = Recorder()
    sync, calls = os.fsync, iter(range(1000))

    class Fill(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                monkeypatch.setattr(files.os, "fsync", full)

    def full(descriptor: int) -> None:
        if next(calls) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with pytest.raises(OSError, match=r"No space left.*blobs.draw-000000000006"):
        fit(sampler(), recorder, Fill(), SampleCollector(every=2, dirpath=tmp_path / "d"))
    assert max(recorder.weights) == 6
    assert_draws(Posterior.load(tmp_path / "d", network()), recorder.weights, [2, 4])


# -------------------------------------------------------------------- BatchNorm


def test_batch_norm_is_recomputed_for_each_draw(tmp_path: Path) -> None:
    recorder = Recorder()
    own, all_batches = SampleCollector(every=4), SampleCollector(every=4, refresh_batch_norm=6)
    on_disk = SampleCollector(every=4, refresh_batch_norm=99, dirpath=tmp_path / "d")
    fit(sampler(), recorder, own, all_batches, on_disk)
    assert_draws(own.posterior(), recorder.weights, [4, 8, 12])
    fresh, kept = all_batches.posterior().sample(6), own.posterior().sample(6)
    # the mean of linear layers' outputs over all batches of a pass is the mean over the data
    inputs = data().tensors[0]
    hidden = torch.einsum("noi,bi->nbo", fresh["0.weight"], inputs) + fresh["0.bias"][:, None]
    torch.testing.assert_close(fresh["1.running_mean"], hidden.mean(1))
    assert not torch.allclose(fresh["1.running_mean"], kept["1.running_mean"], atol=1e-3)
    assert fresh["1.num_batches_tracked"].tolist() == [6] * 6
    assert torch.equal(fresh["3.weight"], kept["3.weight"])
    streamed = Posterior.load(tmp_path / "d", network()).sample(6)
    for name, tensor in fresh.items():  # the data have six batches
        assert torch.equal(streamed[name], tensor)


def test_recomputing_leaves_layers_in_evaluation_mode_alone() -> None:
    class Freeze(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.net[1].eval()

    collector = SampleCollector(every=12, refresh_batch_norm=2)
    bnn = sampler()
    fit(bnn, collector, Freeze())
    found = collector.posterior().sample(2)
    assert torch.equal(found["1.running_mean"], bnn.current_draws()["1.running_mean"])
    assert found["1.num_batches_tracked"].tolist() == [0, 0]


def test_recomputing_uses_as_many_batches_as_told() -> None:
    collector = SampleCollector(every=12, refresh_batch_norm=2)
    bnn = sampler()
    fit(bnn, collector)
    found = collector.posterior().sample(2)
    candidates = list(data().tensors[0])
    assert found["1.num_batches_tracked"].tolist() == [2, 2]
    # the batches are eight different examples, in an order that the step decides
    torch.manual_seed(12)
    first = [inputs for inputs, _ in loader()][:2]
    assert len({tuple(row.tolist()) for batch in first for row in batch}) == 8 <= len(candidates)
    expected = recompute_batch_norm(bnn.net, bnn.current_draws(), first)
    torch.testing.assert_close(found["1.running_var"], expected["1.running_var"])


class Noisy(torch.utils.data.Dataset):
    """Augmentation by the global generator."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, targets = data()[index]
        return inputs + torch.randn(3), targets


@pytest.mark.parametrize("kind", ["sampler", "plain"])
@pytest.mark.parametrize("own_generator", [False, True])
def test_recomputing_does_not_disturb_the_training(kind: str, own_generator: bool) -> None:
    ends = []
    for refresh in (0, 3):
        module = sampler() if kind == "sampler" else Plain()
        module.body = module.body if kind == "plain" else None
        generator = torch.Generator().manual_seed(8) if own_generator else None
        recorder, collector = Recorder(), SampleCollector(refresh_batch_norm=refresh)
        trainer = quiet_trainer(max_epochs=2, callbacks=[recorder, collector])
        torch.manual_seed(5)
        loads = DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=generator)
        trainer.fit(module, loads)
        ends.append(recorder.weights)
    for step, weights in ends[0].items():
        for name, tensor in weights.items():
            assert torch.equal(tensor, ends[1][step][name]), (step, name)


def test_networks_without_batch_norm_and_several_loaders() -> None:
    bnn = SGMCMC(nn.Linear(3, 1), Gaussian(0.5))
    with pytest.raises(ConfigurationError, match="Linear has no BatchNorm layer"):
        fit(bnn, SampleCollector(refresh_batch_norm=1))
    trainer = quiet_trainer(max_epochs=1, callbacks=[SampleCollector(refresh_batch_norm=1)])

    class Two(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

    with pytest.raises(ConfigurationError, match="by itself; the trainer has a dict with 2"):
        trainer.fit(Two(), {"a": loader(), "b": loader()})


# -------------------------------------------------------------------- resume


@pytest.mark.parametrize("refresh", [0, 2])
@pytest.mark.parametrize("saved_at", [3, 6, 7])
def test_resume_gives_the_same_draws(tmp_path: Path, saved_at: int, refresh: int) -> None:
    """Both collectors, both chains, bit for bit; draws after the checkpoint are taken again."""

    def collectors(name: str) -> list[SampleCollector]:
        options = {"burn_in": 1, "every": 2, "refresh_batch_norm": refresh}
        return [
            SampleCollector(**options),
            SampleCollector(**options, dirpath=tmp_path / name / "d"),
        ]

    whole = collectors("whole")
    fit(sampler(), *whole)
    saver = Save(tmp_path / "run.ckpt", saved_at)
    with pytest.raises(InterruptedError):
        fit(sampler(), *collectors("cut"), saver, Stop(10))
    assert DrawStream.open(tmp_path / "cut" / "d").steps() == [3, 5, 7, 9]

    class Between(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == saved_at:
                self.steps = DrawStream.open(tmp_path / "cut" / "d").steps()

    again, between = collectors("cut"), Between()
    fit(sampler(), *again, between, ckpt=tmp_path / "run.ckpt")
    assert between.steps == [step for step in (3, 5, 7, 9) if step <= saved_at]
    assert again[0].steps == again[1].steps == whole[0].steps == [3, 5, 7, 9, 11]
    assert hashes(tmp_path / "cut" / "d") == hashes(tmp_path / "whole" / "d")
    expected = whole[0].posterior().sample(10)
    for collector in (*again, whole[1]):
        for name, tensor in collector.posterior().sample(10).items():
            assert torch.equal(tensor, expected[name])


def test_a_checkpoint_made_before_the_steps_draw_was_taken(tmp_path: Path) -> None:
    whole, recorder = SampleCollector(every=3), Recorder()
    fit(sampler(), recorder, whole)
    for stop in (Stop(6), Callback()):  # the crash comes before the draw, or never
        collector = SampleCollector(every=3, dirpath=tmp_path / type(stop).__name__ / "d")
        try:
            fit(sampler(), Save(tmp_path / "early.ckpt", 6), stop, collector)
        except InterruptedError:
            assert collector.steps == [3]
        again = SampleCollector(every=3, dirpath=tmp_path / type(stop).__name__ / "d")
        fit(sampler(), again, ckpt=tmp_path / "early.ckpt")
        assert again.steps == [3, 6, 9, 12]
        assert_draws(again.posterior(), recorder.weights, again.steps)


def checkpoint_and_draws(tmp_path: Path) -> Path:
    """A run of 12 steps with a checkpoint of step 7 and draws of every second step."""
    saver = Save(tmp_path / "run.ckpt", 7)
    fit(sampler(), SampleCollector(every=2, dirpath=tmp_path / "d"), saver)
    return tmp_path / "run.ckpt"


def resume(tmp_path: Path, ckpt: Any, **options: Any) -> SampleCollector:
    collector = SampleCollector(**{"every": 2, "dirpath": tmp_path / "d", **options})
    fit(sampler(), collector, ckpt=ckpt)
    return collector


def test_a_moved_directory_goes_on(tmp_path: Path) -> None:
    ckpt = checkpoint_and_draws(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "d").rename(tmp_path / "elsewhere" / "renamed")
    collector = resume(tmp_path, ckpt, dirpath=tmp_path / "elsewhere" / "renamed")
    assert collector.steps == DrawStream.open(tmp_path / "elsewhere" / "renamed").steps()
    assert collector.steps == [2, 4, 6, 8, 10, 12]


def test_a_change_of_directory_does_not_move_draws(tmp_path: Path, monkeypatch: Any) -> None:
    class Move(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            monkeypatch.chdir(tmp_path)

    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    collector = SampleCollector(every=6, dirpath="draws")
    fit(sampler(), Move(), collector)
    assert DrawStream.open(tmp_path / "a" / "draws").steps() == [6, 12]
    assert len(collector.posterior()) == 4


@pytest.mark.parametrize("damage", ["record", "blob"])
def test_damage_after_the_checkpoint_is_in_nobodys_way(tmp_path: Path, damage: str) -> None:
    ckpt = checkpoint_and_draws(tmp_path)
    expected = hashes(tmp_path / "d")
    if damage == "record":
        (tmp_path / "d" / "records" / "000000000010.json").write_text("{")
    else:
        next((tmp_path / "d" / "blobs").glob("draw-000000000010-*")).unlink()
    resume(tmp_path, ckpt)
    assert hashes(tmp_path / "d") == expected


def test_a_fit_that_was_done_at_the_checkpoint(tmp_path: Path) -> None:
    """Lightning then skips the training, so that later draws are still on the disk."""
    ckpt = checkpoint_and_draws(tmp_path)
    collector = SampleCollector(every=2, dirpath=tmp_path / "d")
    fit(sampler(), collector, ckpt=ckpt, max_steps=7)
    assert collector.steps == [2, 4, 6]
    assert len(collector.posterior()) == 6


def test_draws_that_the_checkpoint_has_must_be_there(tmp_path: Path) -> None:
    ckpt = checkpoint_and_draws(tmp_path)
    said = r"checkpoint says that .* has the draws of 3 steps, the last of step 6"
    DrawStream.open(tmp_path / "d").truncate(after_step=5)
    with pytest.raises(ConfigurationError, match=said + r"; it lacks those of step 6\. Put"):
        resume(tmp_path, ckpt)
    (tmp_path / "d").rename(tmp_path / "away")
    with pytest.raises(ConfigurationError, match=said + ", and .* does not exist.*Put the"):
        resume(tmp_path, ckpt)
    fit(sampler(), SampleCollector(every=2, dirpath=tmp_path / "d"))
    with pytest.raises(ConfigurationError, match=said + "; those that are there are of another"):
        resume(tmp_path, ckpt)
    assert DrawStream.open(tmp_path / "d").steps() == [2, 4, 6, 8, 10, 12]  # nothing was dropped


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be")
def test_a_directory_with_draws_is_refused_unless_resuming(tmp_path: Path) -> None:
    ckpt = checkpoint_and_draws(tmp_path)
    before = hashes(tmp_path / "d")
    recorder = Recorder()
    with pytest.raises(ConfigurationError, match=r"6 snapshots.*step 12\. Resume with ckpt_path="):
        fit(sampler(), recorder, SampleCollector(every=2, dirpath=tmp_path / "d"))
    # another rule is another collector, whose draws are not in the checkpoint
    with pytest.raises(ConfigurationError, match=r"run.ckpt holds no state of SampleCollector.*"
                       r"'every': 3.*6 snapshots.*the options that it had"):  # fmt: skip
        resume(tmp_path, ckpt, every=3)
    assert recorder.weights == {}
    assert hashes(tmp_path / "d") == before


def test_a_checkpoint_of_the_burn_in(tmp_path: Path) -> None:
    """No draw is lost if the directory of a run without draws is gone, or was used again."""
    saver = Save(tmp_path / "run.ckpt", 7)
    collector = SampleCollector(burn_in=8, dirpath=tmp_path / "d")
    fit(sampler(), collector, saver)
    first = hashes(tmp_path / "d")
    fit(sampler(), SampleCollector(burn_in=8, dirpath=tmp_path / "d"), ckpt=tmp_path / "run.ckpt")
    assert hashes(tmp_path / "d") == first
    (tmp_path / "d").rename(tmp_path / "away")
    with pytest.raises(InterruptedError):
        fit(sampler(), SampleCollector(burn_in=8, dirpath=tmp_path / "d"), Stop(2))
    fit(sampler(), SampleCollector(burn_in=8, dirpath=tmp_path / "d"), ckpt=tmp_path / "run.ckpt")
    assert hashes(tmp_path / "d") == first


def test_a_collector_that_joins_later(tmp_path: Path) -> None:
    saver = Save(tmp_path / "run.ckpt", 7)
    fit(sampler(), saver)
    collector = SampleCollector(every=2)
    fit(sampler(), collector, ckpt=tmp_path / "run.ckpt")
    assert collector.steps == [8, 10, 12]


def test_the_same_collector_in_several_fits(tmp_path: Path) -> None:
    for dirpath in (None, tmp_path / "d"):
        collector, bnn = SampleCollector(every=5, dirpath=dirpath), sampler()
        trainer = quiet_trainer(max_epochs=1, callbacks=[collector])
        trainer.fit(bnn, loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(bnn, loader())  # goes on
        assert collector.steps == [5, 10]
        assert len(collector.posterior()) == 4
    with pytest.raises(ConfigurationError, match="Resume with ckpt_path="):
        fit(sampler(), collector)  # a new trainer starts anew
    collector = SampleCollector(every=5)
    fit(sampler(), collector)
    with pytest.warns(UserWarning, match="drops the 4 draws of an earlier fit"):
        fit(sampler(), collector)
    assert collector.steps == [5, 10]
    assert len(collector.posterior()) == 4


def test_a_trainer_that_fits_another_module_starts_anew(tmp_path: Path) -> None:
    held, stored = SampleCollector(every=5), SampleCollector(every=5, dirpath=tmp_path / "d")
    for collector in (held, stored):
        trainer = quiet_trainer(max_epochs=1, callbacks=[collector])
        trainer.fit(sampler(), loader())
        trainer.fit_loop.max_epochs = 2
        if collector is held:
            with pytest.warns(UserWarning, match="drops the 2 draws"):
                trainer.fit(sampler(seed=9), loader())
            assert collector.steps == [10]
        else:
            with pytest.raises(ConfigurationError, match="already holds draws"):
                trainer.fit(sampler(seed=9), loader())


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_testing_an_earlier_checkpoint(tmp_path: Path, place: str) -> None:
    """The test sees the checkpoint's draws, not those after it, which are not lost."""

    class Count(Callback):
        def on_test_end(self, trainer: Any, pl_module: Any) -> None:
            self.seen = pl_module.posterior().sample(6)["0.weight"], len(pl_module.posterior())

    def make() -> SampleCollector:
        return SampleCollector(every=2, dirpath=tmp_path / "d" if place == "disk" else None)

    saver, counts, recorder = Save(tmp_path / "run.ckpt", 7), Count(), Recorder()
    collector, bnn = make(), sampler()
    trainer = fit(bnn, recorder, collector, saver, counts)
    testing = {"ckpt_path": tmp_path / "run.ckpt", "verbose": False}
    trainer.test(bnn, loader(shuffle=False), **testing)
    expected = torch.cat([recorder.weights[step]["0.weight"] for step in (2, 4, 6)])
    assert counts.seen[1] == 6
    assert torch.equal(counts.seen[0], expected)
    assert_draws(collector.posterior(), recorder.weights, [2, 4, 6, 8, 10, 12])
    # in a new process as well
    new, fresh = make(), sampler()
    quiet_trainer(callbacks=[new]).test(fresh, loader(shuffle=False), **testing)
    assert new.steps == [2, 4, 6]
    assert_draws(fresh.posterior(), recorder.weights, [2, 4, 6])
    if place == "memory":
        with pytest.warns(UserWarning, match="drops the 6 draws"):
            fit(sampler(), new)  # and a new fit starts anew
        assert new.steps == [2, 4, 6, 8, 10, 12]
        return
    DrawStream.open(tmp_path / "d").truncate(after_step=5)
    with pytest.raises(PosteriorFormatError, match="has no draws of step 6"):
        new.posterior()
    (tmp_path / "d").rename(tmp_path / "away")
    fit(sampler(), SampleCollector(every=4, dirpath=tmp_path / "d"))
    with pytest.raises(ConfigurationError, match="are of another run"):
        new.posterior()


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "module", "message"),
    [
        ({"burn_in": 12}, {}, r"burn_in=12, every=1\) would take no draw: the fit has 12 steps\."),
        ({"burn_in": 8, "every": 5}, {}, "burn_in=8, every=5.*12 steps"),
        ({"every": 6}, {"warm_up": 12}, "12 steps, 12 of them a warm-up"),
        (
            {"every": "cycle"},
            {"scheduler": partial(Cyclical, cycle_length=13)},
            r"every='cycle'\) would take no draw",
        ),
        (
            {"every": "cycle"},
            {"scheduler": partial(Cyclical, cycle_length=12), "warm_up": 1},
            "1 of them a warm-up",
        ),
        ({"every": "cycle"}, {}, r"every='cycle' needs a cyclical schedule.*got \[\]"),
        (
            {"burn_in": 1, "every": 4},
            {"scheduler": partial(Cyclical, cycle_length=4)},  # steps 5 and 9 are the first of two
            r"12 steps; a step that explores gives none\. Train",
        ),
        (
            {},
            {"scheduler": partial(Cyclical, cycle_length=14), "warm_up": 5},
            "5 of them a warm-up; a step that explores",
        ),
    ],
)
def test_a_collector_that_would_take_no_draw(options: Any, module: Any, message: str) -> None:
    recorder = Recorder()
    with pytest.raises(ConfigurationError, match=message):
        fit(sampler(**module), recorder, SampleCollector(**options))
    assert recorder.weights == {}


def test_hmc_that_only_adapts_gives_no_draw() -> None:
    def run(adapt: int, **options: Any) -> SampleCollector:
        made = partial(HMC, lr=0.01, leapfrog_steps=2, adapt_steps=adapt)
        net = nn.Linear(3, 1)
        bnn = SGMCMC(net, Gaussian(0.5), sampler=made, seed=1, warm_up=1)
        collector = SampleCollector(**options)
        trainer = quiet_trainer(max_epochs=6, callbacks=[collector])
        trainer.fit(bnn, loader(batch_size=EXAMPLES))
        return collector

    with pytest.raises(
        ConfigurationError, match="6 steps, 1 of them a warm-up, 5 of them to adapt"
    ):
        run(5)
    assert run(4).steps == [6]


def test_a_plain_module_that_only_explores() -> None:
    with pytest.raises(ConfigurationError, match="a step that explores gives none"):
        fit(Plain(cycle=24), SampleCollector())


def test_where_the_number_of_steps_is_not_known() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            return iter([data()[i] for i in range(EXAMPLES)])

    trainer = quiet_trainer(max_epochs=1, callbacks=[SampleCollector(burn_in=99)])
    with pytest.warns(UserWarning, match=r"burn_in=99, every=1\) took no draw in the 6 steps"):
        trainer.fit(sampler(num_data=EXAMPLES), DataLoader(Endless(), batch_size=BATCH))
    assert trainer.global_step == 6
    # with manual optimization Lightning's estimate counts batches, not steps
    collector = SampleCollector(burn_in=20)
    fit(Plain(manual=True), collector)
    assert collector.steps == [22, 24]


def test_a_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    collector = SampleCollector(burn_in=50, dirpath=tmp_path / "d", refresh_batch_norm=2)
    trainer = quiet_trainer(fast_dev_run=True, callbacks=[collector])
    trainer.fit(sampler(), loader())
    assert not (tmp_path / "d").exists()
    assert len(collector) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"burn_in": -1}, "burn_in= is a whole number, at least 0; got -1"),
        ({"burn_in": 1.5}, "burn_in= .*got 1.5"),
        ({"every": 0}, "every= is a whole number, at least 1; got 0"),
        ({"every": 2.5}, "every= .*got 2.5"),
        ({"every": True}, "every= .*got True"),
        ({"every": "epoch"}, "or 'cycle'; got 'epoch'"),
        ({"max_draws": 0}, "max_draws= is a whole number, at least 1; got 0"),
        ({"max_draws": "3"}, "max_draws= .*got '3'"),
        ({"refresh_batch_norm": -2}, "at least 0; got -2"),
        ({"refresh_batch_norm": True}, "refresh_batch_norm= .*got True"),
        ({"dirpath": ""}, "got an empty text"),
    ],
)
def test_options_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SampleCollector(**options)


def test_collectors_are_told_apart() -> None:
    keys = [
        SampleCollector(**options).state_key
        for options in (
            {},
            {"burn_in": 1},
            {"every": 2},
            {"every": "cycle"},
            {"refresh_batch_norm": 1},
            {"dirpath": "runs/a"},
        )
    ]
    assert len(set(keys)) == len(keys)
    assert (  # the directory may be moved, and more draws be asked for
        SampleCollector(dirpath="x/draws/").state_key
        == SampleCollector(dirpath="s3://bucket/b", max_draws=3).state_key
    )
    trainer = quiet_trainer(max_epochs=1, callbacks=[SampleCollector(dirpath="x")])
    trainer.callbacks.append(SampleCollector(dirpath="y"))
    with pytest.raises(ConfigurationError, match="'stored': True}: they would take the same draws"):
        trainer.fit(sampler(), loader())


@pytest.mark.parametrize("other", ["d", "d/", "link", "x/../d"])
def test_two_collectors_with_one_directory(tmp_path: Path, other: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "d")
    first = SampleCollector(burn_in=4, dirpath=tmp_path / "d")
    second = SampleCollector(burn_in=5, dirpath=f"{tmp_path}/{other}")
    with pytest.raises(ConfigurationError, match=r"Two collectors .* same dirpath="):
        fit(sampler(), first, second)
    assert not (tmp_path / "d").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks")
def test_a_directory_is_one_runs_during_the_burn_in_too(tmp_path: Path) -> None:
    class Another(Callback):
        """Another process tries to claim the directory, during the run and after it."""

        says: list[str] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                self.ask()

        def ask(self) -> None:
            code = (
                "import fcntl, sys\nfile = open(sys.argv[1], 'r+')\n"
                "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\nprint('free')"
            )
            run = [sys.executable, "-c", code, str(tmp_path / "d" / ".lock")]
            done = subprocess.run(run, capture_output=True, text=True)
            self.says.append(done.stdout.strip() or done.stderr.split()[-1])

    another = Another()
    fit(sampler(), another, SampleCollector(every=12, dirpath=tmp_path / "d"))
    another.ask()
    with pytest.raises(InterruptedError):
        fit(sampler(), Stop(2), SampleCollector(burn_in=5, dirpath=tmp_path / "e"))
    assert another.says == ["unavailable", "free"]

    holds = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(tmp_path / "e" / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        recorder, head = Recorder(), (tmp_path / "e" / "manifest.json").read_bytes()
        with pytest.raises(ConfigurationError, match="is in use: another run is writing draws"):
            fit(sampler(), recorder, SampleCollector(burn_in=5, dirpath=tmp_path / "e"))
        assert recorder.weights == {}
        assert (tmp_path / "e" / "manifest.json").read_bytes() == head
        holder.kill()  # as by kill -9
    fit(sampler(), SampleCollector(burn_in=5, every=7, dirpath=tmp_path / "e"))
    assert DrawStream.open(tmp_path / "e").steps() == [12]


def test_any_error_of_the_first_rank_reaches_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    """Two ranks in one process: what the first broadcasts is what the second gets."""
    from lightning_bnn.callbacks import sample_collector as module

    class Strategy:
        sent: Any = None

        def broadcast(self, sent: Any) -> Any:
            Strategy.sent = sent if Strategy.sent is None else Strategy.sent
            return Strategy.sent

    class Rank:
        def __init__(self, rank: int) -> None:
            self.is_global_zero, self.strategy = rank == 0, Strategy()

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        module._on_first_rank(Rank(0), fail)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"first rank: OSError: .*No space left"):
        module._on_first_rank(Rank(1), fail)  # type: ignore[arg-type]


# -------------------------------------------------------------------- two processes


@pytest.mark.slow
def test_two_ranks_hold_the_same_draws_and_one_writes(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.callbacks.ddp_collector", str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in (0, 1))
    assert first["whole"]["writes"] == [False, False, True]
    assert second["whole"]["writes"] == [False, False, False]
    for found in (first, second):
        assert "Resume with ckpt_path=" in found["refused"]  # on both: no rank is left waiting
        assert found["whole"]["steps"] == found["resumed"]["steps"] == [[2, 4, 6, 8]] * 3
        assert found["whole"]["digests"] == first["whole"]["digests"]
        assert found["resumed"]["digests"] == first["whole"]["digests"]
    own, refreshed, streamed = first["whole"]["digests"]
    assert own != refreshed == streamed
