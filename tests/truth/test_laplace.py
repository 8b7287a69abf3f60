"""Laplace approximations against closed forms and dense matrices, in float64.

Nothing here is left to chance: every comparison is of numbers that are equal but for rounding, so
that a false alarm has no chance, and the tolerance is 1e-8 where nothing else is said.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import LaplaceBNN, LaplacePosterior, laplace
from lightning_bnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lightning_bnn.priors import Normal
from lightning_bnn.selection import last_layer
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression

PROBLEM = LinearRegression.make()
EXACT: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}


def covariance_of(posterior: LaplacePosterior) -> Tensor:
    """The whole covariance matrix, by projecting the identity."""
    half = posterior.covariance.project(torch.eye(posterior.covariance.layout.size).double())
    return half @ half.T


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(examples: int = 30, features: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(examples, features, generator=generator(seed), dtype=torch.float64)


def make_net(*sizes: int) -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def targets_of(likelihood: Likelihood, count: int, outputs: int) -> Tensor:
    if isinstance(likelihood, Categorical):
        return torch.randint(outputs, (count,), generator=generator(5))
    shape = count, outputs // 2 if isinstance(likelihood, HeteroscedasticGaussian) else outputs
    values = torch.randn(*shape, generator=generator(5), dtype=torch.float64)
    if isinstance(likelihood, Bernoulli):
        return (values > 0).double()
    return values.exp().round() if isinstance(likelihood, Poisson) else values


def flat_function(net: nn.Module) -> tuple[Tensor, Any]:
    """The flat weights, and the outputs as a function of them."""
    own = {name: p.detach() for name, p in net.named_parameters()}
    flat = torch.cat([p.flatten() for p in own.values()])

    def run(flat: Tensor, inputs: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in own.values()])
        named = {n: part.view(p.shape) for (n, p), part in zip(own.items(), parts, strict=True)}
        return torch.func.functional_call(net, named, (inputs,))

    return flat, run


def hessian_of(function: Any) -> Any:
    return torch.func.jacrev(torch.func.jacrev(function))


def gauss_newton(net: nn.Module, likelihood: Likelihood, inputs: Tensor, targets: Tensor) -> Tensor:
    """Σ JᵀΛJ from dense Jacobians and Hessians of each example, by nothing of ours but log_prob."""
    flat, run = flat_function(net)
    total = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        outputs = run(flat, x)
        jacobian = torch.func.jacrev(partial(run, inputs=x))(flat)[0]
        hessian = hessian_of(lambda f, y=y: -likelihood.log_prob(f[None], y)[0])(outputs[0])
        total += jacobian.T @ hessian @ jacobian
    return total


# ---------------------------------------------------------------- linear regression


@pytest.mark.parametrize("structure", ["full", "kron", "low rank"])
def test_a_fit_of_linear_regression_is_exact(structure: str) -> None:
    """Mean, covariance and evidence; one linear layer has exact Kronecker factors, too."""
    optimizer = partial(LBFGS, lr=0.7, max_iter=80, tolerance_grad=1e-14, tolerance_change=0)
    bnn = LaplaceBNN(
        PROBLEM.net(), Gaussian(PROBLEM.noise_sd), Normal(0.0, PROBLEM.prior_sd),
        structure=structure, optimizer=optimizer, seed=0,
    )  # fmt: skip
    data = TensorDataset(PROBLEM.inputs, PROBLEM.targets)
    quiet_trainer(max_epochs=2, precision="64-true").fit(bnn, DataLoader(data, batch_size=120))
    posterior = bnn.posterior()
    assert isinstance(posterior, LaplacePosterior)
    mean = posterior.mean["weight"][0].numpy()
    np.testing.assert_allclose(mean, PROBLEM.mean, rtol=1e-8, atol=1e-9)
    truth = np.linalg.inv(PROBLEM.precision)
    np.testing.assert_allclose(covariance_of(posterior).numpy(), truth, rtol=1e-8, atol=1e-11)
    assert bnn.log_evidence() == pytest.approx(PROBLEM.log_evidence, abs=1e-8)
    x = rows(7, 5, seed=2)
    predictive = posterior.predict(x)
    expected = np.einsum("bi,ij,bj->b", x, truth, x)
    np.testing.assert_allclose(predictive.mean[:, 0], x.numpy() @ PROBLEM.mean, atol=1e-8)
    np.testing.assert_allclose(predictive.epistemic[:, 0], expected, rtol=1e-8)


def test_independent_weights_have_the_variances_of_the_mean_field() -> None:
    """1/A_ii, as variational inference of independent weights finds it."""
    net = PROBLEM.net()
    data = [(PROBLEM.inputs, PROBLEM.targets)]
    posterior = laplace(
        net, data, Gaussian(PROBLEM.noise_sd), Normal(0.0, PROBLEM.prior_sd), "diagonal"
    )
    variance = posterior.moments().variance["weight"][0].numpy()
    np.testing.assert_allclose(variance, 1 / PROBLEM.precision.diagonal(), rtol=1e-10)


def test_the_last_layer_is_linear_regression_on_features() -> None:
    net, x = make_net(3, 5, 1), rows()
    y = torch.sin(x[:, :1])
    features = torch.cat([net[:2](x).detach(), torch.ones(30, 1)], 1)
    posterior = laplace(
        net, [(x[:11], y[:11]), (x[11:], y[11:])], Gaussian(0.3), Normal(0.0, 2.0),
        structure="full", bayesian=last_layer,
    )  # fmt: skip
    truth = torch.linalg.inv(features.T @ features / 0.09 + torch.eye(6).double() / 4)
    torch.testing.assert_close(covariance_of(posterior), truth, **EXACT)
    spread = (features @ truth * features).sum(1)
    torch.testing.assert_close(posterior.predict(x).epistemic[:, 0], spread, **EXACT)


# ---------------------------------------------------------------- other likelihoods


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (Bernoulli(), 1),
        (Categorical(), 4),
        (Categorical(class_weights=[0.5, 1.0, 2.0, 0.1]), 4),
        (Poisson(), 2),
        (Gaussian([0.3, 2.0], learn=True), 2),
    ],
    ids=repr,
)
def test_regression_without_hidden_units_has_the_dense_hessian(
    likelihood: Likelihood, outputs: int
) -> None:
    """Logistic and Poisson regression: the curvature is the Hessian of the log likelihood itself.

    And so is that of the last layer, in any structure that can hold it.
    """
    net, x = make_net(3, outputs), rows()
    likelihood = likelihood.double()
    y = targets_of(likelihood, 30, outputs)
    flat, run = flat_function(net)
    hessian = hessian_of(lambda w: -likelihood.log_prob(run(w, x), y).sum())(flat)
    precision = torch.eye(len(flat)).double() / 0.49
    truth = torch.linalg.inv(hessian + precision)
    prior = Normal(0.0, 0.7)
    posterior = laplace(net, [(x, y)], likelihood, prior, "full")
    torch.testing.assert_close(covariance_of(posterior), truth, **EXACT)
    spread = laplace(net, [(x, y)], likelihood, prior, "diagonal").covariance.variance()
    torch.testing.assert_close(spread, 1 / (hessian + precision).diagonal(), **EXACT)
    volume = -0.5 * torch.linalg.slogdet((hessian + precision) / (2 * torch.pi))[1]
    prior_density = prior.log_prob(flat, 0.0, 0.7).sum()
    evidence = likelihood.log_prob(run(flat, x), y).sum() + prior_density + volume
    assert posterior.log_evidence == pytest.approx(float(evidence.detach()), abs=1e-8)


@pytest.mark.parametrize("structure", ["full", "diagonal", "low rank"])
def test_a_network_has_the_dense_gauss_newton_matrix(structure: str) -> None:
    net, x = make_net(3, 4, 3), rows()
    y = targets_of(Categorical(), 30, 3)
    truth = gauss_newton(net, Categorical(), x, y)
    truth.diagonal().add_(1.0)
    posterior = laplace(net, DataLoader(TensorDataset(x, y), 7), Categorical(), Normal(), structure)
    if structure == "diagonal":
        truth = torch.diag(truth.diagonal())
    torch.testing.assert_close(covariance_of(posterior), torch.linalg.inv(truth), **EXACT)


# ---------------------------------------------------------------- Kronecker factors


def test_one_layer_with_a_constant_hessian_has_exact_factors() -> None:
    """Two outputs of different noise, a bias, and priors that differ between both."""
    net, x = make_net(3, 2), rows()
    y = targets_of(Gaussian(), 30, 2)
    prior = {"*.bias": Normal(0.0, 3.0), "*": Normal(1.0, 0.5)}
    likelihood = Gaussian([0.3, 2.0])
    full, kron = (laplace(net, [(x, y)], likelihood, prior, s) for s in ("full", "kron"))
    torch.testing.assert_close(covariance_of(kron), covariance_of(full), **EXACT)
    assert kron.log_evidence == pytest.approx(full.log_evidence, abs=1e-8)
    variance = kron.covariance.variance()
    torch.testing.assert_close(variance, full.covariance.variance(), **EXACT)


def test_examples_without_a_label_are_in_neither_factor() -> None:
    """Their inputs are other than those with one, as those of padding are."""
    net, x, y = make_net(3, 4), rows(), torch.arange(30) % 4
    x[20:], y[20:] = 0.01 * x[20:], -1
    made = [(x, y), (x[:20], y[:20])]
    some, labelled = (laplace(net, [d], Categorical(-1), Normal(), "kron") for d in made)
    torch.testing.assert_close(covariance_of(some), covariance_of(labelled), **EXACT)
    assert some.log_evidence == pytest.approx(labelled.log_evidence, abs=1e-8)


@pytest.mark.parametrize("likelihood", [Categorical(), HeteroscedasticGaussian()], ids=repr)
def test_one_example_has_exact_factors_in_each_layer(likelihood: Likelihood) -> None:
    """The blocks of the layers are those of the whole matrix; those between layers are left out."""
    net, x = make_net(3, 4, 2), rows(1)
    y = targets_of(likelihood, 1, 2)
    full = laplace(net, [(x, y)], likelihood, Normal(0.0, 1e3), "full")
    kron = laplace(net, [(x, y)], likelihood, Normal(0.0, 1e3), "kron")
    precision, factors = (torch.linalg.inv(covariance_of(one)) for one in (full, kron))
    for block in (slice(0, 16), slice(16, 26)):
        torch.testing.assert_close(
            factors[block, block], precision[block, block], rtol=1e-5, atol=1e-5
        )
    assert not factors[:16, 16:].abs().max() > 1e-6


def test_a_linear_network_with_one_output_has_exact_blocks_for_one_layer_of_it() -> None:
    """Its output is linear in a layer, and the gradient b is the same for all examples."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    x, y = rows(), targets_of(Gaussian(), 30, 1)
    full = laplace(net, [(x, y)], Gaussian(0.5), Normal(), "full", bayesian="0.*")
    kron = laplace(net, [(x, y)], Gaussian(0.5), Normal(), "kron", bayesian="0.*")
    torch.testing.assert_close(covariance_of(kron), covariance_of(full), **EXACT)


def test_a_convolution_with_one_place_is_a_linear_layer() -> None:
    conv = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()).double()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        linear[1].weight.copy_(conv[0].weight.flatten(1))
        linear[1].bias.copy_(conv[0].bias)
    x = torch.randn(9, 2, 2, 2, generator=generator(), dtype=torch.float64)
    y = targets_of(Categorical(), 9, 3)
    one, other = (laplace(n, [(x, y)], Categorical(), Normal()) for n in (conv, linear))
    torch.testing.assert_close(covariance_of(one), covariance_of(other), **EXACT)
    full = laplace(conv, [(x, y)], Categorical(), Normal(), "full")
    dense = laplace(linear, [(x, y)], Categorical(), Normal(), "full")
    torch.testing.assert_close(covariance_of(full), covariance_of(dense), **EXACT)


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2, "dilation": 2}, {
    "padding": "same", "padding_mode": "circular"}], ids=str)  # fmt: skip
def test_convolutional_factors_by_hand(options: Any) -> None:
    """A and B from unfolded patches and gradients, at any padding and stride."""
    torch.manual_seed(3)
    conv = nn.Conv2d(2, 3, 3, **options).double()
    net = nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(1).double())
    x = torch.randn(4, 2, 7, 7, generator=generator(), dtype=torch.float64)
    out = net(x)
    y = torch.zeros_like(out)
    kron = laplace(net, [(x, y)], Gaussian(1.0), Normal(), bayesian="0.*")
    # the gradient of a patch's products, one output place at a time
    places = conv(x).shape[2] * conv(x).shape[3]
    patches = torch.zeros(4, places, 19, dtype=torch.float64)
    patches[..., 18] = 1
    for place in range(places):
        weight = torch.zeros_like(conv.weight).requires_grad_()
        for i in range(4):
            value = torch.func.functional_call(conv, {"weight": weight}, (x[i : i + 1],))
            (patch,) = torch.autograd.grad(value.flatten(2)[0, 0, place], weight)
            patches[i, place, :18] = patch[0].flatten()
    gradients = net[2].weight.detach().view(3, places)
    a = torch.einsum("ipf,ipg->fg", patches, patches) / (4 * places)
    b = 4 * gradients @ gradients.T
    precision = torch.kron(b, a) + torch.eye(57).double()
    order = [o * 19 + f for o in range(3) for f in range(18)] + [o * 19 + 18 for o in range(3)]
    truth = torch.linalg.inv(precision)[order][:, order]
    torch.testing.assert_close(covariance_of(kron), truth, **EXACT)


# ---------------------------------------------------------------- N, the prior, the evidence


@pytest.mark.parametrize("structure", ["full", "kron", "diagonal", "low rank"])
def test_the_covariance_moves_with_n_and_the_prior_as_the_formula_says(structure: str) -> None:
    """(cH + cP)⁻¹ = (H + P)⁻¹/c, and batches that are seen several times count once."""
    net, x = make_net(3, 4, 3), rows()
    y = targets_of(Categorical(), 30, 3)
    approximate = partial(laplace, net, likelihood=Categorical(), structure=structure)
    once = approximate(DataLoader(TensorDataset(x, y), 8), prior=Normal(0.0, 1.0))
    more = approximate([(x, y)], prior=Normal(0.0, 0.5), num_data=120)
    torch.testing.assert_close(4 * covariance_of(more), covariance_of(once), **EXACT)
    thrice = approximate([(x, y)] * 3, prior=Normal(0.0, 1.0), num_data=30)
    torch.testing.assert_close(covariance_of(thrice), covariance_of(once), **EXACT)
    assert thrice.log_evidence == pytest.approx(once.log_evidence, abs=1e-8)
    vague = approximate([(x, y)], prior=Normal(0.0, 1e-3))
    torch.testing.assert_close(
        covariance_of(vague), 1e-6 * torch.eye(31).double(), rtol=1e-4, atol=1e-10
    )


@pytest.mark.parametrize("structure", ["full", "kron", "diagonal", "low rank"])
def test_one_factor_on_the_prior_maximises_the_evidence(structure: str) -> None:
    """Against the evidence of given scales, each from a pass of its own, maximised on a line."""
    net, x = make_net(3, 4, 3), rows()
    y = targets_of(Categorical(), 30, 3)
    approximate = partial(laplace, net, [(x, y)], Categorical(), structure=structure)

    def loss(log_scale: float) -> float:
        return -float(approximate(prior=Normal(0.0, float(np.exp(log_scale)))).log_evidence or 0)

    found = approximate(prior=Normal(0.0, 2.0), scales="one")
    truth = minimize_scalar(loss, bounds=(-4.0, 3.0), method="bounded", options={"xatol": 1e-9})
    assert found.log_evidence == pytest.approx(-truth.fun, abs=1e-8)
    assert -3.9 < truth.x < 2.9  # inside of the bounds
    given = approximate(prior=Normal(0.0, float(np.exp(truth.x))))
    torch.testing.assert_close(covariance_of(found), covariance_of(given), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("structure", ["full", "kron", "diagonal", "low rank"])
def test_factors_of_each_tensor_are_at_a_maximum(structure: str) -> None:
    """Moving the scale of any tensor by 3 % either way lowers the evidence."""
    net, x = make_net(3, 4, 3), rows()
    y = targets_of(Categorical(), 30, 3)
    bnn = LaplaceBNN(net, Categorical(), Normal(), structure=structure, scales="per tensor")
    net = net.requires_grad_(True)
    trainer = quiet_trainer(max_steps=3, max_epochs=-1, precision="64-true")
    trainer.fit(bnn, DataLoader(TensorDataset(x, y), batch_size=30))
    scales = {name: value**-0.5 for name, value in bnn.prior_precisions().items()}
    fitted = bnn.posterior()
    with torch.no_grad():
        for name, value in fitted.mean.items():
            net.get_parameter(name).copy_(value)

    def evidence(**changed: float) -> float:
        prior = {name: Normal(0.0, scale * changed.get(name.replace(".", "_"), 1.0))
                 for name, scale in scales.items()}  # fmt: skip
        return float(laplace(net, [(x, y)], Categorical(), prior, structure).log_evidence or 0)

    best = evidence()
    assert best == pytest.approx(bnn.log_evidence(), abs=1e-6)
    for name, scale in scales.items():
        if 1e-3 < scale < 1e3:  # else at the end of the range that is looked at
            for factor in (0.97, 1.03):
                assert evidence(**{name.replace(".", "_"): factor}) < best + 1e-9, name
    assert sum(1e-3 < scale < 1e3 for scale in scales.values()) >= 2


@pytest.mark.parametrize("structure", ["full", "kron", "diagonal", "low rank"])
def test_a_learned_noise_is_at_the_maximum_of_the_evidence(structure: str) -> None:
    """Moving the noise, the prior's scale or both by 3 % lowers it, each in a pass of its own."""
    net, x = make_net(3, 4, 2), rows()
    y = targets_of(Gaussian(), 30, 2)
    data = [(x, y)]
    start = Gaussian([0.2, 0.3], learn=True)
    found = laplace(net, data, start, Normal(0.0, 2.0), structure, scales="one")
    noise = found.likelihood.log_scale.exp().tolist()  # type: ignore[union-attr, operator]
    assert noise[1] / noise[0] == pytest.approx(1.5)
    assert start.log_scale.exp().tolist() == pytest.approx([0.2, 0.3])  # as it was given

    def evidence(wider: float, log_scale: float) -> float:
        likelihood = Gaussian([wider * each for each in noise])
        prior = Normal(0.0, float(np.exp(log_scale)))
        return float(laplace(net, data, likelihood, prior, structure).log_evidence or 0)

    found_scale = minimize_scalar(lambda log_scale: -evidence(1.0, log_scale), bounds=(-4.0, 3.0),
                                  method="bounded", options={"xatol": 1e-9})  # fmt: skip
    # in float32 the noise is, by 1e-7, another one; at a maximum that hardly moves the evidence
    assert found.log_evidence == pytest.approx(-found_scale.fun, abs=1e-5)
    for wider in (-0.03, 0.0, 0.03):
        for moved in (-0.03, 0.0, 0.03):
            if wider or moved:
                assert evidence(1 + wider, found_scale.x + moved) < found.log_evidence, (
                    wider,
                    moved,
                )


def test_a_learned_noise_is_that_of_the_residuals_and_of_the_degrees_of_freedom() -> None:
    """RSS/(N − γ), to 1e-5 (float32): with 40 weights and 60 examples 1.7 times the residuals'."""
    x, noise = rows(60, 40), 0.5
    weights = torch.randn(40, generator=generator(1), dtype=torch.float64)
    y = (x @ weights + noise * torch.randn(60, generator=generator(2), dtype=torch.float64))[
        :, None
    ]
    net = nn.Linear(40, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
        residuals = float((y - net(x)).square().sum())
    fitted = (residuals / 60) ** 0.5
    found = laplace(net, [(x, y)], Gaussian(fitted, learn=True), structure="full")
    sd = float(found.likelihood.log_scale.exp())  # type: ignore[union-attr, operator, arg-type]
    determined = float(torch.trace(covariance_of(found) @ x.T @ x)) / sd**2
    assert sd**2 == pytest.approx(residuals / (60 - determined), rel=1e-5)
    assert 38 < determined < 40
    assert fitted < 0.65 * noise < 0.8 * noise < sd < 1.25 * noise


def test_the_evidence_finds_the_scale_that_the_weights_were_drawn_with() -> None:
    """With the exact mode, MacKay's fixed point is the maximum of the marginal likelihood in s.

    Found by turns of mode and scale, it is that of scipy on the closed form, to 1e-6.
    """

    def marginal(log_scale: float) -> float:
        return -LinearRegression(
            PROBLEM.inputs, PROBLEM.targets, PROBLEM.noise_sd, float(np.exp(log_scale))
        ).log_evidence

    truth = float(np.exp(minimize_scalar(marginal, bounds=(-3, 3), method="bounded",
                                         options={"xatol": 1e-10}).x))  # fmt: skip
    scale, net = 5.0, PROBLEM.net()
    for _ in range(60):
        problem = LinearRegression(PROBLEM.inputs, PROBLEM.targets, PROBLEM.noise_sd, scale)
        net.weight.data[0] = torch.tensor(problem.mean)
        found = laplace(
            net, [(PROBLEM.inputs, PROBLEM.targets)], Gaussian(PROBLEM.noise_sd),
            Normal(0.0, scale), "full", scales="one",
        )  # fmt: skip
        precision = (
            np.linalg.inv(covariance_of(found).numpy())
            - PROBLEM.inputs.numpy().T @ (PROBLEM.inputs.numpy()) / PROBLEM.noise_sd**2
        )
        scale = float(precision[0, 0] ** -0.5)
    assert scale == pytest.approx(truth, rel=1e-6)
