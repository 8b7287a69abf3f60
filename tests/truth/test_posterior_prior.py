"""Linear regression in two parts is linear regression on all data.

The posterior of the first 70 of 120 examples is the prior of a fit on the other 50. Every
comparison but one is of numbers that are equal but for rounding, so that a false alarm has no
chance; the one of random anchors states its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.optim import LBFGS
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import (
    IVONBNN,
    SGMCMC,
    BayesianLinear,
    DeepEnsemble,
    DrawsPosterior,
    GaussianPosterior,
    LaplaceBNN,
    LowRankPosterior,
    MCDropoutBNN,
    PosteriorPrior,
    VariationalBNN,
    WeightPosterior,
    laplace,
)
from lightning_bnn.ensembles.randomise import draw_offsets
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import FullRank, Kronecker, LowRank, MeanField
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import MatrixNormalPosterior
from lightning_bnn.priors import BoundPrior, Normal
from lightning_bnn.samplers import HMC, SGLD
from tests.families.exact import exact
from tests.trainers import quiet_trainer
from tests.truth import linear_gaussian
from tests.truth.linear_gaussian import probe
from tests.truth.linear_regression import LinearRegression
from tests.truth.test_samplers import CASES

ALL = LinearRegression.make()
PART = 70
CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}


def part(problem: LinearRegression, rows: slice) -> LinearRegression:
    return LinearRegression(
        problem.inputs[rows], problem.targets[rows], problem.noise_sd, problem.prior_sd
    )


MONDAY, TUESDAY = part(ALL, slice(PART)), part(ALL, slice(PART, None))


def orthogonal() -> LinearRegression:
    """Columns that are orthogonal in both parts: independent weights are the truth."""
    random = np.random.default_rng(0)
    roots = [np.linalg.qr(random.normal(size=(n, 5)))[0] for n in (PART, 50)]
    inputs = np.concatenate([6 * roots[0], 5 * roots[1] * np.arange(1, 6)])
    targets = inputs @ random.normal(size=5) + 0.7 * random.normal(size=120)
    return LinearRegression(torch.tensor(inputs), torch.tensor(targets)[:, None], 0.7, 0.9)


def gaussian(problem: LinearRegression) -> GaussianPosterior:
    """The exact posterior, of independent weights."""
    mean, sd = torch.tensor(problem.mean)[None], torch.tensor(np.diag(problem.precision)[None])
    net, noise = problem.net(), Gaussian(problem.noise_sd)
    return GaussianPosterior(net, noise, {"weight": mean}, {"weight": sd**-0.5})


def full(problem: LinearRegression) -> LowRankPosterior:
    """The exact posterior."""
    root = torch.linalg.cholesky(torch.linalg.inv(torch.tensor(problem.precision)))
    mean = torch.tensor(problem.mean)[None]
    return LowRankPosterior.from_covariance(
        problem.net(), Gaussian(problem.noise_sd), {"weight": mean},
        {"weight": torch.zeros_like(mean)}, {"weight": root.T[:, None].clone()},
    )  # fmt: skip


def fit(bnn: Any, problem: LinearRegression) -> Any:
    data = TensorDataset(problem.inputs, problem.targets)
    loader = DataLoader(data, batch_size=len(data))
    quiet_trainer(max_epochs=2, precision="64-true").fit(bnn, loader)
    return bnn


def check_posterior(posterior: WeightPosterior, problem: LinearRegression) -> None:
    mean = posterior.moments().mean["weight"][0]
    torch.testing.assert_close(mean, torch.tensor(problem.mean), **CLOSE)
    truth = torch.linalg.inv(torch.tensor(problem.precision))
    torch.testing.assert_close(posterior.covariance_matrix(), truth, rtol=1e-8, atol=1e-12)


# ---------------------------------------------------------------- the prior's density

NET = nn.Linear(3, 2).double()
OWN = dict(NET.named_parameters())


def coupled(count: int = 8, dtype: torch.dtype = torch.float64) -> WeightPosterior:
    torch.manual_seed(3)
    mean = {name: torch.randn_like(one).to(dtype) for name, one in OWN.items()}
    columns = {name: 0.4 * torch.randn(count, *one.shape, dtype=dtype) for name, one in OWN.items()}
    own = {name: torch.full_like(one, 0.05).to(dtype) for name, one in OWN.items()}
    return LowRankPosterior.from_covariance(NET, Gaussian(0.1), mean, own, columns)


def bound(tempered: float = 1.0, power: float = 1.0) -> tuple[BoundPrior, MultivariateNormal]:
    posterior = coupled()
    mean = torch.cat([one.flatten() for one in posterior.mean.values()])
    prior = BoundPrior(PosteriorPrior(posterior, power), NET, OWN)
    prior.power = tempered
    covariance = posterior.covariance_matrix() / (power * tempered)
    return prior, MultivariateNormal(mean, covariance)


@pytest.mark.parametrize("tempered", [1.0, 2.5])
@pytest.mark.parametrize("power", [1.0, 0.3])
def test_the_density_and_its_gradient_are_those_of_torch_distributions(
    tempered: float, power: float
) -> None:
    prior, truth = bound(tempered, power)
    weights = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    energy = -truth.log_prob(weights)
    torch.testing.assert_close(prior.energy(weights), energy, **CLOSE)
    (slope,) = torch.autograd.grad(energy.sum(), weights)
    (found,) = torch.autograd.grad(prior.energy(weights).sum(), weights)
    torch.testing.assert_close(found, slope, **CLOSE)
    added = torch.ones_like(slope)
    prior.add_energy_gradient(added, torch.full((4,), 2.0).double(), weights.detach())
    torch.testing.assert_close(added, 1 + 2 * slope, **CLOSE)
    assert prior.energy_at_mode() == pytest.approx(-float(truth.log_prob(truth.mean)))


@pytest.mark.parametrize("family", [MeanField(), FullRank(), LowRank(3), Kronecker()])
def test_the_kl_is_that_of_torch_distributions(family: Any) -> None:
    """The mean of the estimate over the sigma points of the noise is the KL exactly."""
    prior, truth = bound()
    torch.manual_seed(4)
    family = family.bind(OWN, 0.3)
    with torch.no_grad():
        for parameter in family.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    size = family.noise_size
    points = torch.cat([torch.eye(size), -torch.eye(size)]).double() * size**0.5
    draws = torch.stack([family.rsample(point) for point in points])
    kl = torch.stack([family.kl(draw, prior) for draw in draws]).mean()
    steps = (draws - family.mean).detach()
    q = MultivariateNormal(family.mean, steps.T @ steps / len(steps))
    torch.testing.assert_close(kl, kl_divergence(q, truth), **CLOSE)


def test_the_gradients_of_the_mean_fields_step_are_those_of_autograd() -> None:
    prior, truth = bound()
    torch.manual_seed(4)
    mean = torch.randn(8, dtype=torch.float64, requires_grad=True)
    sd = torch.rand(8, dtype=torch.float64, requires_grad=True)
    energy = -truth.log_prob(mean) + 0.5 * (truth.precision_matrix.diagonal() * sd**2).sum()
    noise = torch.randn(8, dtype=torch.float64)
    torch.testing.assert_close(prior.expected_energy(mean, sd, mean + sd * noise), energy, **CLOSE)
    slopes = torch.autograd.grad(energy, (mean, sd))
    found = [torch.zeros_like(one) for one in slopes]
    weight = torch.ones((), dtype=torch.float64)
    prior.add_energy_gradients(*found, weight, mean.detach(), sd.detach(), noise)
    torch.testing.assert_close(tuple(found), slopes, **CLOSE)


def test_draws_of_the_prior_have_its_covariance() -> None:
    """20,000 draws: the whitened covariance is Wishart's, whose eigenvalues lie within 0.04 of 1.

    Its edges are at (1 ± √(8/20000))² = 0.96 and 1.04; 6 % lies 8 sd of an edge farther out.
    """
    prior, truth = bound()
    like = torch.zeros(20_000, 8, dtype=torch.float64)
    drawn = draw_offsets(prior, torch.arange(20_000), like)
    white = torch.linalg.solve_triangular(truth.scale_tril, drawn.T, upper=False)
    values = torch.linalg.eigvalsh(torch.cov(white))
    assert 0.94 < float(values.min()) <= float(values.max()) < 1.06


# ---------------------------------------------------------------- two parts are the whole

OF_WEIGHTS: dict[str, Any] = {
    "SGLD": partial(SGMCMC, sampler=partial(SGLD, lr=1e-3), chains=3),
    "HMC": partial(SGMCMC, sampler=partial(HMC, lr=1e-3), chains=3),
    "ensemble": partial(DeepEnsemble, members=3),
}


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_the_energy_of_chains_and_members_is_that_of_all_data(name: str) -> None:
    """Its gradient is A(w − m) with A and m of all examples, and its differences follow."""
    bnn = OF_WEIGHTS[name](
        TUESDAY.net(), Gaussian(ALL.noise_sd), prior=full(MONDAY), num_data=50, seed=0
    )
    assert float(bnn.weights.detach().std(0).min()) > 0.01  # they begin apart, at draws
    bnn.weights.data.add_(torch.randn(3, 5, dtype=torch.float64))
    energies = bnn.energies((TUESDAY.inputs, TUESDAY.targets))
    (slope,) = torch.autograd.grad(50 * energies.sum(), bnn.weights)
    distance = bnn.weights.detach() - torch.tensor(ALL.mean)
    precision = torch.tensor(ALL.precision)
    torch.testing.assert_close(slope, distance @ precision, **CLOSE)
    quadratic = 0.5 * (distance @ precision * distance).sum(1)
    evidence = ALL.log_evidence - MONDAY.log_evidence
    at_mode = 50 * energies.detach() - quadratic
    # −log p(D₂|m) p(m|D₁) = −log p(D₂|D₁) − log p(m|D₁, D₂)
    expected = -evidence - 0.5 * float(torch.logdet(precision / (2 * torch.pi)))
    torch.testing.assert_close(at_mode, torch.full_like(at_mode, expected), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_samplers_step_is_that_on_all_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The affine map, and so the stationary law, where rates are in the same ratio to N."""
    if name == "PSGLD":
        pytest.skip("its metric is of gradients on each part")
    case, whole = CASES[name], None
    for problem, prior, share in ((ALL, None, 1.0), (TUESDAY, full(MONDAY), 50 / 120)):

        def energy(problem: LinearRegression, weight: Tensor, prior: Any = prior) -> Tensor:
            given = Normal(0.0, problem.prior_sd) if prior is None else prior
            bnn = DeepEnsemble(
                problem.net(), Gaussian(problem.noise_sd), given, members=1,
                num_data=len(problem.inputs), mode="loop",
            )  # fmt: skip
            outputs = problem.inputs @ weight[:, None]
            return bnn.target.mean_energy(weight, outputs, problem.targets)

        monkeypatch.setattr(linear_gaussian, "mean_energy", energy)
        rate = case.small["lr"] * share
        make = case.make("small", lr=rate, num_data=len(problem.inputs))
        found = probe(make, problem, case.prepare)
        whole = found if whole is None else whole
    np.testing.assert_allclose(found.transition, whole.transition, atol=1e-10)
    np.testing.assert_allclose(found.offset, whole.offset, atol=1e-10)
    np.testing.assert_allclose(found.noise, whole.noise, atol=1e-10)


@pytest.mark.parametrize("family", [FullRank(), MeanField(), LowRank(2), Kronecker()])
def test_the_bound_of_variational_inference_is_that_on_all_data(family: Any) -> None:
    """ELBO(q) of Tuesday and log p(Monday) are ELBO(q) of all data, whatever q is."""
    elbos = []
    for problem, prior in ((TUESDAY, full(MONDAY)), (ALL, None)):
        bnn = exact(problem, family, prior=prior)
        if prior is not None:
            start = bnn.family.mean.detach()
            torch.testing.assert_close(start, torch.tensor(MONDAY.mean), **CLOSE)
        torch.manual_seed(0)
        with torch.no_grad():
            bnn.family.mean.copy_(torch.tensor(MONDAY.mean))
            for parameter in bnn.family.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        elbos.append(-len(problem.inputs) * bnn.loss((problem.inputs, problem.targets)).item())
    assert elbos[0] + MONDAY.log_evidence == pytest.approx(elbos[1], abs=1e-8)


@pytest.mark.parametrize("kind", [VariationalBNN, IVONBNN])
def test_independent_weights_are_exact_where_inputs_are_orthogonal(kind: Any) -> None:
    """At the posterior of all data the exact bound has no slope, and is the evidence."""
    problem = orthogonal()
    monday, tuesday = part(problem, slice(PART)), part(problem, slice(PART, None))
    bnn = exact(tuesday, MeanField(), prior=gaussian(monday))
    if kind is IVONBNN:
        other = IVONBNN(
            tuesday.net(), Gaussian(0.7), gaussian(monday), num_data=50, initial_scale=0.1
        )
        other.noise.stream, other.train_draws = bnn.noise.stream, bnn.train_draws
        bnn = other
    with torch.no_grad():
        bnn.family.mean.copy_(torch.tensor(problem.mean))
        bnn.family.rho.copy_(-0.5 * torch.tensor(np.diag(problem.precision)).log())
    loss = bnn.loss((tuesday.inputs, tuesday.targets))
    slopes = torch.autograd.grad(loss, (bnn.family.mean, bnn.family.rho))
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-10
    evidence = problem.log_evidence - monday.log_evidence
    assert -50 * loss.item() == pytest.approx(evidence, abs=1e-8)


LBFGS_TO_THE_END = partial(LBFGS, lr=0.7, max_iter=80, tolerance_grad=1e-14, tolerance_change=0)


@pytest.mark.parametrize("structure", ["full", "kron", "diagonal"])
def test_laplace_in_two_parts(structure: Any) -> None:
    """Mean, covariance and evidence, each part with the structure."""
    problem = orthogonal() if structure == "diagonal" else ALL
    monday, tuesday = part(problem, slice(PART)), part(problem, slice(PART, None))
    options: dict[str, Any] = {"structure": structure, "optimizer": LBFGS_TO_THE_END, "seed": 0}
    noise = Gaussian(problem.noise_sd)
    first = fit(LaplaceBNN(problem.net(), noise, Normal(0.0, problem.prior_sd), **options), monday)
    today = fit(LaplaceBNN(problem.net(), noise, first.posterior(), **options), tuesday)
    check_posterior(today.posterior(), problem)
    together = first.log_evidence() + today.log_evidence()
    assert together == pytest.approx(problem.log_evidence, abs=1e-7)
    assert today.prior_precisions() == {}


def test_laplace_of_several_outputs_in_two_parts() -> None:
    """Kronecker factors are exact for a linear layer and one noise; so is their sum."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 3).double(), torch.randn(60, 2).double()
    noise, net = Gaussian(0.7), nn.Linear(3, 2).double()
    whole = laplace(net, [(x, y)], noise, Normal(0.0, 0.5), structure="full", num_data=60)
    for structure in ("full", "kron"):
        taken: Any = partial(laplace, structure=structure, predictive="draws")
        first = taken(net, [(x[:20], y[:20])], noise, Normal(0.0, 0.5), num_data=20)
        today = taken(net, [(x[20:], y[20:])], noise, first, num_data=40)
        torch.testing.assert_close(
            today.covariance_matrix(), whole.covariance_matrix(), rtol=1e-7, atol=1e-12
        )


@pytest.mark.parametrize("correlated", [True, False])
def test_a_kronecker_product_as_the_prior_is_kept_by_kronecker_factors(correlated: bool) -> None:
    """Covariance and evidence are those of the full structure, with a noise for each output."""
    torch.manual_seed(0)
    net, noise = nn.Linear(3, 2, bias=False).double(), Gaussian([0.3, 0.8])
    x, y = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    sd = torch.outer(torch.tensor([0.5, 2.0]), torch.tensor([0.2, 1.0, 3.0])).double()
    roots = {"weight.rows": torch.randn(2, 2), "weight.columns": torch.randn(3, 3)}
    factors = {name: nn.functional.normalize(root.double(), dim=1) for name, root in roots.items()}
    mean = {"weight": torch.randn(2, 3).double()}
    yesterday = MatrixNormalPosterior(
        net, noise, mean, {"weight": sd}, factors if correlated else None
    )
    full, kron = (
        laplace(net, [(x, y)], noise, yesterday, structure=one)  # type: ignore[arg-type]
        for one in ("full", "kron")
    )
    torch.testing.assert_close(kron.covariance_matrix(), full.covariance_matrix(), **CLOSE)
    assert kron.log_evidence == pytest.approx(full.log_evidence, abs=1e-8)
    if correlated:
        with pytest.raises(ConfigurationError, match="a prior of independent weights"):
            laplace(net, [(x, y)], noise, yesterday, structure="low rank")  # type: ignore[arg-type]
    else:
        thin = laplace(net, [(x, y)], noise, yesterday, structure="low rank")  # type: ignore[arg-type]
        torch.testing.assert_close(thin.covariance_matrix(), full.covariance_matrix(), **CLOSE)


@pytest.mark.parametrize("outputs", [1, 3])
def test_bayesian_linear_in_two_parts(outputs: int) -> None:
    """Each output with a noise of its own, and so with a prior of its own on the second day."""
    torch.manual_seed(0)
    x = torch.randn(40, 4).double() @ (torch.eye(4) + 0.4).double()
    y = (x @ torch.randn(4, outputs).double() + 0.3 * torch.randn(40, outputs)).double()
    noise = Gaussian([0.3, 0.5, 0.2][:outputs])

    def fitted(prior: Any, rows: slice) -> BayesianLinear:
        bnn = BayesianLinear(nn.Linear(4, outputs).double(), noise, prior)
        data = DataLoader(TensorDataset(x[rows], y[rows]), batch_size=16)
        quiet_trainer(max_epochs=1, precision="64-true").fit(bnn, data)
        return bnn

    first, whole = (fitted(Normal(0.0, 2.0), rows) for rows in (slice(25), slice(40)))
    today = fitted(first.posterior(), slice(25, None))
    ours, theirs = today.posterior(), whole.posterior()
    for name in ("weight", "bias"):
        torch.testing.assert_close(ours.mean[name], theirs.mean[name], **CLOSE)
    torch.testing.assert_close(ours.covariance_matrix(), theirs.covariance_matrix(), **CLOSE)
    together = first.log_evidence() + today.log_evidence()
    assert together == pytest.approx(whole.log_evidence(), abs=1e-8)
    before = BayesianLinear(nn.Linear(4, outputs).double(), noise, first.posterior()).posterior()
    torch.testing.assert_close(before.mean["weight"], first.posterior().mean["weight"], **CLOSE)
    torch.testing.assert_close(
        before.covariance_matrix(), first.posterior().covariance_matrix(), **CLOSE
    )


def test_many_draws_of_a_posterior_come_close_to_it() -> None:
    """4000 draws of yesterday: whitened by the truth, Σ is Wishart's: 1 ± 0.07 and never 1 ± 0.11.

    (See tests/truth/test_ensemble.py for the rate.) Without their correlations it is far off.
    """
    generator = torch.Generator().manual_seed(0)
    sets = full(MONDAY).sample(4000, generator)["weight"]
    draws = DrawsPosterior(MONDAY.net(), Gaussian(0.7), [{"weight": one} for one in sets])
    own = dict(MONDAY.net().named_parameters())
    root = np.linalg.cholesky(MONDAY.precision)
    for covariance, near in (("full", True), ("diagonal", False)):
        prior: Any = PosteriorPrior(draws, covariance=covariance)  # type: ignore[arg-type]
        _, precision = prior.gaussian(MONDAY.net(), own)
        found = precision if precision.dim() == 2 else precision.diag()
        ratios = np.linalg.eigvalsh(root.T @ np.linalg.inv(found.numpy()) @ root)
        assert (ratios.min() > 0.89 and ratios.max() < 1.11) == near


def test_dropout_has_the_expected_energy_of_the_prior() -> None:
    """E[½(w − m)ᵀΛ(w − m)], by the average over masks: an input feature has one for its weights."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double()
    own = dict(net.named_parameters())
    torch.manual_seed(0)
    columns = {name: 0.4 * torch.randn(20, *one.shape).double() for name, one in own.items()}
    mean = {name: torch.randn_like(one) for name, one in own.items()}
    nothing = {name: torch.zeros_like(one) for name, one in own.items()}
    yesterday = LowRankPosterior.from_covariance(net, Gaussian(0.1), mean, nothing, columns)
    bnn = MCDropoutBNN(net, Gaussian(0.1), yesterday, rate=0.2, num_data=10)
    for name, one in bnn.net.named_parameters():
        torch.testing.assert_close(one.detach(), mean[name])
    with torch.no_grad():
        for one in bnn.net.parameters():
            one.add_(0.1)
    covariance, sizes = yesterday.covariance_matrix(), [6, 3, 6, 2]
    flat = torch.cat([torch.arange(sum(sizes[:i]), sum(sizes[: i + 1])) for i in (0, 1, 3)])
    total = 0.0
    for at, spread in ((flat, 0.0), (torch.arange(9, 15), 0.25)):
        prior = MultivariateNormal(torch.zeros(len(at)).double(), covariance[at][:, at])
        total -= float(prior.log_prob(torch.full((len(at),), 0.1).double()))
        weights = torch.cat([one.detach().flatten() for one in bnn.net.parameters()])[at]
        if spread:  # each of three features is there, at 1/0.8, or not
            for feature in range(3):
                step = weights.view(2, 3) * (torch.arange(3) == feature)
                total += (
                    0.5 * spread * float(step.flatten() @ prior.precision_matrix @ step.flatten())
                )
    assert bnn.kl().item() == pytest.approx(total, rel=1e-8)
