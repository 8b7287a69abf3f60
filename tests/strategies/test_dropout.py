"""Training with dropout: the objective against closed forms and quadrature, and what is said."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, seed_everything
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import MCDropoutBNN, Posterior, mc_dropout
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.priors import Laplace, Learned, Normal, StudentT
from lightning_bnn.strategies.dropout import mask_entropy, relaxed_mask
from tests.nets import SequenceTransformer, loader, make_data, mlp
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression, full_batches

PROBLEM = LinearRegression.make(examples=60, features=4)
X, Y = PROBLEM.inputs, PROBLEM.targets
NOISE, SCALE = PROBLEM.noise_sd, PROBLEM.prior_sd


def linear(noise: float = NOISE, **options: Any) -> MCDropoutBNN:
    """Linear regression whose inputs are dropped, in float64."""
    torch.manual_seed(1)
    net = nn.Linear(4, 1, bias=False).double()
    options = {"layers": "weight", "seed": 5, **options}
    return MCDropoutBNN(net, Gaussian(noise), Normal(0.0, SCALE), **options).double()


def closed_form(weights: Any, rate: float, num_data: int, variance: float | None = None) -> float:
    """E_m[−log p(y|x, w m)]/n + (E[−log p(w m)])/N by NumPy, for noise of mean 1."""
    x, y, w = X.numpy(), Y.numpy()[:, 0], np.asarray(weights)
    variance = rate / (1 - rate) if variance is None else variance
    squares = ((y - x @ w) ** 2 + variance * (x**2 @ w**2)).mean()
    data = squares / (2 * NOISE**2) + 0.5 * math.log(2 * math.pi * NOISE**2)
    prior = (1 + rate / (1 - rate)) * (w**2).sum() / (2 * SCALE**2)
    return data + (prior + len(w) * 0.5 * math.log(2 * math.pi * SCALE**2)) / num_data


def entropy(rate: float) -> float:
    return -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)


# ---------------------------------------------------------------- the objective


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_the_loss_of_a_linear_model_has_a_closed_form(kind: Any) -> None:
    """60 examples 1000 times, a mask for each: within 5 standard errors, a false alarm in 10⁶."""
    bnn = linear(kind=kind, rate=0.3, num_data=100)
    bnn.net.weight.data.copy_(torch.tensor([[1.0, -0.5, 0.3, 2.0]]))
    losses = torch.stack([bnn.loss((X, Y)).detach() for _ in range(1000)])
    expected = closed_form(bnn.net.weight.detach()[0], 0.3, 100)
    assert abs(losses.mean() - expected) < 5 * losses.std() / 1000**0.5
    assert losses.std() / 1000**0.5 < 0.02 * abs(expected)  # the test can tell


def test_each_example_has_a_mask_of_its_own_in_training() -> None:
    seen: list[Tensor] = []
    net = nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 1))
    bnn = MCDropoutBNN(net, Gaussian(), rate=0.5, num_data=10, seed=0)
    bnn.net[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0] == 0))
    bnn.loss((torch.ones(8, 4), torch.zeros(8, 1)))
    assert len({tuple(row.tolist()) for row in seen[-1]}) == 8
    # in an image, one number for each channel
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 20, 1), nn.Conv2d(20, 1, 1))
    bnn = MCDropoutBNN(net, Gaussian(), rate=0.5, num_data=10, seed=0)
    bnn.net[2].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0] == 0))
    bnn.loss((torch.ones(8, 1, 5, 5), torch.zeros(8, 1, 5, 5)))
    assert torch.equal(seen[-1], seen[-1][..., :1, :1].expand_as(seen[-1]))
    assert len({tuple(row.tolist()) for row in seen[-1][..., 0, 0]}) == 8


def test_ranks_have_other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for rank in (0, 0, 1):
        bnn = linear(rate=0.5, num_data=10)
        monkeypatch.setattr(MCDropoutBNN, "global_rank", rank)
        losses.append(bnn.loss((X, Y)).item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_the_kl_of_concrete_dropout_by_quadrature(rate: float, outputs: int) -> None:
    """KL of p N(0, σ²) + (1 − p) N(w/(1 − p), σ²) from N(0, s²), one mask for all outputs.

    By Gauss and Hermite about both modes, of which at σ = 0.001 neither sees the other. It is
    ``kl()`` less the entropy of the narrow Gaussians, and their σ²/(2s²): to 1e-9.
    """
    net = nn.Linear(1, outputs, bias=False).double()
    net.weight.data.copy_(torch.tensor([[0.7], [-0.4]])[:outputs])
    bnn = MCDropoutBNN(net, Gaussian(), Normal(0.0, 0.8), rate=rate, kind="concrete", layers="*")
    bnn = bnn.double()
    bnn.logits.data.copy_(torch.tensor([rate], dtype=torch.float64).logit())
    sigma, scale = 1e-3, 0.8
    means = np.stack([np.zeros(outputs), net.weight.detach().numpy()[:, 0] / (1 - rate)])
    chances = np.array([rate, 1 - rate])
    points, factors = np.polynomial.hermite_e.hermegauss(40)
    grid = np.stack(np.meshgrid(*[points] * outputs), -1).reshape(-1, outputs)
    weights = np.prod(np.stack(np.meshgrid(*[factors] * outputs), -1).reshape(-1, outputs), -1) / (
        2 * math.pi
    ) ** (outputs / 2)

    def log_normal(x: np.ndarray, mean: np.ndarray, sd: float) -> np.ndarray:
        squares = (((x - mean) / sd) ** 2).sum(-1)
        return -0.5 * squares - outputs * math.log(sd * math.sqrt(2 * math.pi))

    kl = 0.0
    for chance, mean in zip(chances, means, strict=True):
        x = mean + sigma * grid
        parts = [math.log(c) + log_normal(x, m, sigma) for c, m in zip(chances, means, strict=True)]
        difference = np.logaddexp(*parts) - log_normal(x, np.zeros(outputs), scale)
        kl += chance * float((weights * difference).sum())
    narrow = 0.5 * math.log(2 * math.pi * math.e * sigma**2) - sigma**2 / (2 * scale**2)
    assert bnn.kl().item() == pytest.approx(kl + outputs * narrow, abs=1e-9)


def test_the_entropy_of_a_mask_and_its_derivative() -> None:
    logits = torch.tensor([-6.0, -1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    expected = [entropy(p) for p in logits.sigmoid().tolist()]
    assert mask_entropy(logits).tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(mask_entropy, logits)


@pytest.mark.parametrize("prior", [Normal(0.0, 0.5), Normal(scale=Learned())], ids=repr)
def test_the_derivative_of_the_loss_by_the_rate(prior: Any) -> None:
    """Against central differences at the same noise, to 1e-6."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    bnn = MCDropoutBNN(net, Gaussian(NOISE), prior, kind="concrete", num_data=70, seed=3).double()
    assert list(bnn.rates) == ["2", "4"]
    state = bnn.noise.get_extra_state()

    def loss(logits: Tensor) -> Tensor:
        bnn.noise.set_extra_state(state)
        with torch.no_grad():
            bnn.logits.copy_(logits)
        return bnn.loss((X, Y))

    for start in ([-2.2, -2.2], [0.5, -4.0]):
        at = torch.tensor(start, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(loss(at), bnn.logits)
        for index in range(2):
            step = torch.zeros(2, dtype=torch.float64)
            step[index] = 1e-6
            central = (loss(at + step) - loss(at - step)).item() / 2e-6
            assert float(gradient[index]) == pytest.approx(central, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_the_relaxed_mask_is_close_to_the_mask(rate: float) -> None:
    """E z = p + p (1 − p)(1 − 2p) π² t²/6 + O(t⁴), by the midpoint rule with 10⁶ points."""
    uniform = (torch.arange(10**6, dtype=torch.float64) + 0.5) / 10**6
    logit = torch.tensor(rate, dtype=torch.float64).logit()
    mask = relaxed_mask(uniform, logit)
    dropped = float(1 - mask.mean() * (1 - rate))
    first = rate * (1 - rate) * (1 - 2 * rate) * math.pi**2 * 0.01 / 6
    assert dropped == pytest.approx(rate + first, abs=0.1 * first + 1e-5)
    assert float(((1 - mask * (1 - rate)) > 0.5).double().mean()) == pytest.approx(rate, abs=1e-5)


# ---------------------------------------------------------------- what is fitted


LOUD = 2.5  # noise so large that a learned rate is not almost 0


def relaxed_moments(rate: float) -> tuple[float, float]:
    uniform = (torch.arange(10**5, dtype=torch.float64) + 0.5) / 10**5
    mask = relaxed_mask(uniform, torch.tensor(rate, dtype=torch.float64).logit())
    return float(mask.mean()), float(mask.var())


def smallest_bound(num_data: int) -> tuple[np.ndarray, float]:
    """Weights and logit p at which the bound of the relaxed masks is smallest."""
    x, y, n = X.numpy(), Y.numpy()[:, 0], num_data / len(X) / LOUD**2

    def best_weights(logit: float) -> tuple[np.ndarray, float]:
        rate = 1 / (1 + math.exp(-logit))
        mean, variance = relaxed_moments(rate)
        gram = n * (mean**2 * x.T @ x + variance * np.diag((x**2).sum(0)))
        w = np.linalg.solve(gram + np.eye(4) / (SCALE**2 * (1 - rate)), n * mean * x.T @ y)
        squares = ((y - mean * x @ w) ** 2 + variance * (x**2 @ w**2)).sum()
        kl = (w**2).sum() / (2 * SCALE**2 * (1 - rate)) - 4 * entropy(rate)
        return w, n * squares / 2 + kl

    logit = minimize_scalar(lambda z: best_weights(z)[1], bounds=(-7, 1), method="bounded").x
    return best_weights(logit)[0], logit


def test_the_gradient_is_zero_where_the_bound_is_smallest() -> None:
    """The mean of 150 gradients is within 4 standard errors of 0: of 5 a false alarm in 3000."""
    weights, logit = smallest_bound(10)
    bnn = linear(LOUD, kind="concrete", num_data=10)
    bnn.net.weight.data.copy_(torch.tensor(weights)[None])
    batch = X.repeat(10, 1), Y.repeat(10, 1)
    gradients = {}
    for shift in (-0.3, 0.0, 0.3):
        bnn.logits.data.fill_(logit + shift)
        parameters = bnn.net.weight, bnn.logits
        rows = [torch.autograd.grad(bnn.loss(batch), parameters) for _ in range(150)]
        flat = torch.stack([torch.cat([one.flatten() for one in row]) for row in rows])
        gradients[shift] = flat.mean(0) / (flat.std(0) / 150**0.5)
    assert (gradients[0.0].abs() < 4).all()
    assert gradients[-0.3][-1] < -5  # the test can tell
    assert gradients[0.3][-1] > 5


def test_the_learned_rate_falls_as_n_grows() -> None:
    """The exact minimum does; training goes there: to 20 % after 250 steps of Adam."""
    exact = [1 / (1 + math.exp(-smallest_bound(n)[1])) for n in (10, 30, 60, 120)]
    assert all(more > 1.5 * less for more, less in itertools.pairwise(exact))
    found = []
    for num_data in (10, 30):
        bnn = linear(LOUD, kind="concrete", num_data=num_data)
        optimizer = Adam(bnn.parameters(), lr=0.03)
        logits = []
        for _ in range(250):
            optimizer.zero_grad()
            bnn.loss((X, Y)).backward()
            optimizer.step()
            logits.append(bnn.logits.item())
        found.append(1 / (1 + math.exp(-np.mean(logits[-80:]))))
    np.testing.assert_allclose(found, exact[:2], rtol=0.2)


def test_a_fit_reaches_the_closed_form_minimum() -> None:
    """Dropout on a linear model is ridge regression; weights to 0.03 by a fit of 150 steps."""
    bnn = linear(rate=0.2, num_data=60, optimizer=partial(Adam, lr=0.05), scheduler="cosine")
    trainer = quiet_trainer(max_epochs=1, precision="64-true")
    inputs, targets = (tensor.repeat(20, 1) for tensor in (X, Y))
    trainer.fit(bnn, full_batches(inputs, targets, epoch=150))
    best = minimize(lambda w: closed_form(w, 0.2, 60), np.zeros(4)).x
    np.testing.assert_allclose(bnn.net.weight.detach()[0].numpy(), best, atol=0.03)
    predictive = bnn.posterior().predict(X, draws=2000)
    variance = 0.25 * (X.numpy() ** 2 @ bnn.net.weight.detach().numpy()[0] ** 2)
    np.testing.assert_allclose(predictive.epistemic[:, 0], variance, rtol=0.25)


# ---------------------------------------------------------------- which layers


def own() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.0),
        nn.Linear(8, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("net", "options", "rates"),
    [
        (own(), {}, {"2": 0.3}),
        (own(), {"rate": 0.2}, {"2": 0.2, "4": 0.2}),
        (own(), {"layers": ["*", "!3.*"]}, {"0": 0.1, "5": 0.1}),
        (own(), {"layers": nn.Linear, "kind": "gaussian"}, {"0": 0.1, "3": 0.1, "5": 0.1}),
        (own(), {"kind": "concrete"}, {"3": 0.1, "5": 0.1}),
        (mlp(3), {}, {"2": 0.1}),
        (nn.Linear(4, 3), {}, {"": 0.1}),
        (nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)), {}, {"2": 0.1}),
    ],
)
def test_where_dropout_is(net: nn.Module, options: Any, rates: dict[str, float]) -> None:
    before = [getattr(module, "p", None) for module in net.modules()]
    bnn = MCDropoutBNN(net, Categorical(), **options)
    assert bnn.rates == pytest.approx(rates)
    assert bnn.posterior().rates == pytest.approx(rates)
    assert [getattr(module, "p", None) for module in net.modules()] == before
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert {*bnn.inferred, *bnn.point_estimates} == set(bnn.trained)
    left_out = {name for name, module in bnn.net.named_modules() if hasattr(module, "p")}
    assert all(bnn.net.get_submodule(name).p == 0 for name in left_out - set(rates))


def test_a_networks_own_layers_are_the_posterior_that_they_are_by_themselves() -> None:
    net = SequenceTransformer(3)
    inputs = make_data("transformer", "classification").tensors[0]
    one = MCDropoutBNN(net, Categorical()).posterior().predict(inputs, 5)
    assert torch.equal(one.outputs, mc_dropout(net, Categorical()).predict(inputs, 5).outputs)
    assert (one.epistemic > 0).all()


def test_forward_is_the_network_without_dropout() -> None:
    torch.manual_seed(0)
    net, inputs = own(), torch.randn(5, 4)
    bnn = MCDropoutBNN(net, Categorical())
    torch.testing.assert_close(bnn(inputs), net.eval()(inputs))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) @ self.head.weight.T


ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "rate": (mlp(3), {"rate": 1.0}, "rate= is a number between 0 and 1; got 1.0"),
    "kind": (mlp(3), {"kind": "cauchy"}, "kind="),
    "variational": (mlp(3), {"kind": "variational"}, "family=VariationalDropout"),
    "layers": (mlp(3), {"layers": "fc*"}, "'fc\\*' matches no weight of a Linear or Conv layer"),
    "nothing": (nn.LSTM(4, 3), {}, "no layer before which dropout can be inserted"),
    "prior": (mlp(3), {"kind": "concrete", "prior": Laplace()}, "under a Gaussian prior"),
    "pattern": (mlp(3), {"prior": {"fc*": Normal()}}, "matches no trainable parameter"),
    "alpha": (
        nn.Sequential(nn.Linear(4, 3), nn.AlphaDropout(0.1)), {"kind": "gaussian"}, "AlphaDropout",
    ),
    "net": (lambda: mlp(3), {}, "net= is a torch.nn.Module"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_are_named(name: str) -> None:
    net, options, words = ERRORS[name]
    with pytest.raises(ConfigurationError, match=words):
        MCDropoutBNN(net, Categorical(), **options)


def test_a_layer_that_is_never_called_is_named() -> None:
    bnn = MCDropoutBNN(Reads(), Categorical(), num_data=8)
    with pytest.raises(ConfigurationError, match=r"does not call 'head'.*'!head.weight'"):
        bnn.loss((torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)))


@pytest.mark.parametrize("prior", [Laplace(), StudentT(), Normal("pretrained", 0.1)], ids=repr)
def test_other_priors_give_finite_gradients(prior: Any) -> None:
    """Also of weights that are exactly 0."""
    net = mlp(1)
    net[2].weight.data.zero_()
    bnn = MCDropoutBNN(net, Gaussian(), prior, num_data=10)
    bnn.kl().backward()
    assert all(p.grad.isfinite().all() for p in bnn.net.parameters() if p.grad is not None)
    assert bnn.net[2].weight.grad is not None


# ---------------------------------------------------------------- a fit


class Logged(Callback):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.names = set(trainer.callback_metrics)


def test_rates_are_shown_and_logged(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    data, logged = make_data("mlp", "classification"), Logged()
    bnn = MCDropoutBNN(mlp(3), Categorical(), kind="concrete", seed=0)
    trainer = quiet_trainer(max_epochs=2, callbacks=[logged], enable_model_summary=True)
    with caplog.at_level("INFO"):
        trainer.fit(bnn, loader(data))
    assert (
        "MCDropoutBNN trains 131 of the 131 parameters of Sequential under concrete dropout before "
        "the layers, with the rates 2 0.1, to be learned." in caplog.text
    )
    assert {"dropout_rate/2", "train_nll", "kl", "train_loss"} <= logged.names
    assert trainer.callback_metrics["dropout_rate/2"].item() == pytest.approx(bnn.rates["2"])
    assert bnn.rates["2"] != pytest.approx(0.1)
    path = tmp_path / "end.ckpt"
    trainer.save_checkpoint(path)
    again = MCDropoutBNN.load_from_checkpoint(path)
    assert again.rates == bnn.rates
    inputs = data.tensors[0]
    expected = bnn.posterior().predict(inputs, 6).outputs
    assert torch.equal(again.posterior().predict(inputs, 6).outputs, expected)
    bnn.posterior().save(tmp_path / "saved")
    loaded = Posterior.load(tmp_path / "saved").predict(inputs, 6).outputs
    torch.testing.assert_close(loaded, expected)


def test_the_noise_of_a_fit_is_its_own() -> None:
    """The same seed gives the same fit, whatever else draws random numbers."""
    data, ends = make_data("mlp", "classification"), []
    for other in (1, 2):
        net = mlp(3)
        for index, parameter in enumerate(net.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
        bnn = MCDropoutBNN(net, Categorical(), seed=4)
        seed_everything(other, verbose=False)
        quiet_trainer(max_epochs=2).fit(bnn, DataLoader(TensorDataset(*data.tensors), 16))
        ends.append(bnn.net[0].weight.detach())
    assert torch.equal(*ends)
