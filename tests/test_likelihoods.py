"""The likelihoods against SciPy, and what they say about data that does not fit."""

import json

import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import vmap

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from tests.toy_likelihoods import Geometric, Logistic, Ordinal

BATCH = 6


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def randint(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=generator(1))


# likelihood, outputs of one batch, its targets
CASES: dict[str, tuple[Likelihood, torch.Tensor, torch.Tensor]] = {
    "categorical": (Categorical(), randn(BATCH, 4), randint(4, BATCH)),
    "categorical-positions": (Categorical(), randn(BATCH, 4, 3, 2), randint(4, BATCH, 3, 2)),
    "categorical-uint8": (Categorical(), randn(BATCH, 4), randint(4, BATCH).to(torch.uint8)),
    "bernoulli": (Bernoulli(), randn(BATCH), randint(2, BATCH)),
    "bernoulli-labels": (Bernoulli(), randn(BATCH, 3), randint(2, BATCH, 3).float()),
    "bernoulli-column": (Bernoulli(), randn(BATCH, 1), randint(2, BATCH).bool()),
    "gaussian": (Gaussian(0.3), randn(BATCH), randn(BATCH, seed=2)),
    "gaussian-outputs": (Gaussian([0.3, 2.0]), randn(BATCH, 2), randn(BATCH, 2, seed=2)),
    "gaussian-column": (Gaussian(0.3), randn(BATCH, 1), randn(BATCH, seed=2).float()),
    "gaussian-learned": (
        Gaussian([0.3, 2.0], learn=True).double(),
        randn(BATCH, 2),
        randn(BATCH, 2, seed=2),
    ),
    "heteroscedastic": (HeteroscedasticGaussian(), randn(BATCH, 2), randn(BATCH, seed=2)),
    "heteroscedastic-outputs": (
        HeteroscedasticGaussian(0.1),
        randn(BATCH, 6),
        randn(BATCH, 3, seed=2),
    ),
    "poisson": (Poisson(), randn(BATCH), randint(9, BATCH)),
    "poisson-outputs": (Poisson(), randn(BATCH, 2), randint(9, BATCH, 2).float()),
    "poisson-row": (Poisson(), randn(BATCH), randint(9, BATCH, 1)),
    "logistic": (Logistic(), randn(BATCH), randn(BATCH, seed=2)),
    "geometric-outputs": (Geometric(), randn(BATCH, 2), randint(9, BATCH, 2)),
    "ordinal": (Ordinal(), randn(BATCH), randint(3, BATCH)),
}


def expected_log_prob(name: str, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """SciPy's answer, summed over everything but the batch."""
    kind = name.split("-")[0]
    if kind == "categorical":
        log_p = outputs - np.log(np.exp(outputs).sum(1, keepdims=True))
        values = np.take_along_axis(log_p, targets[:, None].astype(int), 1)
    elif kind == "bernoulli":
        p = 1 / (1 + np.exp(-outputs))
        values = stats.bernoulli(p).logpmf(targets.reshape(outputs.shape).astype(int))
    elif kind == "gaussian":
        scale = [0.3, 2.0] if outputs.ndim == 2 and outputs.shape[1] == 2 else 0.3
        values = stats.norm(outputs, scale).logpdf(targets.reshape(outputs.shape))
    elif kind == "heteroscedastic":
        mean, raw = np.split(outputs, 2, 1)
        scale = np.log1p(np.exp(raw)) + (0.1 if outputs.shape[1] == 6 else 1e-4)
        values = stats.norm(mean, scale).logpdf(targets.reshape(mean.shape))
    elif kind == "logistic":
        values = stats.logistic(outputs).logpdf(targets)
    elif kind == "geometric":
        values = stats.geom(1 / (1 + np.exp(-outputs)), loc=-1).logpmf(targets)
    elif kind == "ordinal":
        p = np.diff(stats.logistic(outputs[:, None]).cdf([-np.inf, -1, 1, np.inf]))
        values = np.log(p[np.arange(BATCH), targets])
    else:
        values = stats.poisson(np.exp(outputs)).logpmf(targets.reshape(outputs.shape))
    return values.reshape(BATCH, -1).sum(1)


@pytest.mark.parametrize("name", CASES)
class TestEveryLikelihood:
    def test_log_prob_against_scipy(self, name):
        likelihood, outputs, targets = CASES[name]
        likelihood.check(outputs, targets)
        actual = likelihood.log_prob(outputs, targets)
        assert actual.shape == (BATCH,)
        assert actual.dtype == torch.float64
        # A learned scale is stored in float32 when it is made, so exact to 1e-7 only.
        tolerance = 1e-5 if name == "gaussian-learned" else 1e-12
        expected = expected_log_prob(name, outputs.numpy(), targets.numpy())
        np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=tolerance)

    def test_gradient(self, name):
        likelihood, outputs, targets = CASES[name]
        outputs = outputs.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: likelihood.log_prob(x, targets), outputs)

    def test_float32_and_bfloat16(self, name):
        likelihood, outputs, targets = CASES[name]
        low = outputs.bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            actual = likelihood.log_prob(low, targets)
            predicted = likelihood.predictive(low[None]).log_prob(targets)
        assert actual.dtype == predicted.dtype == torch.float32
        torch.testing.assert_close(actual, likelihood.log_prob(low.float(), targets))
        exact = likelihood.log_prob(low.double(), targets)
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)

    def test_vmap_over_members(self, name):
        likelihood, outputs, targets = CASES[name]
        members = torch.stack([outputs, outputs + 0.1, -outputs])
        actual = vmap(likelihood.log_prob, in_dims=(0, None))(members, targets)
        expected = torch.stack([likelihood.log_prob(member, targets) for member in members])
        torch.testing.assert_close(actual, expected)
        gradient = torch.func.grad(lambda x: likelihood.log_prob(x, targets).sum())
        torch.testing.assert_close(
            vmap(gradient)(members), torch.stack([gradient(member) for member in members])
        )

    def test_predictive_mixes_draws(self, name):
        likelihood, outputs, targets = CASES[name]
        assert torch.equal(likelihood.predictive(outputs[None]).outputs, outputs[None])
        torch.testing.assert_close(
            likelihood.predictive(outputs[None]).log_prob(targets),
            likelihood.log_prob(outputs, targets),
        )
        draws = torch.stack([outputs, -outputs, outputs + 1])
        by_draw = torch.stack([likelihood.log_prob(draw, targets) for draw in draws])
        torch.testing.assert_close(
            likelihood.predictive(draws).log_prob(targets), by_draw.exp().mean(0).log()
        )

    def test_metrics_take_the_loaders_targets(self, name):
        likelihood, outputs, targets = CASES[name]
        metrics = likelihood.metrics()
        metrics.update(likelihood.predictive(outputs[None].detach()), targets)
        values = metrics.compute()
        classes = ("accuracy", "nll", "brier", "ece")
        regression = ("rmse", "nll", "crps", "coverage")
        assert set(values) == set(classes if likelihood.task == "classification" else regression)
        assert all(value.isfinite() and value.ndim == 0 for value in values.values())
        nll = -likelihood.log_prob(outputs, targets).mean()
        torch.testing.assert_close(values["nll"].double(), nll, rtol=1e-5, atol=1e-5)

    def test_config_and_state_rebuild(self, name):
        likelihood, outputs, targets = CASES[name]
        config = json.loads(json.dumps(likelihood.config()))
        again = type(likelihood)(**config).double()
        again.load_state_dict(likelihood.state_dict())
        assert again.config() == likelihood.config()
        assert repr(again) == repr(likelihood)
        torch.testing.assert_close(
            again.log_prob(outputs, targets), likelihood.log_prob(outputs, targets)
        )


class TestGaussianScale:
    def test_learned_scale_reaches_the_maximum_of_the_likelihood(self):
        residuals = 3 * randn(200)
        likelihood = Gaussian(1.0, learn=True).double()
        optimizer = torch.optim.LBFGS(
            likelihood.parameters(), max_iter=100, tolerance_grad=1e-12, tolerance_change=0
        )

        def closure():
            optimizer.zero_grad()
            loss = -likelihood.log_prob(torch.zeros(200).double(), residuals).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        root_mean_square = residuals.square().mean().sqrt()
        torch.testing.assert_close(likelihood.log_scale.exp(), root_mean_square)
        predictive = likelihood.predictive(torch.zeros(2, 4).double())
        torch.testing.assert_close(predictive.aleatoric, root_mean_square.square().expand(4))
        assert likelihood.config() == {"scale": 1.0, "learn": True}

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), [1.0, 0.0]])
    def test_scales_must_be_positive(self, scale):
        for kind in (Gaussian, HeteroscedasticGaussian):
            with pytest.raises(ConfigurationError, match="scale= is a number greater than 0; got"):
                kind(scale)

    def test_scales_must_match_the_outputs(self):
        likelihood = Gaussian([1.0, 2.0, 3.0])
        for call in (likelihood.check, likelihood.log_prob):
            with pytest.raises(DataError, match=r"3 scales, one per output, .* gives 2 outputs"):
                call(randn(BATCH, 2), randn(BATCH, 2))
            with pytest.raises(DataError, match="gives 1 outputs"):
                call(randn(3), randn(3))  # would broadcast over the batch
        with pytest.raises(DataError, match="gives 2 outputs"):
            likelihood.predictive(randn(4, BATCH, 2))


NAN = float("nan")
BAD = [
    # likelihood, outputs, targets, what the error says
    (Categorical(), randn(6), randint(2, 6), r"one logit per class on axis 1; got \(6,\)"),
    (Categorical(), randn(6, 1), randint(1, 6), "at least 2 logits per example, got 1"),
    (Categorical(), randn(6, 3), randint(3, 6).float(), "integer dtype, got torch.float32"),
    (Categorical(), randn(6, 2), randint(2, 6).bool(), r"got torch.bool.*targets.long\(\)"),
    (Categorical(), randn(6, 3), randn(6, 3), r"one-hot, pass targets.argmax\(1\)"),
    (Categorical(), randn(6, 3), randint(3, 6, 1), r"got targets of shape \(6, 1\).*squeeze\(1\)"),
    (Categorical(), randn(6, 3, 4), randint(3, 6), r"indices of shape \(6, 4\)"),
    (
        Categorical(),
        randn(3, 3),
        torch.tensor([0, 3, 4]),
        r"classes from 0 to 2, as the network gives 3 logits; 2 of 3 are not, the first being 3 "
        r"at index \(1,\)",
    ),
    (Categorical(), randn(2, 3), torch.tensor([0, -100]), "the first being -100"),
    (Bernoulli(), randn(2), torch.tensor([0.0, 0.5]), "0 or 1; 1 of 2 are not.* 0.5 at index"),
    (Bernoulli(), randn(2), torch.tensor([0, 2]), r"being 2 at index \(1,\).*Categorical\(\)"),
    (Bernoulli(), randn(6, 3), randint(2, 6), "gives 3 and the targets hold 1 numbers"),
    (Bernoulli(), randn(6, 1), randint(2, 5), r"got \(5,\). The first axis is the batch"),
    (Gaussian(), randn(6, 1), randn(6, 6), r"shape \(6, 1\).*got \(6, 6\)"),
    (Gaussian(), randn(6), randn(1, 6), r"got \(1, 6\). The first axis is the batch"),
    (Gaussian(), randn(6), torch.tensor(1.0), r"got \(\). The first axis is the batch"),
    (Gaussian(), randn(2), torch.tensor([1.0, NAN]), r"finite.*1 of 2.*nan at index \(1,\)"),
    (Gaussian(), randn(2), torch.tensor([True, False]), "real numbers, got torch.bool"),
    (Gaussian(), randint(3, 2), randn(2), "floating-point outputs.* got torch.int64"),
    (Gaussian(), (randn(2), randn(2)), randn(2), "outputs to be one tensor, got tuple"),
    (Gaussian(), randn(2), [1.0, 2.0], "the targets to be one tensor, got list"),
    (HeteroscedasticGaussian(), randn(6, 3), randn(6, 3), "even number .* got 3 .*2 x D"),
    (HeteroscedasticGaussian(), randn(6), randn(6), r"got 1 \(shape \(6,\)\)"),
    (HeteroscedasticGaussian(), randn(6, 2), randn(6, 2), r"shape \(6, 1\).*got \(6, 2\).*2 x D"),
    (HeteroscedasticGaussian(), randn(1, 2), torch.tensor([NAN]), "finite targets"),
    (Poisson(), randn(2), torch.tensor([1, -1]), r"whole numbers.*being -1 at index \(1,\)"),
    (Poisson(), randn(2), torch.tensor([1.0, 2.5]), r"being 2.5.*Gaussian\(\)"),
    (Poisson(), randn(2), torch.tensor([1.0, float("inf")]), "finite targets"),
    (Poisson(), randn(2, 3), randint(3, 2), "gives 3 and the targets hold 1"),
]


@pytest.mark.parametrize(("likelihood", "outputs", "targets", "message"), BAD)
def test_bad_data(likelihood, outputs, targets, message):
    with pytest.raises(DataError, match="(?s)" + message):
        likelihood.check(outputs, targets)


SHAPES = [
    (Categorical(), (6, 3), (5,), torch.int64),
    (Bernoulli(), (6, 3), (6,), torch.int64),
    (Bernoulli(), (6,), (1, 6), torch.int64),
    (Gaussian(), (6, 1), (6, 6), torch.float32),
    (Gaussian(), (6,), (1, 6), torch.float32),
    (Gaussian(), (6, 1), (1,), torch.float32),
    (HeteroscedasticGaussian(), (6, 2), (6, 2), torch.float32),
    (HeteroscedasticGaussian(), (6, 3), (6, 3), torch.float32),
    (Poisson(), (6, 3), (6,), torch.int64),
]


@pytest.mark.parametrize(("likelihood", "outputs", "targets", "dtype"), SHAPES)
def test_log_prob_never_broadcasts(likelihood, outputs, targets, dtype):
    with pytest.raises(DataError, match="expected"):
        likelihood.log_prob(randn(*outputs), torch.zeros(targets, dtype=dtype))
    with pytest.raises(DataError, match="expected"):
        likelihood.predictive(randn(2, *outputs)).log_prob(torch.zeros(targets, dtype=dtype))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Bernoulli(), (5, 3), "binary"),
        (Bernoulli(), (5,), "binary"),
        (Categorical(), (5, 4), "classes"),
        (Categorical(class_weights=[0.5, 0.0, 2.0, 1.0]), (5, 4), "classes"),
        (Categorical(ignore_index=1, class_weights=[0.5, 3.0, 2.0, 1.0]), (5, 4), "classes"),
        (Categorical(ignore_index=-1), (5, 4, 2, 3), "some"),
        (Poisson(), (5, 2), "counts"),
        (Gaussian([0.3, 2.0]), (5, 2), "numbers"),
        (Gaussian(0.4, learn=True), (5,), "numbers"),
    ],
    ids=repr,
)
def test_hessian_columns_are_a_root_of_the_hessian(likelihood, outputs, targets) -> None:
    """Against automatic differentiation of log_prob, which is also the default; to 1e-6."""
    torch.manual_seed(0)
    likelihood, values = likelihood.double(), torch.randn(outputs, dtype=torch.float64)
    shape = (5, *outputs[2:])
    made = {
        "binary": (values > 0).double(),
        "classes": torch.randint(4, shape),
        "some": torch.randint(-1, 4, shape),
        "counts": values.exp().round(),
        "numbers": torch.randn(outputs),
    }[targets]
    found, default = (
        torch.stack([column.reshape(5, -1) for column in columns])
        for columns in (
            likelihood.hessian_columns(values, made),
            Likelihood.hessian_columns(likelihood, values, made),
        )
    )
    hessians = [torch.einsum("cbi,cbj->bij", columns, columns) for columns in (found, default)]
    torch.testing.assert_close(hessians[0], hessians[1].double(), rtol=1e-6, atol=1e-9)


def test_heteroscedastic_columns_are_a_root_of_the_fisher_information() -> None:
    """The mean Hessian over targets m ± σ, exact because the Hessian is quadratic in the target."""
    likelihood = HeteroscedasticGaussian(minimum_scale=0.1)
    outputs = torch.tensor([[0.3, -1.0], [-0.5, 2.0]], dtype=torch.float64)
    scale = likelihood.predictive(outputs[None]).aleatoric.sqrt()
    columns = torch.stack(list(likelihood.hessian_columns(outputs, outputs[:, :1])))
    found = torch.einsum("cbi,cbj->bij", columns, columns)
    hessian = torch.func.jacrev(torch.func.jacrev(lambda f, y: -likelihood.log_prob(f, y).sum()))
    total = torch.zeros(2, 2, 2, dtype=torch.float64)
    for sign in (-1, 1):
        whole = hessian(outputs, outputs[:, :1] + sign * scale)  # (B, F, B, F)
        total += 0.5 * torch.stack([whole[i, :, i] for i in range(2)])
    torch.testing.assert_close(found, total, rtol=1e-10, atol=1e-12)
