"""Masks: exact counts, order, ties, the floor of one, against a plain loop; refusals."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bnn import GaussianPosterior
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.pruning.masks import check_fraction, keep_masks, pruning_masks
from tests.pruning.posteriors import draws, gaussian, multi_swag, network

# few different values, so that ties are everywhere, between and within tensors
SCORES = st.lists(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, math.inf]), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


def by_loop(tensors: list[list[float]], count: int) -> list[list[bool]]:
    """What stays, with a sorted list of (score, tensor, place) and nothing else."""
    best = set()
    for number, values in enumerate(tensors):
        best.add((number, max(range(len(values)), key=lambda place: (values[place], place))))
    order = sorted(
        (score, number, place)
        for number, values in enumerate(tensors)
        for place, score in enumerate(values)
        if (number, place) not in best
    )
    gone = {(number, place) for _, number, place in order[:count]}
    return [
        [(number, place) not in gone for place in range(len(values))]
        for number, values in enumerate(tensors)
    ]


def named(tensors: list[list[float]]) -> dict[str, torch.Tensor]:
    return {f"layer{number}": torch.tensor(values) for number, values in enumerate(tensors)}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(tensors=SCORES, fraction=st.floats(0, 0.999), scope=st.sampled_from(["global", "layer"]))
def test_masks_are_those_of_a_plain_loop(tensors, fraction, scope):
    total = sum(map(len, tensors))
    count = round(fraction * total)
    if scope == "global" and count > total - len(tensors):
        with pytest.raises(ConfigurationError, match=f"of {total} would remove {count}"):
            keep_masks(named(tensors), fraction, scope)
        return
    if scope == "global":
        expected = by_loop(tensors, count)
    else:
        expected = [
            by_loop([values], min(round(fraction * len(values)), len(values) - 1))[0]
            for values in tensors
        ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        masks = keep_masks(named(tensors), fraction, scope)
    assert [mask.tolist() for mask in masks.values()] == expected
    if scope == "global":
        assert sum(int((~mask).sum()) for mask in masks.values()) == count
        order = sorted((s, n, p) for n, values in enumerate(tensors) for p, s in enumerate(values))
        gone = [number for _, number, _ in order[:count]]
        vanished = [n for n, values in enumerate(tensors) if gone.count(n) == len(values)]
    else:
        sizes = [len(values) for values in tensors]
        vanished = [n for n, size in enumerate(sizes) if round(fraction * size) == size]
    assert bool(caught) == bool(vanished)
    for number in vanished:
        assert f"layer{number}" in str(caught[0].message)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_many_scores_in_any_shape(dtype):
    noise = torch.Generator().manual_seed(3)
    scores = {
        "a": torch.rand(40, 50, generator=noise).to(dtype),
        "b": torch.rand(7, 3, 3, 3, generator=noise).to(dtype).permute(3, 2, 1, 0),
    }
    masks = keep_masks(scores, 0.37)
    flat = np.concatenate([score.double().numpy().ravel() for score in scores.values()])
    kept = np.concatenate([mask.numpy().ravel() for mask in masks.values()])
    assert (~kept).sum() == round(0.37 * len(flat))
    assert flat[~kept].max() <= flat[kept].min()
    assert all(masks[name].shape == scores[name].shape for name in scores)


def test_the_layer_that_was_saved_is_named():
    scores = {"low": torch.tensor([0.1, 0.2]), "high": torch.tensor([5.0, 6.0, 7.0, 8.0])}
    with pytest.warns(UserWarning, match="would have removed all of low; the best.*use scope"):
        masks = keep_masks(scores, 0.5)
    assert masks["low"].tolist() == [False, True]
    assert masks["high"].tolist() == [False, False, True, True]
    with pytest.warns(UserWarning, match="all of low, high.*Prune less, or protect"):
        masks = keep_masks(scores, 0.9, "layer")
    assert [int(mask.sum()) for mask in masks.values()] == [1, 1]


def test_a_fraction_that_cannot_be_reached_says_which_can():
    scores = {"a": torch.rand(3), "b": torch.rand(4)}
    message = r"=0.9 of 7 would remove 6, but each of the 2.*most 5.*is 0.714285"
    with pytest.raises(ConfigurationError, match=message):
        keep_masks(scores, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masks = keep_masks(scores, 0.714285)
    assert sum(int(mask.sum()) for mask in masks.values()) == 2


def test_posterior_masks_are_of_weights_only_and_protection_counts_out():
    posterior = gaussian()
    masks = pruning_masks(posterior, 0.5)
    assert list(masks) == ["0.weight", "5.weight"]
    assert sum(int((~mask).sum()) for mask in masks.values()) == 21  # of 18 + 24
    masks = pruning_masks(posterior, 0.5, protect="5.*")
    assert list(masks) == ["0.weight"]
    assert int((~masks["0.weight"]).sum()) == 9
    masks = pruning_masks(posterior, 0.5, scope="layer")
    assert [int((~mask).sum()) for mask in masks.values()] == [9, 12]


@pytest.mark.parametrize("fraction", [1, -0.1, math.nan, True, "0.5", None])
def test_fractions_that_are_none(fraction):
    with pytest.raises(ConfigurationError, match=r"fraction= is the share .* not including 1"):
        pruning_masks(gaussian(), fraction)
    assert check_fraction(np.float32(0.5)) == 0.5  # of another library


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "neuron"}, "unit= is 'weight' or 'channel'; got 'neuron'"),
        ({"scope": "tensor"}, "scope= is 'global' or 'layer'; got 'tensor'"),
        ({"rest": None}, "rest= is 'raise', 'keep' or 'weight'; got None"),
        ({"protect": "x*"}, "'x.' matches no parameter"),
    ],
)
def test_options_that_are_not(options, message):
    with pytest.raises(ConfigurationError, match=message):
        pruning_masks(gaussian(), 0.5, **options)


def test_posteriors_that_cannot_be_pruned():
    with pytest.raises(ConfigurationError, match=r"No prunable weight.*single draw"):
        pruning_masks(draws(0, 1, 1), 0.5)
    with pytest.raises(ConfigurationError, match=r"Each of the 3 components.*Use prune"):
        pruning_masks(multi_swag(), 0.5)
    biases = {"5.bias": torch.ones(3)}
    with pytest.raises(ConfigurationError, match=r"nothing to prune.*'5.bias'"):
        pruning_masks(GaussianPosterior(network(), Gaussian(0.3), biases, biases), 0.5)
    posterior = gaussian()
    posterior.mean["5.weight"][0, :2] = math.nan
    with pytest.raises(ConfigurationError, match=r"'5.weight' is not a number in 2 places"):
        pruning_masks(posterior, 0.5)
