"""SGHMC's predictive against HMC's, on a network with two hidden layers."""

from __future__ import annotations

import pytest

from benchmarks import toy_agreement


@pytest.mark.slow
def test_sghmc_agrees_with_hmc_on_the_training_range() -> None:
    """The means within 0.15 predictive sd; with a quarter of the steps of the kept result."""
    assert toy_agreement.main(["--share", "0.25"]) <= toy_agreement.BAR
