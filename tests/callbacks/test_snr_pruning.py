"""SNRPruning in real fits: what it prunes and when, that zeros stay, that fits resume exactly."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint, WeightAveraging
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, IterableDataset

from lightning_bnn import DeepEnsemble, VariationalBNN
from lightning_bnn.callbacks import SNRPruning
from lightning_bnn.cli import main
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from lightning_bnn.pruning import compact, mean_network, sparsity
from tests.callbacks import fits
from tests.nets import loader, make_data, mlp
from tests.test_cli import configuration
from tests.trainers import quiet_trainer

# so few weights that a layer may be down to its last one; a test of its own is about that
pytestmark = pytest.mark.filterwarnings("ignore:Removing .* would have removed all:UserWarning")

DATA = make_data("mlp", "classification")
INPUTS = DATA.tensors[0][:6]
WEIGHTS = 64 + 48  # those of mlp(3) that may be pruned; 12 steps are an epoch, 48 a fit


def make_bnn(net: nn.Module | None = None, **options: Any) -> VariationalBNN:
    torch.manual_seed(0)
    defaults = {
        "prior": Normal(0.125, 0.5),
        "initial_scale": 0.25,
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "num_data": 48,
        "seed": 4,
    }
    return VariationalBNN(net or mlp(3), Categorical(), **{**defaults, **options})


def fit(
    bnn: pl.LightningModule,
    *callbacks: pl.Callback,
    ckpt: Any = None,
    data: Any = None,
    **more: Any,
) -> pl.Trainer:
    trainer = quiet_trainer(**{"max_epochs": 4, "callbacks": list(callbacks), **more})
    torch.manual_seed(5)
    data = loader(DATA, shuffle=True, batch_size=4) if data is None else data
    trainer.fit(bnn, data, ckpt_path=ckpt)
    return trainer


def often(fraction: float = 0.75, **options: Any) -> SNRPruning:
    """Prunes after the steps 17, 22, 27, 32 and 36."""
    return SNRPruning(fraction, **{"start": 0.25, "end": 0.75, "every_n_steps": 5, **options})


class Record(pl.Callback):
    """The posterior after each step, as the callback before it left it."""

    def __init__(self) -> None:
        self.posterior: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.posterior[trainer.global_step] = pl_module.posterior()


class Save(pl.Callback):
    """Saves a checkpoint after each of some steps, before another batch is accumulated."""

    def __init__(self, folder: Path, name: str, *steps: int) -> None:
        self.folder, self.name, self.steps = folder, name, set(steps)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            self.steps.remove(trainer.global_step)
            trainer.save_checkpoint(self.folder / f"{self.name}{trainer.global_step}.ckpt")


def removed(masks: dict[str, Tensor]) -> int:
    return sum(int((mask == 0).sum()) for mask in masks.values())


def assert_zero(posterior: Any, masks: dict[str, Tensor]) -> None:
    """In every draw, where a mask is; all else of these tensors is no zero."""
    drawn = posterior.sample(7)
    for name, mask in masks.items():
        for draw in drawn[name] if name in drawn else posterior.fixed[name][None]:
            assert torch.equal(draw != 0, mask.bool()), name


def assert_same(one: VariationalBNN, other: VariationalBNN) -> None:
    """To the last bit, and with the same masks."""
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    for name, value in first.items():
        if isinstance(value, Tensor):
            assert value.dtype == second[name].dtype
            assert torch.equal(value, second[name]), name
    assert_same_masks(one.masks(), other.masks())


def assert_same_masks(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    assert all(torch.equal(mask, other[name]) for name, mask in one.items())


def copy_of(masks: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: mask.clone() for name, mask in masks.items()}


# -------------------------------------------------------------------- what it prunes, and when


def test_the_program_of_the_manual(tmp_path: Path) -> None:
    bnn, record = make_bnn(), Record()
    trainer = pl.Trainer(
        callbacks=[record, SNRPruning(fraction=0.95, schedule="cubic", start=0.5, end=0.9)],
        max_epochs=4,
        accelerator="cpu",
        logger=CSVLogger(tmp_path, name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(5)
    trainer.fit(bnn, loader(DATA, shuffle=True, batch_size=4))
    pruning: Any = trainer.callbacks[1]  # type: ignore[attr-defined]

    # exactly so many are zero in every draw, and no others
    count = round(0.95 * WEIGHTS)
    for draw in range(5):
        drawn = {name: part[draw] for name, part in bnn.posterior().sample(5).items()}
        zeros = {name: int((part == 0).sum()) for name, part in drawn.items()}
        assert zeros["0.weight"] + zeros["2.weight"] == count
        assert zeros["0.bias"] == zeros["2.bias"] == 0
    assert_zero(bnn.posterior(), pruning.masks)
    assert removed(pruning.masks) == count
    assert pruning.sparsity == pytest.approx(sparsity(bnn.posterior())) == count / WEIGHTS

    # along the schedule, the lowest ratios first
    steps = range(25, 44)
    shares = [0.95 * (1 - (1 - (step - 24) / 19) ** 3) for step in steps]
    history = pruning.history
    assert [one.step for one in history] == list(steps)
    assert [one.fraction for one in history] == pytest.approx(shares, abs=1e-12)
    assert history[-1].fraction == 0.95
    assert [one.removed for one in history] == [round(share * WEIGHTS) for share in shares]
    gone = np.zeros(WEIGHTS, dtype=bool)
    for one in history:
        before = record.posterior[one.step]
        ratio, best = ratios(before)
        assert np.array_equal(gone, ratio == 0)
        order = [place for place in ratio.argsort(kind="stable") if place not in best]
        taken = order[: one.removed]
        new = [place for place in taken if not gone[place]]
        assert one.threshold == (None if not new else pytest.approx(ratio[new].max(), rel=1e-5))
        gone[taken] = True
    assert np.array_equal(gone, ratios(bnn.posterior())[0] == 0)
    assert sum(one.threshold is None for one in history) >= 2  # the last ones round to nothing

    # in the logs
    last = [one.threshold for one in history if one.threshold is not None][-1]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["sparsity"] == pytest.approx(count / WEIGHTS)
    assert logged["pruning_threshold"] == pytest.approx(last)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("sparsity")]
    by_step: dict[int, list[float]] = {}
    for row in rows:
        by_step.setdefault(int(row["step"]) + 1, []).append(float(row["sparsity"]))
    for one in history:
        assert by_step[one.step][0] == pytest.approx(one.removed / WEIGHTS)
    assert [by_step[step][-1] for step in (12, 24, 48)] == pytest.approx([0, 0, count / WEIGHTS])
    assert any(row["pruning_threshold"] for row in rows)


def ratios(posterior: Any) -> tuple[np.ndarray, list[int]]:
    """|mean|/sd of all prunable weights, 0 where both are 0, and the best of each layer."""
    parts, best, start = [], [], 0
    for name in ("0.weight", "2.weight"):
        mean, sd = (part[name].double().numpy().ravel() for part in (posterior.mean, posterior.sd))
        parts.append(np.divide(np.abs(mean), sd, out=np.zeros_like(mean), where=sd > 0))
        best.append(start + int(parts[-1].argmax()))
        start += len(mean)
    return np.concatenate(parts), best


def test_pruning_before_the_first_and_after_the_last_step() -> None:
    for start, step in ((0, 0), (1.0, 12)):
        bnn, pruning = make_bnn(), SNRPruning(0.5, schedule="once", start=start)
        fit(bnn, pruning, max_epochs=1)
        assert [(one.step, one.removed) for one in pruning.history] == [(step, 56)]
        assert_zero(bnn.posterior(), pruning.masks)


class Stream(IterableDataset):
    """The examples without their number."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*DATA.tensors, strict=True))


class Skipping(VariationalBNN):
    """Skips the rest of each epoch after five batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 5 else None


@pytest.mark.parametrize(("kind", "steps"), [(VariationalBNN, 12), (Skipping, 5)])
def test_data_without_a_length_are_pruned_after_whole_epochs(kind: Any, steps: int) -> None:
    pruning = SNRPruning(0.5, schedule="linear", start=1, end=3)
    bnn = kind(mlp(3), Categorical(), num_data=48)
    fit(bnn, pruning, data=DataLoader(Stream(), 4), max_epochs=3)
    found = [(one.step, one.fraction) for one in pruning.history]
    assert found == [(2 * steps, 0.25), (3 * steps, 0.5)]
    assert removed(pruning.masks) == 56
    with pytest.raises(ConfigurationError, match=r"start=0.5 cannot .* as numbers of epochs"):
        fit(bnn, SNRPruning(0.5), data=DataLoader(Stream(), 4))


def test_a_fast_dev_run_prunes_nothing() -> None:
    pruning = SNRPruning(0.95)
    fit(make_bnn(), pruning, fast_dev_run=True)
    assert pruning.history == []
    assert pruning.sparsity == 0


def test_only_bayesian_weights_are_pruned() -> None:
    bnn, pruning = make_bnn(bayesian="2.*"), often()
    fit(bnn, pruning)
    assert list(pruning.masks) == ["2.weight"]
    assert removed(pruning.masks) == pruning.history[-1].removed == 36
    assert pruning.sparsity == 0.75


# -------------------------------------------------------------------- resume


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[VariationalBNN, SNRPruning, Path]:
    """A fit that was never interrupted, and the folder of its checkpoints."""
    folder, bnn, pruning = tmp_path_factory.mktemp("whole"), make_bnn(), often()
    steps = (5, 17, 19, 40)
    fit(bnn, Save(folder, "before", *steps), pruning, Save(folder, "after", *steps))
    return bnn, pruning, folder


@pytest.mark.parametrize(
    "name",
    [
        "before17",  # of the step of a pruning, by a callback that comes before it
        "after17",  # of the same step, by one that comes after it
        "after19",  # between two prunings, in the middle of an epoch
    ],
)
def test_resume_is_bit_equal(whole: Any, name: str) -> None:
    bnn, pruning, folder = whole
    resumed, again = make_bnn(), often()
    torch.manual_seed(99)
    trainer = quiet_trainer(max_epochs=4, callbacks=[again])
    batches = loader(DATA, shuffle=True, batch_size=4)
    trainer.fit(resumed, batches, ckpt_path=folder / f"{name}.ckpt")
    assert_same(bnn, resumed)
    assert removed(again.masks) == 84
    assert_same_masks(pruning.masks, again.masks)
    assert again.history == pruning.history
    assert [one.step for one in again.history] == [17, 22, 27, 32, 36]
    assert again.state_dict() == pruning.state_dict()
    assert_zero(resumed.posterior(), again.masks)


def test_resume_is_bit_equal_for_channels_and_flipout(tmp_path: Path) -> None:
    def make() -> tuple[VariationalBNN, SNRPruning]:
        bnn = make_bnn(normalised(), estimator="flipout")
        return bnn, often(0.5, unit="channel", every_n_steps=3)

    bnn, pruning = make()
    fit(bnn, pruning, Save(tmp_path, "run", 10), accumulate_grad_batches=2)
    resumed, again = make()
    fit(resumed, again, ckpt=tmp_path / "run10.ckpt", accumulate_grad_batches=2)
    assert 0 < sum(one.step <= 10 for one in again.history) < len(again.history)
    assert_same(bnn, resumed)
    assert again.history == pruning.history
    assert again.sparsity == pruning.sparsity > 0.3


def test_resume_from_a_model_checkpoint_where_epochs_are_counted(tmp_path: Path) -> None:
    """With validation."""

    def run(ckpt: Any = None) -> tuple[VariationalBNN, SNRPruning]:
        bnn, pruning = make_bnn(optimizer=None), SNRPruning(0.5, start=0, end=3)
        folder = tmp_path / ("whole" if ckpt is None else "resumed")
        saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = quiet_trainer(max_epochs=4, callbacks=[saver, pruning], enable_checkpointing=True)
        torch.manual_seed(5)
        trainer.fit(bnn, DataLoader(Stream(), 4), loader(DATA), ckpt_path=ckpt)
        return bnn, pruning

    bnn, pruning = run()
    resumed, again = run(tmp_path / "whole" / "step=24.ckpt")
    assert_same(bnn, resumed)
    assert again.history == pruning.history
    assert pruning.sparsity == 0.5


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.:UserWarning")
def test_a_fit_that_goes_on_without_the_callback_keeps_the_masks(whole: Any) -> None:
    bnn, pruning, folder = whole
    resumed = make_bnn()
    fit(resumed, ckpt=folder / "after40.ckpt")  # nothing was to be pruned any more
    assert_same(bnn, resumed)
    # what the callback keeps is plain too, and is read without pickle
    saved = torch.load(folder / "after19.ckpt", weights_only=True)["state_dict"]
    keep, other = saved["family.keep"], make_bnn()
    assert int((~keep).sum()) == pruning.history[0].removed > 0
    fit(other, ckpt=folder / "after19.ckpt")
    assert torch.equal(other.family.keep, keep)
    assert_zero(other.posterior(), other.masks())
    assert (other.family.mean != saved["family.mean"])[keep].all()


def test_a_callback_that_is_new_in_a_resumed_fit(tmp_path: Path) -> None:
    fit(make_bnn(), Save(tmp_path, "run", 20), max_epochs=2)
    bnn, pruning = make_bnn(), often()
    fit(bnn, pruning, ckpt=tmp_path / "run20.ckpt")
    # it begins with what is overdue
    assert [one.step for one in pruning.history] == [20, 22, 27, 32, 36]
    assert removed(pruning.masks) == 84


def test_a_longer_fit_goes_on_with_the_schedule_that_has_begun(whole: Any) -> None:
    _, pruning, folder = whole
    early, late = often(), often()
    fit(make_bnn(), late, ckpt=folder / "after19.ckpt", max_epochs=5)
    assert [one.step for one in late.history] == [17, 22, 27, 32, 36]
    assert late.history[0] == pruning.history[0]
    fit(make_bnn(), early, ckpt=folder / "after5.ckpt", max_epochs=5)  # nothing has begun yet
    assert [one.step for one in early.history] == [*range(20, 46, 5)]


def test_a_test_of_an_earlier_checkpoint_forgets_nothing(whole: Any) -> None:
    _, _, folder = whole
    bnn, pruning = make_bnn(), often()
    trainer = fit(bnn, pruning)
    state = pruning.state_dict()
    trainer.test(bnn, loader(DATA), ckpt_path=folder / "after19.ckpt", verbose=False)
    assert pruning.state_dict() == state
    fresh = often()
    trainer = quiet_trainer(callbacks=[fresh])
    trainer.test(make_bnn(), loader(DATA), ckpt_path=folder / "after40.ckpt", verbose=False)
    assert fresh.sparsity == 0.75
    assert removed(fresh.masks) == 84


# -------------------------------------------------------------------- further training


def test_a_second_fit_keeps_the_masks() -> None:
    bnn, pruning = make_bnn(), often()
    trainer = fit(bnn, pruning)
    masks, history = copy_of(bnn.masks()), list(pruning.history)

    def fit_again() -> None:
        trainer.fit_loop.max_epochs = 6
        trainer.fit(bnn, loader(DATA, shuffle=True, batch_size=4))
        assert trainer.global_step == 72

    for train in (
        fit_again,  # the same trainer, then fresh ones without the callback
        lambda: fit(bnn, max_epochs=1),
        lambda: fit(bnn, WeightAveraging(use_buffers=False), max_epochs=1),
    ):
        before = bnn.family.mean.detach().clone()
        train()
        assert_same_masks(bnn.masks(), masks)
        assert_zero(bnn.posterior(), masks)
        moved = bnn.family.mean.detach() != before
        keep = bnn.family.keep
        assert keep is not None
        assert moved[keep].all()
        assert not moved[~keep].any()
    assert pruning.history == history


def test_a_fresh_trainer_starts_anew_with_what_is_left() -> None:
    bnn, first = make_bnn(), often()
    fit(bnn, first)
    for fraction, pruning in ((0.75, first), (0.9, often(0.9))):
        masks = copy_of(bnn.masks())
        fit(bnn, pruning)
        assert [one.step for one in pruning.history] == [17, 22, 27, 32, 36]
        assert removed(pruning.masks) == pruning.history[-1].removed == round(fraction * WEIGHTS)
        for name, keep in bnn.masks().items():
            assert not keep[~masks[name]].any()
        assert (pruning.history[-1].threshold is None) == (fraction == 0.75)
        assert pruning.history[0].threshold is None  # fewer than are gone already
        assert_zero(bnn.posterior(), bnn.masks())


def test_another_strategy_in_the_same_trainer_is_pruned_too() -> None:
    pruning = often()
    trainer = fit(make_bnn(), pruning)
    assert pruning.sparsity == 0.75
    other = make_bnn()
    trainer.fit_loop.max_epochs = 6
    trainer.fit(other, loader(DATA, shuffle=True, batch_size=4))
    assert pruning.sparsity == sparsity(other.posterior()) == 0.75
    assert [one.step for one in pruning.history] == [48, 53, 54]


# -------------------------------------------------------------------- torch.nn.utils.prune


def test_masks_work_with_the_pruning_of_torch(whole: Any) -> None:
    bnn, pruning, _ = whole
    given = mlp(3)
    net: Any = pruning.apply(given)
    assert prune.is_pruned(net)
    assert not prune.is_pruned(given)
    kept = [given[index].weight * pruning.masks[f"{index}.weight"] for index in (0, 2)]
    hidden = torch.relu(nn.functional.linear(INPUTS, kept[0], given[0].bias))
    wanted = nn.functional.linear(hidden, kept[1], given[2].bias)
    assert torch.equal(net(INPUTS), wanted)
    for index in (0, 2):
        assert torch.equal(net[index].weight_mask, pruning.masks[f"{index}.weight"])
        prune.remove(net[index], "weight")
    assert not prune.is_pruned(net)
    assert torch.equal(net(INPUTS), wanted)
    # a network with zeros that are in place already predicts what it did
    mean = mean_network(bnn.posterior())
    assert torch.equal(pruning.apply(mean)(INPUTS), mean(INPUTS))
    with pytest.raises(ConfigurationError, match=r"masks has '0.weight' in the shape \[16, 4\]"):
        pruning.apply(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(inputs)))))


def test_tied_weights_are_pruned_together() -> None:
    bnn, pruning = make_bnn(Tied()), often()
    fit(bnn, pruning)
    assert sorted(pruning.masks) == ["first.weight", "head.weight"]
    assert removed(pruning.masks) == round(0.75 * (16 + 12))
    net: Any = pruning.apply(mean_network(bnn.posterior()))
    assert net.first.weight_orig is net.second.weight_orig
    for layer in (net.first, net.second):
        assert torch.equal(layer.weight_mask, pruning.masks["first.weight"])
    assert torch.equal(net(INPUTS), mean_network(bnn.posterior())(INPUTS))


# -------------------------------------------------------------------- channels, layers, protection


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 10, 2, padding=1, bias=False), nn.BatchNorm2d(10),
        nn.ReLU(), nn.Conv2d(10, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8),
        nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def test_whole_channels() -> None:
    bnn, pruning = make_bnn(convolutional()), often(0.5, unit="channel")
    fit(bnn, pruning)
    layers = {"1": "2", "4": None, "7": "8"}
    posterior = bnn.posterior()
    tensors = {**posterior.fixed, **posterior.mean}
    units = {name: tensors[f"{name}.weight"].flatten(1).eq(0).all(1) for name in layers}
    assert sum(int(gone.sum()) for gone in units.values()) == 12  # of 10 + 6 + 8
    for layer, norm in layers.items():
        gone = units[layer]
        assert torch.equal(tensors[f"{layer}.weight"].flatten(1).eq(0).any(1), gone)
        names = [f"{layer}.bias", f"{norm}.weight", f"{norm}.bias", f"{norm}.running_mean"]
        for name in names:
            if name in tensors:
                assert torch.equal(tensors[name] == 0, gone), name
                assert name in pruning.masks
    assert_zero(posterior, pruning.masks)
    total = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim > 1)
    lost = sum(int((pruning.masks[f"{name}.weight"] == 0).sum()) for name in layers)
    assert pruning.history[-1].removed == lost
    assert pruning.sparsity == lost / total
    # what remains is a smaller network that says the same
    small = compact(posterior)
    assert small.net[7].out_features == int((~units["7"]).sum())
    outputs = [mean_network(one).eval()(INPUTS) for one in (small, posterior)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    # buffers are masked on another network too
    given = convolutional()
    given.get_buffer("2.running_mean").fill_(1.0)
    assert torch.equal(pruning.apply(given)[2].running_mean, 1.0 - units["1"].float())
    assert given[2].running_mean.all()


def test_a_layer_that_would_vanish_is_said_once() -> None:
    """Not at each of the prunings on the way, of which there may be 50."""
    net = mlp(3)
    net[2].weight.data.mul_(1e-3)
    pruning = often(0.9)
    with pytest.warns(
        UserWarning, match=r"Removing 0.9 would have removed all of 2.weight"
    ) as said:
        fit(make_bnn(net, optimizer=partial(torch.optim.SGD, lr=1e-6)), pruning)
    assert sum("would have removed" in str(one.message) for one in said) == 1
    assert int(pruning.masks["2.weight"].sum()) == 1
    assert removed(pruning.masks) == 101


def test_protected_weights_stay() -> None:
    bnn = make_bnn()
    pruning = often(0.75, protect=["0.bias", bnn.net[2]])
    fit(bnn, pruning)
    assert list(pruning.masks) == ["0.weight"]
    assert removed(pruning.masks) == pruning.history[-1].removed == 48
    assert pruning.sparsity == pytest.approx(48 / WEIGHTS)  # of all
    with pytest.raises(ConfigurationError, match=r"Linear .* holds no parameter"):
        fit(make_bnn(), often(protect=mlp(3)[2]))  # of another network


# -------------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1.0}, r"^fraction= is the share of weights to remove, .* got 1.0"),
        ({"rest": None}, r"rest= is 'raise', 'keep' or 'weight'; got None"),
        ({"every_n_steps": 2.0}, r"every_n_steps= is a whole number, at least 1; got 2.0"),
        ({"every_n_steps": 2, "schedule": "once"}, r"leave every_n_steps=2 out"),
        ({"start": 0.9, "end": 0.5}, r"Give the larger one to end=, or use schedule='once'"),
    ],
)
def test_options_that_make_no_sense(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SNRPruning(**options)


@pytest.mark.parametrize(
    "module",
    [DeepEnsemble(mlp(3), Categorical(), members=2), fits.Plain()],
    ids=["members", "plain"],
)
def test_modules_without_variances_are_told_what_to_do(module: Any) -> None:
    name = type(module).__name__
    message = rf"deviations of a VariationalBNN; got {name}\. .*prune\(posterior, fraction"
    with pytest.raises(ConfigurationError, match=message):
        fit(module, SNRPruning(0.5))


def test_a_fit_that_cannot_work_is_refused_before_training() -> None:
    bnn = make_bnn()
    before = bnn.family.mean.detach().clone()
    with pytest.raises(ConfigurationError, match="end after 0 steps, and this fit ends after 1"):
        fit(bnn, SNRPruning(0.5), max_steps=1)
    with pytest.raises(ConfigurationError, match=r"The largest fraction is 0.982142"):
        fit(bnn, SNRPruning(0.99))
    assert torch.equal(bnn.family.mean, before)
    assert bnn.masks() == {}


def test_an_average_of_the_weights_would_bring_back_what_was_pruned() -> None:
    message = r"weights WeightAveraging averages.*Leave WeightAveraging out.*use_buffers=False"
    with pytest.raises(ConfigurationError, match=message):
        fit(make_bnn(), often(), WeightAveraging())


class Stop(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def test_a_fit_that_is_stopped_before_the_fraction_is_reached() -> None:
    words = r"after 29 steps with 0\.7\d* pruned; .* to reach 0.75 after 36 steps"
    with pytest.warns(UserWarning, match=words):
        fit(make_bnn(), often(), Stop(29))


def test_asking_before_a_fit() -> None:
    pruning = SNRPruning(0.5)
    with pytest.raises(ConfigurationError, match="has pruned nothing yet"):
        pruning.apply(mlp(3))
    assert pruning.history == []


# -------------------------------------------------------------------- files


def test_the_callback_in_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path)
    options = {"fraction": 0.9, "start": 0, "end": 0.9, "scope": "layer", "protect": ["3.*"]}
    content = yaml.safe_load(Path(config).read_text())
    made = {"class_path": "lightning_bnn.callbacks.SNRPruning", "init_args": options}
    content["trainer"]["callbacks"].append(made)
    Path(config).write_text(yaml.safe_dump(content, sort_keys=False))
    printed = []
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            main(["fit", "--config", config, "--print_config"])
        assert stopped.value.code == 0
        printed.append(capsys.readouterr().out)
        config = str(tmp_path / "printed.yaml")
        Path(config).write_text(printed[-1])
    assert printed[0] == printed[1]
    found = yaml.safe_load(printed[0])["trainer"]["callbacks"][-1]["init_args"]
    assert {name: found[name] for name in options} == options
    assert type(found["start"]) is int  # epochs, and no share
