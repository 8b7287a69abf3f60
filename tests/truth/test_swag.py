"""SWAG against what is known: covariances of iterates, constant-step SGD, BatchNorm's need."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_bnn.callbacks import SWAGMoments
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.posteriors import LowRankPosterior, Posterior
from lightning_bnn.priors import BoundPrior, Normal
from lightning_bnn.strategies.base import Strategy
from lightning_bnn.target import Target
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression


class Drift(pl.LightningModule):
    """Two layers whose single weights see the same noise, and so are the same at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for parameter in self.model.parameters():
            nn.init.constant_(parameter, 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = (layer.weight.sum() for layer in self.model)
        return ((a - batch[0]).square() + (b - batch[0]).square()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class OneVectorPerTensor(LowRankPosterior):
    """The known mistake: low-rank noise drawn tensor by tensor."""

    def draws(self, count: int, *options: Any, **more: Any) -> Iterator[dict[str, Tensor]]:
        drawn = {}
        for name, columns in self.deviations.items():
            z = torch.randn(count, self.rank) / (2 * self.rank - 2) ** 0.5
            drawn[name] = self.mean[name] + torch.einsum("nr,r...->n...", z, columns)
        yield drawn


def test_correlation_across_layers_is_kept() -> None:
    """Perfectly correlated in training; without the diagonal part in draws too (bar: 0.95).

    With one vector per tensor 500 draws correlate by 0 with a standard error of 0.045: the bar of
    0.3 for it has a false-alarm rate below 1e-10.
    """
    numbers = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    swag = SWAGMoments(start=20, every_n_steps=2, net="model", likelihood=Gaussian(0.1))
    trainer = quiet_trainer(max_epochs=1, callbacks=[swag])
    trainer.fit(Drift(), DataLoader(TensorDataset(numbers)))
    posterior = swag.posterior()
    nothing = {name: 0 * tensor for name, tensor in posterior.variance.items()}

    def correlation(kind: type[LowRankPosterior]) -> float:
        made = kind(posterior.net, Gaussian(0.1), posterior.mean, nothing, posterior.deviations)
        draws = made.sample(500, torch.Generator().manual_seed(1))
        return float(np.corrcoef(*(tensor.flatten().numpy() for tensor in draws.values()))[0, 1])

    assert correlation(LowRankPosterior) >= 0.95
    assert abs(correlation(OneVectorPerTensor)) < 0.3


# -------------------------------------------------------------------- constant-step SGD

LR, BATCH, EVERY, SNAPSHOTS, RANK = 0.15, 16, 8, 150, 80
COPIES = 600
SETTLE = 100  # steps: the slowest direction has forgotten its start by e⁻¹⁵


class WithReplacement(Sampler):
    """For every step the indices of examples, drawn with replacement, as one tensor."""

    def __init__(self, examples: int, size: int, steps: int) -> None:
        self.examples, self.size, self.steps = examples, size, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(11)
        for _ in range(self.steps):
            yield torch.randint(self.examples, (self.size,), generator=generator)


def with_replacement(problem: LinearRegression, copies: int) -> DataLoader:
    data = TensorDataset(problem.inputs, problem.targets)
    sampler = WithReplacement(len(data), BATCH * copies, SETTLE + EVERY * SNAPSHOTS)
    return DataLoader(data, batch_size=None, sampler=sampler)


def stationary_covariance(problem: LinearRegression) -> np.ndarray:
    """Σ = (I − ηA) Σ (I − ηA) + η² C, with A the Hessian of the mean energy and C exact.

    The gradient on a batch of n, drawn with replacement, is A δ − g* + noise at w* + δ, where
    example i gives g_i(δ) = h_i δ − e_i with h_i = x_i x_iᵀ/σ². Its covariance at δ is
    Cov_i(g_i(δ))/n, and over the stationary δ, of mean zero,

        C = (Cov_i(e_i) + E_i[h_i Σ h_i] − H Σ H) / n,  H = E_i[h_i].
    """
    x, y, count = problem.inputs.numpy(), problem.targets.numpy()[:, 0], len(problem.inputs)
    hessians = np.einsum("ni,nj->nij", x, x) / problem.noise_sd**2
    mean_hessian = hessians.mean(0)
    errors = x * (y - x @ problem.mean)[:, None] / problem.noise_sd**2
    contraction = np.eye(x.shape[1]) - LR * problem.precision / count
    at_optimum = np.cov(errors.T, bias=True)
    sigma = np.zeros_like(contraction)
    for _ in range(3000):
        moved = np.einsum("nij,jk,nkl->il", hessians, sigma, hessians) / count
        noise = (at_optimum + moved - mean_hessian @ sigma @ mean_hessian) / BATCH
        sigma = contraction @ sigma @ contraction + LR**2 * noise
    return sigma


def eigenvalues_of_ratio(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    root = np.linalg.inv(np.linalg.cholesky(exact))
    return np.linalg.eigvalsh(root @ found @ root.T)


class Copies(pl.LightningModule):
    """Many independent runs of SGD as the outputs of one linear layer; no strategy of ours."""

    def __init__(self, problem: LinearRegression, copies: int) -> None:
        super().__init__()
        self.problem, self.copies = problem, copies
        self.model = problem.net(copies)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = (part.view(self.copies, BATCH, -1) for part in batch)
        outputs = torch.einsum("cbi,ci->cb", inputs, self.model.weight)
        squares = (targets[..., 0] - outputs).square().mean(1) / (2 * self.problem.noise_sd**2)
        prior = self.model.weight.square().sum(1) / (2 * self.problem.prior_sd**2)
        return (squares + prior / len(self.problem.inputs)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def check_against_theory(
    problem: LinearRegression, mean: np.ndarray, variance: np.ndarray, deviations: np.ndarray
) -> None:
    """Means and variances (copies, P) and deviations (R, copies, P) against the stationary law.

    The mean over copies is the optimum w*, to five of its standard errors (copies do not depend on
    each other): a false alarm in fewer than one in 500,000.

    The worst direction of the low-rank part and every variance lie within 0.95–1.05. In the slowest
    direction neighbouring snapshots correlate by 0.29, so 600 copies of 80 deviations count as
    40,000 draws, a standard error of 0.7%, and the copies' own means lower the covariance by up to
    1.6%. A false alarm needs more than four standard errors: below one in 10,000.
    """
    standard_error = mean.std(0) / len(mean) ** 0.5
    assert (np.abs(mean.mean(0) - problem.mean) < 5 * standard_error).all()
    assert (standard_error < 0.01 * np.abs(problem.mean)).all()
    exact = stationary_covariance(problem)
    low_rank = np.einsum("rci,rcj->ij", deviations, deviations)
    low_rank /= (len(deviations) - 1) * deviations.shape[1]
    ratios = eigenvalues_of_ratio(low_rank, exact)
    assert 0.95 < ratios.min() <= ratios.max() < 1.05
    diagonal = variance.mean(0) / exact.diagonal()
    assert 0.95 < diagonal.min() <= diagonal.max() < 1.05
    # the Bayes posterior is another thing, and the test can tell
    bayes = eigenvalues_of_ratio(low_rank, np.linalg.inv(problem.precision))
    assert not (bayes.min() > 0.95 and bayes.max() < 1.05)


def test_constant_step_sgd_of_a_plain_module() -> None:
    problem, copies = LinearRegression.make(examples=60, features=3), COPIES
    swag = SWAGMoments(
        start=SETTLE, every_n_steps=EVERY, rank=RANK, net="model", likelihood=Gaussian(0.7)
    )
    trainer = quiet_trainer(max_epochs=1, precision="64-true", callbacks=[swag])
    trainer.fit(Copies(problem, copies), with_replacement(problem, copies))
    assert swag.snapshots == SNAPSHOTS
    posterior = swag.posterior()
    deviations = posterior.deviations["weight"].numpy()
    mean, variance = (one["weight"].numpy() for one in (posterior.mean, posterior.variance))
    check_against_theory(problem, mean, variance, deviations)
    # copies do not correlate, to five standard errors
    rows = deviations / deviations.std((0, 1))
    between = np.einsum("rci,rci->i", rows, np.roll(rows, 1, axis=1)) / rows[..., 0].size
    assert np.abs(between).max() < 5 * 1.3 / rows[..., 0].size ** 0.5


class Walkers(Strategy):
    """The same runs of SGD as members of a strategy, each with weights of its own."""

    def __init__(self, problem: LinearRegression, members: int) -> None:
        likelihood = Gaussian(problem.noise_sd)
        super().__init__(problem.net(), likelihood, 60, partial(torch.optim.SGD, lr=LR))
        self.net.requires_grad_(False)
        self.copies = Copies(problem, members)
        prior = BoundPrior(
            Normal(0.0, problem.prior_sd), self.net, dict(self.net.named_parameters())
        )
        self.target = Target(likelihood, prior, 60)

    def loss(self, batch: Any) -> Tensor:
        return self.copies.training_step(batch, 0)

    def current_draws(self) -> dict[str, Tensor]:
        return {"weight": self.copies.model.weight.detach()[:, None]}

    def posterior(self) -> Posterior:
        raise NotImplementedError


def test_constant_step_sgd_of_a_strategy() -> None:
    problem, members = LinearRegression.make(examples=60, features=3), COPIES
    swag = SWAGMoments(start=SETTLE, every_n_steps=EVERY, rank=RANK)
    trainer = quiet_trainer(max_epochs=1, precision="64-true", callbacks=[swag])
    trainer.fit(Walkers(problem, members), with_replacement(problem, members))
    moments = swag.moments
    variance, deviations = moments.variance.numpy(), torch.stack(moments.deviations).numpy()
    check_against_theory(problem, moments.mean.numpy(), variance, deviations)


# -------------------------------------------------------------------- BatchNorm


class Classifier(pl.LightningModule):
    """A small network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(64, 50), nn.BatchNorm1d(50), nn.ReLU(),
            nn.Linear(50, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 10),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def test_batch_norm_needs_the_refresh() -> None:
    """Accuracy on digits: with the refresh within 1% of SWA's, without it the loss is seen.

    Data, training and draws have fixed seeds. Found: 0.940 for SWA; with the refresh 0.938 (0.930
    for a draw by itself, NLL 0.17), without it 0.888 (0.834, NLL 0.38).
    """
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = slice(0, 1200), slice(1200, None)
    torch.manual_seed(0)
    swag = SWAGMoments(
        start=4, every_n_epochs=1, rank=6, lr=0.2, net="model", likelihood=Categorical()
    )
    loader = DataLoader(TensorDataset(inputs[train], targets[train]), 64, shuffle=True)
    quiet_trainer(max_epochs=10, callbacks=[swag]).fit(Classifier(), loader)

    def scores(posterior: Posterior) -> tuple[float, float, float]:
        predictive = posterior.predict(inputs[test])
        right = [one.argmax(-1) == targets[test] for one in (predictive.mean, predictive.outputs)]
        mixed, alone = (float(one.float().mean()) for one in right)
        return mixed, alone, float(-predictive.log_prob(targets[test]).mean())

    average, _, _ = scores(swag.average())
    refreshed, stale = scores(swag.posterior()), scores(swag.gaussian())
    assert average > 0.92
    assert abs(refreshed[0] - average) <= 0.01
    assert stale[0] < refreshed[0] - 0.02
    assert stale[1] < refreshed[1] - 0.05
    assert stale[2] > refreshed[2] * 1.3
