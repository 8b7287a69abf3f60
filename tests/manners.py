"""What a Lightning user does with every strategy: ten programs, for either Lightning package.

``python -m tests.manners lightning.pytorch FOLDER`` runs all of them and prints the name of each
that ended well.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PACKAGE = sys.argv[1] if __name__ == "__main__" else "pytorch_lightning"
pl = import_module(PACKAGE)  # before lightning_bnn, as `import lightning as L` is

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.optim.lr_scheduler import ReduceLROnPlateau  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from lightning_bnn import SGMCMC, DeepEnsemble, VariationalBNN  # noqa: E402
from lightning_bnn.callbacks import SampleCollector  # noqa: E402
from lightning_bnn.errors import ConfigurationError  # noqa: E402
from lightning_bnn.likelihoods import Categorical  # noqa: E402
from lightning_bnn.samplers import SGLD  # noqa: E402

STRATEGIES: list[Callable[..., Any]] = [
    VariationalBNN,
    partial(SGMCMC, chains=2, sampler=partial(SGLD, lr=1e-4), seed=0),
    partial(DeepEnsemble, members=2, seed=0),
]
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(48, 4, generator=GENERATOR)
TARGETS = (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long()
ROWS = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=16)


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 1}
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), **{**quiet, **options})


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def options_are_in_hparams_and_in_the_logger(folder: Path) -> None:
    for make in STRATEGIES:
        bnn = make(net(), Categorical())
        logger = import_module(f"{PACKAGE}.loggers").CSVLogger(folder)
        trainer(logger=logger).fit(bnn, ROWS)
        for shown in (bnn.hparams, logger.experiment.hparams):
            assert shown["net"] == "Sequential, 43 weights"
            assert shown["likelihood"] == "Categorical()"
            assert shown["prior"] == "Normal()"


def a_checkpoint_loads_without_arguments(folder: Path) -> None:
    for make in STRATEGIES:
        bnn, fitted = make(net(), Categorical()), trainer()
        fitted.fit(bnn, ROWS)
        fitted.save_checkpoint(folder / "end.ckpt")
        loaded = type(bnn).load_from_checkpoint(folder / "end.ckpt")
        saved = bnn.state_dict()
        for name, value in loaded.state_dict().items():
            assert not isinstance(value, Tensor) or torch.equal(value, saved[name])


def a_learning_rate_is_found_and_used(folder: Path) -> None:
    tuner = import_module(f"{PACKAGE}.tuner").Tuner
    for make in STRATEGIES:
        bnn, fitted = make(net(), Categorical()), trainer(default_root_dir=folder, max_epochs=9)
        found = tuner(fitted).lr_find(bnn, ROWS, num_training=30, min_lr=1e-6, max_lr=1e-2)
        assert bnn.lr == found.suggestion()
        fitted.fit(bnn, ROWS)
        rates = {g["lr"] for one in fitted.optimizers for g in one.param_groups}
        assert (rates if bnn.peak_lr is None else {bnn.peak_lr}) == {bnn.lr}


def a_scheduler_waits_for_a_metric(folder: Path) -> None:
    waits = partial(ReduceLROnPlateau, mode="max", patience=0, factor=0.5)
    for make in STRATEGIES:
        fitted = trainer(max_epochs=4)
        fitted.fit(make(net(), Categorical(), scheduler=waits, monitor="val_nll"), ROWS, ROWS)
        assert max(g["lr"] for one in fitted.optimizers for g in one.param_groups) < 1e-3


def batches_are_mappings(folder: Path) -> None:
    rows = [{"input": x, "label": y} for x, y in zip(INPUTS, TARGETS, strict=True)]
    loader = DataLoader(rows, batch_size=16)  # type: ignore[arg-type]
    for make in STRATEGIES:
        bnn, fitted = make(net(), Categorical(), split="label"), trainer()
        fitted.fit(bnn, loader, loader)
        assert "val_nll" in fitted.callback_metrics
        assert sum(map(len, fitted.predict(bnn, loader))) == 48


class Model(nn.Module):
    """As models of transformers are: keyword arguments, and an object with several tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(4, 3), name

    def forward(self, input: Tensor) -> Any:
        return SimpleNamespace(**{self.name: self.linear(input), "hidden": input})


def networks_return_objects(folder: Path) -> None:
    ways = (("logits", None), ("scores", "scores"), ("scores", lambda o: o.scores))
    for make, (name, output) in zip(STRATEGIES, ways, strict=True):
        bnn, fitted = make(Model(name), Categorical(), output=output), trainer()
        fitted.fit(bnn, ROWS, ROWS)
        assert sum(map(len, fitted.predict(bnn, ROWS))) == 48


def classes_are_ignored_and_weighted(folder: Path) -> None:
    targets = torch.where(torch.arange(48) % 4 == 0, -100, TARGETS)
    rows = DataLoader(TensorDataset(INPUTS, targets), batch_size=16)
    weights = torch.tensor([1.0, 2.0, 4.0])
    for make in STRATEGIES:
        bnn = make(net(), Categorical(ignore_index=-100, class_weights=weights))
        fitted = trainer()
        fitted.fit(bnn, rows, rows)
        assert torch.isfinite(fitted.callback_metrics["val_nll"])


def logs_can_be_read_and_the_bar_tells_the_phase(folder: Path) -> None:
    bars = import_module(f"{PACKAGE}.callbacks")
    kinds = (bars.TQDMProgressBar, bars.RichProgressBar, bars.TQDMProgressBar)
    for make, bar in zip(STRATEGIES, kinds, strict=True):
        shown: list[dict[str, Any]] = []

        class Note(pl.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
                shown.append(trainer.progress_bar_callback.get_metrics(trainer, module))  # noqa: B023

        collector, bnn = SampleCollector(burn_in=2), make(net(), Categorical())
        fitted = trainer(collector, bar(), Note(), enable_progress_bar=True)
        fitted.fit(bnn, ROWS, ROWS)
        logged = fitted.callback_metrics
        assert logged["train_loss"] >= logged["train_nll"] > 0
        assert [texts.get("phase") for texts in shown] == ["burn-in 1/2", None, None]
        assert [texts["draws"] for texts in shown] == ["0", "0", str(len(bnn.ids))]


def the_summary_counts_what_is_inferred(folder: Path) -> None:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(f"{PACKAGE}.utilities.rank_zero")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        for make in STRATEGIES:
            frozen = net()
            frozen[0].requires_grad_(False)
            start = {"start": "around"} if getattr(make, "func", None) is DeepEnsemble else {}
            trainer(enable_model_summary=True).fit(make(frozen, Categorical(), **start), ROWS)
            expected = "infers 18 of the 43 parameters of Sequential; 0 are point estimates and 25"
            assert any(expected in text for text in said), said
            said.clear()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def averages_are_refused(folder: Path) -> None:
    callbacks = import_module(f"{PACKAGE}.callbacks")
    _, chains, ensemble = STRATEGIES
    averages = (callbacks.WeightAveraging, partial(callbacks.StochasticWeightAveraging, 0.1))
    wrong = [(chains, average) for average in averages] + [(ensemble, callbacks.WeightAveraging)]
    for make, average in wrong:
        with pytest.raises(ConfigurationError, match="averages"):
            trainer(average()).fit(make(net(), Categorical()), ROWS)


PROGRAMS = [
    options_are_in_hparams_and_in_the_logger,
    a_checkpoint_loads_without_arguments,
    a_learning_rate_is_found_and_used,
    a_scheduler_waits_for_a_metric,
    batches_are_mappings,
    networks_return_objects,
    classes_are_ignored_and_weighted,
    logs_can_be_read_and_the_bar_tells_the_phase,
    the_summary_counts_what_is_inferred,
    averages_are_refused,
]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for program in PROGRAMS:
        place = Path(sys.argv[2]) / program.__name__
        place.mkdir()
        torch.manual_seed(0)
        try:
            program(place)
            print(f"ended well: {program.__name__}", flush=True)
        except Exception as problem:
            print(f"{program.__name__}: {problem!r}", flush=True)
