"""Known mistakes in samplers, put in on purpose: the truth checks must fail for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_bnn.priors import BoundPrior
from lightning_bnn.samplers import SGNHT, Sampler
from tests.truth.test_samplers import CASES, check_draws, check_map, check_thermostat

Scale = Callable[[Sampler, dict[str, Any], float], float]

RIGHT: Scale = Sampler.noise_scale


def without_n(sampler: Sampler, group: dict[str, Any], variance: float) -> float:
    return RIGHT(sampler, group, variance * sampler.num_data)


def times_root_two(sampler: Sampler, group: dict[str, Any], variance: float) -> float:
    return RIGHT(sampler, group, 2 * variance)


def temperature_squared(sampler: Sampler, group: dict[str, Any], variance: float) -> float:
    return RIGHT(sampler, group, variance * group["temperature"])


def without_friction(sampler: Sampler, group: dict[str, Any], variance: float) -> float:
    return RIGHT(sampler, group, 2 * group["lr"])


def of_the_wrong_splitting(sampler: Sampler, group: dict[str, Any], variance: float) -> float:
    friction = group["friction"]
    return RIGHT(sampler, group, friction * (2 - friction) * group["lr"])


NOISE_BUGS = [without_n, times_root_two, temperature_squared]
MOMENTUM_BUGS = [without_friction, of_the_wrong_splitting]
MOMENTUM = ["SGHMC", "SGNHT", "BAOA"]
PAIRS = [(bug, name) for bug in NOISE_BUGS for name in CASES]
PAIRS += [(bug, name) for bug in MOMENTUM_BUGS for name in MOMENTUM]


@pytest.mark.parametrize(("bug", "name"), PAIRS)
def test_wrong_noise_is_seen(monkeypatch: pytest.MonkeyPatch, bug: Scale, name: str) -> None:
    """In the one-step map, and again in the draws, each by itself."""
    monkeypatch.setattr(Sampler, "noise_scale", bug)
    with pytest.raises(AssertionError, match="noise"):
        check_map(name, "large")
    with pytest.raises(AssertionError):
        check_draws(name, "large")


@pytest.mark.parametrize("name", CASES)
def test_a_dropped_prior_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(BoundPrior, "energy", lambda self, weights: weights.sum() * 0)
    with pytest.raises(AssertionError, match="transition"):
        check_map(name, "small")


def test_a_thermostat_of_the_wrong_target_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held to N|v|²/(ηTd) = 1, as velocities of small friction have it."""
    right = SGNHT.read_temperature

    def wrong(sampler: SGNHT, group: dict[str, Any], *rest: Any) -> Any:
        reading, count = right(sampler, group, *rest)
        return reading / (1 - group["thermostat"] / 2), count

    monkeypatch.setattr(SGNHT, "read_temperature", wrong)
    with pytest.raises(AssertionError):
        check_thermostat(0.01, 0.0)


def test_without_bugs_the_checks_pass() -> None:
    check_map("SGHMC", "large")
    check_draws("SGHMC", "large")
