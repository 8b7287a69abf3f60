"""The fast gradient sign step against its formula, and the range of the inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_bnn.ensembles.adversarial import (
    InputRange,
    check_adversarial,
    check_inputs,
    fast_gradient_sign,
)
from lightning_bnn.errors import ConfigurationError, DataError


def test_step_is_a_share_of_each_dimensions_range_to_where_the_loss_grows() -> None:
    inputs = torch.randn(3, 5, 2, requires_grad=True)
    weights = torch.randn(3, 1, 2)
    extent = torch.tensor([2.0, 30.0])
    (gradient,) = torch.autograd.grad((inputs * weights).sum(), inputs)
    moved = fast_gradient_sign(inputs, gradient, 0.01, extent)
    assert not moved.requires_grad
    expected = inputs.detach() + 0.01 * extent * weights.sign().expand(3, 5, 2)
    assert torch.equal(moved, expected)
    assert (moved * weights).sum() > (inputs * weights).sum()


def test_range_is_that_of_all_batches() -> None:
    batches = torch.randn(4, 6, 3, 2)
    seen = InputRange()
    for batch in batches:
        seen.update(batch)
    everything = batches.flatten(0, 1)
    assert torch.equal(seen.extent, everything.amax(0) - everything.amin(0))
    assert seen.extent.shape == (3, 2)


def test_range_of_each_member() -> None:
    batches = torch.randn(4, 3, 6, 2)
    seen = InputRange(axis=1)
    for batch in batches:
        seen.update(batch)
    assert torch.equal(seen.extent, batches.amax((0, 2)) - batches.amin((0, 2)))
    assert seen.extent.shape == (3, 2)


def test_range_is_saved() -> None:
    seen, other = InputRange(), InputRange()
    other.load_state_dict(seen.state_dict())
    seen.update(torch.randn(5, 2))
    other.load_state_dict(seen.state_dict())
    assert torch.equal(other.extent, seen.extent)
    seen.update(10 * torch.randn(5, 2))
    assert not torch.equal(other.extent, seen.extent), "a saved range is a copy"


def test_range_before_the_first_batch_and_of_another_shape() -> None:
    seen = InputRange()
    with pytest.raises(ConfigurationError, match="first batch"):
        _ = seen.extent
    seen.update(torch.zeros(5, 2))
    with pytest.raises(DataError, match=r"one shape; got \(3,\) after \(2,\)"):
        seen.update(torch.zeros(5, 3))


@pytest.mark.parametrize("epsilon", [0.0, -0.1, 1.5, math.nan, True])
def test_epsilon_is_a_share(epsilon: float) -> None:
    with pytest.raises(ConfigurationError, match="share of each input's range"):
        check_adversarial(epsilon)


@pytest.mark.parametrize(
    ("inputs", "what"),
    [(torch.zeros(2, 3, dtype=torch.int64), "torch.int64"), ({"x": torch.zeros(2)}, "dict")],
)
def test_inputs_that_cannot_be_moved(inputs: Any, what: str) -> None:
    with pytest.raises(DataError, match=f"one floating-point tensor; got {what}.*leave"):
        check_inputs(inputs)
