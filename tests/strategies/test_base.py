"""The Lightning work of every strategy: what a Lightning user expects, and bad input."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bnn import SGMCMC, DeepEnsemble, DrawsPosterior, VariationalBNN
from lightning_bnn.errors import ConfigurationError, DataError, NonFiniteError
from lightning_bnn.likelihoods import Categorical, Gaussian, Poisson
from lightning_bnn.metrics import MonteCarloStandardError
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import SGLD
from tests.nets import loader, make_data, mlp
from tests.trainers import quiet_trainer


def make_bnn(outputs: int = 3, likelihood: Any = None, **options: Any) -> VariationalBNN:
    torch.manual_seed(1)
    return VariationalBNN(
        mlp(outputs), likelihood or Categorical(), Normal(0.0, 1.0), seed=3, **options
    )


@pytest.fixture
def data() -> TensorDataset:
    return make_data("mlp", "classification")


# -------------------------------------------------------------------- Lightning's features


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_accumulated_batches_equal_one_large_batch(
    data: TensorDataset, dtype: torch.dtype, tolerance: float
) -> None:
    """One draw serves all batches of a step, so 2 × n is 1 × 2n exactly, but for rounding."""
    ends = []
    for batch_size, accumulate in ((8, 2), (16, 1)):
        bnn = make_bnn(optimizer=lambda parameters: SGD(parameters, lr=0.1)).to(dtype)
        converted = TensorDataset(data.tensors[0].to(dtype), data.tensors[1])
        trainer = quiet_trainer(max_epochs=3, accumulate_grad_batches=accumulate)
        trainer.fit(bnn, DataLoader(converted, batch_size=batch_size))
        ends.append(bnn)
    for name in ("mean", "rho"):
        first, second = (getattr(bnn.family, name) for bnn in ends)
        torch.testing.assert_close(first, second, rtol=0, atol=tolerance)


@pytest.mark.parametrize("how", ["norm", "value"])
def test_gradient_clipping(data: TensorDataset, how: str) -> None:
    """With SGD at lr 1 a step is the clipped gradient itself."""
    bnn = make_bnn(optimizer=lambda parameters: SGD(parameters, lr=1.0))
    before = torch.cat([bnn.family.mean, bnn.family.rho]).detach().clone()
    quiet_trainer(max_steps=1, gradient_clip_val=0.01, gradient_clip_algorithm=how).fit(
        bnn, loader(data)
    )
    step = torch.cat([bnn.family.mean, bnn.family.rho]).detach() - before
    size = step.norm() if how == "norm" else step.abs().max()
    assert size == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("estimator", ["weight", "flipout", "local"])
def test_precision_flags(data: TensorDataset, precision: Any, estimator: str) -> None:
    bnn = make_bnn(estimator=estimator, initial_scale=0.1)
    before = bnn.family.mean.detach().double().clone()
    trainer = quiet_trainer(max_epochs=2, precision=precision)
    trainer.fit(bnn, loader(data), loader(data))
    trainer.test(bnn, loader(data), verbose=False)
    assert bnn.family.mean.isfinite().all()
    assert not torch.equal(bnn.family.mean.detach().double(), before)


def test_logging_checkpoints_and_early_stopping(data: TensorDataset, tmp_path: Path) -> None:
    bnn = make_bnn()
    logger = CSVLogger(tmp_path)
    best = ModelCheckpoint(tmp_path / "checkpoints", monitor="val_nll", filename="best")
    trainer = quiet_trainer(
        max_epochs=3,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=True,
        callbacks=[best, EarlyStopping("val_nll", patience=5)],
    )
    trainer.fit(bnn, loader(data), loader(data))
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    for name in (
        "train_loss",
        "train_nll",
        "kl",
        "val_nll",
        "val_accuracy",
        "val_brier",
        "val_ece",
    ):
        assert name in text
    (by_path,) = trainer.test(bnn, loader(data), ckpt_path="best", verbose=False)
    assert by_path["test_nll"] == pytest.approx(float(best.best_model_score), abs=1e-4)
    loaded = VariationalBNN.load_from_checkpoint(
        best.best_model_path, net=mlp(3), likelihood=Categorical(), prior=Normal(0.0, 1.0)
    )
    assert torch.equal(loaded.family.mean, torch.load(best.best_model_path, weights_only=True)[
        "state_dict"]["family.mean"])  # fmt: skip


def test_several_validation_loaders_are_kept_apart(data: TensorDataset) -> None:
    bnn = make_bnn()
    other = TensorDataset(5 + data.tensors[0], (data.tensors[1] + 1) % 3)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, loader(data), [loader(data), loader(other)])
    both = dict(trainer.callback_metrics)
    for index, each in enumerate((data, other)):
        (alone,) = trainer.validate(bnn, loader(each), verbose=False)
        name = f"val_nll/dataloader_idx_{index}"
        assert both[name] == pytest.approx(alone["val_nll"], abs=1e-5)


@pytest.mark.parametrize("draws", [None, 5, 1])
def test_the_monte_carlo_error_of_the_nll_is_logged(data: TensorDataset, draws: int | None) -> None:
    bnn = make_bnn(predict_draws=draws, initial_scale=0.3)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, loader(data), loader(data))
    assert "val_nll" in trainer.progress_bar_metrics
    assert "val_nll_mcse" not in trainer.progress_bar_metrics
    assert ("val_nll_mcse" in trainer.callback_metrics) is (draws != 1)
    alone = trainer.test(bnn, loader(data), verbose=False)[0]
    if draws == 1:
        assert "test_nll_mcse" not in alone
        return
    predictive = bnn.posterior().predict(data.tensors[0], draws=draws or 32)
    (metric := MonteCarloStandardError()).update(predictive, data.tensors[1])
    assert alone["test_nll_mcse"] == pytest.approx(metric.compute().item(), rel=1e-4)


def test_as_many_draws_as_suit_the_posterior() -> None:
    bnn, fixed = make_bnn(), mlp(3)
    few, many = (
        DrawsPosterior(fixed, Categorical(), [dict(fixed.named_parameters())] * count)
        for count in (40, 300)
    )
    assert [bnn.draws_of(one) for one in (bnn.posterior(), few, many)] == [32, 40, 128]
    assert make_bnn(predict_draws=7).draws_of(few) == 7


def test_members_have_no_monte_carlo_error(data: TensorDataset) -> None:
    """They are all that the posterior is; draws of a chain are a sample."""
    ensemble = DeepEnsemble(mlp(3), Categorical(), members=3, num_data=48)
    chains = SGMCMC(mlp(3), Categorical(), sampler=partial(SGLD, lr=1e-4), chains=3, num_data=48)
    trainer = quiet_trainer()
    for bnn, logged in ((ensemble, False), (chains, True)):
        alone = trainer.validate(bnn, loader(data), verbose=False)[0]
        assert ("val_nll_mcse" in alone) is logged


def test_metrics_start_afresh_in_each_epoch(data: TensorDataset) -> None:
    bnn = make_bnn()
    trainer = quiet_trainer(max_epochs=3)
    trainer.fit(bnn, loader(data), loader(data))
    last = float(trainer.callback_metrics["val_nll"])
    (alone,) = trainer.validate(bnn, loader(data), verbose=False)
    assert last == pytest.approx(alone["val_nll"], abs=1e-6)


def test_predict_takes_inputs_alone_or_with_targets(data: TensorDataset) -> None:
    bnn = make_bnn()
    trainer = quiet_trainer()
    pairs = trainer.predict(bnn, loader(data))
    alone = trainer.predict(bnn, DataLoader(data.tensors[0], batch_size=16))
    single = trainer.predict(bnn, loader(TensorDataset(data.tensors[0])))
    for other in (alone, single):
        torch.testing.assert_close(
            Predictive.concatenate(pairs).mean, Predictive.concatenate(other).mean
        )


def test_inputs_may_be_several_tensors_or_keywords() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.head(left + right)

    rows = torch.randn(12, 4)
    targets = torch.randint(0, 3, (12,))
    pairs = [((rows[i], rows[i]), targets[i]) for i in range(12)]
    named = [({"left": rows[i], "right": rows[i]}, targets[i]) for i in range(12)]
    ends = []
    for examples in (pairs, named):
        torch.manual_seed(0)
        bnn = VariationalBNN(Sum(), Categorical(), Normal(), seed=1)
        trainer = quiet_trainer(max_epochs=1)
        batches = DataLoader(examples, batch_size=6)
        trainer.fit(bnn, batches, batches)
        ends.append(bnn.family.mean)
    assert torch.equal(*ends)


class _Named(VariationalBNN):
    def split(self, batch: Any) -> tuple[Any, Any]:
        return batch["x"], batch["y"]


def test_inputs_of_batches_with_a_split_of_ones_own() -> None:
    bnn = _Named(mlp(3), Categorical())
    x = torch.zeros(2, 4)
    assert bnn.inputs({"x": x, "y": torch.zeros(2)}) is x
    assert bnn.inputs(x) is x
    alone = {"x": x}
    assert bnn.inputs(alone) is alone  # keywords of the network


def test_learning_rate_scheduler_each_step(data: TensorDataset) -> None:
    bnn = make_bnn(
        optimizer=lambda parameters: SGD(parameters, lr=1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        scheduler_interval="step",
    )
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, loader(data))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5**3)


def test_n_follows_data_that_are_loaded_anew() -> None:
    seen = []

    class Growing(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            size = 16 + 8 * self.trainer.current_epoch
            whole = make_data("mlp", "classification")
            return loader(TensorDataset(*(part[:size] for part in whole.tensors)), batch_size=8)

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *rest: Any) -> None:
            seen.append(module.target.num_data)

    trainer = quiet_trainer(
        max_epochs=3, reload_dataloaders_every_n_epochs=1, callbacks=[Watch()], limit_val_batches=0
    )
    trainer.fit(make_bnn(), Growing())
    assert seen == [16] * 2 + [24] * 3 + [32] * 4


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_weight_decay_is_refused(data: TensorDataset, kind: str) -> None:
    bnn = make_bnn(
        optimizer=lambda parameters: getattr(torch.optim, kind)(parameters, weight_decay=0.01)
    )
    with pytest.raises(ConfigurationError, match=f"{kind} decays weights by 0.01.*prior="):
        quiet_trainer(max_epochs=1).fit(bnn, loader(data))


@pytest.mark.parametrize("how", ["batches", "sampler"])
def test_n_that_cannot_be_told(data: TensorDataset, how: str) -> None:
    if how == "batches":
        loading = DataLoader([data[0:8], data[8:16]], batch_size=None)
    else:
        loading = DataLoader(data, batch_size=4, sampler=list(range(10)))
    with pytest.raises(ConfigurationError, match=r"whole batches, or by a sampler.*Pass num_data="):
        quiet_trainer(max_epochs=1).fit(make_bnn(), loading)
    bnn = make_bnn(num_data=10)
    quiet_trainer(max_epochs=1).fit(bnn, loading)
    assert bnn.target.num_data == 10


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(make_data("mlp", "classification"))


def test_data_without_a_length_need_num_data() -> None:
    bnn = make_bnn()
    with pytest.raises(ConfigurationError, match=r"\(Stream\) have no length. Pass num_data="):
        quiet_trainer(max_epochs=1).fit(bnn, DataLoader(Stream(), batch_size=8))
    bnn = make_bnn(num_data=48)
    quiet_trainer(max_epochs=1).fit(bnn, DataLoader(Stream(), batch_size=8))
    assert bnn.target.num_data == 48


@pytest.mark.parametrize("where", ["inputs", "targets", "step"])
def test_a_loss_that_is_not_finite_stops_the_fit_at_that_step(where: str) -> None:
    rows, values = torch.randn(40, 4), torch.randn(40, 1)
    if where == "inputs":
        rows[21] = torch.nan
    if where == "targets":
        values[21] = torch.inf
    bnn = make_bnn(1, Gaussian(1.0))
    trainer = quiet_trainer(max_epochs=1)
    snapshots = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            snapshots.append(module.family.mean.detach().clone())
            if where == "step" and len(snapshots) == 2:
                module.family.mean.data[0] = torch.nan

    trainer.callbacks.append(Watch())
    if where == "targets":  # named by the likelihood before there is a loss
        with pytest.raises(DataError, match="finite targets; 1 of 10 are not"):
            trainer.fit(bnn, DataLoader(TensorDataset(rows, values), batch_size=10))
        return
    reason = "inputs hold NaN" if where == "inputs" else "because weights are not finite"
    with pytest.raises(
        NonFiniteError, match=rf"not finite at step 2 \(epoch 0, batch 2\).*{reason}"
    ):
        trainer.fit(bnn, DataLoader(TensorDataset(rows, values), batch_size=10))
    if where == "inputs":
        assert torch.equal(bnn.family.mean, snapshots[-1]), "the last good weights are kept"


@pytest.mark.parametrize(
    ("outputs", "likelihood", "targets", "message"),
    [
        (3, Categorical(), torch.tensor([0, 1, 3, 0]), "3"),
        (3, Categorical(), torch.rand(4), "integer"),
        (3, Categorical(), torch.zeros(4, 2, dtype=torch.long), "shape"),
        (2, Gaussian(), torch.rand(4, 3), "shape"),
        (4, Gaussian(), torch.rand(4), "shape"),
        (1, Poisson(), torch.tensor([1.0, 2.0, -1.0, 0.0]), "-1"),
    ],
)
def test_targets_or_outputs_that_do_not_fit(
    outputs: int, likelihood: Any, targets: Tensor, message: str
) -> None:
    data = TensorDataset(torch.randn(4, 4), targets)
    with pytest.raises(DataError, match=message):
        quiet_trainer(max_epochs=1).fit(make_bnn(outputs, likelihood), loader(data))
    with pytest.raises(DataError, match=message):
        quiet_trainer().test(make_bnn(outputs, likelihood), loader(data), verbose=False)


def test_a_batch_of_another_form(data: TensorDataset) -> None:
    triple = TensorDataset(*data.tensors, data.tensors[1])
    with pytest.raises(DataError, match=r"pair \(inputs, targets\); got list of length 3"):
        quiet_trainer(max_epochs=1).fit(make_bnn(), loader(triple))


def test_a_network_that_returns_a_tuple() -> None:
    bnn = VariationalBNN(nn.LSTM(4, 3), Categorical(), Normal(), num_data=10)
    with pytest.raises(ConfigurationError, match="LSTM returned tuple"):
        bnn.loss((torch.randn(2, 5, 4), torch.tensor([0, 1])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"net": "resnet18"}, "net= is a torch.nn.Module; got str"),
        ({"likelihood": "categorical"}, "likelihood= is an object"),
        ({"num_data": 0}, "num_data= is a whole number, at least 1; got 0"),
        ({"temperature": -1.0}, "temperature= is a number of at least 0; got -1.0"),
        ({"estimator": "flip"}, "estimator= is 'weight', 'flipout' or 'local'; got 'flip'"),
        ({"draws": 0}, "draws= is a whole number, at least 1"),
        ({"predict_draws": 0}, "predict_draws= is a whole number, at least 1"),
        ({"kl_warmup": -1}, "kl_warmup= is a whole number, at least 0"),
        ({"initial_scale": 0.0}, "initial_scale= is a number greater than 0"),
        ({"scheduler_interval": "batch"}, "scheduler_interval= is 'epoch' or 'step'"),
        ({"bayesian": "fc.*"}, r"The pattern 'fc.\*' matches no trainable parameter"),
        ({"net": nn.ReLU()}, "none of its parameters"),
        ({"net": nn.LazyLinear(3)}, "lazy module has no shape yet"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    arguments = {"net": mlp(3), "likelihood": Categorical(), "prior": Normal(), **options}
    with pytest.raises(ConfigurationError, match=message):
        VariationalBNN(**arguments)


def test_num_data_is_needed_outside_of_a_trainer() -> None:
    with pytest.raises(ConfigurationError, match="Outside of a trainer pass num_data="):
        make_bnn().loss((torch.randn(2, 4), torch.tensor([0, 1])))


class NoRows(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize(
    "rows",
    [
        DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0)), batch_size=2),
        DataLoader(TensorDataset(torch.zeros(3, 4), torch.zeros(3)), batch_size=4, drop_last=True),
        DataLoader(NoRows(), batch_size=4),
        [],
    ],
    ids=["no examples", "less than a batch", "a stream of nothing", "no loader"],
)
def test_a_fit_without_data_is_refused(rows: Any) -> None:
    with pytest.raises(DataError, match="nothing to train on: the training data gave no batch"):
        quiet_trainer(max_epochs=2).fit(make_bnn(num_data=5), rows)
    # asked for, it is no mistake
    quiet_trainer(max_epochs=2, limit_train_batches=0).fit(make_bnn(num_data=5), rows)


class OnlyOnce(IterableDataset):
    def __init__(self) -> None:
        self.rows = iter([(torch.zeros(4), torch.tensor(0))] * 8)

    def __iter__(self) -> Any:
        return self.rows


def test_epochs_for_which_no_data_are_left_are_told() -> None:
    trainer = quiet_trainer(max_epochs=3)
    with pytest.warns(UserWarning, match="Nothing was trained in epoch [12]:") as said:
        trainer.fit(make_bnn(num_data=8), DataLoader(OnlyOnce(), batch_size=4))
    assert trainer.global_step == 2
    assert sum("Nothing was trained" in str(one.message) for one in said) == 2


class WhileFitting(pl.Callback):
    """Lets another thread fit in the midst of a fit."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def on_train_epoch_start(self, *_: Any) -> None:
        self.other()


def test_fits_in_two_threads_at_once_are_warned_of(data: TensorDataset) -> None:
    def fit(*callbacks: Any) -> None:
        trainer = quiet_trainer(max_epochs=1, callbacks=list(callbacks))
        trainer.fit(make_bnn(), DataLoader(data, batch_size=16))

    def in_thread() -> None:
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join()

    in_thread()  # one after another is well, also after one that has died
    with pytest.raises(ZeroDivisionError):
        fit(WhileFitting(lambda: 1 / 0))
    in_thread()
    with pytest.warns(UserWarning, match="Another thread of this process is fitting"):
        fit(WhileFitting(in_thread))
