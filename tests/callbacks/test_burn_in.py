"""The burn-in ends when chains agree, and draws are an autocorrelation time apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_bnn.callbacks.burn_in import BurnIn


def run(burn_in: BurnIn, steps: int, apart: float = 0.0, memory: float = 0.0) -> BurnIn:
    """Chains that start apart and come together with e^(−step/100); autoregressive beside it."""
    generator = torch.Generator().manual_seed(0)
    state = torch.zeros(4, 2)
    for step in range(steps):
        noise = torch.randn(4, 2, generator=generator)
        state = memory * state + math.sqrt(1 - memory**2) * noise
        if burn_in.step():
            burn_in.add(state + apart * torch.arange(4.0)[:, None] * math.exp(-step / 100))
    return burn_in


def test_chains_that_agree_end_it_after_a_tenth() -> None:
    """Ten records of each chain let R-hat be above 1.1 by chance for some more."""
    found = run(BurnIn(2000, 10), 400)
    assert found.spacing == 10
    assert found.ended is not None
    assert 200 <= found.ended <= 300
    assert found.rhat < 1.1


def test_it_lasts_until_chains_agree() -> None:
    """They are 50 sd apart at first, and within 0.3 sd after 500 steps."""
    found = run(BurnIn(4000, 10), 2000, apart=50)
    assert found.ended is not None
    assert 500 <= found.ended < 1300


def test_chains_that_never_agree_end_it_after_a_third() -> None:
    found = run(BurnIn(3000, 10), 2000, apart=1e9)
    assert found.ended == 1000
    assert found.rhat > 1.1


def test_draws_are_an_autocorrelation_time_apart() -> None:
    """φ = 0.99 has the time 199 in steps, estimated within a factor of two from 4 × 100 records."""
    found = run(BurnIn(20_000, 10), 2500, memory=0.99)
    assert found.ended == 2000
    assert 100 < found.time < 400
    assert found.every == math.ceil(max(found.time, 18_000 / 50))
    slow = run(BurnIn(2000, 10), 700, memory=0.9999)
    assert slow.time > 50
    assert 10 <= (2000 - slow.ended) / slow.every <= 50  # draws of each chain


def test_few_draws_where_they_are_large() -> None:
    found = run(BurnIn(2000, 2**30), 300)
    assert found.every == 2000 - found.ended


def test_an_unknown_length() -> None:
    found = run(BurnIn(math.inf, 10), 1200)
    assert found.ended == 1000
    assert 10 <= found.every <= 20


def test_cycles_need_no_agreement() -> None:
    found = BurnIn(400, 10, cycles=True)
    assert not found.step()
    assert (found.ended, found.every) == (1, 10)


@pytest.mark.parametrize("at", [57, 350])
def test_resume_is_exact(at: int) -> None:
    first = run(BurnIn(1000, 10), at, memory=0.9)
    second = BurnIn.from_state_dict(first.state_dict())
    rows: list[Tensor] = [torch.randn(4, 2) for _ in range(300)]
    for one in (first, second):
        for row in rows:
            if one.step():
                one.add(row)
    assert torch.equal(first.settled(), second.settled())
    assert (first.ended, first.every, first.rhat) == (second.ended, second.every, second.rhat)
