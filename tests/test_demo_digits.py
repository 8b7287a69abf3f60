"""The digits of the demo: four fits of one network, and the report that compares them."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import roc_auc_score

from lightning_bnn import demo_digits
from lightning_bnn.data import Digits
from lightning_bnn.posteriors import DrawsPosterior

pytestmark = pytest.mark.filterwarnings("ignore:You passed in a .val_dataloader. but have no")


@pytest.mark.slow
def test_variational_is_no_worse_than_plain_adam() -> None:
    """Same network and seed; on the 360 test digits: validation digits have chosen T."""
    inputs, targets = demo_digits.unseen_digits()
    ours = demo_digits.evaluate(demo_digits.fit_variational(), inputs, targets, draws=64)
    plain = demo_digits.evaluate(demo_digits.fit_plain(), inputs, targets)
    assert ours["accuracy"] >= 0.97
    assert ours["nll"] <= plain["nll"]
    assert ours["ece"] <= plain["ece"]


@pytest.mark.filterwarnings("ignore:The chains do not agree")
def test_chains_and_ensemble_have_the_draws_that_they_say() -> None:
    chains = demo_digits.fit_chains(epochs=9)
    assert isinstance(chains, DrawsPosterior)
    assert chains.chains == 4
    assert 4 * 10 <= len(chains) <= 4 * 50
    assert len(list(demo_digits.fit_ensemble(epochs=1).draws(10, chunk=1))) == 10


def test_the_report_compares_all_on_test_digits_and_turned_ones() -> None:
    named = {
        "net": demo_digits.fit_plain(epochs=3),
        "ensemble": demo_digits.fit_ensemble(epochs=1),
    }
    numbers = demo_digits.compare(named).numbers
    assert [block["name"] for block in numbers["models"]] == ["net", "ensemble"]
    assert numbers["data"]["examples"] == 360
    data = Digits()
    data.setup()
    inputs, targets = data.splits.test.tensors
    for block in numbers["models"]:
        expected = demo_digits.evaluate(named[block["name"]], inputs, targets)
        for name in ("accuracy", "nll", "brier", "ece"):
            assert block["scalars"][name] == pytest.approx(expected[name], abs=1e-5), name
        assert block["temperature"]["fitted_on"] == "validation"
        assert set(block["shift"]) == set(demo_digits.SHIFTS)
        assert all(part["examples"] == 360 for part in block["shift"].values())
    turned = Digits(rotate=90)
    turned.setup()
    entropies = [named["net"].predict(x).entropy for x in (inputs, turned.splits.test.tensors[0])]
    foreign = torch.arange(2).repeat_interleave(360)
    found = numbers["models"][0]["shift"]["turned by 90°"]["by"]["entropy"]["auroc"]
    assert found == pytest.approx(roc_auc_score(foreign, torch.cat(entropies)), abs=1e-4)
