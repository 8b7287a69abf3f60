"""Checks that numbers are independent and standard normal, with stated false-alarm rates."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def check_moments(numbers: Tensor, lags: Iterable[int]) -> None:
    """Moments 1 to 6, and products at lags that a generator's parts could tie together.

    Every figure has its exact standard error under independence; 5 of them in 40 figures is a
    false alarm in 40,000.
    """
    numbers = numbers.double()
    count, power = len(numbers), torch.ones_like(numbers)
    for mean, variance in ((0, 1), (1, 2), (0, 15), (3, 96), (0, 945), (15, 10170)):
        power *= numbers
        score = (power.mean() - mean) / math.sqrt(variance / count)
        assert abs(score) < 5, f"moment of variance {variance}: {score:.1f} standard errors"
    squares = (numbers**2 - 1) / math.sqrt(2)
    for lag in lags:
        for kind, values in (("values", numbers), ("squares", squares)):
            score = values[:-lag] @ values[lag:] / math.sqrt(count - lag)
            assert abs(score) < 5, f"{kind} at lag {lag}: {score:.1f} standard errors"


def check_distribution(numbers: Tensor) -> None:
    """Kolmogorov's distance to the normal law, and the counts in the tails.

    The distance exceeds 2.5/√n with probability 2·exp(−12.5) = 7e-6; each tail count is
    within 5 standard errors.
    """
    numbers = numbers.sort().values.double()
    count = len(numbers)
    ideal = torch.special.ndtr(numbers)
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    distance = torch.maximum((steps - ideal).abs(), (steps - 1 / count - ideal).abs()).max()
    assert distance < 2.5 / math.sqrt(count)
    for bound in (3.0, 3.5, 4.0, 4.5):
        expected = count * math.erfc(bound / math.sqrt(2)) / 2
        for tail in ((numbers > bound).sum(), (numbers < -bound).sum()):
            assert abs(tail - expected) < 5 * math.sqrt(expected) + 1
