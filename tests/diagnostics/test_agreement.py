"""R-hat and autocorrelation times from short records, against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_bnn.diagnostics.agreement import autocorrelation_time, split_rhat
from lightning_bnn.diagnostics.statistics import require_arviz


def autoregression(coefficient: float, records: int, chains: int = 8, seed: int = 0) -> Tensor:
    """Chains x ← φ x + √(1 − φ²) ξ, which have the autocorrelation time (1 + φ)/(1 − φ)."""
    noise = torch.randn(
        records, chains, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    values = [noise[0]]
    for one in noise[1:]:
        values.append(coefficient * values[-1] + (1 - coefficient**2) ** 0.5 * one)
    return torch.stack(values, dim=1)


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.8])
def test_the_time_of_an_autoregression(coefficient: float) -> None:
    """Over 16,000 records the estimate has a standard error below 6 %; the tolerance is five."""
    expected = (1 + coefficient) / (1 - coefficient)
    found = autocorrelation_time(autoregression(coefficient, 2000))
    assert found.item() == pytest.approx(expected, rel=0.3)


def test_rhat_is_arvizs_without_ranks() -> None:
    arviz = require_arviz()
    for coefficient in (0.0, 0.9, 0.99):
        record = autoregression(coefficient, 200)
        expected = arviz.rhat(record[..., 0].numpy(), method="split")
        assert split_rhat(record).item() == pytest.approx(max(1.0, float(expected)), rel=1e-9)


def test_nothing_moves() -> None:
    same, apart = torch.ones(3, 10, 1), torch.arange(3.0).view(3, 1, 1).expand(3, 10, 1)
    assert split_rhat(same).item() == 1.0
    assert split_rhat(apart).item() == torch.inf
    assert autocorrelation_time(same).item() == 1.0
