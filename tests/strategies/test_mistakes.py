"""Mistakes that a fit would not show by itself, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC, DeepEnsemble, VariationalBNN
from lightning_bnn.callbacks import CalibrationReport, SampleCollector
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Bernoulli, Categorical
from lightning_bnn.samplers import HMC, SGLD
from tests.nets import EXAMPLES, make_data
from tests.trainers import quiet_trainer

STRATEGIES: dict[str, Callable[..., Any]] = {
    "VariationalBNN": VariationalBNN,
    "SGMCMC": partial(SGMCMC, chains=2, sampler=partial(SGLD, lr=1e-4)),
    "stacked": partial(DeepEnsemble, members=2, mode="stacked"),
    "loop": partial(DeepEnsemble, members=2, mode="loop"),
}
every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
DATA = make_data("mlp", "classification")
LABELS = TensorDataset(DATA.tensors[0], (DATA.tensors[1] > 0).float())


def rows(data: Any = DATA, size: int = 16, **options: Any) -> DataLoader:
    return DataLoader(data, batch_size=size, **options)


# ---------------------------------------------------------------- probabilities as logits


class Squeezed(nn.Module):
    """A sigmoid, and then operations that change no value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: Any) -> Any:
        return torch.sigmoid(self.linear(inputs)).clamp(1e-6, 1 - 1e-6).squeeze(1)


@every_strategy
@pytest.mark.parametrize(
    ("end", "size"), [(nn.Softmax(1), 16), (nn.Softmax(1), 3), (nn.Sigmoid(), 16), ("squeezed", 16)]
)
def test_probabilities_in_place_of_logits_are_noticed(make: Any, end: Any, size: int) -> None:
    softmax = isinstance(end, nn.Softmax)
    net = Squeezed() if end == "squeezed" else nn.Sequential(nn.Linear(4, 3 if softmax else 1), end)
    likelihood, data = (Categorical(), DATA) if softmax else (Bernoulli(), LABELS)
    words = "none of 3 classes could get more than 58%" if softmax else "between 50% and 73%"
    with pytest.warns(UserWarning, match=f"are probabilities already.*{words}.*Take the") as said:
        quiet_trainer(max_epochs=2).fit(make(net, likelihood), rows(data, size))
    assert sum("probabilities already" in str(one.message) for one in said) == 1


def test_probabilities_are_noticed_in_the_sanity_check() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
    bnn, loader = VariationalBNN(net, Categorical()), rows(size=EXAMPLES)
    with pytest.warns(UserWarning, match="probabilities already"):
        quiet_trainer(max_epochs=1, limit_train_batches=0).fit(bnn, loader, loader)


@every_strategy
@pytest.mark.parametrize("value", [0.0, 1 / 3 + 0.001, 0.4])
def test_logits_that_look_like_probabilities_are_left_in_peace(make: Any, value: float) -> None:
    """Warnings are errors: constant logits, between 0 and 1 for labels, at the start of a fit."""
    for outputs, likelihood, data in ((3, Categorical(), DATA), (1, Bernoulli(), LABELS)):
        net = nn.Linear(4, outputs)
        nn.init.zeros_(net.weight)
        nn.init.constant_(net.bias, value)
        start = {"start": "around"} if getattr(make, "func", None) is DeepEnsemble else {}
        quiet_trainer(max_steps=2).fit(make(net, likelihood, **start), rows(data))


class OfProbabilities(Categorical):
    def log_prob(self, outputs: Any, targets: Any) -> Any:
        return outputs.log().gather(1, targets[:, None]).squeeze(1)


def test_a_likelihood_of_ones_own_may_take_probabilities() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
    quiet_trainer(max_epochs=2).fit(VariationalBNN(net, OfProbabilities()), rows())


# ---------------------------------------------------------------- N, and pages


@every_strategy
@pytest.mark.parametrize(("batches", "expected"), [(1, 16), (2, 32), (0.67, 32), (99, EXAMPLES)])
def test_overfit_batches_train_on_what_is_in_them(make: Any, batches: Any, expected: int) -> None:
    bnn = make(nn.Linear(4, 3), Categorical())
    quiet_trainer(max_epochs=1, overfit_batches=batches).fit(bnn, rows())
    assert bnn.target.num_data == expected


def test_n_of_overfitting_that_cannot_be_known_and_that_is_given() -> None:
    bnn = VariationalBNN(nn.Linear(4, 3), Categorical())
    batches = DataLoader(DATA, batch_sampler=[list(range(4)), list(range(9))])
    with pytest.raises(ConfigurationError, match=r"overfit_batches .* Pass num_data="):
        quiet_trainer(max_epochs=1, overfit_batches=1).fit(bnn, batches)
    given = VariationalBNN(nn.Linear(4, 3), Categorical(), num_data=7)
    quiet_trainer(max_epochs=1, overfit_batches=1).fit(given, rows())
    assert given.target.num_data == 7
    hmc = SGMCMC(nn.Linear(4, 3), Categorical(), sampler=partial(HMC, lr=1e-4))
    quiet_trainer(max_epochs=1, overfit_batches=1).fit(hmc, rows())  # the batch is all there is
    limited = VariationalBNN(nn.Linear(4, 3), Categorical())
    quiet_trainer(max_epochs=1, limit_train_batches=1).fit(limited, rows(shuffle=True))
    assert limited.target.num_data == EXAMPLES


@pytest.mark.parametrize("options", [{}, {"limit_val_batches": 0}])
def test_a_report_without_validation_data_is_missed_before_training(
    options: Any, tmp_path: Path
) -> None:
    bnn, report = VariationalBNN(nn.Linear(4, 3), Categorical()), CalibrationReport(tmp_path)
    trainer = quiet_trainer(max_epochs=1, callbacks=[report], **options)
    validation = rows() if options else None
    with pytest.warns(UserWarning, match=r"no page of this fit.*after_fit=False"):
        trainer.fit(bnn, rows(), validation)
    assert not report.files
    silent = CalibrationReport(tmp_path, after_fit=False)
    quiet_trainer(max_epochs=1, callbacks=[silent]).fit(bnn, rows())


# ---------------------------------------------------------------- errors


def test_a_class_chooses_its_layers() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Sequential(nn.Linear(5, 3)))
    bnn = VariationalBNN(net, Categorical(), bayesian=nn.Linear, num_data=4)
    assert bnn.inferred == ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]
    with pytest.raises(ConfigurationError, match=r"no layer of the class Conv2d.*'LayerNorm'"):
        VariationalBNN(net, Categorical(), bayesian=nn.Conv2d, num_data=4)
    with pytest.raises(ConfigurationError, match="classes of layers; got <class 'int'>"):
        VariationalBNN(net, Categorical(), bayesian=[int], num_data=4)


@every_strategy
def test_networks_that_cannot_be_inferred(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="the real and the imaginary part as two"):
        make(nn.Linear(4, 3, dtype=torch.complex64), Categorical())
    quantised = nn.Module()
    quantised.weight = nn.Parameter(torch.ones(3, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigurationError, match="If it is quantised, pass the network that"):
        make(quantised, Categorical())


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    bnn = SGMCMC(nn.Linear(4, 3), Categorical())
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        trainer = quiet_trainer(max_epochs=1, callbacks=[SampleCollector(dirpath=bad)])
        with pytest.raises(ConfigurationError, match=r"is a file|cannot write to dirpath="):
            trainer.fit(bnn, rows())
        assert trainer.global_step == 0
    with pytest.raises(ConfigurationError, match="dirpath= is a path or a URL; got 3"):
        SampleCollector(dirpath=3)  # type: ignore[arg-type]


def test_split_replaced_on_an_instance_holds_in_prediction() -> None:
    bnn = VariationalBNN(nn.Linear(4, 3), Categorical())
    bnn.split = lambda batch: (batch["x"], batch["y"])  # type: ignore[method-assign]
    batches = DataLoader([{"x": x, "y": y} for x, y in DATA], batch_size=EXAMPLES)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, batches)
    assert [len(predictive) for predictive in trainer.predict(bnn, batches)] == [EXAMPLES]


class HandsOn(VariationalBNN):
    def __init__(self, *args: Any, extra: int = 3, **options: Any) -> None:
        super().__init__(*args, **options)


class Mixin:
    pass


class OfItsOwn(Mixin, VariationalBNN):
    def __init__(self, *sizes: int) -> None:
        super().__init__(nn.Linear(*sizes), Categorical())


def test_checkpoints_of_another_strategy_and_of_constructors_with_args(tmp_path: Path) -> None:
    bnn = HandsOn(nn.Linear(4, 3), Categorical(), temperature=0.5)
    assert bnn.hparams["net"] == "Linear, 15 weights"
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, rows())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    loaded = HandsOn.load_from_checkpoint(tmp_path / "end.ckpt")
    assert torch.equal(loaded.family.mean, bnn.family.mean)
    assert loaded.target.temperature == 0.5
    with pytest.raises(
        ConfigurationError, match=r"is of HandsOn.*SGMCMC cannot be made.*HandsOn\."
    ):
        SGMCMC.load_from_checkpoint(tmp_path / "end.ckpt")
    other = OfItsOwn(4, 3)
    assert other.hparams["sizes"] == "(4, 3)"
    trainer.fit(other, rows())
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(ConfigurationError, match=r"of OfItsOwn.*Make it yourself.*ckpt_path="):
        OfItsOwn.load_from_checkpoint(tmp_path / "other.ckpt")
