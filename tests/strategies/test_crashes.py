"""Fits that crash and resume again and again end with the bits of the undisturbed fit."""

from __future__ import annotations

import random
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_bnn import SGMCMC, DeepEnsemble, VariationalBNN
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import HMC, SGHMC
from tests.nets import EXAMPLES, make_data
from tests.trainers import quiet_trainer

DATA = make_data("mlp", "classification")


def network(norm: bool = True) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.BatchNorm1d(6), nn.Dropout(0.1)] if norm else [nn.LayerNorm(6)]
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.ReLU(), nn.Linear(6, 3))


STRATEGIES: dict[str, Any] = {
    "variational": lambda: VariationalBNN(
        network(), Categorical(), Normal(0.0, 1.0), num_data=EXAMPLES
    ),
    "flipout": lambda: VariationalBNN(
        network(), Categorical(), num_data=EXAMPLES, estimator="flipout"
    ),
    "chains": lambda: SGMCMC(
        network(), Categorical(), sampler=partial(SGHMC, lr=1e-3), chains=2, warm_up=5, seed=3,
        mode="stacked", num_data=EXAMPLES,
    ),
    "HMC": lambda: SGMCMC(
        network(norm=False), Categorical(), sampler=partial(HMC, lr=1e-3, leapfrog_steps=3),
        chains=2, seed=3, mode="stacked",
    ),
    "ensemble": lambda: DeepEnsemble(
        network, Categorical(), members=3, seed=3, mode="stacked", chunk=2, bootstrap=True,
        independent_batches=True,
    ),
    "snapshots": lambda: DeepEnsemble(
        network, Categorical(), num_data=EXAMPLES, members=2, seed=3, mode="stacked", snapshots=2
    ),
}  # fmt: skip


class Crash(Exception):
    """The process has died."""


class CrashAfter(Callback):
    """Dies after so many batches of this process."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_train_batch_start(self, *_: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash


class Stream(IterableDataset):
    """Examples one after another, with or without a length."""

    def __init__(self, known: bool) -> None:
        if known:
            self.__class__ = SizedStream

    def __iter__(self) -> Any:
        return iter(DATA)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(DATA)


def draw_case(chance: random.Random) -> dict[str, Any]:
    """A fit, its checkpoints, and where it crashes."""
    strategy = chance.choice(list(STRATEGIES))
    indexed = strategy == "ensemble"
    full = strategy == "HMC"
    kinds = ["table", "sized"] if strategy == "snapshots" else ["table", "sized", "stream"]
    accumulate = 1 if full else chance.choice([1, 1, 2, 3])
    rule = chance.choice(
        [
            {"every_n_train_steps": chance.randint(1, 5)},
            {"every_n_train_steps": 6 // accumulate},  # with the last batch of an epoch
            {"every_n_epochs": 1},
            {"every_n_epochs": 1, "save_on_train_epoch_end": True},
            {"every_n_train_steps": 2, "save_last": True},
            {"train_time_interval": timedelta(seconds=0)},
        ]
    )
    whole = accumulate in (1, 3)  # validations do not fall between accumulated gradients
    return {
        "strategy": strategy,
        "data": "table" if indexed or full else chance.choice(kinds),
        "batch_size": EXAMPLES if full else 8,
        "workers": 0 if full else chance.choice([0, 0, 0, 1]),
        "accumulate": accumulate,
        "length": chance.choice([{"max_epochs": 5}, {"max_steps": 13, "max_epochs": -1}]),
        "validation": chance.choice([None, {}, {"val_check_interval": 3 if whole else 2}]),
        "rule": rule,
        "crashes": [chance.randint(1, 14) for _ in range(chance.randint(1, 4))],
    }


def loader(case: dict[str, Any]) -> DataLoader:
    if case["data"] == "table":
        return DataLoader(DATA, case["batch_size"], shuffle=True, num_workers=case["workers"])
    return DataLoader(Stream(case["data"] == "sized"), case["batch_size"])


def run(case: dict[str, Any], folder: Path, crash: int | None, path: Path | None) -> Any:
    """One process: from its start, or from a checkpoint, to the end or to a crash."""
    seed_everything(5 if path is None else random.randrange(10**6), verbose=False)
    bnn = STRATEGIES[case["strategy"]]()
    collector = [SampleCollector(burn_in=2, every=2)] if isinstance(bnn, SGMCMC) else []
    saver = ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **case["rule"])
    crashes = [] if crash is None else [CrashAfter(crash)]
    options = dict(case["validation"] or {})
    if case["data"] == "table" and case["batch_size"] == EXAMPLES:
        options.pop("val_check_interval", None)
    trainer = quiet_trainer(
        callbacks=[*collector, saver, *crashes], accumulate_grad_batches=case["accumulate"],
        enable_checkpointing=True, **case["length"], **options,
    )  # fmt: skip
    val = None if case["validation"] is None else DataLoader(DATA, 16)
    trainer.fit(bnn, loader(case), val, ckpt_path=path)
    return trainer.global_step, result(bnn)


def result(bnn: Any) -> dict[str, Tensor]:
    """The weights at the end, and all draws."""
    found = {k: v.clone() for k, v in bnn.state_dict().items() if isinstance(v, Tensor)}
    if isinstance(bnn, SGMCMC) and bnn.collector is not None and len(bnn.collector):
        draws = bnn.posterior()
        found |= {f"draws of {k}": v for k, v in draws.sample(len(draws)).items()}
    return found


def newest(folder: Path) -> Path | None:
    files = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return files[-1] if files else None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(s, marks=pytest.mark.slow) for s in range(20, 200))]
)
def test_a_fit_that_crashes_again_and_again_is_the_undisturbed_one(
    seed: int, tmp_path: Path
) -> None:
    case = draw_case(random.Random(seed))
    steps, expected = run(case, tmp_path / "whole", None, None)
    folder = tmp_path / "crashed"
    for crash in case["crashes"]:
        try:
            found_steps, found = run(case, folder, crash, newest(folder))
            break
        except Crash:
            continue
    else:
        found_steps, found = run(case, folder, None, newest(folder))
    assert found_steps == steps, case
    assert expected.keys() == found.keys(), case
    wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert not wrong, case


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_fit_that_died_leaves_nothing_to_a_new_fit(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    rows = DataLoader(DATA, 8)
    bnn = STRATEGIES["variational"]()
    quiet_trainer(max_epochs=1, callbacks=[saver], enable_checkpointing=True).fit(bnn, rows)
    with pytest.raises(Crash):
        quiet_trainer(max_epochs=2, callbacks=[CrashAfter(1)]).fit(
            bnn, rows, ckpt_path=tmp_path / "step=2.ckpt"
        )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        new = quiet_trainer(max_epochs=1, accumulate_grad_batches=4)
        new.fit(bnn, rows)
    assert new.global_step == 2
    assert not [one for one in said if "accumulated" in str(one.message)]
