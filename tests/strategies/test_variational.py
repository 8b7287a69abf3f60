"""What VariationalBNN minimises, which weights it moves, and what it leaves behind."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from torch import nn
from torch.distributions import Normal as Gauss
from torch.distributions import kl_divergence

from lightning_bnn import VariationalBNN
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import MeanField
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.native import library
from lightning_bnn.priors import Laplace, Normal, ScaleMixture
from lightning_bnn.selection import last_layer
from tests.native.compiler import needs_compiler
from tests.nets import loader, make_data, mlp
from tests.trainers import quiet_trainer

BATCH = (torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2]))


def make_bnn(net: nn.Module | None = None, **options: object) -> VariationalBNN:
    torch.manual_seed(0)
    options = {"prior": Normal(0.1, 0.7), "num_data": 50, "seed": 4, **options}
    return VariationalBNN(net or mlp(3).double(), Categorical(), initial_scale=0.2, **options)


def by_hand(bnn: VariationalBNN, kl_weight: float = 1.0, temperature: float = 1.0) -> torch.Tensor:
    """The loss and its graph by plain autograd from the noise that the strategy drew."""
    mean, sd = bnn.family.mean, bnn.family.rho.exp()
    weights = mean + sd * bnn.family.workspace().noise
    outputs = torch.func.functional_call(bnn.net, bnn.family.layout.views(weights), BATCH[0])
    prior = Gauss(torch.full_like(mean, 0.1), 0.7)
    kl = kl_divergence(Gauss(mean, sd), prior).sum()
    energy = nn.functional.cross_entropy(outputs, BATCH[1])
    return energy + kl_weight * temperature * kl / 50


@pytest.mark.parametrize(
    ("kl_weight", "temperature"), [(1.0, 1.0), (0.3, 1.0), (1.0, 0.2), (1.0, 0.0)]
)
def test_loss_and_gradients_equal_autograd(kl_weight: float, temperature: float) -> None:
    bnn = make_bnn(temperature=temperature)
    loss = bnn.loss(BATCH, kl_weight)
    loss.backward()
    expected = by_hand(bnn, kl_weight, temperature)
    gradients = torch.autograd.grad(expected, [bnn.family.mean, bnn.family.rho])
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(bnn.family.mean.grad, gradients[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(bnn.family.rho.grad, gradients[1], rtol=0, atol=1e-10)


def test_several_draws_average_losses_and_gradients() -> None:
    """Three draws in one step equal the mean of three steps that share their noise."""
    bnn = make_bnn(draws=3)
    bnn.loss(BATCH).backward()
    noises = [bnn.family.workspace(index).noise.clone() for index in range(3)]
    assert not torch.equal(noises[0], noises[1])
    single = make_bnn()
    single._keep_noise = True
    for noise in noises:
        single.family.workspace().noise.copy_(noise)
        (single.loss(BATCH) / 3).backward()
    torch.testing.assert_close(bnn.family.mean.grad, single.family.mean.grad)
    torch.testing.assert_close(bnn.family.rho.grad, single.family.rho.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_noise_is_new_in_each_step_and_decided_by_the_seed(dtype: torch.dtype) -> None:
    batch = (BATCH[0].to(dtype), BATCH[1])
    pair = [make_bnn(mlp(3)).to(dtype) for _ in range(2)]
    losses = [[bnn.loss(batch).item() for _ in range(2)] for bnn in pair]
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]
    assert make_bnn(mlp(3), seed=5).to(dtype).loss(batch).item() != losses[0][0]


@needs_compiler
def test_draws_of_a_compiled_step_have_a_key_each_and_a_copy_goes_on_with_the_same() -> None:
    batch = (BATCH[0].float(), BATCH[1])
    bnn = make_bnn(mlp(3), draws=3)
    bnn.loss(batch).backward()
    keys = [bnn.family.workspace(index).key for index in range(3)]
    assert len({*keys, None}) == 4
    flat = [bnn.family.workspace(index).weights.clone() for index in range(3)]
    assert not torch.equal(flat[0], flat[1])
    other = make_bnn(mlp(3), draws=3, seed=9)
    other.load_state_dict(bnn.state_dict())
    assert other.loss(batch).item() == bnn.loss(batch).item()
    bnn._keep_noise = True  # as in an accumulated batch
    bnn.loss(batch)
    assert bnn.family.workspace(2).key == other.family.workspace(2).key != keys[2]


@needs_compiler
def test_a_compiled_fit_does_not_go_on_without_its_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = (BATCH[0].float(), BATCH[1])
    bnn = make_bnn(mlp(3))
    bnn.loss(batch)
    other = make_bnn(mlp(3))
    other.load_state_dict(bnn.state_dict())
    monkeypatch.setattr(library, "load", lambda: None)
    with pytest.raises(ConfigurationError, match="Install a C compiler"):
        other.loss(batch)
    monkeypatch.setenv("LIGHTNING_BNN_COMPILE", "0")
    with pytest.warns(UserWarning, match="continues from PyTorch's generator"):
        other.loss(batch).backward()
    assert other.family.workspace().key is None


def test_kl_warmup_is_a_function_of_the_trainers_steps() -> None:
    data = make_data("mlp", "classification")
    bnn = make_bnn(mlp(3), kl_warmup=4)
    seen = []
    original = bnn.loss

    def spy(batch: object, kl_weight: float = 1.0) -> torch.Tensor:
        seen.append(kl_weight)
        return original(batch, kl_weight)

    bnn.loss = spy  # type: ignore[method-assign]
    quiet_trainer(max_epochs=2, accumulate_grad_batches=2).fit(bnn, loader(data, batch_size=8))
    assert seen == [0.25] * 2 + [0.5] * 2 + [0.75] * 2 + [1.0] * 6


# -------------------------------------------------------------------- which weights


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def test_the_others_are_point_estimates_under_their_prior() -> None:
    bnn = make_bnn(normalised(), bayesian=last_layer)
    assert bnn.family.layout.names == ["3.weight", "3.bias"]
    trained = {name for name, parameter in bnn.named_parameters() if parameter.requires_grad}
    points = {"net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"}
    assert trained == {"family.mean", "family.rho", *points}
    loss = bnn.loss(BATCH)
    energy, kl = bnn._last
    flat = torch.cat([bnn.net.get_parameter(name[4:]).flatten() for name in sorted(points)])
    prior = -Gauss(torch.tensor(0.1, dtype=torch.float64), 0.7).log_prob(flat).sum()
    torch.testing.assert_close(loss, energy + (kl + prior) / 50)
    loss.backward()
    assert all(bnn.get_parameter(name).grad is not None for name in points)


def test_frozen_weights_stay_where_they_are() -> None:
    net = normalised()
    net[0].requires_grad_(False)
    bnn = make_bnn(net, bayesian="3.*", prior={"3.*": Normal(), "*": Laplace()})
    bnn.loss(BATCH).backward()
    assert bnn.net[0].weight.grad is None
    assert "0.weight" in bnn.posterior().fixed


def test_pretrained_weights_can_be_the_prior_mean() -> None:
    net = mlp(3).double()
    bnn = make_bnn(net, prior=Normal("pretrained", 0.5))
    expected = kl_divergence(
        Gauss(torch.zeros((), dtype=torch.float64), 0.2), Gauss(torch.zeros(()).double(), 0.5)
    )
    bnn.loss(BATCH)
    torch.testing.assert_close(bnn._last[1], expected * bnn.family.layout.size)
    assert "prior.pretrained" in bnn.state_dict()


def test_learned_noise_is_trained_and_saved() -> None:
    """y = x with noise of sd 0.5: the likelihood's scale finds it within 15 %."""
    torch.manual_seed(0)
    inputs = torch.randn(400, 1)
    targets = inputs + 0.5 * torch.randn(400, 1)
    bnn = VariationalBNN(
        nn.Linear(1, 1),
        Gaussian(2.0, learn=True),
        Normal(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    )
    data = torch.utils.data.TensorDataset(inputs, targets)
    quiet_trainer(max_epochs=60).fit(bnn, loader(data, batch_size=100))
    predictive = bnn.posterior().predict(inputs)
    assert predictive.aleatoric.sqrt().mean() == pytest.approx(0.5, rel=0.15)


def test_priors_without_a_closed_form_are_estimated_at_the_draw() -> None:
    """Mean over 2,000 draws against quadrature, within 5 standard errors (1 in 10⁶)."""
    prior = ScaleMixture(scale=1.0, narrow=0.1, mix=0.4)
    bnn = VariationalBNN(
        nn.Linear(1, 1, bias=False).double(),
        Gaussian(),
        prior,
        num_data=1,
        initial_scale=0.3,
        seed=0,
    )
    mean = bnn.family.mean.item()
    batch = (torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    values = []
    for _ in range(2000):
        bnn.loss(batch)
        values.append(float(bnn._last[1]))
    grid = torch.linspace(-4, 4, 200_001, dtype=torch.float64)
    q = Gauss(mean, 0.3).log_prob(grid)
    p = torch.logaddexp(
        math.log(0.4) + Gauss(0.0, 1.0).log_prob(grid),
        math.log(0.6) + Gauss(0.0, 0.1).log_prob(grid),
    )
    exact = float(torch.trapezoid(q.exp() * (q - p), grid))
    estimate = torch.tensor(values)
    assert abs(float(estimate.mean()) - exact) < 5 * float(estimate.std()) / 2000**0.5


def test_a_current_draw_is_decided_by_seed_and_step_and_takes_no_noise() -> None:
    bnn = VariationalBNN(nn.BatchNorm1d(3), Gaussian(1.0), initial_scale=0.5, seed=4, num_data=9)
    state = bnn.noise.get_extra_state()
    first, second = bnn.current_draws(), bnn.current_draws()
    for generator in ("lanes", "state"):
        assert torch.equal(bnn.noise.get_extra_state()[generator], state[generator])
    assert set(first) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["weight"].shape == (1, 3)
    assert not torch.equal(first["weight"][0], bnn.net.weight)


class FirstScale(Callback):
    """Note the largest σ when the first step begins."""

    def __init__(self, stops: bool = False) -> None:
        self.stops = stops

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step == 0:
            self.seen = float(module.family.sd().detach().max())
        trainer.should_stop |= self.stops


def first_scale(bnn: VariationalBNN, steps: int) -> float:
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, callbacks=[noted := FirstScale()])
    trainer.fit(bnn, loader(make_data("mlp", "classification")))
    return noted.seen


def test_scales_begin_where_the_fit_lets_them_rise_as_far_as_they_should() -> None:
    """exp(-2 - 0.005 steps / 2), within bounds; only of a q that is as it was made."""
    made = partial(VariationalBNN, mlp(3), Categorical(), seed=1)
    assert first_scale(bnn := made(), 1200) == pytest.approx(math.exp(-5), rel=1e-5)
    assert first_scale(bnn, 2) > 0.02, "a later fit goes on with what it finds"
    assert first_scale(made(), 30) == pytest.approx(0.01)
    for options, expected in (
        ({"initial_scale": 0.2}, 0.2),
        ({"optimizer": partial(torch.optim.Adam, lr=0.005)}, 0.01),
        ({"scheduler": None}, 0.01),
        ({"family": MeanField("softplus")}, math.exp(-5)),
    ):
        trainer = quiet_trainer(max_steps=1200, max_epochs=-1, callbacks=[stop := FirstScale(True)])
        trainer.fit(made(**options), loader(make_data("mlp", "classification")))
        assert stop.seen == pytest.approx(expected, rel=1e-4), options
