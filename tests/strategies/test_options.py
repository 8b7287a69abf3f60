"""What a Lightning user expects of every strategy: any batches, tuners, schedulers, logs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.tuner import Tuner
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from lightning_bnn import SGMCMC, DeepEnsemble, VariationalBNN
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.families import MeanField
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Laplace, Normal
from lightning_bnn.samplers import SGLD, Cyclical
from lightning_bnn.stacked import with_output
from tests.nets import EXAMPLES, make_data
from tests.trainers import quiet_trainer

STRATEGIES: dict[str, Callable[..., Any]] = {
    "VariationalBNN": VariationalBNN,
    "SGMCMC": partial(SGMCMC, chains=2, sampler=partial(SGLD, lr=1e-4), seed=0),
    "DeepEnsemble": partial(DeepEnsemble, members=2, seed=0),
}
every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
INPUTS, TARGETS = make_data("mlp", "classification").tensors


class Rows(Dataset):
    """Examples as a mapping, or as a tuple with a third part between inputs and targets."""

    def __init__(self, mapping: bool) -> None:
        self.mapping = mapping

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.mapping:
            return {"a": INPUTS[index], "b": INPUTS[index], "labels": TARGETS[index]}
        return INPUTS[index], index, TARGETS[index]


class Output(NamedTuple):
    logits: Tensor
    hidden: Tensor


class TwoInputs(nn.Module):
    """Returns several tensors, as the models of many libraries do."""

    def __init__(self, kind: str = "tuple") -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 3), kind

    def forward(self, a: Tensor, b: Tensor | None = None) -> Any:
        logits = self.linear(a if b is None else (a + b) / 2)
        made: dict[str, Any] = {"tuple": (None, logits), "mapping": {"y": logits}}
        return made.get(self.kind) or Output(logits, a)


@every_strategy
@pytest.mark.parametrize(
    ("mapping", "split", "kind", "output"),
    [
        (True, "labels", "tuple", 1),
        (True, (["a", "b"], "labels"), "mapping", "y"),
        (True, ("a", "labels"), "object", None),  # its logits are found without a word
        (False, (0, 2), "object", "logits"),
        (False, lambda batch: (batch[0], batch[2]), "tuple", lambda outputs: outputs[1]),
    ],
)
def test_batches_and_outputs_of_another_form(
    make: Any, mapping: bool, split: Any, kind: str, output: Any
) -> None:
    torch.manual_seed(0)
    bnn = make(TwoInputs(kind), Categorical(), split=split, output=output)
    loader = DataLoader(Rows(mapping), batch_size=16)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, loader, loader)
    found = torch.cat([predictive.mean for predictive in trainer.predict(bnn, loader)])
    torch.manual_seed(0)
    plain = make(Plain(), Categorical())
    plain_trainer = quiet_trainer(max_epochs=1)
    rows = DataLoader(make_data("mlp", "classification"), batch_size=16)
    plain_trainer.fit(plain, rows, rows)
    expected = torch.cat([predictive.mean for predictive in plain_trainer.predict(plain, rows)])
    torch.testing.assert_close(found, expected)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


def test_inputs_alone_are_predicted_whatever_split_says() -> None:
    bnn = VariationalBNN(TwoInputs(), Categorical(), split="labels", output=1, num_data=4)
    without = DataLoader([{"a": row, "b": row} for row in INPUTS[:4]], batch_size=4)
    (predictive,) = quiet_trainer().predict(bnn, without)
    assert len(predictive) == 4


def test_a_posterior_of_such_a_network_is_saved_and_loaded(tmp_path: Any) -> None:
    bnn = VariationalBNN(TwoInputs(), Categorical(), output=1, num_data=4)
    bnn.posterior().save(tmp_path)
    loaded = type(bnn.posterior()).load(tmp_path, with_output(TwoInputs(), 1))
    assert torch.equal(loaded.predict(INPUTS).mean, bnn.posterior().predict(INPUTS).mean)
    with pytest.raises(ConfigurationError, match=r"returned tuple.*output=0.*with_output\(net"):
        type(bnn.posterior()).load(tmp_path, TwoInputs()).predict(INPUTS)


@pytest.mark.parametrize(
    ("split", "error", "words"),
    [
        (3.5, ConfigurationError, "split= is the key of the targets"),
        (("a", "y"), DataError, r"split= names 'y', which a batch does not have: \['a', 'b', 'lab"),
        ((0, 1, 2), ConfigurationError, "a pair of the keys"),
        (None, DataError, "must be a pair.*got dict of length 3.*split='labels'"),
    ],
)
def test_a_split_that_cannot_be(split: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        VariationalBNN(TwoInputs(), Categorical(), split=split, output=1, num_data=4).loss(
            {"a": INPUTS, "b": INPUTS, "labels": TARGETS}
        )


@every_strategy
def test_a_tuner_sets_the_learning_rate(make: Any, tmp_path: Any) -> None:
    bnn = make(Plain(), Categorical())
    rows = DataLoader(make_data("mlp", "classification"), batch_size=4)
    trainer = quiet_trainer(max_epochs=9, default_root_dir=tmp_path)
    before = bnn.posterior().mean["linear.weight"].clone()
    Tuner(trainer).lr_find(bnn, rows, num_training=100, min_lr=1e-6, max_lr=1e-2)
    assert bnn.lr is not None
    assert torch.equal(bnn.posterior().mean["linear.weight"], before), "the trial leaves no trace"
    trainer.fit(bnn, rows)
    rates = {group["lr"] for one in trainer.optimizers for group in one.param_groups}
    assert (rates if bnn.peak_lr is None else {bnn.peak_lr}) == {bnn.lr}


@every_strategy
def test_a_scheduler_waits_for_the_metric_that_monitor_names(make: Any) -> None:
    rows = DataLoader(make_data("mlp", "classification"), batch_size=16)
    waits = partial(ReduceLROnPlateau, mode="max", patience=0, factor=0.5)
    bnn = make(Plain(), Categorical(), scheduler=waits, monitor="val_nll")
    trainer = quiet_trainer(max_epochs=4)
    trainer.fit(bnn, rows, rows)
    rates = {group["lr"] for one in trainer.optimizers for group in one.param_groups}
    assert max(rates) < 1e-3  # the NLL falls, and so does not rise
    with pytest.raises(ConfigurationError, match="Name it, as in monitor='val_nll'"):
        quiet_trainer(max_epochs=1).fit(make(Plain(), Categorical(), scheduler=waits), rows)


@every_strategy
@pytest.mark.parametrize("prior", [Normal(0.5, 0.01), {"*bias": Laplace(0.0, 3.0), "*": Normal()}])
def test_logs_hold_the_nll_and_a_loss_that_can_be_read(make: Any, prior: Any) -> None:
    bnn = make(Plain(), Categorical(), prior)
    rows = DataLoader(make_data("mlp", "classification"), batch_size=EXAMPLES)
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=1)
    sets = bnn.current_draws() if hasattr(bnn, "bank") else None
    kept = None if sets is None else {name: value.clone() for name, value in sets.items()}
    trainer.fit(bnn, rows)
    logged = trainer.callback_metrics
    assert logged["train_loss"] >= logged["train_nll"] > 0
    if kept is not None:
        nll, weights = 0.0, 0.0
        for row in range(2):
            logits = INPUTS @ kept["linear.weight"][row].T + kept["linear.bias"][row]
            nll += nn.functional.cross_entropy(logits, TARGETS).item() / 2
            for name, value in kept.items():
                one = (
                    prior
                    if isinstance(prior, Normal)
                    else prior["*bias" if "bias" in name else "*"]
                )
                loc, scale = float(one.loc), one.scale
                far = (value[row] - loc).abs() / scale
                weights += (far**2 / 2 if isinstance(one, Normal) else far).sum().item() / 2
        assert logged["train_nll"].item() == pytest.approx(nll, rel=1e-5)
        assert logged["train_loss"].item() == pytest.approx(nll + weights / EXAMPLES, rel=1e-4)


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_an_optimizer_in_place_of_a_function_that_makes_it(name: str) -> None:
    made = torch.optim.Adam(Plain().parameters())
    given = made if name == "optimizer" else torch.optim.lr_scheduler.StepLR(made, 1)
    for make in (VariationalBNN, DeepEnsemble):
        with pytest.raises(ConfigurationError, match=f"{name}= is a function that makes"):
            make(Plain(), Categorical(), **{name: given})


@pytest.mark.parametrize(
    ("make", "average", "words"),
    [
        ("SGMCMC", WeightAveraging, "averages the states of a chain"),
        ("SGMCMC", EMAWeightAveraging, "averages the states of a chain"),
        ("SGMCMC", partial(StochasticWeightAveraging, 0.1), "averages the states of a chain"),
        ("DeepEnsemble", WeightAveraging, "use_buffers=False"),
        ("DeepEnsemble", partial(WeightAveraging, use_buffers=False), None),
        ("DeepEnsemble", EMAWeightAveraging, None),
    ],
)
def test_averaging_callbacks_are_refused_where_they_are_wrong(
    make: str, average: Any, words: str | None
) -> None:
    rows = DataLoader(make_data("mlp", "classification"), batch_size=16)
    trainer = quiet_trainer(max_epochs=2, callbacks=[average()])
    if words is None:
        trainer.fit(STRATEGIES[make](Plain(), Categorical()), rows)
        assert trainer.global_step == 6
        return
    with pytest.raises(ConfigurationError, match=words):
        trainer.fit(STRATEGIES[make](Plain(), Categorical()), rows)


@pytest.mark.parametrize("kind", ["fresh", "trained", "batch norm", "factory", "around"])
def test_trained_weights_are_not_discarded_without_a_word(
    kind: str, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    if kind in ("trained", "around", "factory"):
        net[0].weight.data *= 1.5
    if kind == "batch norm":
        net(INPUTS)
    given = (lambda: net) if kind == "factory" else net
    DeepEnsemble(given, Categorical(), members=2, start="around" if kind == "around" else "reset")
    said = [str(one.message) for one in recwarn if "of another size" in str(one.message)]
    assert len(said) == (kind in ("trained", "batch norm"))
    assert all("start='around'" in text for text in said)


def mlp_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.1), nn.Linear(5, 3))


SAVED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "VariationalBNN": (
        lambda: VariationalBNN(
            mlp_net(), Categorical(), {"*bias": Laplace(0.0, 2.0), "*": Normal(0.0, 0.7)},
            temperature=0.5, family=MeanField("softplus"), optimizer=partial(SGD, lr=0.01),
            split=(0, 1),
        ),
        {"temperature": 0.5, "optimizer": "SGD(lr=0.01)", "net": "Sequential, 43 weights"},
    ),
    "SGMCMC": (
        lambda: SGMCMC(
            mlp_net(), Categorical(), sampler=partial(SGLD, lr=1e-4), chains=[2, 5],
            scheduler=partial(Cyclical, cycle_length=4),
        ),
        {"sampler": "SGLD(lr=0.0001)", "chains": "[2, 5]", "prior": "Normal()"},
    ),
    "DeepEnsemble": (
        lambda: DeepEnsemble(mlp_net(), Categorical(), members=3, start="around", chunk=2),
        {"members": 3, "chunk": 2, "optimizer": "Adam(lr=0.005)"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_loggers_show_the_options_and_a_checkpoint_loads_without_them(
    name: str, tmp_path: Any
) -> None:
    make, shown = SAVED[name]
    bnn = make()
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(max_epochs=1, logger=logger)
    trainer.fit(bnn, DataLoader(make_data("mlp", "classification"), batch_size=16))
    assert shown.items() <= logger.experiment.hparams.items()
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    loaded = type(bnn).load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)
    expected = bnn.state_dict()
    for key, value in loaded.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, expected[key]), key
    inputs = INPUTS[:5]
    if name != "SGMCMC":
        assert torch.equal(
            loaded.posterior().predict(inputs).mean, bnn.posterior().predict(inputs).mean
        )


def test_what_a_checkpoint_cannot_say_has_to_be_given(tmp_path: Any) -> None:
    bnn = DeepEnsemble(lambda: Plain(), Categorical(), members=2, optimizer=lambda p: SGD(p, 0.1))
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, DataLoader(make_data("mlp", "classification"), batch_size=16))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.raises(ConfigurationError, match=r"'net': '<lambda>', 'optimizer'.*net=\.\.\., or"):
        DeepEnsemble.load_from_checkpoint(tmp_path / "end.ckpt")
    loaded = DeepEnsemble.load_from_checkpoint(tmp_path / "end.ckpt", net=Plain, optimizer=None)
    assert torch.equal(loaded.weights, bnn.weights)


def test_a_network_that_is_partly_frozen_has_to_be_given(tmp_path: Any) -> None:
    net = mlp_net()
    net[0].requires_grad_(False)
    trainer = quiet_trainer(max_epochs=1)
    bnn = VariationalBNN(net, Categorical())
    trainer.fit(bnn, DataLoader(make_data("mlp", "classification"), batch_size=16))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.raises(ConfigurationError, match="'net': 'Sequential, 43 weights'"):
        VariationalBNN.load_from_checkpoint(tmp_path / "end.ckpt")
    assert VariationalBNN.load_from_checkpoint(tmp_path / "end.ckpt", net=net)


class WithTensor(VariationalBNN):
    def __init__(self, net: nn.Module, likelihood: Any, weights: Tensor) -> None:
        super().__init__(net, likelihood)


class SeededData(LightningDataModule):
    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(make_data("mlp", "classification"), batch_size=16)


def test_options_of_other_kinds_and_of_the_data_are_no_hindrance(tmp_path: Any) -> None:
    bnn = WithTensor(Plain(), Categorical(), torch.ones(3))
    assert "tensor" in bnn.hparams["weights"]
    trainer = quiet_trainer(max_epochs=1, logger=CSVLogger(tmp_path))
    trainer.fit(VariationalBNN(Plain(), Categorical(), seed=7), datamodule=SeededData())


@pytest.mark.parametrize("output", ["nope", 5])
def test_an_output_that_is_not_there(output: Any) -> None:
    bnn = VariationalBNN(TwoInputs(), Categorical(), output=output, num_data=4)
    with pytest.raises(ConfigurationError, match="names no part of what TwoInputs returns: tuple"):
        bnn.loss((INPUTS, TARGETS))
