"""The best weights of each member by its own validation NLL."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import DeepEnsemble
from lightning_bnn.bank import Bank
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.strategies.best_weights import BestWeights
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


def noise(seed: int) -> TensorDataset:
    """Targets that do not depend on the inputs: a network can only overfit them."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(24, size, generator=generator) for size in (4, 1))
    return TensorDataset(inputs, targets)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def make(**options: Any) -> DeepEnsemble:
    defaults: dict[str, Any] = {"members": 3, "seed": 7, "mode": "stacked"}
    optimizer = partial(Adam, lr=0.05)
    options = {**defaults, "optimizer": optimizer, **options}
    return DeepEnsemble(net, Gaussian(0.7, learn=True), **options)


def fit(ensemble: DeepEnsemble, epochs: int = 8, path: Any = None, **options: Any) -> pl.Trainer:
    validation = options.pop("validation", [DataLoader(noise(2), batch_size=10)])
    trainer = quiet_trainer(max_epochs=epochs, **options)
    torch.manual_seed(0 if path is None else 5)
    trainer.fit(
        ensemble, DataLoader(noise(1), batch_size=8, shuffle=True), validation, ckpt_path=path
    )
    return trainer


def state(ensemble: DeepEnsemble) -> dict[str, Tensor]:
    learned = ensemble.bank.learned
    assert learned is not None
    tensors = {**ensemble.current_draws(), "learned": learned.detach()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal(
    first: dict[str, Tensor], second: dict[str, Tensor], row: int = 0, other: int = 0
) -> bool:
    return all(torch.equal(tensor[row], second[name][other]) for name, tensor in first.items())


class Record(pl.Callback):
    """After each validation, the members' states, and their NLL computed one by one."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.nll: list[list[float]] = []

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            inputs, targets = noise(2).tensors
            self.states.append(state(module))
            members = module.member_posteriors().values()
            self.nll.append(
                [-float(m.predict(inputs).log_prob(targets).double().mean()) for m in members]
            )


def test_each_member_goes_back_to_the_weights_of_its_own_best_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bit-equal, buffers and what the likelihood learned included; others keep their last."""
    caplog.set_level(logging.INFO)
    ensemble, record = make(), Record()
    fit(ensemble, callbacks=[record])
    nll = torch.tensor(record.nll, dtype=torch.float64)
    assert ensemble.best is not None
    torch.testing.assert_close(ensemble.best.nll, nll.min(0).values, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(ensemble.best.last_nll, nll[-1], rtol=1e-5, atol=0.0)
    epochs = nll.argmin(0).tolist()
    assert ensemble.best.epoch.tolist() == epochs
    assert len(set(epochs)) > 1, "the members should have different best epochs"
    assert min(epochs) < 7, "one should overfit"
    for row, epoch in enumerate(epochs):
        assert equal(state(ensemble), record.states[epoch], row, row)
    (line,) = (r.getMessage() for r in caplog.records if "Restored the best" in r.getMessage())
    for row, epoch in enumerate(epochs):
        assert (f"{row} (epoch {epoch}," in line) == (epoch < 7)


@pytest.mark.parametrize(
    "options",
    [
        {"restore_best": False},
        {"validation": None},
        {"callbacks": [StochasticWeightAveraging(1e-3, 0.5)], "mode": "loop"},
        {"callbacks": [EMAWeightAveraging(use_buffers=False)]},
        {"snapshots": 2, "optimizer": None, "restore_best": True},
    ],
    ids=["off", "no data", "swa", "ema", "snapshots"],
)
def test_nothing_is_restored(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer = {k: options[k] for k in ("callbacks", "validation") if k in options}
    fit(make(**{k: v for k, v in options.items() if k not in trainer}), **trainer)
    assert "Restored" not in caplog.text


def test_member_alone_keeps_what_it_keeps_beside_others() -> None:
    together = make(mode="loop")
    fit(together)
    assert together.best is not None
    for number in (0, 2):
        alone = make(members=[number], mode="loop")
        fit(alone)
        assert alone.best is not None
        assert alone.best.epoch[0] == together.best.epoch[number]
        for name, tensor in state(alone).items():
            torch.testing.assert_close(tensor[0], state(together)[name][number])


def test_resumed_fit_restores_the_same_weights(tmp_path: Path) -> None:
    """From the middle, from the end, and from there to a longer fit.

    The kept weights of an early epoch come from the checkpoint, and a longer fit resumes from the
    last weights, not from the restored ones.
    """
    fit_and_save = partial(fit, enable_checkpointing=True)
    saver = partial(ModelCheckpoint, filename="{epoch}", save_top_k=-1)
    first = make()
    fit_and_save(first, callbacks=[saver(tmp_path)])
    last = torch.load(tmp_path / "epoch=7.ckpt", weights_only=True)
    assert torch.equal(last["state_dict"]["bank.weights"], first.weights)
    for epoch in (2, 6, 7):
        resumed = make()
        path = tmp_path / f"epoch={epoch}.ckpt"
        fit_and_save(resumed, path=path, callbacks=[saver(tmp_path / str(epoch))])
        assert all(equal(state(first), state(resumed), row, row) for row in range(3))
    long, longer = make(), make()
    fit(long, epochs=11)
    path = tmp_path / "epoch=7.ckpt"
    fit_and_save(longer, epochs=11, path=path, callbacks=[saver(tmp_path / "longer")])
    assert long.best is not None
    assert longer.best is not None
    assert torch.equal(long.best.nll, longer.best.nll)
    assert torch.equal(long.best.last_nll, longer.best.last_nll)
    assert all(equal(state(long), state(longer), row, row) for row in range(3))


def test_stop_that_must_wait_does_not_change_the_fit() -> None:
    """EarlyStopping before min_epochs; and an early stop restores, too."""
    plain, waiting, stopped = make(), make(), make()
    stop = partial(EarlyStopping, "val_nll", patience=0, min_delta=100.0)
    fit(plain)
    trainer = fit(waiting, min_epochs=8, callbacks=[stop()])
    assert trainer.current_epoch == 8
    assert all(equal(state(plain), state(waiting), row, row) for row in range(3))
    record = Record()
    trainer = fit(stopped, epochs=50, min_epochs=6, callbacks=[record, stop()])
    assert trainer.current_epoch == 6
    assert stopped.best is not None
    for row, epoch in enumerate(stopped.best.epoch.tolist()):
        assert equal(state(stopped), record.states[epoch], row, row)


def test_only_the_first_validation_data_count() -> None:
    one, two = make(), make()
    fit(one)
    fit(two, validation=[DataLoader(noise(seed), batch_size=10) for seed in (2, 3)])
    assert one.best is not None
    assert two.best is not None
    torch.testing.assert_close(one.best.nll, two.best.nll)


def test_second_fit_begins_anew_from_the_restored_weights() -> None:
    ensemble = make()
    fit(ensemble)
    before = state(ensemble)
    trainer = fit(ensemble, epochs=1)
    trainer.validate(ensemble, DataLoader(noise(2)), verbose=False)
    assert ensemble.best is not None
    assert ensemble.best.epoch.tolist() == [0, 0, 0]
    assert not equal(before, state(ensemble))


def test_dropped_member_is_neither_scored_nor_restored() -> None:
    class Break(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
            if trainer.current_epoch == 4:
                module.weights.data[1] = float("nan")

    ensemble, record = make(members=2), Record()
    with pytest.warns(match="member 1 is not finite"):
        fit(ensemble, callbacks=[Break(), record])
    assert ensemble.best is not None
    assert ensemble.best.last_nll.isnan().tolist() == [False, True]
    assert ensemble.best.exchanged.tolist()[1] is False
    assert list(ensemble.member_posteriors()) == [0]


def bank(rows: int = 2) -> Bank:
    tensors = {"weight": torch.zeros(rows, 1, 1), "bias": torch.zeros(rows, 1)}
    return Bank(nn.Linear(1, 1), tensors, ids=range(rows), names=["weight", "bias"])


def score(best: BestWeights, sets: Bank, step: int, *log_prob: float) -> None:
    best.begin_round(range(len(sets)))
    best.add(torch.tensor(log_prob)[:, None])
    best.end_round(sets, step, epoch=step)


def test_rounds_that_are_not_finite_or_repeated() -> None:
    best, sets = BestWeights(2), bank()
    score(best, sets, 0, float("nan"), -1.0)
    assert best.epoch.tolist() == [-1, 0]
    best.exchange(sets, torch.tensor([True, False]))  # never scored: there is nothing to restore
    assert not best.exchanged.any()
    score(best, sets, 1, -3.0, float("-inf"))
    score(best, sets, 1, -2.0, 0.0)  # validated again after a resume
    assert best.nll.tolist() == [3.0, 1.0]
    assert best.rounds_since_best.tolist() == [0, 1]
    best.begin_round(None)
    best.end_round(sets, 2, epoch=2)
    best.begin_round([0, 1])
    best.end_round(sets, 2, epoch=2)  # no batch at all
    assert best.rounds_since_best.tolist() == [0, 1]


def test_processes_are_summed() -> None:
    """Two processes with 1 and 2 examples: the mean over the 3."""
    sums = []
    for log_prob in ([[-1.0], [-2.0]], [[-4.0, -4.0], [-2.0, -2.0]]):
        best = BestWeights(2)
        best.begin_round([0, 1])
        best.add(torch.tensor(log_prob))
        sums.append(best._sums)
    best.end_round(bank(), 0, epoch=0, reduce=lambda own: sums[0] + own)
    assert best.nll.tolist() == [3.0, 2.0]
