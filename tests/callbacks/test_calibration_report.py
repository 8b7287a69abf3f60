"""The callback: which pages it writes, what it logs, and that training does not notice it."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC, DeepEnsemble, DrawsPosterior, VariationalBNN
from lightning_bnn.callbacks import CalibrationReport, SampleCollector
from lightning_bnn.errors import ConfigurationError, DataError, PosteriorFormatError
from lightning_bnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lightning_bnn.report import report
from lightning_bnn.samplers import SGLD
from tests.trainers import quiet_trainer


def data(count: int = 50, seed: int = 0, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, classes, (count,), generator=generator))


def loader(count: int = 50, seed: int = 0, **options: Any) -> DataLoader:
    return DataLoader(data(count, seed), batch_size=16, **options)


def net(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def variational(likelihood: Likelihood | None = None, outputs: int = 3) -> VariationalBNN:
    return VariationalBNN(net(outputs), likelihood or Categorical(), predict_draws=4)


def log_loss(targets: Tensor, probabilities: Tensor) -> float:
    chosen = probabilities.numpy().astype(float)[np.arange(len(targets)), targets.numpy()]
    return float(-np.log(chosen).mean())


def pages(folder: Path) -> list[str]:
    assert {p.stem for p in folder.glob("*.html")} == {p.stem for p in folder.glob("*.json")}
    return sorted(path.name for path in folder.glob("*.html"))


def fit(bnn: Any, callback: CalibrationReport, **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(**{"max_epochs": 2, "callbacks": [callback], **options})
    trainer.fit(bnn, loader(shuffle=True), loader(40, seed=1))
    return trainer


# -------------------------------------------------------------------- which pages


def test_after_fit_and_test(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path)
    bnn = variational()
    trainer = fit(bnn, callback)
    assert pages(tmp_path) == ["fit.html"]
    trainer.test(bnn, loader(30, seed=2), verbose=False)
    assert pages(tmp_path) == ["fit.html", "test.html"]
    assert callback.files == [str(tmp_path / "fit.html"), str(tmp_path / "test.html")]
    trainer.validate(bnn, loader(30, seed=2), verbose=False)
    assert pages(tmp_path) == ["fit.html", "test.html", "validation.html"]
    for name, examples, source in (("fit", 40, "validation"), ("test", 30, "test")):
        numbers = json.loads((tmp_path / f"{name}.json").read_text())
        assert numbers == callback.reports[f"{name}.html"].numbers
        assert numbers["data"]["examples"] == examples
        assert numbers["data"]["source"] == source
        assert [block["name"] for block in numbers["models"]] == ["VariationalBNN"]


@pytest.mark.parametrize(
    ("options", "made"),
    [
        # the last validation made a page at the same step: it is that of the fit as well
        ({"every_n_epochs": 2}, ["epoch-0001", "epoch-0003", "fit"]),
        ({"every_n_epochs": 3, "after_fit": False}, ["epoch-0002"]),
        ({"after_fit": False}, []),
    ],
)
def test_which_epochs_have_a_page(tmp_path: Path, options: dict[str, Any], made: list[str]) -> None:
    """The sanity check makes none."""
    callback = CalibrationReport(tmp_path / "reports", **options)
    fit(variational(), callback, max_epochs=4)
    assert [Path(file).stem for file in callback.files] == made
    assert (tmp_path / "reports").exists() == bool(made)
    if options.get("every_n_epochs") == 2:
        assert callback.reports["fit.html"] is callback.reports["epoch-0003.html"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3, "check_val_every_n_epoch": 2},
        {"max_epochs": -1, "max_steps": 6},
        {"max_epochs": 9, "callbacks": "early"},
    ],
    ids=["unvalidated", "steps", "early"],
)
def test_after_fit_is_of_the_last_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    """Whether the last validation can serve, or the data are predicted once more."""
    callback = CalibrationReport(tmp_path)
    if options.get("callbacks") == "early":
        stop = EarlyStopping("val_nll", patience=1, min_delta=1e9)
        options = {**options, "callbacks": [stop, callback]}
    bnn = variational()
    fit(bnn, callback, **options)
    inputs, targets = data(40, seed=1).tensors
    wanted = log_loss(targets, bnn.posterior().predict(inputs, draws=4).mean)
    (block,) = callback.reports["fit.html"].numbers["models"]
    assert block["scalars"]["nll"] == pytest.approx(wanted, abs=1e-5)
    assert callback.files == [str(tmp_path / "fit.html")]  # made once


def test_default_folder(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="runs")
    fit(variational(), CalibrationReport(), logger=logger, log_every_n_steps=1, max_epochs=1)
    assert pages(tmp_path / "runs" / "version_0" / "reports") == ["fit.html"]


def test_several_loaders(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path, ood={"other": loader(20, seed=3)})
    trainer = quiet_trainer(callbacks=[callback])
    (first, second) = trainer.test(
        variational(), [loader(30, seed=2), loader(20, seed=3)], verbose=False
    )
    assert pages(tmp_path) == ["test-1.html", "test-2.html"]
    assert callback.reports["test-2.html"].numbers["data"]["examples"] == 20
    # the second loader has the out-of-distribution data: nothing tells them apart
    assert second["test_auroc_other/dataloader_idx_1"] == pytest.approx(0.5)
    assert "test_auroc_other/dataloader_idx_0" in first | second


def test_trial_runs_leave_nothing(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path / "reports", every_n_epochs=1)
    fit(variational(), callback, fast_dev_run=1)
    quiet_trainer(callbacks=[callback], fast_dev_run=1).test(variational(), loader(), verbose=False)
    assert not (tmp_path / "reports").exists()


def test_too_few_examples_are_no_error(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path / "reports", bins=20)
    with pytest.warns(UserWarning, match="20 bins needs as many predictions, and 16"):
        fit(variational(), callback, limit_val_batches=1, max_epochs=1)
    assert not (tmp_path / "reports").exists()


# -------------------------------------------------------------------- the right numbers


def test_numbers_are_those_of_the_predictions(tmp_path: Path) -> None:
    """The report of arrays has tests of its own: the callback must give the same."""
    bnn = variational()
    plain = net()
    other = DrawsPosterior(net(), Categorical(), [dict(net().named_parameters()) for _ in "ab"])
    strange = torch.randn(33, 4, generator=torch.Generator().manual_seed(9)) * 3
    callback = CalibrationReport(
        tmp_path,
        ood={"far": DataLoader(TensorDataset(strange), batch_size=10)},
        compare={"plain": plain, "two": other},
        class_names=["a", "b", "c"],
        risk=0.4,
    )
    (logged,) = quiet_trainer(callbacks=[callback]).test(bnn, loader(), verbose=False)
    inputs, targets = data().tensors
    mine = bnn.posterior()

    def predicted(x: Tensor) -> dict[str, Any]:
        logits = plain(x)[None].detach()
        return {
            "VariationalBNN": mine.predict(x, draws=4),
            "plain": Categorical().predictive(logits),
            "two": other.predict(x),
        }

    wanted = report(
        predicted(inputs),
        targets,
        ood={"far": predicted(strange)},
        class_names=["a", "b", "c"],
        risk=0.4,
        title="Calibration of VariationalBNN, test",
    ).numbers
    made = callback.reports["test.html"].numbers
    assert flat(made) == pytest.approx(flat(wanted), abs=1e-5, nan_ok=True)
    block = made["models"][0]
    scores = [predicted(x)["VariationalBNN"].entropy for x in (inputs, strange)]
    auroc = roc_auc_score(np.repeat([0, 1], [50, 33]), torch.cat(scores))
    assert logged["test_auroc_far"] == pytest.approx(auroc, abs=1e-6)
    assert logged["test_aurc"] == pytest.approx(block["scalars"]["aurc"], abs=1e-6)
    assert logged["test_excess_nll"] == pytest.approx(block["scalars"]["excess_nll"], abs=1e-6)
    assert logged["test_nll"] == pytest.approx(block["scalars"]["nll"], abs=1e-5)


def flat(value: Any, name: str = "") -> dict[str, float]:
    """Every number of a document by its place, pictures and words left out."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)  # type: ignore[assignment]
    else:
        kept = isinstance(value, (int, float)) and not isinstance(value, bool)
        return {name: float(value)} if kept else {}
    found: dict[str, float] = {}
    for key, inner in items:
        found |= flat(inner, f"{name}.{key}")
    return found


def test_draws_of_the_strategy_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What validation predicts serves the report: no batch is predicted a second time."""
    calls = []
    original = VariationalBNN._predict

    def counted(self: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return original(self, inputs)

    monkeypatch.setattr(VariationalBNN, "_predict", counted)
    for callbacks in ([], [CalibrationReport(tmp_path, every_n_epochs=1)]):
        calls.clear()
        trainer = quiet_trainer(max_epochs=2, callbacks=callbacks)
        trainer.fit(variational(), loader(), loader(40, seed=1))
        assert sum(calls) == 32 + 2 * 40  # the sanity check, and two validations


def test_temperature_is_fitted_on_validation_data(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path)
    bnn = variational()
    trainer = quiet_trainer(callbacks=[callback])
    trainer.test(bnn, loader(), verbose=False)
    alone = callback.reports["test.html"].numbers["models"][0]["temperature"]
    assert alone["fitted_on"] == "cross-fit"
    trainer = fit(bnn, callback)
    trainer.test(bnn, loader(), verbose=False)
    fitted = callback.reports["test.html"].numbers["models"][0]["temperature"]
    assert fitted["fitted_on"] == "validation"


# -------------------------------------------------------------------- every strategy and task


def regression(outputs: int = 1) -> DataLoader:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs[:, :outputs].exp()), batch_size=16)


TASKS: dict[str, tuple[Any, int, Any]] = {
    "gaussian": (Gaussian(0.5), 1, regression),
    "heteroscedastic": (HeteroscedasticGaussian(), 4, partial(regression, 2)),
    "poisson": (
        Poisson(),
        1,
        lambda: DataLoader(TensorDataset(torch.randn(40, 4), torch.arange(40) % 3), 16),
    ),
    "bernoulli": (
        Bernoulli(),
        2,
        lambda: DataLoader(TensorDataset(torch.randn(40, 4), torch.arange(80).view(40, 2) % 2), 16),
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task(tmp_path: Path, task: str) -> None:
    likelihood, outputs, make = TASKS[task]
    callback = CalibrationReport(tmp_path, ood=make(), compare={"plain": net(outputs)})
    trainer = quiet_trainer(callbacks=[callback])
    (logged,) = trainer.test(variational(likelihood, outputs), make(), verbose=False)
    assert pages(tmp_path) == ["test.html"]
    numbers = callback.reports["test.html"].numbers
    assert [block["name"] for block in numbers["models"]] == ["VariationalBNN", "plain"]
    assert logged["test_auroc_ood"] == pytest.approx(0.5, abs=0.2)
    assert ("test_sharpness" in logged) == (task != "bernoulli")
    assert ("test_excess_nll" in logged) == (task == "bernoulli")


def test_chains_and_ensembles(tmp_path: Path) -> None:
    sampled = SGMCMC(net(), Categorical(), sampler=partial(SGLD, lr=0.01), chains=2)
    collector = SampleCollector(burn_in=2, every=2, dirpath=tmp_path / "draws")
    callback = CalibrationReport(tmp_path / "chains")
    quiet_trainer(max_epochs=2, callbacks=[callback, collector]).fit(
        sampled, loader(), loader(40, seed=1)
    )
    (block,) = callback.reports["fit.html"].numbers["models"]
    posterior = sampled.posterior()
    inputs, targets = data(40, seed=1).tensors
    predictive = posterior.predict(inputs, draws=sampled.draws_of(posterior))
    assert block["draws"] == predictive.draws
    wanted = log_loss(targets, predictive.mean)
    assert block["scalars"]["nll"] == pytest.approx(wanted, abs=1e-5)

    # the draws that were collected, from their folder, beside an ensemble
    ensemble = DeepEnsemble(net(), Categorical(), members=3)
    callback = CalibrationReport(tmp_path / "both", compare=[str(tmp_path / "draws")])
    quiet_trainer(max_epochs=1, callbacks=[callback]).fit(ensemble, loader(), loader(40, seed=1))
    first, second = callback.reports["fit.html"].numbers["models"]
    assert (first["name"], first["draws"], second["name"]) == ("DeepEnsemble", 3, "draws")
    whole = log_loss(targets, posterior.predict(inputs).mean)
    assert second["scalars"]["nll"] == pytest.approx(whole, abs=1e-5)


# -------------------------------------------------------------------- training does not notice


def test_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    ends = []
    for name in ("without", "with"):
        torch.manual_seed(0)
        bnn = VariationalBNN(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)), Categorical()
        )
        shared = torch.Generator().manual_seed(5)
        train = loader(shuffle=True, generator=shared)
        ood = loader(20, seed=4, shuffle=True, num_workers=1, generator=shared)
        compare = DeepEnsemble(net(), Categorical(), members=2)
        callback = CalibrationReport(
            tmp_path, ood=ood, compare={"other": compare}, every_n_epochs=1, pruning=(0, 0.5)
        )
        torch.manual_seed(1)
        trainer = quiet_trainer(max_epochs=2, callbacks=[callback] * (name == "with"))
        trainer.fit(bnn, train, loader(40, seed=1))
        ends.append([bnn.family.mean.detach().clone(), torch.rand(3), shared.get_state()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(tmp_path: Path, precision: str) -> None:
    other = DrawsPosterior(net(), Categorical(), [dict(net().named_parameters())])
    callback = CalibrationReport(tmp_path, ood=loader(20, seed=4), compare={"other": other})
    trainer = quiet_trainer(callbacks=[callback], precision=precision)
    trainer.test(variational(), loader(40, seed=1), verbose=False)
    first, second = callback.reports["test.html"].numbers["models"]
    inputs, targets = data(40, seed=1).tensors
    rounded = 2e-2 if "bf16" in precision else 1e-6
    wanted = log_loss(targets, other.predict(inputs).mean)
    assert second["scalars"]["nll"] == pytest.approx(wanted, abs=rounded)
    assert first["invalid"]["count"] == 0


# -------------------------------------------------------------------- wrong input, found early


def never_trained(callback: CalibrationReport, bnn: Any = None, **options: Any) -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback], **options)
    bnn = bnn or variational()
    try:
        trainer.fit(bnn, loader(), loader(40, seed=1))
    finally:
        assert trainer.global_step == 0


def test_wrong_shape_of_out_of_distribution_data(tmp_path: Path) -> None:
    """Seen in the first batch, be it that of the sanity check, of the training or of a test."""
    wrong = DataLoader(TensorDataset(torch.zeros(20, 7)), batch_size=5)
    callback = CalibrationReport(tmp_path, ood={"letters": wrong})
    for sanity in (0, 2):
        with pytest.raises(DataError, match=r"ood\['letters'\].*\(5, 7\).*\(4,\)"):
            never_trained(callback, num_sanity_val_steps=sanity)
    with pytest.raises(DataError, match="letters"):
        quiet_trainer(callbacks=[callback]).test(variational(), loader(), verbose=False)


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="every_n_epochs"):
        CalibrationReport(every_n_epochs=0)
    with pytest.raises(ConfigurationError, match="risk"):
        CalibrationReport(risk=1.5)
    with pytest.raises(ConfigurationError, match="without a name"):
        CalibrationReport(compare=[net()])
    with pytest.raises(ConfigurationError, match="'VariationalBNN'"):
        never_trained(CalibrationReport(tmp_path, compare={"VariationalBNN": net()}))
    with pytest.raises(PosteriorFormatError, match="nowhere"):
        never_trained(CalibrationReport(tmp_path, compare=[tmp_path / "nowhere"]))
    with pytest.raises(ConfigurationError, match=r"names 2 classes .* of 3 classes"):
        never_trained(CalibrationReport(tmp_path, class_names=["a", "b"]))


class _Plain(pl.LightningModule):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        return None


def test_a_module_that_is_no_strategy(tmp_path: Path) -> None:
    trainer = quiet_trainer(callbacks=[CalibrationReport(tmp_path)])
    with pytest.raises(ConfigurationError, match=r"needs a strategy.*_Plain"):
        trainer.test(_Plain(), loader(), verbose=False)


def test_a_fit_without_validation_data(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(max_epochs=1, callbacks=[CalibrationReport(tmp_path / "x")]).fit(
            variational(), loader()
        )
    assert not (tmp_path / "x").exists()
