"""What every sampler leaves behind: draws of exp(−U/T), whatever N and T are.

How a step is taken, saved and resumed is in ``tests/samplers/test_base.py``; the laws of our own
samplers, to the digit, are in ``tests/truth``.
"""

from __future__ import annotations

import pytest
import torch

from tests.contract.cases import SAMPLERS

COPIES, STEPS, N = 4096, 600, 50


@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_stationary_law_of_a_gaussian(name: str, temperature: float) -> None:
    """Mean energy w²/2 has U = N w²/2, so that w ~ N(0, T/N).

    4096 independent chains of one weight. The bias of a step of 0.05 is below 3 %; the sd of a
    chain's variance estimate is 2.2 %, so 15 % is beyond 5 standard errors: a false alarm in 10⁶.
    """
    options = {"freeze_after": 20, "damping": 1.0} if name == "PSGLD" else {}
    weights = torch.zeros(COPIES, requires_grad=True)
    sampler = SAMPLERS[name](
        [weights], lr=0.05, num_data=N, temperature=temperature, seed=3, **options
    )
    for _ in range(STEPS):
        weights.grad = weights.detach().clone()
        sampler.step()
    draws = weights.detach()
    sd = (temperature / N) ** 0.5
    assert abs(float(draws.mean())) < 5 * sd / COPIES**0.5
    assert float(draws.var()) == pytest.approx(sd**2, rel=0.15)
