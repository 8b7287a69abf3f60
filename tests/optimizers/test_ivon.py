"""IVON in a plain loop."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_bnn import IVON
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from tests.optimizers.test_natural import BETA1, BETA2, LR, PRIOR_SD, SCALE, N, T, published
from tests.truth.linear_regression import LinearRegression

INPUTS, TARGETS = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(1)).unbind()
OPTIONS: dict[str, Any] = {
    "lr": LR, "num_data": N, "temperature": T, "prior_scale": PRIOR_SD, "initial_scale": SCALE,
    "beta1": BETA1, "beta2": BETA2, "seed": 4,
}  # fmt: skip


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()


def train(net: nn.Module, optimizer: IVON, steps: int, draws: int = 1) -> None:
    first = next(net.parameters())
    inputs, targets = INPUTS.to(first), TARGETS.to(first)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(draws):
            with optimizer.sampled_params():
                mse_loss(net(inputs), targets).backward()
        optimizer.step()


@pytest.mark.parametrize("draws", [1, 3])
def test_it_is_the_published_algorithm(draws: int) -> None:
    """At the draws that the network saw, in float64, to rounding; several are averaged."""
    net = network(torch.float64)
    optimizer = IVON(net.parameters(), **OPTIONS)
    ess = N / T
    delta = 1 / (ess * PRIOR_SD**2)
    mean = flat(net)
    h, v = torch.full_like(mean, 1 / (ess * SCALE**2) - delta), torch.zeros_like(mean)
    for step in range(1, 11):
        seen = []
        for _ in range(draws):
            with optimizer.sampled_params():
                loss = mse_loss(net(INPUTS.double()), TARGETS.double())
                loss.backward()
                by_weights = torch.cat([p.grad.flatten() for p in net.parameters()])
                seen.append((flat(net), by_weights.clone()))
            assert torch.equal(flat(net), mean), "the means are back"
        gradient = torch.stack([g for _, g in seen]).mean(0)
        product = torch.stack([(w - mean) * g for w, g in seen]).mean(0)
        mean, h, v = published(mean, h, v, gradient, product, step)
        optimizer.step()
        torch.testing.assert_close(flat(net), mean, rtol=1e-9, atol=1e-11)
        mean = flat(net)
    sd = optimizer.posterior(net, Gaussian()).sd
    found = torch.cat([sd[name].flatten() for name, _ in net.named_parameters()])
    torch.testing.assert_close(found, (ess * (h + delta)).rsqrt(), rtol=1e-8, atol=0.0)


def test_its_fixed_point_is_the_mean_field_of_linear_regression() -> None:
    """Means, and variances 1/A_ii, over 512 copies of the problem (see test_variational).

    False alarms: over seeds 0 to 7 the largest errors seen were 0.008 posterior sd and 0.011 of a
    variance, with a spread of 0.002; the tolerance of 0.02 is four spreads beyond the worst.
    """
    problem, copies, steps = LinearRegression.make(), 512, 1500
    net = problem.net(copies)
    likelihood = Gaussian(problem.noise_sd)
    inputs, targets = problem.inputs, problem.targets.expand(-1, copies)
    optimizer = IVON(
        net.parameters(), lr=0.3, num_data=len(inputs), prior_scale=problem.prior_sd,
        initial_scale=0.1, beta2=0.99, seed=1,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        optimizer.zero_grad()
        with optimizer.sampled_params():
            (-likelihood.log_prob(net(inputs), targets).mean()).backward()
        if step == steps // 2:
            optimizer.param_groups[0]["beta2"] = 0.998
        optimizer.step()
        schedule.step()
    posterior = optimizer.posterior(net, likelihood)
    exact = np.diag(problem.precision)
    mean = posterior.mean["weight"].numpy().mean(0)
    variance = posterior.sd["weight"].square().numpy().mean(0)
    sd = np.sqrt(np.diag(np.linalg.inv(problem.precision)))
    assert np.abs((mean - problem.mean) / sd).max() < 0.02
    assert np.abs(variance * exact - 1).max() < 0.02


@pytest.mark.parametrize(
    ("dtype", "made_in"),
    [(torch.float32,) * 2, (torch.float64,) * 2, (torch.float64, torch.float32)],
)
def test_it_resumes_to_the_last_bit(dtype: torch.dtype, made_in: torch.dtype) -> None:
    """Also where a trainer converts the network after the optimizer was made."""
    net = network(dtype)
    optimizer = IVON(net.parameters(), **OPTIONS)
    train(net, optimizer, 3)
    file = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), file)
    train(net, optimizer, 4)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = network(made_in)
    resumed = IVON(other.parameters(), **{**OPTIONS, "seed": 99, "lr": 0.9})
    other.to(dtype)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    train(other, resumed, 4)
    assert torch.equal(flat(other), flat(net))


def test_a_state_of_other_weights_is_refused() -> None:
    optimizer = IVON(network().parameters(), num_data=N)
    with pytest.raises(ConfigurationError, match="of 8 weights, this IVON of 39"):
        optimizer.load_state_dict(IVON(nn.Linear(7, 1).parameters(), num_data=N).state_dict())
    with pytest.raises(ConfigurationError, match="of 0 weights"):
        optimizer.load_state_dict(torch.optim.Adam(network().parameters()).state_dict())


def test_a_closure_has_the_draw_made_for_it() -> None:
    nets = network(), network()
    one, other = (IVON(net.parameters(), **OPTIONS) for net in nets)
    train(nets[0], one, 2)
    for _ in range(2):
        other.zero_grad()

        def closure() -> Tensor:
            loss = mse_loss(nets[1](INPUTS), TARGETS)
            loss.backward()
            return loss

        assert other.step(closure) > 0
    assert torch.equal(flat(nets[0]), flat(nets[1]))


def test_several_draws_may_be_cleared_inside_of_each() -> None:
    """As loops written for ivon-opt do; outside of a draw all is forgotten."""
    nets = network(), network()
    one, other = (IVON(net.parameters(), **OPTIONS) for net in nets)
    train(nets[0], one, 2, draws=2)
    for step in range(2):
        if step == 1:
            with other.sampled_params():
                (mse_loss(nets[1](INPUTS), TARGETS) * float("nan")).backward()
            other.zero_grad()  # a bad batch
            one._stream.fill_(torch.empty(0))
        for _ in range(2):
            with other.sampled_params():
                other.zero_grad()
                mse_loss(nets[1](INPUTS), TARGETS).backward()
        other.step()
    assert flat(nets[1]).isfinite().all()


def test_a_draw_without_a_gradient_is_for_predictions() -> None:
    net = network().eval()
    optimizer = IVON(net.parameters(), **OPTIONS)
    before = net(INPUTS)
    with optimizer.sampled_params(), torch.no_grad():
        assert not torch.equal(net(INPUTS), before)
    assert torch.equal(net(INPUTS), before)
    with pytest.raises(ConfigurationError, match="no gradient at a draw"):
        optimizer.step()


def test_clipped_gradients_are_those_that_count() -> None:
    net = network()
    optimizer = IVON(net.parameters(), **{**OPTIONS, "temperature": 1e-9})
    start = flat(net)
    with optimizer.sampled_params():
        mse_loss(net(INPUTS), TARGETS).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-6)
    optimizer.step()
    assert (flat(net) - start).norm() < 1e-5


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_a_scaled_loss_and_clipping_reach_every_draw(draws: int, clip: float | None) -> None:
    """As under ``GradScaler``, which sees the weights' gradients once, before the step.

    The scale is a power of 2, so that nothing is rounded. Clipping to a thousandth of the norm
    scales what all draws say: their momentum is that of the average, clipped.
    """
    ends = []
    for scale in (1.0, 1024.0):
        net = network(torch.float64)
        optimizer = IVON(net.parameters(), **OPTIONS)
        scaler = torch.amp.GradScaler("cpu", enabled=scale > 1, init_scale=scale)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(draws):
                with optimizer.sampled_params():
                    loss = mse_loss(net(INPUTS.double()), TARGETS.double())
                    scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        ends.append(torch.cat([flat(net), optimizer._family.rho.detach()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=0.0)
    if clip is not None:
        lower = T / N / PRIOR_SD**2 * flat(net)
        assert (optimizer._momentum - lower * (1 - BETA1**3)).norm() < 2 * clip


def test_gradients_from_outside_of_a_draw_are_refused() -> None:
    """Those of a backward pass after the draw are at the means; so are those that were there."""
    net = network()
    optimizer = IVON(net.parameters(), **OPTIONS)
    with optimizer.sampled_params():
        loss = mse_loss(net(INPUTS), TARGETS)
    loss.backward()
    with pytest.raises(ConfigurationError, match="no gradient at a draw"):
        optimizer.step()
    with pytest.raises(ConfigurationError, match="not those at a draw"):
        train_once_more(net, optimizer)
    optimizer.zero_grad(set_to_none=False)
    train_once_more(net, optimizer)


def train_once_more(net: nn.Module, optimizer: IVON) -> None:
    with optimizer.sampled_params():
        mse_loss(net(INPUTS), TARGETS).backward()
    optimizer.step()


def test_what_the_network_clears_is_forgotten() -> None:
    nets = network(), network()
    one, other = (IVON(net.parameters(), **OPTIONS) for net in nets)
    for net, optimizer in zip(nets, (one, other), strict=True):
        with optimizer.sampled_params():
            (mse_loss(net(INPUTS), TARGETS) * (1 if net is nets[0] else 100)).backward()
        net.zero_grad()
        train(net, optimizer, 1) if net is nets[0] else train_once_more(net, optimizer)
    assert torch.equal(flat(nets[0]), flat(nets[1]))


def test_copies_go_on_alike() -> None:
    net = network()
    optimizer = IVON(net.parameters(), **OPTIONS)
    train(net, optimizer, 2)
    copied, its = copy.deepcopy((net, optimizer))
    train(net, optimizer, 2)
    assert not torch.equal(flat(copied), flat(net))
    train(copied, its, 2)
    assert torch.equal(flat(copied), flat(net))


def test_frozen_parameters_stay() -> None:
    net = network()
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    optimizer = IVON(net.parameters(), **OPTIONS)
    train(net, optimizer, 2)
    assert torch.equal(net[0].weight, before)
    posterior = optimizer.posterior(net, Gaussian())
    assert "0.weight" not in posterior.varying


def test_a_network_may_be_converted_between_steps() -> None:
    net = network()
    optimizer = IVON(net.parameters(), **OPTIONS)
    train(net, optimizer, 2)
    net.double()
    train(net, optimizer, 2)
    assert flat(net).dtype == torch.float64
    assert flat(net).isfinite().all()
    copied = copy.deepcopy(net)
    train(net, optimizer, 1)
    assert not torch.equal(flat(copied), flat(net))


def test_mistakes_are_named() -> None:
    net = network()
    with pytest.raises(ConfigurationError, match="num_data="):
        IVON(net.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="got none"):
        IVON([], num_data=N)
    with pytest.raises(ConfigurationError, match="one group"):
        IVON([{"params": list(net.parameters())}], num_data=N)
    optimizer = IVON(net.parameters(), num_data=N)
    with pytest.raises(ConfigurationError, match="no further group"):
        optimizer.add_param_group({"params": nn.Linear(2, 1).parameters()})
    with optimizer.sampled_params(), pytest.raises(ConfigurationError, match="in use already"):
        optimizer.sampled_params().__enter__()
    with pytest.raises(ConfigurationError, match="not the network"):
        optimizer.posterior(network(), Gaussian())
