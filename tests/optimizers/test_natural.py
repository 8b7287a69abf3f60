"""The step of a Gaussian against the published formulas, written out in other symbols."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.native.library import load
from lightning_bnn.optimizers import NaturalGradient
from lightning_bnn.optimizers.natural import natural_step_
from tests.native.compiler import needs_compiler

N, T, PRIOR_SD, SCALE = 50, 0.5, 0.8, 0.1
LR, BETA1, BETA2 = 0.3, 0.8, 0.99  # so small a step that u is not held


def published(
    mean: Tensor, h: Tensor, v: Tensor, gradient: Tensor, product: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """IVON in the symbols of the paper, the prior's gradient in the momentum.

    The product is that of w − μ and the gradient, which several draws average.
    """
    ess = N / T
    delta = 1 / (ess * PRIOR_SD**2)
    h0 = 1 / (ess * SCALE**2) - delta
    guess = ess * (h + delta) * product
    change = (1 - BETA2) ** 2 * (h - guess) ** 2 / (h + delta) / 2
    v = BETA1 * v + (1 - BETA1) * (gradient + delta * mean)
    h = BETA2 * h + (1 - BETA2) * guess + change
    rate = LR * (h0 + delta) / (1 - BETA1**step)
    return mean - rate * v / (h + delta), h, v


def test_it_is_the_published_step() -> None:
    """In float64, to rounding, over 20 steps with gradients at draws."""
    torch.manual_seed(2)
    ess = N / T
    delta = 1 / (ess * PRIOR_SD**2)
    mean, rho = nn.Parameter(torch.randn(6).double()), nn.Parameter(torch.zeros(6).double())
    rho.data.fill_(math.log(SCALE))
    optimizer = NaturalGradient(mean, rho, lr=LR, ess=ess, scale=SCALE, beta1=BETA1, beta2=BETA2)
    expected = mean.detach().clone(), 1 / (ess * rho.detach().exp() ** 2) - delta, torch.zeros(6)
    for step in range(1, 21):
        sd = rho.detach().exp()
        noise = torch.randn(6).double()
        weights = mean.detach() + sd * noise
        gradient = torch.sin(3 * weights)  # of the data's part
        mean.grad = gradient + mean.detach() / (ess * PRIOR_SD**2)
        rho.grad = gradient * sd * noise + (sd**2 / PRIOR_SD**2 - 1) / ess
        expected = published(*expected, gradient, (weights - mean.detach()) * gradient, step)
        optimizer.step()
        torch.testing.assert_close(mean.detach(), expected[0], rtol=1e-10, atol=1e-12)
        h = 1 / (ess * rho.detach().exp() ** 2) - delta
        torch.testing.assert_close(h, expected[1], rtol=1e-9, atol=1e-12)


@needs_compiler
@pytest.mark.parametrize("most", [0.01, math.inf])
@pytest.mark.parametrize("size", [1, 8193, 100_003])
def test_the_compiled_step_is_that_of_pytorch(size: int, most: float) -> None:
    torch.manual_seed(1)
    flats = torch.randn(5, size)
    wide = flats.double()
    natural_step_(*flats, 0.9, 0.6, 0.1, most)
    natural_step_(*wide, 0.9, 0.6, 0.1, most)
    # means are differences of numbers up to 600
    torch.testing.assert_close(flats.double(), wide, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_the_compiled_step_is_the_same_for_any_number_of_threads() -> None:
    flats = torch.randn(5, 100_003)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(flats.clone())
        natural_step_(*results[-1], 0.9, 0.6, 0.1)
    torch.set_num_threads(1)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_is_not_hidden(dtype: torch.dtype) -> None:
    for place in (3, 4):
        flats = torch.zeros(5, 2, dtype=dtype)
        flats[place, 0] = math.nan
        natural_step_(*flats, 0.9, 0.1, 0.1, 1.0)
        assert flats[0].isnan().tolist() == [True, False]


def test_a_precision_changes_by_a_bounded_factor_and_in_the_right_direction() -> None:
    for dtype in (torch.float32, torch.float64):
        rho, by_rho = torch.zeros(3, dtype=dtype), torch.tensor([-50.0, 0.0, 50.0], dtype=dtype)
        zero = torch.zeros_like(rho)
        natural_step_(zero.clone(), rho, zero.clone(), zero, by_rho, 0.9, 1.0, 0.1)
        torch.testing.assert_close((-2 * rho).exp(), torch.tensor([0.5, 1.0, 2.5], dtype=dtype))


def test_point_estimates_take_the_step_at_the_first_scale() -> None:
    mean, rho, point = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = NaturalGradient(mean, rho, [point], lr=0.1, ess=10.0, scale=1.0, radius=2.0)
    mean.grad, rho.grad, point.grad = torch.ones(2), torch.zeros(2), torch.tensor([1.0, 50.0])
    optimizer.step()
    torch.testing.assert_close(mean.detach(), torch.tensor([-0.1, -0.1]))
    torch.testing.assert_close(point.detach(), torch.tensor([-0.1, -0.2]))  # held by the radius


def test_it_resumes_to_the_last_bit() -> None:
    def fit(steps: int, state: dict | None = None, start: tuple | None = None) -> tuple:
        generator = torch.Generator().manual_seed(0)
        mean, rho, point = (
            nn.Parameter(one.clone()) for one in (start or torch.randn(3, 5, generator=generator))
        )
        optimizer = NaturalGradient(mean, rho, [point], ess=7.0, scale=1.0)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(steps):
            mean.grad, rho.grad, point.grad = (torch.sin(p.detach()) for p in (mean, rho, point))
            optimizer.step()
        return (mean.detach(), rho.detach(), point.detach()), optimizer.state_dict()

    whole, _ = fit(7)
    half, state = fit(3)
    again, _ = fit(4, state, half)
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


@pytest.mark.parametrize("options", [{"beta1": 1.0}, {"beta2": -0.1}, {"ess": 0.0}, {"lr": -1.0}])
def test_wrong_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        NaturalGradient(nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1)), **options)


def test_there_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    flats = torch.randn(5, 4)
    compiled = flats.clone()
    natural_step_(*compiled, 0.9, 0.6, 0.1)
    monkeypatch.setattr("lightning_bnn.optimizers.natural.load", lambda: None)
    natural_step_(*flats, 0.9, 0.6, 0.1)
    torch.testing.assert_close(flats, compiled)
    assert load is not None
