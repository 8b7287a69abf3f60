from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bnn.diagnostics.chains import label_elements, watch
from lightning_bnn.diagnostics.examples import choose_examples
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lightning_bnn.posteriors import DrawsPosterior, MixturePosterior
from lightning_bnn.posteriors.gaussian import GaussianPosterior
from tests.diagnostics.chains import chained, independent_draws

INPUTS = torch.randn(6, 2, generator=torch.Generator().manual_seed(3))


def network(outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "shape"),
    [
        (Categorical(), 3, torch.tensor([0, 1, 2, 0, 1, 2]), (6, 3)),
        (Bernoulli(), 1, torch.tensor([0, 1, 1, 0, 1, 0]), (6,)),
        (Gaussian(0.5), 1, torch.linspace(-1, 1, 6), (6,)),
        (Gaussian([0.5, 2.0]), 2, torch.ones(6, 2), (6, 2)),
        (HeteroscedasticGaussian(), 4, torch.ones(6, 2), (6, 2)),
        (Poisson(), 1, torch.arange(6), (6,)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Likelihood) else None,
)
def test_each_draw_by_itself(
    likelihood: Likelihood, outputs: int, targets: Tensor, shape: tuple[int, ...]
) -> None:
    """Against the network run with one draw after another, and its own predictive."""
    net = network(outputs)
    draws = independent_draws(net, 20)
    watched = watch(
        chained(net, likelihood, draws, chains=2), choose_examples((INPUTS, targets), 64)
    )
    assert watched.notes == ()
    assert watched.function["prediction"].values.shape == (2, 10, *shape)
    assert ("predicted_variance" in watched.function) == (outputs == 4)
    for index, draw in enumerate(draws):
        single = functional_call(net, draw, (INPUTS,)).double()
        place = index % 2, index // 2
        log_prob = likelihood.log_prob(single, targets)
        predictive = likelihood.predictive(single[None])
        expected = {
            "prediction": predictive.mean.reshape(shape),
            "predicted_variance": predictive.variance.reshape(shape),
            "log_likelihood": log_prob,
            "mean_log_likelihood": log_prob.mean(),
        }
        for name, series in watched.function.items():
            found = series.values[place]
            np.testing.assert_allclose(found, expected[name].detach(), rtol=1e-5)


def test_draws_go_to_their_chains() -> None:
    net = nn.Linear(1, 1, bias=False)
    draws = [{"weight": torch.full((1, 1), float(i))} for i in range(12)]
    watched = watch(
        chained(net, Gaussian(), draws, chains=3), choose_examples(torch.ones(1, 1), 1), "weight"
    )
    expected = [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert watched.function["prediction"].values[..., 0].tolist() == expected
    assert watched.weights["weight"].values[..., 0, 0].tolist() == expected
    assert "mean_log_likelihood" not in watched.function


def test_a_mixture_is_its_components_chains() -> None:
    net = network(1)
    draws = independent_draws(net, 36)
    parts = [chained(net, Gaussian(0.1), draws[:24], 2), chained(net, Gaussian(1.0), draws[24:], 1)]
    examples = choose_examples((INPUTS, torch.zeros(6)), 6)
    watched = watch(MixturePosterior([MixturePosterior(parts[:1]), parts[1]]), examples)
    for name in ("prediction", "mean_log_likelihood"):  # each with its own noise
        alone = [watch(part, examples).function[name].values for part in parts]
        np.testing.assert_array_equal(watched.function[name].values, np.concatenate(alone))
    assert watched.notes == ()
    parts[1] = chained(net, Gaussian(0.1), draws[24:31], 1)
    shorter = watch(MixturePosterior(parts), examples)
    np.testing.assert_array_equal(
        shorter.function["prediction"].values, watched.function["prediction"].values[:, :7]
    )
    assert "from 7 to 12 draws: of each the first 7" in shorter.notes[0]


def test_what_is_fixed_is_used() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    draws = [{k: v for k, v in d.items() if k == "2.weight"} for d in independent_draws(net, 9)]
    fixed = {"1.running_mean": torch.full((3,), 5.0)}
    posterior = DrawsPosterior(net, Gaussian(), draws, fixed)
    found = watch(posterior, choose_examples(INPUTS, 6)).function["prediction"].values[0]
    expected = posterior.predict(INPUTS).outputs[..., 0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, []),
        ("*.bias", ["0.bias", "2.bias"]),
        (["*", "!0.*"], ["2.weight", "2.bias"]),
    ],
)
def test_chosen_weights(choice: Any, names: list[str]) -> None:
    net = network(2)
    draws = independent_draws(net, 10)
    posterior = chained(net, Gaussian(), draws, 2)
    watched = watch(posterior, choose_examples(INPUTS, 2), choice)
    assert list(watched.weights) == names
    for name in names:
        np.testing.assert_array_equal(watched.weights[name].values[1, 3], draws[7][name])
    posterior = DrawsPosterior(net, Gaussian(), [{"2.bias": draw["2.bias"]} for draw in draws])
    assert list(watch(posterior, None, "*").weights) == ["2.bias"]  # of what varies
    with pytest.raises(ConfigurationError, match=r"matches no varying"):
        watch(posterior, None, "0.*")


def test_elements_are_a_fixed_choice_with_their_names() -> None:
    net = network(2)
    posterior = chained(net, Gaussian(), independent_draws(net, 8), 2)
    examples = choose_examples(INPUTS, 5)
    whole = watch(posterior, examples, "0.weight")
    some = watch(posterior, examples, "0.weight", elements=4)
    for full, part, first in (
        (whole.function["prediction"], some.function["prediction"], examples.indices),
        (whole.weights["0.weight"], some.weights["0.weight"], None),
    ):
        assert part.values.shape == (2, 4, 4)
        assert part.shape == full.values.shape[2:]
        labels = label_elements("x", part.shape, 4, first)
        for index, label in enumerate(labels):
            row, column = (int(place) for place in label[2:-1].split(","))
            row = row if first is None else first.index(row)
            np.testing.assert_array_equal(part.values[:, :, index], full.values[:, :, row, column])


class Counting(DrawsPosterior):
    """Knows how many of the chunks that it gave are still held."""

    most = 0

    def draws(self, *arguments: Any) -> Iterator[dict[str, Tensor]]:
        given: list[Any] = []
        for chunk in super().draws(*arguments):
            given.append(weakref.ref(chunk["0.weight"]))
            self.most = max(self.most, sum(one() is not None for one in given))
            yield chunk
            del chunk


def test_draws_are_not_kept() -> None:
    net = network(1)
    posterior = Counting(net, Gaussian(), independent_draws(net, 80))
    before = torch.get_rng_state()
    watch(posterior, choose_examples(INPUTS, 4), "*", elements=2)
    assert 1 <= posterior.most <= 2  # the next one is made while the last is still named
    assert torch.equal(torch.get_rng_state(), before)


def test_other_posteriors_have_no_chains() -> None:
    net = network(1)
    means = {name: p.detach() for name, p in net.named_parameters()}
    scales = {name: torch.ones_like(p) for name, p in means.items()}
    posterior = GaussianPosterior(net, Gaussian(), means, scales)
    with pytest.raises(ConfigurationError, match="got GaussianPosterior"):
        watch(MixturePosterior([posterior]), choose_examples(INPUTS, 2))


def test_targets_that_do_not_fit() -> None:
    net = network(3)
    posterior = chained(net, Categorical(), independent_draws(net, 8), 2)
    with pytest.raises(DataError, match="classes from 0 to 2"):
        watch(posterior, choose_examples((INPUTS, torch.full((6,), 5)), 6))
