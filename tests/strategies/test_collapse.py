"""A fit whose weights stayed at their prior is told so, and only one that is hurt by it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import VariationalBNN
from lightning_bnn.likelihoods import Categorical, Gaussian, Likelihood
from lightning_bnn.priors import Laplace, Prior
from lightning_bnn.strategies.collapse import concordant_pairs, explain_collapse, is_suspicious
from tests.trainers import quiet_trainer


def digits(examples: int) -> tuple[Tensor, Tensor]:
    data = load_digits()
    inputs = torch.tensor(data.data[:examples] / 16, dtype=torch.float32)
    return inputs, torch.tensor(data.target[:examples])


def fit(
    net: nn.Module,
    likelihood: Likelihood,
    data: tuple[Tensor, Tensor],
    steps: int,
    scale: float,
    prior: Prior | None = None,
) -> VariationalBNN:
    bnn = VariationalBNN(
        net,
        likelihood,
        prior,
        initial_scale=scale,
        optimizer=partial(Adam, lr=1e-2),
        seed=1,
    )
    loader = DataLoader(TensorDataset(*data), batch_size=50, shuffle=True)
    quiet_trainer(max_steps=steps).fit(bnn, loader)
    return bnn


def wide() -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def test_a_collapsed_fit_is_told_what_helps() -> None:
    """93,000 weights that start at their prior, and 200 examples."""
    with pytest.warns(UserWarning, match=r"predicts no better than a constant.*bayesian=.*prior"):
        fit(wide(), Categorical(), digits(200), steps=60, scale=1.0)


def test_a_fit_that_has_learned_is_not() -> None:
    bnn = fit(wide(), Categorical(), digits(200), steps=60, scale=0.01)
    assert not is_suspicious(bnn.family.layout.views(bnn.family.at_prior(bnn.prior)))


def test_nor_is_one_that_predicts_though_most_of_its_weights_are_at_the_prior() -> None:
    """Nineteen inputs are always 0: nothing is known about their weights, and nothing is wrong."""
    torch.manual_seed(0)
    inputs = torch.zeros(100, 20)
    inputs[:, 0] = torch.randn(100)
    bnn = fit(nn.Linear(20, 1), Gaussian(0.1), (inputs, 2 * inputs[:, :1]), 300, scale=1.0)
    at_prior = bnn.family.layout.views(bnn.family.at_prior(bnn.prior))
    assert at_prior["weight"].tolist() == [[False, *[True] * 19]]
    assert is_suspicious(at_prior)


def test_pruned_weights_and_other_priors_are_no_suspicion() -> None:
    bnn = VariationalBNN(nn.Linear(20, 1), Gaussian(0.1), num_data=9, initial_scale=1.0)
    nn.init.zeros_(bnn.family.mean)
    assert bnn.family.at_prior(bnn.prior).all()
    bnn.prune({"weight": torch.zeros(1, 20)})
    assert bnn.family.at_prior(bnn.prior).sum() == 1  # the bias
    other = VariationalBNN(nn.Linear(20, 1), Gaussian(0.1), Laplace(), num_data=9)
    assert not other.family.at_prior(other.prior).any()


def test_concordance_of_classes_does_not_depend_on_how_rare_they_are() -> None:
    """Three of a hundred examples are of the second class: pairs of one class do not tell."""
    targets = torch.zeros(100, dtype=torch.int64)
    targets[[10, 40, 41]] = 1
    knowing = nn.functional.one_hot(targets, 2)[None] * 4.0
    wins, losses = concordant_pairs(Categorical().predictive(knowing), targets)
    assert wins > 0 == losses
    constant = torch.tensor([3.0, 0.0]).expand(1, 100, 2)
    wins, losses = concordant_pairs(Categorical().predictive(constant), targets)
    at_prior = {"weight": torch.ones(3, 2, dtype=torch.bool)}
    assert wins == losses > 0
    assert "100% of the weights" in (explain_collapse(at_prior, wins, losses) or "")
    assert explain_collapse(at_prior, 1, 0) is explain_collapse(at_prior, 0, 0) is None
