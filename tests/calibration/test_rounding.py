"""What is ranked keeps the digits that were meant, and no others."""

import numpy as np
import pytest

from lightning_bnn.calibration.rounding import rounded, rounded_probability


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("parts", [3, 7, 10, 20])
def test_noise_goes_and_order_stays(parts, single):
    noise = np.random.default_rng(0).normal(size=(50, 1)) * (2e-8 if single else 1e-15)
    stated = np.arange(1, parts) / parts
    noisy = stated * (1 + noise)
    found = np.stack([rounded_probability(row, 1 - row, single) for row in noisy])
    assert all(len(np.unique(column)) == 1 for column in found.T)
    np.testing.assert_allclose(found[0], stated, atol=1e-6 if single else 1e-12)
    assert (np.diff(found[0]) > 0).all()


def test_nearness_to_one_is_kept_in_single_precision():
    rest = np.geomspace(1e-11, 1e-3, 40)
    found = rounded_probability(1 - rest, rest, single=True)
    assert (np.diff(found) < 0).all()
    assert rounded_probability(np.array([0.0, 1.0]), np.array([1.0, 0.0]), True).tolist() == [0, 1]


def test_rounded_is_never_negative():
    assert rounded(np.array([-1e-15, 1e-15, 2e-12])).tolist() == [0, 0, 2e-12]
