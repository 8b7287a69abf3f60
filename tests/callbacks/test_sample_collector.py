"""Draws are taken at the right steps, kept whole, and the same after a crash and a resume."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_bnn import SGMCMC, DrawsPosterior, Posterior, VariationalBNN
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.errors import ConfigurationError, NonFiniteError, PosteriorFormatError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors.batch_norm import recompute_batch_norm
from lightning_bnn.samplers import SGLD, Cyclical
from lightning_bnn.storage.stream import DrawStream
from tests.callbacks.fits import (
    BATCH,
    EXAMPLES,
    Endless,
    Freeze,
    Plain,
    Recorder,
    chains,
    data,
    fit,
    loader,
    network,
    save,
    spoil,
    stop,
    with_scheduler,
)
from tests.trainers import quiet_trainer


def assert_draws(posterior: Posterior, recorded: dict[int, dict[str, Tensor]], steps: Any) -> None:
    """Step after step, and in it chain after chain, bit for bit."""
    drawn = posterior.sample(len(posterior))
    assert drawn.keys() == recorded[min(recorded)].keys()
    for name, tensor in drawn.items():
        assert torch.equal(tensor, torch.cat([recorded[step][name] for step in steps])), name


def hashes(directory: Path) -> dict[int, str]:
    return DrawStream.open(directory).hashes()


# -------------------------------------------------------------------- which steps


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"burn_in": 4}, [5, 6, 7, 8, 9, 10, 11, 12]),
        ({"burn_in": 3, "every": 4}, [7, 11]),
        ({"every": 2, "max_draws": 3}, [2, 4, 6]),
    ],
)
def test_steps(tmp_path: Path, options: Any, steps: Any) -> None:
    recorder, bnn, dirpath = Recorder(), chains(), tmp_path / "draws"
    held, stored = SampleCollector(**options), SampleCollector(**options, dirpath=dirpath)
    assert bnn.collector is None
    fit(bnn, recorder, held, stored)
    assert bnn.collector is held
    for collector in (held, stored):
        assert collector.steps == steps
        assert len(collector) == 2 * len(steps)
        posterior = collector.posterior()
        assert type(posterior) is DrawsPosterior
        assert posterior.chains == 2
        assert_draws(posterior, recorder.weights, steps)
    assert_draws(bnn.posterior(), recorder.weights, steps)
    loaded = Posterior.load(dirpath, network())
    assert loaded.chains == 2
    assert_draws(loaded, recorder.weights, steps)
    assert DrawStream.open(dirpath).fields(steps[0]) == {"epoch": (steps[0] - 1) // 6}
    # memory does not grow with draws on the disk
    assert stored._state.draws == stored.state_dict()["draws"] == []


def cyclic(cycle: int = 4, **options: Any) -> SGMCMC:
    return chains(scheduler=partial(Cyclical, cycle_length=cycle), **options)


@pytest.mark.parametrize(
    ("make", "options", "trainer", "steps"),
    [
        # six batches an epoch, accumulated: steps after the fourth and the last
        (chains, {"every": 2}, {"max_epochs": 4, "accumulate_grad_batches": 4}, [2, 4, 6, 8]),
        # manual optimization: two steps a batch; what is due in a batch is taken at its end
        (
            partial(Plain, manual=True),
            {"burn_in": 1, "every": 3},
            {},
            [4, 8, 10, 14, 16, 20, 22],
        ),
        (partial(chains, warm_up=6), {"burn_in": 2, "every": 2}, {}, [8, 10, 12]),
        # the first half of each cycle explores
        (cyclic, {"every": "cycle"}, {}, [4, 8, 12]),
        (cyclic, {"every": 1}, {}, [3, 4, 7, 8, 11, 12]),
        (partial(cyclic, warm_up=2), {"every": "cycle"}, {}, [6, 10]),
        (partial(cyclic, warm_up=2), {"every": 1}, {}, [5, 6, 9, 10]),
        # round(2.5) = 2 steps of each cycle explore
        (
            lambda: with_scheduler(Plain(), partial(Cyclical, cycle_length=5)),
            {},
            {},
            [3, 4, 5, 8, 9, 10],
        ),
    ],
)
def test_steps_of_loops_warm_ups_and_cycles(
    make: Any, options: Any, trainer: Any, steps: Any
) -> None:
    recorder, collector, module = Recorder(), SampleCollector(**options), make()
    fit(module, recorder, collector, **trainer)
    assert collector.steps == steps
    assert_draws(collector.posterior(Gaussian(0.5)), recorder.weights, steps)


def test_cycles_are_counted_in_steps() -> None:
    module = with_scheduler(Plain(), partial(Cyclical, cycle_length=5), interval="epoch")
    with pytest.raises(ConfigurationError, match=r"counted in steps: .*'interval': 'step'"):
        fit(module, SampleCollector(every="cycle"))


# -------------------------------------------------------------------- what is collected


def test_a_plain_module(tmp_path: Path) -> None:
    module, recorder = Plain(), Recorder()
    held, stored = SampleCollector(every=4), SampleCollector(every=4, dirpath=tmp_path / "d")
    fit(module, recorder, held, stored)
    for collector in (held, stored):
        with pytest.raises(ConfigurationError, match="has no likelihood"):
            collector.posterior()
        posterior = collector.posterior(Gaussian(0.3))
        assert posterior.chains == 1
        assert_draws(posterior, recorder.weights, [4, 8, 12])
        assert posterior.net is not module
        assert posterior.net._trainer is None
        inputs = torch.randn(5, 3)
        module.eval()
        torch.testing.assert_close(posterior.predict(inputs).outputs[-1], module(inputs))
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
    held, stored = SampleCollector(every=4), SampleCollector(every=4, dirpath=tmp_path / "d")
    fit(bnn, held, stored)
    scale = bnn.likelihood.log_scale.item()
    assert scale != pytest.approx(torch.tensor(0.5).log().item(), abs=1e-4)
    for posterior in (held.posterior(), Posterior.load(tmp_path / "d", network())):
        assert posterior.likelihood.log_scale.item() == scale
        assert torch.equal(posterior.fixed["0.weight"], net[0].weight)
        assert posterior.sample(2)["1.weight"].shape == (2, 4)


def test_a_diverged_chain_is_named_and_earlier_draws_are_safe(tmp_path: Path) -> None:
    collector = SampleCollector(every=1, dirpath=tmp_path / "d")
    with pytest.raises(NonFiniteError, match=r"'0.weight' of chain 7 is not finite after step 5"):
        fit(chains(chains=[4, 7]), spoil(5, row=1, column=3), collector)
    assert DrawStream.open(tmp_path / "d").steps() == [1, 2, 3, 4]
    assert Posterior.load(tmp_path / "d", network()).sample(8)["0.weight"].isfinite().all()


def test_no_draws_yet() -> None:
    collector = SampleCollector(burn_in=7)
    with pytest.raises(ConfigurationError, match=r"No draws.*burn_in=7 steps.*has taken 0"):
        collector.posterior()
    bnn = chains()
    with pytest.raises(InterruptedError):
        fit(bnn, collector, stop(5))
    with pytest.raises(ConfigurationError, match="has taken 5"):
        collector.posterior()
    assert len(bnn.posterior()) == 2  # the chains as they stand


def test_validation_sees_the_draws_so_far(tmp_path: Path) -> None:
    counts = []

    class Count(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            counts.append(len(pl_module.posterior()))

    collector = SampleCollector(every=3, dirpath=tmp_path / "d")
    trainer = quiet_trainer(max_epochs=2, callbacks=[Count(), collector], num_sanity_val_steps=1)
    trainer.fit(chains(), loader(), loader(shuffle=False))
    assert counts == [2, 4, 8]


# -------------------------------------------------------------------- BatchNorm


def test_batch_norm_is_recomputed_for_each_draw(tmp_path: Path) -> None:
    recorder = Recorder()
    plain, all_batches = SampleCollector(every=4), SampleCollector(every=4, refresh_batch_norm=6)
    on_disk = SampleCollector(every=4, refresh_batch_norm=99, dirpath=tmp_path / "d")
    fit(chains(), recorder, plain, all_batches, on_disk)
    assert_draws(plain.posterior(), recorder.weights, [4, 8, 12])
    fresh, kept = all_batches.posterior().sample(6), plain.posterior().sample(6)
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


def test_recomputing_uses_as_many_batches_as_told() -> None:
    collector, bnn = SampleCollector(every=12, refresh_batch_norm=2), chains()
    fit(bnn, collector)
    drawn = collector.posterior().sample(2)
    assert drawn["1.num_batches_tracked"].tolist() == [2, 2]
    # the batches are eight different examples, in an order that the step decides
    torch.manual_seed(12)
    first = [inputs for inputs, _ in loader()][:2]
    assert len({tuple(row.tolist()) for batch in first for row in batch}) == 8
    expected = recompute_batch_norm(bnn.net, bnn.current_draws(), first)
    torch.testing.assert_close(drawn["1.running_var"], expected["1.running_var"])


def test_recomputing_leaves_layers_in_evaluation_mode_alone() -> None:
    collector, bnn = SampleCollector(every=12, refresh_batch_norm=2), chains()
    fit(bnn, collector, Freeze(1))
    drawn = collector.posterior().sample(2)
    assert torch.equal(drawn["1.running_mean"], bnn.current_draws()["1.running_mean"])
    assert drawn["1.num_batches_tracked"].tolist() == [0, 0]


class Noisy(torch.utils.data.Dataset):
    """Augmentation by the global generator."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, targets = data()[index]
        return inputs + torch.randn(3), targets


@pytest.mark.parametrize(
    ("make", "kind"), [(chains, "plain"), (Plain, "generator"), (chains, "persistent workers")]
)
def test_recomputing_does_not_disturb_the_training(make: Any, kind: str) -> None:
    ends = []
    for refresh in (0, 3):
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(8)}
        if kind == "persistent workers":
            options = {"num_workers": 1, "persistent_workers": True}
        batches = DataLoader(Noisy(), BATCH, shuffle=True, **({} if kind == "plain" else options))
        recorder, collector = Recorder(), SampleCollector(refresh_batch_norm=refresh)
        fit(make(), recorder, collector, batches=batches)
        ends.append(recorder.weights)
    for step, weights in ends[0].items():
        for name, tensor in weights.items():
            assert torch.equal(tensor, ends[1][step][name]), (step, name)


def test_networks_without_batch_norm_have_nothing_to_recompute() -> None:
    with pytest.raises(ConfigurationError, match="Linear has no BatchNorm layer"):
        fit(SGMCMC(nn.Linear(3, 1), Gaussian(0.5)), SampleCollector(refresh_batch_norm=1))


# -------------------------------------------------------------------- resume


@pytest.mark.parametrize("saved_at", [6, 7])
def test_resume_gives_the_same_draws(tmp_path: Path, saved_at: int) -> None:
    """All collectors, both chains, bit for bit; draws after the checkpoint are taken again."""

    def collectors(name: str) -> list[SampleCollector]:
        return [
            SampleCollector(1, 2, refresh_batch_norm=refresh, dirpath=place)
            for refresh in (0, 2)
            for place in (None, tmp_path / name / f"d{refresh}")
        ]

    whole = collectors("whole")
    fit(chains(), *whole)
    saver = save(tmp_path / "run.ckpt", saved_at)
    with pytest.raises(InterruptedError):
        fit(chains(), *collectors("cut"), saver, stop(10))
    assert DrawStream.open(tmp_path / "cut" / "d0").steps() == [3, 5, 7, 9]

    class Between(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == saved_at:
                self.steps = DrawStream.open(tmp_path / "cut" / "d0").steps()

    again, between = collectors("cut"), Between()
    fit(chains(), *again, between, ckpt=tmp_path / "run.ckpt")
    assert between.steps == [step for step in (3, 5, 7, 9) if step <= saved_at]
    for name in ("d0", "d2"):
        assert hashes(tmp_path / "cut" / name) == hashes(tmp_path / "whole" / name)
    for refreshed in (slice(0, 2), slice(2, 4)):
        expected = whole[refreshed][0].posterior().sample(10)
        for collector in (*again[refreshed], whole[refreshed][1]):
            assert collector.steps == [3, 5, 7, 9, 11]
            for name, tensor in collector.posterior().sample(10).items():
                assert torch.equal(tensor, expected[name])


def test_a_checkpoint_made_before_the_steps_draw_was_taken(tmp_path: Path) -> None:
    whole, recorder = SampleCollector(every=3), Recorder()
    fit(chains(), recorder, whole)
    for name, crash in (("crash", stop(6)), ("none", Callback())):  # before the draw, or never
        collector = SampleCollector(every=3, dirpath=tmp_path / name)
        try:
            fit(chains(), save(tmp_path / "early.ckpt", 6), crash, collector)
        except InterruptedError:
            assert collector.steps == [3]
        again = SampleCollector(every=3, dirpath=tmp_path / name)
        fit(chains(), again, ckpt=tmp_path / "early.ckpt")
        assert again.steps == [3, 6, 9, 12]
        assert_draws(again.posterior(), recorder.weights, again.steps)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A checkpoint of step 7, of a run of 12 steps with draws of every second step in ``d``."""
    fit(chains(), SampleCollector(every=2, dirpath=tmp_path / "d"), save(tmp_path / "run.ckpt", 7))
    return tmp_path / "run.ckpt"


def resume(ckpt: Path, **options: Any) -> SampleCollector:
    trainer = {"max_steps": options.pop("max_steps", -1)}
    collector = SampleCollector(**{"every": 2, "dirpath": ckpt.parent / "d", **options})
    fit(chains(), collector, ckpt=ckpt, **trainer)
    return collector


def test_a_moved_directory_is_resumed(tmp_path: Path, ckpt: Path) -> None:
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    (tmp_path / "d").rename(moved)
    collector = resume(ckpt, dirpath=moved)
    assert collector.steps == DrawStream.open(moved).steps() == [2, 4, 6, 8, 10, 12]


def test_damage_after_the_checkpoint_is_in_nobodys_way(tmp_path: Path, ckpt: Path) -> None:
    expected = hashes(tmp_path / "d")
    (tmp_path / "d" / "records" / "000000000010.json").write_text("{")
    next((tmp_path / "d" / "blobs").glob("draw-000000000012-*")).unlink()
    resume(ckpt)
    assert hashes(tmp_path / "d") == expected


def test_a_fit_that_was_done_at_the_checkpoint(ckpt: Path) -> None:
    """Lightning then skips the training, so that later draws are still on the disk."""
    collector = resume(ckpt, max_steps=7)
    assert collector.steps == [2, 4, 6]
    assert len(collector.posterior()) == 6


def test_draws_that_the_checkpoint_has_must_be_there(tmp_path: Path, ckpt: Path) -> None:
    said = r"checkpoint has draws of 3 steps in .*, but "
    DrawStream.open(tmp_path / "d").truncate(after_step=5)
    with pytest.raises(ConfigurationError, match=said + r"the draws of step 6 are not there\. Put"):
        resume(ckpt)
    (tmp_path / "d").rename(tmp_path / "away")
    with pytest.raises(ConfigurationError, match=said + ".* does not exist.*Put the"):
        resume(ckpt)
    fit(chains(), SampleCollector(every=2, dirpath=tmp_path / "d"))
    with pytest.raises(ConfigurationError, match=said + "its draws are of another run"):
        resume(ckpt)
    assert DrawStream.open(tmp_path / "d").steps() == [2, 4, 6, 8, 10, 12]  # nothing was dropped


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be")
def test_a_directory_with_draws_is_refused_unless_resuming(tmp_path: Path, ckpt: Path) -> None:
    before, recorder = hashes(tmp_path / "d"), Recorder()
    with pytest.raises(ConfigurationError, match=r"6 snapshots.*step 12\. Resume with ckpt_path="):
        fit(chains(), recorder, SampleCollector(every=2, dirpath=tmp_path / "d"))
    assert recorder.weights == {}
    # another rule is another collector, whose draws are not in the checkpoint
    with pytest.raises(ConfigurationError, match="6 snapshots"):
        resume(ckpt, every=3)
    assert hashes(tmp_path / "d") == before


def test_a_checkpoint_of_the_burn_in(tmp_path: Path) -> None:
    """No draw is lost if the directory of a run without draws is gone, or was used again."""

    def run(*callbacks: Callback, **options: Any) -> dict[int, str]:
        collector = SampleCollector(burn_in=8, dirpath=tmp_path / "d")
        fit(chains(), collector, *callbacks, **options)
        return hashes(tmp_path / "d")

    first = run(save(tmp_path / "run.ckpt", 7))
    assert run(ckpt=tmp_path / "run.ckpt") == first
    (tmp_path / "d").rename(tmp_path / "away")
    with pytest.raises(InterruptedError):
        run(stop(2))
    assert run(ckpt=tmp_path / "run.ckpt") == first


def test_the_same_collector_in_several_fits(tmp_path: Path) -> None:
    for dirpath in (None, tmp_path / "d"):
        collector, bnn = SampleCollector(every=5, dirpath=dirpath), chains()
        trainer = quiet_trainer(max_epochs=1, callbacks=[collector])
        trainer.fit(bnn, loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(bnn, loader())  # resumes
        assert collector.steps == [5, 10]
        assert len(collector.posterior()) == 4
    with pytest.raises(ConfigurationError, match="Resume with ckpt_path="):
        fit(chains(), collector)  # a new trainer starts anew
    collector, bnn = SampleCollector(every=5), chains()
    fit(bnn, collector)
    with pytest.warns(UserWarning, match="drops the 4 draws of an earlier fit"):
        fit(chains(), collector)
    assert collector.steps == [5, 10]
    assert len(collector.posterior()) == 4
    # a fit without the collector forgets its draws
    fit(bnn)
    assert bnn.collector is None


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_testing_an_earlier_checkpoint(tmp_path: Path, place: str) -> None:
    """The test sees the checkpoint's draws, not those after it, which are not lost."""

    class Look(Callback):
        def on_test_end(self, trainer: Any, pl_module: Any) -> None:
            self.posterior = pl_module.posterior()

    def make() -> SampleCollector:
        return SampleCollector(every=2, dirpath=tmp_path / "d" if place == "disk" else None)

    look, recorder = Look(), Recorder()
    collector, bnn = make(), chains()
    trainer = fit(bnn, recorder, collector, save(tmp_path / "run.ckpt", 7), look)
    testing = {"ckpt_path": tmp_path / "run.ckpt", "verbose": False}
    trainer.test(bnn, loader(shuffle=False), **testing)
    assert_draws(look.posterior, recorder.weights, [2, 4, 6])
    assert_draws(collector.posterior(), recorder.weights, [2, 4, 6, 8, 10, 12])
    # in a new process as well
    new, fresh = make(), chains()
    quiet_trainer(callbacks=[new]).test(fresh, loader(shuffle=False), **testing)
    assert new.steps == [2, 4, 6]
    assert_draws(fresh.posterior(), recorder.weights, [2, 4, 6])
    if place == "memory":
        with pytest.warns(UserWarning, match="drops the 6 draws"):
            fit(chains(), new)  # and a new fit starts anew
        assert new.steps == [2, 4, 6, 8, 10, 12]
        return
    DrawStream.open(tmp_path / "d").truncate(after_step=5)
    with pytest.raises(PosteriorFormatError, match="has no draws of step 6"):
        new.posterior()
    (tmp_path / "d").rename(tmp_path / "away")
    fit(chains(), SampleCollector(every=4, dirpath=tmp_path / "d"))
    with pytest.raises(ConfigurationError, match="its draws are of another run"):
        new.posterior()


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "make", "message"),
    [
        ({"burn_in": 12}, chains, r"burn_in=12, every=1\) would take no draw in the 12 steps"),
        ({"burn_in": 8, "every": 5}, chains, "burn_in=8, every=5.*12 steps"),
        ({"every": 6}, partial(chains, warm_up=12), "12 steps of this fit, 12 of them to warm up"),
        ({"every": "cycle"}, partial(cyclic, 13), r"every='cycle'\) would take no draw"),
        ({"every": "cycle"}, partial(cyclic, 12, warm_up=1), "1 of them to warm up"),
        ({"every": "cycle"}, chains, "every='cycle' needs a cyclical schedule"),
    ],
)
def test_a_collector_that_would_take_no_draw(options: Any, make: Any, message: str) -> None:
    recorder = Recorder()
    with pytest.raises(ConfigurationError, match=message):
        fit(make(), recorder, SampleCollector(**options))
    assert recorder.weights == {}


def test_where_the_number_of_steps_is_not_known() -> None:
    batches = DataLoader(Endless(), batch_size=BATCH)
    with pytest.warns(UserWarning, match=r"burn_in=99, every=1\) took no draw in 6 steps"):
        fit(chains(num_data=EXAMPLES), SampleCollector(99), batches=batches, max_epochs=1)
    # with manual optimization Lightning's estimate counts batches, not steps
    collector = SampleCollector(burn_in=20)
    fit(Plain(manual=True), collector)
    assert collector.steps == [22, 24]


def test_a_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    collector = SampleCollector(burn_in=50, dirpath=tmp_path / "d", refresh_batch_norm=2)
    fit(chains(), collector, fast_dev_run=True)
    assert not (tmp_path / "d").exists()
    assert len(collector) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"burn_in": -1}, "burn_in= is a whole number, at least 0; got -1"),
        ({"every": "epoch"}, "every= is a whole number, at least 1; got 'epoch'"),
        ({"dirpath": ""}, "got an empty text"),
    ],
)
def test_options_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SampleCollector(**options)


def test_collectors_are_told_apart() -> None:
    options: list[dict[str, Any]] = [
        {}, {"burn_in": 1}, {"every": 2}, {"every": "cycle"}, {"refresh_batch_norm": 1},
        {"dirpath": "runs/a"},
    ]  # fmt: skip
    assert len({SampleCollector(**one).state_key for one in options}) == len(options)
    assert (  # the directory may be moved, and more draws be asked for
        SampleCollector(dirpath="x/draws/").state_key
        == SampleCollector(dirpath="s3://bucket/b", max_draws=3).state_key
    )
    with pytest.raises(RuntimeError, match="more than one stateful callback"):  # of Lightning
        quiet_trainer(callbacks=[SampleCollector(dirpath="x"), SampleCollector(dirpath="y")])


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks")
def test_a_directory_is_one_runs_during_the_burn_in_too(tmp_path: Path) -> None:
    claim = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'r+')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\nprint('free', flush=True)\n"
        "sys.stdin.read()"
    )

    command = [sys.executable, "-c", claim, str(tmp_path / "e" / ".lock")]
    pipe = subprocess.PIPE
    with pytest.raises(InterruptedError):
        fit(chains(), stop(2), SampleCollector(burn_in=5, dirpath=tmp_path / "e"))
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "free\n"
        recorder, head = Recorder(), (tmp_path / "e" / "manifest.json").read_bytes()
        with pytest.raises(ConfigurationError, match="is in use: another run is writing draws"):
            fit(chains(), recorder, SampleCollector(burn_in=5, dirpath=tmp_path / "e"))
        assert recorder.weights == {}
        assert (tmp_path / "e" / "manifest.json").read_bytes() == head
        holder.kill()  # as by kill -9
    fit(chains(), SampleCollector(burn_in=5, every=7, dirpath=tmp_path / "e"))
    assert DrawStream.open(tmp_path / "e").steps() == [12]


def test_two_collectors_in_one_directory_are_refused(tmp_path: Path) -> None:
    both = [SampleCollector(every=every, dirpath=tmp_path / "d") for every in (2, 3)]
    with pytest.raises(ConfigurationError, match="Two collectors of the trainer have the same"):
        fit(chains(), *both)


def test_each_run_has_its_draws_in_the_folder_of_its_logger(tmp_path: Path) -> None:
    """A fit that resumes has another version, and goes on with the draws of its checkpoint."""

    def run(*further: Callback, **options: Any) -> SampleCollector:
        collector = SampleCollector(every=3, dirpath="<log_dir>/draws")
        logger = CSVLogger(tmp_path, "runs")
        fit(chains(), collector, *further, logger=logger, **options)
        return collector

    whole = run()
    assert whole.dirpath == str(tmp_path / "runs/version_0/draws")
    with pytest.raises(InterruptedError):
        run(save(tmp_path / "7.ckpt", 7), stop(8))
    resumed = run(ckpt=tmp_path / "7.ckpt")
    assert resumed.dirpath == str(tmp_path / "runs/version_1/draws")
    assert resumed.steps == whole.steps == [3, 6, 9, 12]
    drawn = [Posterior.load(one.dirpath, network()).sample(8) for one in (whole, resumed)]
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    fit(chains(), whole, logger=CSVLogger(tmp_path, "runs"))  # the same collector in another run
    assert whole.dirpath == str(tmp_path / "runs/version_3/draws")
