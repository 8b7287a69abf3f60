"""Averages over models: exact weights, different networks and kinds, shares of draws, saving."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import (
    AveragePosterior,
    DrawsPosterior,
    GaussianPosterior,
    MixturePosterior,
    Posterior,
    mc_dropout,
)
from lightning_bnn.errors import ConfigurationError, DataError, PosteriorFormatError
from lightning_bnn.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from lightning_bnn.posteriors import Evidence, LinearPosterior
from lightning_bnn.posteriors.average import mixture_of
from lightning_bnn.predictive import Predictive
from lightning_bnn.report import report_posteriors
from tests.test_predictive import BATCH, EXAMPLES

INPUTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def point(value: float, likelihood: Any = None, outputs: int = 1) -> DrawsPosterior:
    """A network of one draw, that predicts a number whatever the input is."""
    net = nn.Linear(3, outputs)
    draw = {"weight": torch.zeros(outputs, 3), "bias": torch.full((outputs,), float(value))}
    return DrawsPosterior(net, likelihood or Gaussian(0.1), [draw])


def gaussian() -> GaussianPosterior:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    mean = {name: tensor.detach() for name, tensor in net.named_parameters()}
    sd = {name: torch.full_like(tensor, 0.3) for name, tensor in mean.items()}
    return GaussianPosterior(net, Gaussian(0.3, learn=True), mean, sd)


def dropout() -> Posterior:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 1))
    return mc_dropout(net, Gaussian(0.2))


def linear() -> LinearPosterior:
    net = nn.Linear(3, 1, bias=False)
    mean, deviations = {"weight": torch.ones(1, 3)}, {"weight": 0.5 * torch.eye(3)[:, None]}
    return LinearPosterior(net, Gaussian(0.4), mean, deviations)


def mixed() -> AveragePosterior:
    """Three networks, three kinds."""
    return AveragePosterior([gaussian(), dropout(), linear()], [0.5, 0.2, 0.3])


# ---------------------------------------------------------------- weighted draws are exact


def targets_of(predictive: Predictive) -> Tensor:
    shape = list(predictive.mean.shape)
    if predictive.task == "regression":
        return (predictive.mean + 0.7).abs().round()
    classes = 2 if predictive.binary else shape.pop(1)  # type: ignore[attr-defined]
    return torch.arange(int(np.prod(shape))).view(shape) % classes


LARGE_COUNTS = Poisson().predictive(
    torch.tensor([2.0, 300.0, 400.0]).double().log()[:, None].repeat(1, BATCH)
)


@pytest.mark.parametrize("predictive", [*EXAMPLES, LARGE_COUNTS], ids=repr)
def test_a_draw_of_twice_the_weight_is_that_draw_twice(predictive: Predictive) -> None:
    """Of all that a predictive gives, in closed forms and integrals alike; to rounding."""
    rows = [0, 1, 1, 2, 2, 2]
    twice = predictive.map(lambda tensor: tensor[rows])
    parts = [predictive.map(lambda tensor, row=row: tensor[[row]]) for row in range(3)]
    weighted = Predictive.mix(parts, weights=[1 / 6, 2 / 6, 3 / 6])
    assert (twice.draws, weighted.draws) == (6, 3)
    names = ["mean", "variance", "aleatoric", "epistemic", "entropy", "mutual_information"]
    found = {name: [getattr(one, name) for one in (twice, weighted)] for name in names}
    targets = targets_of(predictive)
    calls = ["log_prob", "crps", "covers", "cdf"] if predictive.task == "regression" else ["brier"]
    for name in calls:
        found[name] = [getattr(one, name)(targets) for one in (twice, weighted)]
    if predictive.task == "regression":
        found["quantile"] = [one.quantile(0.3) for one in (twice, weighted)]
    for name, (one, other) in found.items():
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9, msg=name)
    some = weighted[2:5]
    torch.testing.assert_close(some.mean, weighted.mean[2:5])
    again = type(weighted).concatenate([weighted[:2], weighted[2:]])
    torch.testing.assert_close(again.variance, weighted.variance)
    assert len(weighted) == BATCH


def test_mixing_weighted_predictives_multiplies_weights() -> None:
    parts = [Gaussian(1.0).predictive(torch.full((1, 2), value)) for value in (0.0, 1.0, 10.0)]
    inner = Predictive.mix(parts[:2], weights=[0.25, 0.75])
    outer = Predictive.mix([inner, parts[2]], weights=[0.5, 0.5])
    assert outer.weights.tolist() == pytest.approx([0.125, 0.375, 0.5])
    assert Predictive.mix([inner, parts[2]]).weights.tolist() == pytest.approx([1 / 6, 0.5, 1 / 3])
    assert Predictive.mix(parts).weights is None
    with pytest.raises(DataError, match="3 weights from 0 to 1"):
        Predictive.mix(parts, weights=[0.5, 0.5])
    with pytest.raises(DataError, match="whose sum is 1"):
        Predictive.mix(parts, weights=[0.5, 0.1, 0.1])
    with pytest.raises(DataError, match="draws weigh the same"):
        Predictive.concatenate([inner, Predictive.mix(parts[:2])])


# ---------------------------------------------------------------- the average


def test_the_predictive_is_the_weighted_mixture() -> None:
    average = AveragePosterior([point(0.0), point(10.0, Gaussian(0.5))], [0.9, 0.1])
    predictive = average.predict(INPUTS)
    assert predictive.draws == 2
    assert predictive.mean[0].item() == pytest.approx(1.0)
    assert predictive.aleatoric[0].item() == pytest.approx(0.9 * 0.1**2 + 0.1 * 0.5**2)
    assert predictive.epistemic[0].item() == pytest.approx(0.9 * 0.1 * 100)
    # the weights are exact whatever the number of draws is
    for draws in (2, 3, 7, 100):
        more = average.predict(INPUTS, draws=draws)
        assert more.draws == draws
        torch.testing.assert_close(more.mean, predictive.mean)


def test_closed_forms_dropout_and_draws_go_together() -> None:
    average = mixed()
    predictive = average.predict(INPUTS)
    assert predictive.draws == 32 + 32 + 1
    alone = [one.predict(INPUTS, None, seed=5) for one in average.components]
    expected = 0.5 * alone[0].mean + 0.2 * alone[1].mean + 0.3 * alone[2].mean
    # the draws are others: within 6 standard errors of 32, of outputs whose sd is below 1
    assert (predictive.mean - expected).abs().max() < 6 * (0.5**2 + 0.2**2) ** 0.5 / 32**0.5
    last = predictive.map(lambda tensor: tensor[-1:])
    torch.testing.assert_close(last.aleatoric, torch.full((6, 1), 0.4**2))
    assert torch.equal(average.predict(INPUTS).mean, predictive.mean)
    part = average.predict(INPUTS[:2])
    torch.testing.assert_close(part.mean, predictive.mean[:2])
    assert "3 components of the weights 0.5, 0.2, 0.3" in repr(average)


def test_networks_with_other_outputs_and_one_likelihood_family() -> None:
    """A heteroscedastic network has two outputs where another has one."""
    average = AveragePosterior([point(1.0), point(0.0, HeteroscedasticGaussian(), 2)], [0.5, 0.5])
    predictive = average.predict(INPUTS)
    scale = float(nn.functional.softplus(torch.zeros(()))) + 1e-4
    assert predictive.aleatoric[0].item() == pytest.approx((0.1**2 + scale**2) / 2)


def test_shares_of_draws() -> None:
    average = AveragePosterior([gaussian() for _ in range(3)], [0.7, 0.25, 0.05])

    def shares(draws: int, seed: int = 0) -> list[float]:
        weights = average.predict(INPUTS[:1], draws, seed).weights
        return [1 / draws] * draws if weights is None else weights.tolist()

    assert Counter(round(w, 6) for w in shares(20)) == {0.05: 20}
    counts = Counter(round(w, 6) for w in shares(10))
    assert sorted(counts.values()) == [1, 2, 7]
    # with fewer draws than models they are chosen at random: right in the mean over seeds.
    # 400 seeds, 5 sd of a share: 5 √(.25/400); false alarms below 1e-5
    values = AveragePosterior([point(0.0), point(1.0), point(4.0)], [0.7, 0.25, 0.05])
    means = [values.predict(INPUTS[:1], 1, seed).mean.item() for seed in range(400)]
    assert np.mean(means) == pytest.approx(0.45, abs=5 * np.std(means) / 20)
    values = AveragePosterior([point(float(k)) for k in range(4)], [0.7, 0.1, 0.1, 0.1])
    three = [values.predict(INPUTS[:1], 3, seed).mean.item() for seed in range(400)]
    assert np.mean(three) == pytest.approx(0.6, abs=5 * np.std(three) / 20)
    assert AveragePosterior([point(0.0), point(1.0)], [1.0, 0.0]).predict(INPUTS).draws == 1


def test_two_models_are_moved_by_different_noise() -> None:
    average = AveragePosterior([gaussian(), gaussian()])
    outputs = average.predict(INPUTS, draws=8).means
    assert len(outputs[:, 0, 0].unique()) == 8


def test_it_comes_back_from_the_disk_with_its_networks(tmp_path: Any) -> None:
    average = AveragePosterior([mixed(), gaussian(), MixturePosterior([point(1.0), point(2.0)])])
    average.components[1].evidence = Evidence(-3.5, 0.1, "AIS")
    average.save(tmp_path)
    loaded = Posterior.load(tmp_path)
    assert loaded.entry() == average.entry()
    assert loaded.components[1].evidence == Evidence(-3.5, 0.1, "AIS")
    assert loaded.weights == average.weights
    one, other = average.predict(INPUTS), loaded.predict(INPUTS)
    torch.testing.assert_close(one.means, other.means)
    torch.testing.assert_close(one.variance, other.variance)


class Own(nn.Sequential):
    """A network that no recipe makes."""


def test_networks_of_the_users_own_are_given_as_a_list(tmp_path: Any) -> None:
    net = Own(nn.Linear(3, 1))
    mean = {name: tensor.detach() for name, tensor in net.named_parameters()}
    own = GaussianPosterior(net, Gaussian(), mean, mean)
    AveragePosterior([own, gaussian()]).save(tmp_path)
    with pytest.raises(ConfigurationError, match="Pass net="):
        Posterior.load(tmp_path)
    for given in (net, [net, None]):
        assert type(Posterior.load(tmp_path, given).components[0].net) is Own
    with pytest.raises(ConfigurationError, match="each of the 2 models"):
        Posterior.load(tmp_path, [net])
    with pytest.raises(PosteriorFormatError, match="another network"):
        Posterior.load(tmp_path, [net, net])


def test_a_report_shows_it_beside_others() -> None:
    targets = INPUTS.sum(1, keepdim=True)
    data = DataLoader(TensorDataset(INPUTS, targets), batch_size=4)
    made = report_posteriors({"average": mixed(), "one": gaussian()}, data, bins=3)
    nll = made.numbers["models"][0]["scalars"]["nll"]
    assert nll == pytest.approx(-float(mixed().predict(INPUTS).log_prob(targets).mean()), rel=1e-4)


def test_the_fit_in_a_report_weighs_draws() -> None:
    """Of one input and one output: the band of the means is that of the weights."""
    net = nn.Linear(1, 1)

    def constant(value: float) -> DrawsPosterior:
        draw = {"weight": torch.zeros(1, 1), "bias": torch.full((1,), value)}
        return DrawsPosterior(net, Gaussian(0.1), [draw])

    average = AveragePosterior([constant(0.0), constant(1.0)], [0.97, 0.03])
    x = torch.linspace(-1, 1, 12)[:, None]
    made = report_posteriors(
        {"average": average}, DataLoader(TensorDataset(x, x), batch_size=6), bins=3
    )
    fit = made.numbers["models"][0]["fit"]
    assert set(fit["epistemic_lower"]) == set(fit["epistemic_upper"]) == {0.0}  # 0.95 < 0.97


@pytest.mark.parametrize(
    ("components", "weights", "message"),
    [
        ([], None, "at least one"),
        ("text", None, "at least one"),
        ([point(1), point(2, Poisson())], None, r"0 has Gaussian .*component 1 has Poisson"),
        ([point(1), point(2, Categorical())], None, r"Gaussian \(regression\).*\(classification\)"),
        ([point(1), point(2)], [0.5, 0.4], "whose sum is 1"),
        ([point(1), point(2)], [1.5, -0.5], "from 0 on"),
        ([point(1), point(2)], [1.0], "2 numbers"),
        ([point(1), point(2)], [float("nan"), 1.0], "from 0 on"),
        ([point(1), point(2)], "equal", "2 numbers"),
    ],
)
def test_what_cannot_be_averaged(components: Any, weights: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AveragePosterior(components, weights)


def test_models_of_different_classes_say_so() -> None:
    average = AveragePosterior([point(1, Categorical(), 3), point(1, Categorical(), 4)])
    with pytest.raises(DataError, match="same classes"):
        average.predict(INPUTS)


def test_members_over_weights_stay_a_posterior_over_weights() -> None:
    assert isinstance(mixture_of([point(1), point(2)]), MixturePosterior)
    assert isinstance(mixture_of([dropout(), dropout()]), AveragePosterior)
