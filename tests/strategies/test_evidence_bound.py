"""The bound of the evidence that a variational fit leaves in its posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import IVONBNN, Posterior, VariationalBNN
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import FullRank, MeanField
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import Evidence
from lightning_bnn.priors import Normal
from tests.families.exact import best_elbo, exact
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression

PROBLEM = LinearRegression.make()
DATA = [(PROBLEM.inputs[:50], PROBLEM.targets[:50]), (PROBLEM.inputs[50:], PROBLEM.targets[50:])]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(PROBLEM.inputs.float(), PROBLEM.targets.float()), 40)


@pytest.mark.parametrize("family", [MeanField(), FullRank()])
def test_the_bound_and_its_error(family: Any) -> None:
    """Within 4 standard errors of the exact bound, which of a full rank is the evidence."""
    bnn = exact(PROBLEM, family)
    truth = best_elbo(bnn, (PROBLEM.inputs, PROBLEM.targets))
    if isinstance(family, FullRank):
        assert truth == pytest.approx(PROBLEM.log_evidence, abs=1e-8)
    found = bnn.evidence_bound(DATA, draws=400)
    assert found.is_bound
    assert found.error < 0.15
    assert abs(found.value - truth) < 4 * found.error
    assert bnn.elbo((PROBLEM.inputs, PROBLEM.targets), 400).item() == pytest.approx(found.value)


@pytest.mark.parametrize("strategy", [VariationalBNN, IVONBNN])
def test_a_fit_leaves_it_in_the_posterior(strategy: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    bnn = strategy(nn.Linear(5, 1), Gaussian(0.7), Normal(0.0, 0.9), evidence_draws=64)
    trainer = quiet_trainer(max_epochs=20)
    trainer.fit(bnn, loader())
    found = bnn.posterior().evidence
    assert found == bnn.posterior().evidence
    again = bnn.evidence_bound(loader(), draws=64)
    assert found.value == pytest.approx(again.value, abs=1e-2)
    assert found.error == pytest.approx(again.error, rel=1e-3)
    assert found.value < PROBLEM.log_evidence  # the network has a bias beside
    bnn.posterior().save(tmp_path / "posterior")
    assert Posterior.load(tmp_path / "posterior").evidence == found
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = strategy.load_from_checkpoint(tmp_path / "last.ckpt")
    assert loaded.posterior().evidence == found
    # other weights have another evidence
    with torch.no_grad():
        bnn.family.mean.add_(0.01)
    assert bnn.posterior().evidence is None


def test_without_being_asked_nothing_is_known() -> None:
    bnn = VariationalBNN(nn.Linear(5, 1), Gaussian(0.7))
    quiet_trainer(max_epochs=1).fit(bnn, loader())
    assert bnn.finished == {}
    assert bnn.posterior().evidence is None


@pytest.mark.parametrize(
    "options", [{"temperature": 0.5}, {"temperature": "validation"}, {"evidence_draws": 1}]
)
def test_what_has_no_bound(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="that of the Bayes posterior, temperature=1"):
        VariationalBNN(nn.Linear(5, 1), Gaussian(0.7), **{"evidence_draws": 8, **options})


def test_it_prints_as_a_bound() -> None:
    assert str(Evidence(-1.0, 0.2, "ELBO")).startswith("at least -1.00 ± 0.20")
