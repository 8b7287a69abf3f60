from __future__ import annotations

import sys

import numpy as np
import pytest

from lightning_bnn.diagnostics.statistics import RHAT_LIMIT, compute_statistics, require_arviz
from lightning_bnn.errors import ConfigurationError
from tests.diagnostics.chains import autoregressive


def names(count: int) -> list[str]:
    return [f"x{index}" for index in range(count)]


def test_equals_arviz_on_a_data_set() -> None:
    """Through ArviZ's own loop over a data set, where ours goes scalar by scalar."""
    arviz, chains = require_arviz(), 3
    values = autoregressive(0.6, (chains, 60, 7))
    values[0] += np.linspace(0, 2, 7)
    statistics = compute_statistics(values, names(7))
    data = arviz.convert_to_dataset({"x": values})
    for found, expected in (
        (statistics.rhat, arviz.rhat(data, method="rank")),
        (statistics.ess_bulk, arviz.ess(data, method="bulk")),
        (statistics.ess_tail, arviz.ess(data, method="tail", prob=(0.05, 0.95))),
    ):
        np.testing.assert_allclose(found, expected["x"].values, rtol=1e-12)
    for chain in range(chains):
        alone = arviz.convert_to_dataset({"x": values[chain : chain + 1]})
        expected = arviz.ess(alone, method="bulk")["x"].values
        np.testing.assert_allclose(statistics.chain_ess[chain], expected, rtol=1e-12)


def test_independent_chains_agree() -> None:
    """Tolerances are 3.5 standard deviations of what 300 other seeds gave."""
    values = np.random.default_rng(1).normal(size=(4, 1000, 8))
    statistics = compute_statistics(values, names(8))
    assert statistics.max_rhat < 1.005
    assert np.all(np.abs(statistics.ess_bulk / 4000 - 1) < 0.2)
    assert np.all(np.abs(statistics.ess_tail / 4000 - 1) < 0.2)


@pytest.mark.parametrize("correlation", [0.5, 0.8])
def test_ess_of_autoregressive_chains(correlation: float) -> None:
    """n (1 - rho) / (1 + rho): one scalar scatters by 6% (10% at 0.8), the mean of 8 by 3.4%."""
    statistics = compute_statistics(autoregressive(correlation, (4, 2000, 8)), names(8))
    expected = 8000 * (1 - correlation) / (1 + correlation)
    assert abs(statistics.ess_bulk.mean() / expected - 1) < 0.15
    by_chain = statistics.chain_ess.mean() / (expected / 4)
    assert abs(by_chain - 1) < 0.2
    assert statistics.max_rhat < RHAT_LIMIT


@pytest.mark.parametrize(("shift", "width"), [(1.0, 1.0), (5.0, 1.0), (0.0, 5.0)])
def test_a_chain_elsewhere_or_of_another_width_is_found(shift: float, width: float) -> None:
    values = np.random.default_rng(2).normal(size=(4, 200, 3))
    values[2, :, 1] = width * values[2, :, 1] + shift
    statistics = compute_statistics(values, names(3))
    assert (statistics.rhat > RHAT_LIMIT).tolist() == [False, True, False]
    assert statistics.worst(1) == [1]
    assert min(statistics.ess_bulk[1], statistics.ess_tail[1]) < statistics.ess_bulk[0]


def test_constant_scalars_are_counted_and_not_in_the_way() -> None:
    values = np.random.default_rng(4).normal(size=(3, 50, 4))
    values[:, :, 1] = 0.0
    values[:, :, 2] = 7.0 + 1e-7 * values[:, :, 2]  # rounding of float32
    values[:, :, 3] *= 1e-30  # a tiny probability
    statistics = compute_statistics(values, names(4))
    assert statistics.constant.tolist() == [False, True, True, False]
    for array in (statistics.rhat, statistics.ess_bulk, statistics.ess_tail):
        assert np.isnan(array).tolist() == [False, True, True, False]
    assert np.isnan(statistics.chain_ess).all(0).tolist() == [False, True, True, False]
    assert np.isfinite(statistics.max_rhat)
    assert statistics.worst(4)[2:] == [1, 2]


def test_chains_that_stand_still_in_different_places() -> None:
    values = np.arange(3.0)[:, None, None] * np.ones((3, 20, 1))
    statistics = compute_statistics(values, names(1))
    assert statistics.max_rhat == np.inf
    assert statistics.chain_ess.tolist() == [[1.0]] * 3
    assert not statistics.constant.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_value_that_is_not_finite(bad: float) -> None:
    values = np.random.default_rng(5).normal(size=(2, 500, 2))
    values[1, 30, 0] = bad
    statistics = compute_statistics(values, names(2))
    assert statistics.not_finite.tolist() == [True, False]
    assert statistics.max_rhat == np.inf
    assert statistics.ess_bulk[0] == statistics.ess_tail[0] == 0
    assert statistics.rhat[1] < RHAT_LIMIT
    assert not statistics.constant.any()


def test_one_chain_sees_its_own_drift() -> None:
    values = np.random.default_rng(7).normal(size=(1, 400, 2))
    values[0, :, 1] += np.linspace(0, 4, 400)
    statistics = compute_statistics(values, names(2))
    assert statistics.rhat[0] < RHAT_LIMIT < statistics.rhat[1]
    assert statistics.chain_ess.shape == (1, 2)
    # back and forth: both halves of the run, and every second draw, have the same mean
    values = np.random.default_rng(7).normal(size=(1, 400, 1))
    values[0, :, 0] += np.repeat([0.0, 2.0, 0.0, 2.0], 100)
    assert compute_statistics(values, names(1)).max_rhat > 1.2
    np.testing.assert_array_equal(statistics.chain_ess[0], statistics.ess_bulk)


def test_without_arviz_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ConfigurationError, match=r"lightning-bnn\[diagnostics\]"):
        compute_statistics(np.zeros((2, 10, 1)), names(1))
