"""Labels that are missing, and classes that count more than others."""

from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC, Posterior, VariationalBNN
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.predictive import CategoricalPredictive
from lightning_bnn.report.rows import make_rows
from lightning_bnn.samplers import SGHMC

MISSING = -100


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def labels(classes: int, *shape: int, missing: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    found = torch.randint(classes, shape, generator=generator)
    return found.masked_fill(torch.rand(shape, generator=generator) < missing, MISSING)


@pytest.mark.parametrize("positions", [(), (7,), (3, 2)], ids=str)
@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 2.5, 0.5]], ids=["equal", "weighted"])
def test_as_cross_entropy_has_it(positions, weights):
    outputs, targets = logits(20, 4, *positions), labels(4, 20, *positions, missing=0.4)
    likelihood = Categorical(ignore_index=MISSING, class_weights=weights)
    likelihood.check(outputs, targets)
    weight = None if weights is None else torch.tensor(weights)
    expected = -F.cross_entropy(outputs, targets, weight, ignore_index=MISSING, reduction="none")
    torch.testing.assert_close(
        likelihood.log_prob(outputs, targets), expected.reshape(20, -1).sum(1)
    )


def test_weights_are_not_rounded_with_the_network():
    outputs, targets = logits(8, 2), labels(2, 8)
    likelihood = Categorical(class_weights=[0.1, 0.7])
    exact = likelihood.log_prob(outputs, targets)
    assert torch.equal(likelihood.bfloat16().log_prob(outputs, targets), exact)


def test_labels_of_eight_bits_are_no_negative_numbers():
    outputs, targets = logits(3, 200), torch.tensor([156, 3, 255 - 99])  # -100 in eight bits
    few = targets.to(torch.uint8)
    likelihood, alone = Categorical(ignore_index=MISSING), Categorical()
    assert torch.equal(likelihood.log_prob(outputs, few), alone.log_prob(outputs, targets))
    predictive = likelihood.predictive(outputs[None])
    assert torch.equal(predictive.log_prob(few), alone.log_prob(outputs, targets))
    assert len(predictive.hits(few)) == 3


def test_a_class_that_counts_twice_is_one_that_was_seen_twice():
    outputs, targets = logits(30, 3), labels(3, 30)
    twice = Categorical(class_weights=torch.tensor([1.0, 2.0, 1.0])).log_prob(outputs, targets)
    again = torch.cat([torch.arange(30), (targets == 1).nonzero().squeeze(1)])
    seen = Categorical().log_prob(outputs[again], targets[again])
    torch.testing.assert_close(twice.sum(), seen.sum())


@pytest.mark.parametrize("positions", [(), (7,)], ids=str)
def test_metrics_are_those_of_what_has_a_label(positions):
    outputs, targets = logits(5, 40, 3, *positions), labels(3, 40, *positions, missing=0.5)
    if positions:
        targets[3:6] = MISSING  # whole examples, too
    likelihood = Categorical(ignore_index=MISSING)
    metrics = likelihood.metrics()
    for part in (slice(0, 25), slice(25, 40)):
        metrics.update(likelihood.predictive(outputs[:, part]), targets[part])
    values = metrics.compute()
    rows = outputs.movedim(2, -1).reshape(5, -1, 3)
    known = targets.flatten() != MISSING
    alone = Categorical().metrics()
    alone.update(CategoricalPredictive(rows[:, known]), targets.flatten()[known])
    expected = alone.compute()
    if positions:  # the density of an example is that of all its labels together
        index = targets.clamp(min=0).expand(5, 40, 7)[:, :, None]
        log_prob = F.log_softmax(outputs, 2).gather(2, index)
        joint = log_prob.squeeze(2).masked_fill(targets == MISSING, 0.0).sum(2)
        labelled = (targets != MISSING).any(1)
        expected["nll"] = -(joint.logsumexp(0) - np.log(5))[labelled].mean()
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_rows_of_a_report_leave_out_what_has_no_label():
    outputs, targets = logits(5, 40, 3, 7), labels(3, 40, 7, missing=0.5)
    rows = make_rows(CategoricalPredictive(outputs, MISSING), targets, np.arange(40))
    known = (targets != MISSING).flatten().numpy()
    assert len(rows.example) == known.sum()
    flat = CategoricalPredictive(outputs.movedim(2, -1).reshape(5, -1, 3)[:, known])
    expected = make_rows(flat, targets.flatten()[known], np.arange(known.sum()))
    for name, column in expected.columns.items():
        np.testing.assert_allclose(rows.columns[name], column, err_msg=name)


def test_parts_and_joins_of_a_predictive_know_what_is_ignored():
    predictive = CategoricalPredictive(logits(2, 6, 3), MISSING)
    for other in (
        predictive[:3],
        predictive.to("cpu", torch.float64),
        CategoricalPredictive.concatenate([predictive, predictive]),
        CategoricalPredictive.mix([predictive, predictive]),
    ):
        assert other.ignore_index == MISSING


class OfOnesOwn(CategoricalPredictive):
    def __init__(self, outputs):
        super().__init__(outputs)


def test_a_likelihood_derived_from_it_keeps_its_predictive():
    class Derived(Categorical):
        predictive_type = OfOnesOwn

    predictive = Derived().predictive(logits(2, 6, 3))
    assert type(predictive) is type(predictive[:3]) is OfOnesOwn


class Tagger(nn.Module):
    """Classes on the last axis, as models of tokens give them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


OPTIONS = {
    VariationalBNN: {"optimizer": partial(torch.optim.Adam, lr=0.05)},
    SGMCMC: {"sampler": partial(SGHMC, lr=0.01), "chains": 4},
}


@pytest.mark.filterwarnings("ignore:SGMCMC has no collected draws")
@pytest.mark.parametrize("strategy", list(OPTIONS))
def test_a_tagger_learns_from_labelled_tokens(strategy):
    tokens = torch.randint(11, (96, 6), generator=torch.Generator().manual_seed(2))
    tags = (tokens % 3).masked_fill(labels(2, 96, 6) == 0, MISSING)  # half of them
    loader = DataLoader(TensorDataset(tokens, tags), batch_size=32)
    torch.manual_seed(0)
    bnn = strategy(
        Tagger(),
        Categorical(ignore_index=MISSING, class_weights=[1, 1, 1]),
        output=lambda logits: logits.movedim(-1, 1),
        **OPTIONS[strategy],
    )
    trainer = pl.Trainer(
        max_epochs=30, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(bnn, loader)
    accuracy = trainer.validate(bnn, loader, verbose=False)[0]["val_accuracy"]
    assert accuracy > 0.9, accuracy


@pytest.mark.parametrize("number", [int, np.int64])
def test_options_are_saved_with_a_posterior(tmp_path, number):
    likelihood = Categorical(ignore_index=number(9), class_weights=np.array([1.0, 3.0]))
    net = nn.Linear(4, 2)
    VariationalBNN(net, likelihood, num_data=10).posterior().save(tmp_path / "p")
    again = Posterior.load(tmp_path / "p", nn.Linear(4, 2)).likelihood
    assert again.config() == {"ignore_index": 9, "class_weights": [1.0, 3.0]}
    outputs, targets = logits(5, 2), torch.tensor([0, 1, 9, 1, 0])
    assert torch.equal(again.log_prob(outputs, targets), likelihood.log_prob(outputs, targets))


def test_what_cannot_be():
    with pytest.raises(ConfigurationError, match="ignore_index= is a whole number"):
        Categorical(ignore_index=0.5)
    for weights in (0.5, "12", [1.0, -1.0], [float("nan"), 1.0]):
        with pytest.raises(ConfigurationError, match="class_weights= is"):
            Categorical(class_weights=weights)
    with pytest.raises(ConfigurationError, match="nothing counts"):
        Categorical(class_weights=[0.0, 0.0])
    with pytest.raises(DataError, match="3 class weights, and the network gives 2 logits"):
        Categorical(class_weights=[1, 2, 3]).check(logits(5, 2), labels(2, 5))
    with pytest.raises(DataError, match=r"the first being -100 at index .*ignore_index"):
        Categorical().check(logits(50, 2), labels(2, 50, missing=0.5))
    with pytest.raises(DataError, match=r"the first being 7 at index \(3,\)"):
        Categorical(ignore_index=-1).check(logits(5, 2), torch.tensor([0, -1, 1, 7, 0]))
    with pytest.raises(DataError, match=r"classes on the last axis.*movedim"):
        Categorical().check(logits(5, 7, 3), labels(3, 5, 7))
