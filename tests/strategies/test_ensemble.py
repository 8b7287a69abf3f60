"""Deep ensembles: the same as networks trained one by one; what they leave behind; bad input."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader

from lightning_bnn import DeepEnsemble, MixturePosterior, Posterior
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from lightning_bnn.priors import Laplace, Normal
from lightning_bnn.random import isolated_random_state, member_seed
from lightning_bnn.strategies.schedule import WarmUpCosine
from tests.nets import loader, make_data, mlp
from tests.strategies.ensembles import (
    FACTORIES,
    SCALE,
    assert_member_equals,
    batch_norm_net,
    fit,
    make,
    networks,
    train_plainly,
)

# -------------------------------------------------------------------- equal to single networks


@pytest.mark.parametrize(
    ("name", "mode"),
    [("mlp", "stacked"), ("mlp", "loop"), ("cnn", "stacked"), ("cnn", "loop"), ("lstm", "auto")],
)
def test_members_equal_networks_trained_one_by_one(name: str, mode: Any) -> None:
    """50 steps in float64: against a plain PyTorch loop, and against a member alone."""
    build, kind = FACTORIES[name]
    data = make_data(kind, "classification")
    optimizer = partial(Adam, lr=0.01)
    ensemble = make(build, optimizer=optimizer, mode=mode)
    plain = networks(ensemble, build)
    fit(ensemble, 50, data=data, precision="64-true")
    assert ensemble.bank.stack.mode == ("loop" if name == "lstm" else mode)
    for index, net in enumerate(plain):
        train_plainly(net.double(), optimizer, data, 50)
        assert_member_equals(ensemble, index, net, rtol=1e-8, atol=1e-10)
    alone = make(build, optimizer=optimizer, mode=mode, members=[2])
    fit(alone, 50, data=data, precision="64-true")
    assert_member_equals(alone, 0, plain[2], rtol=1e-8, atol=1e-10)
    assert not torch.allclose(ensemble.weights[0], ensemble.weights[1])


def test_members_equal_networks_built_and_trained_one_by_one_under_their_seeds() -> None:
    """From the start: nothing is taken over from the ensemble. With the default schedule."""
    data = make_data("mlp", "classification")
    ensemble = make(members=[0, 4])
    fit(ensemble, 50, data=data, precision="64-true")
    for index, number in enumerate((0, 4)):
        with isolated_random_state(member_seed(7, number, "start")):
            net = batch_norm_net()
        adam, schedule = partial(Adam, lr=5e-3, fused=True), partial(WarmUpCosine, total=50)
        train_plainly(net.double(), adam, data, 50, schedule)
        assert_member_equals(ensemble, index, net, rtol=1e-8, atol=1e-10)


def test_an_ensemble_of_one_is_its_member_exactly() -> None:
    """Bit-equal: energy, gradient, weights after 20 steps of SGD, and predictions.

    The plain network's prior is added to its gradient by hand, w/(N s²), because autograd on a
    sum of squares rounds otherwise.
    """
    ensemble = make(partial(mlp, 3), members=1, optimizer=partial(SGD, lr=0.1), mode="auto")
    (net,) = networks(ensemble, partial(mlp, 3))
    data = make_data("mlp", "classification")
    fit(ensemble, 20)
    optimizer = SGD(net.parameters(), lr=0.1)
    batches = list(loader(data))
    share = torch.tensor(1.0) / 48 / SCALE**2
    for step in range(20):
        inputs, targets = batches[step % 3]
        optimizer.zero_grad()
        (-Categorical().log_prob(net(inputs), targets).mean()).backward()
        for parameter in net.parameters():
            parameter.grad.addcmul_(parameter.detach(), share)
        optimizer.step()
    assert_member_equals(ensemble, 0, net, rtol=0, atol=0)
    posterior = ensemble.posterior()
    assert len(posterior) == 1
    inputs = data.tensors[0]
    with torch.no_grad():
        assert torch.equal(posterior.predict(inputs).outputs[0], net(inputs))
        assert torch.equal(ensemble(inputs)[0], net(inputs))


# -------------------------------------------------------------------- where members start


def test_a_factory_gives_each_member_values_of_its_own_and_the_seed_decides() -> None:
    before = torch.get_rng_state()
    first = make().weights
    assert torch.equal(first, make().weights)
    assert not torch.equal(first, make(seed=8).weights)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(before, torch.get_rng_state())


def test_a_network_starts_anew_around_or_from_a_posterior() -> None:
    net = batch_norm_net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    fresh = make(net).current_draws()["0.weight"]
    assert not any(torch.equal(one, before["0.weight"]) for one in fresh)
    around = make(net, start="around").current_draws()["0.weight"]
    assert torch.equal(around[0], before["0.weight"])
    assert 0 < (around[1] - around[0]).abs().max() < 0.5
    ensemble = make(net)
    fit(ensemble, 3)
    again = make(net, start=ensemble.posterior())
    assert torch.equal(again.weights, ensemble.weights)
    assert torch.equal(
        again.current_draws()["1.running_mean"], ensemble.current_draws()["1.running_mean"]
    )
    nets = [batch_norm_net() for _ in range(3)]
    listed = make(net, start=nets).current_draws()["3.weight"]
    assert all(torch.equal(one, other[3].weight) for one, other in zip(listed, nets, strict=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


class RandomFeatures(nn.Module):
    """Random features that stay as they are, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(4, 16)
        self.features.requires_grad_(False)
        self.common = nn.Parameter(torch.full((16,), 0.5), requires_grad=False)
        self.head = nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.features(inputs)) * self.common)


@pytest.mark.parametrize("mode", ["stacked", "loop"])
def test_frozen_parameters_are_each_members_own_where_they_differ(mode: Any) -> None:
    ensemble = make(RandomFeatures, mode=mode, optimizer=partial(SGD, lr=0.1))
    assert ensemble.weights.shape == (3, 16 * 3 + 3)
    assert set(ensemble.bank.buffer_names) == {"features.weight", "features.bias"}
    start = {name: tensor.clone() for name, tensor in ensemble.current_draws().items()}
    fit(ensemble, 3)
    draws = ensemble.current_draws()
    assert torch.equal(draws["features.weight"], start["features.weight"])
    assert not torch.equal(draws["features.weight"][0], draws["features.weight"][1])
    inputs = make_data("mlp", "classification").tensors[0]
    found = ensemble.posterior().predict(inputs).outputs
    for index in range(3):
        net = RandomFeatures()
        net.load_state_dict({name: t[index] for name, t in draws.items()}, strict=False)
        torch.testing.assert_close(found[index], net(inputs).detach())


# -------------------------------------------------------------------- what it leaves behind


def test_the_predictive_is_the_mixture_of_the_members() -> None:
    """Total variance = mean of σ² + variance of μ, and the NLL of the mixture, by NumPy."""
    data = make_data("mlp", "regression")
    ensemble = make(partial(mlp, 4), likelihood=HeteroscedasticGaussian(), members=4)
    trainer = fit(ensemble, 30, data=data)
    (results,) = trainer.test(ensemble, loader(data), verbose=False)
    inputs, targets = (tensor.double().numpy() for tensor in data.tensors)
    draws = {name: tensor.double().numpy() for name, tensor in ensemble.current_draws().items()}
    hidden = np.einsum("ni,moi->mno", inputs, draws["0.weight"]) + draws["0.bias"][:, None]
    outputs = np.einsum("mnh,moh->mno", np.maximum(hidden, 0), draws["2.weight"])
    outputs += draws["2.bias"][:, None]
    means, scales = outputs[..., :2], np.log1p(np.exp(outputs[..., 2:])) + 1e-4
    predictive = ensemble.posterior().predict(data.tensors[0])
    np.testing.assert_allclose(predictive.mean, means.mean(0), rtol=1e-4, atol=1e-5)
    total = (scales**2).mean(0) + means.var(0)
    np.testing.assert_allclose(predictive.variance, total, rtol=1e-4)
    np.testing.assert_allclose(predictive.epistemic, means.var(0), rtol=1e-3, atol=1e-6)
    # of an example: the mixture over members of the product over its two targets
    member = norm.logpdf(targets, means, scales).sum(-1)
    mixture = -np.log(np.exp(member).mean(0)).mean()
    assert results["test_nll"] == pytest.approx(mixture, rel=1e-4)
    assert results["test_nll"] != pytest.approx(-member.mean(), rel=1e-2)


def test_what_the_likelihood_learns_is_each_members_own(tmp_path: Path) -> None:
    data = make_data("mlp", "regression")
    options: dict[str, Any] = {
        "likelihood": Gaussian(0.5, learn=True),
        "optimizer": partial(Adam, lr=0.05),
    }
    ensemble = make(partial(mlp, 2), **options)
    trainer = fit(ensemble, 30, data=data)
    assert ensemble.bank.learned.shape == (3, 1)
    scales = ensemble.bank.learned.detach().exp().flatten()
    assert len(set(scales.tolist())) == 3
    alone = make(partial(mlp, 2), members=[1], **options)
    fit(alone, 30, data=data)
    torch.testing.assert_close(
        alone.bank.learned[0], ensemble.bank.learned[1], rtol=1e-4, atol=1e-5
    )
    assert ensemble.likelihood_of(2).log_scale.exp() == scales[2]

    posterior = ensemble.posterior()
    assert isinstance(posterior, MixturePosterior)
    posterior.save(tmp_path / "posterior")
    inputs = data.tensors[0]
    outputs = ensemble(inputs).detach()
    total = scales.square().mean() + outputs.var(0, correction=0)
    for one in (posterior, Posterior.load(tmp_path / "posterior", mlp(2))):
        torch.testing.assert_close(one.predict(inputs).variance, total, rtol=1e-4, atol=1e-6)
    (batch,) = trainer.predict(ensemble, DataLoader(inputs, batch_size=48))
    torch.testing.assert_close(batch.variance, total, rtol=1e-4, atol=1e-6)


# -------------------------------------------------------------------- bad input


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


def changing_width() -> Any:
    widths = iter(range(3, 99))
    return lambda: nn.Linear(4, next(widths))


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (batch_norm_net, {"members": 0}, "members= is how many members run, at least 1.*got 0"),
        (batch_norm_net, {"members": [1, 1]}, "each once"),
        (batch_norm_net, {"seed": -1}, "seed= is a whole number, at least 0"),
        (batch_norm_net, {"chunk": 0}, "chunk= is a whole number, at least 1"),
        (batch_norm_net, {"mode": "fast"}, "mode="),
        (batch_norm_net, {"start": "somewhere"}, "start= is 'around'"),
        (batch_norm_net, {"start": [batch_norm_net()]}, "start= has 1 networks for 3 members"),
        (nn.Sequential(nn.Linear(4, 3), Scale()), {}, r"module '1' \(Scale\).*net=lambda"),
        (changing_width(), {}, "net= gives for member 1 is another one: tensor 0 is 'weight'"),
        (lambda: 3, {}, "net= gave int for member 0"),
        (3, {}, "net= gave int for member 0; expected a network, or a function"),
        (batch_norm_net, {"optimizer": 0.1}, "optimizer= is a function that makes the optimizer"),
        (batch_norm_net, {"optimizer": [SGD]}, "optimizer= has 1 entries for 3 members"),
        (
            batch_norm_net,
            {"optimizer": [SGD, None, SGD]},
            "optimizer= is a function.* None in place 1",
        ),
        (lambda: nn.Linear(4, 3, dtype=torch.complex64), {}, "real numbers; 'weight' is"),
    ],
)
def test_bad_options(net: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(net, **options)


def test_a_prior_around_pretrained_weights_needs_weights_that_members_share() -> None:
    prior = Normal(loc="pretrained")
    with pytest.raises(ConfigurationError, match="net= gives each member others"):
        DeepEnsemble(partial(mlp, 3), Categorical(), prior, members=2)
    net = mlp(3)
    ensemble = DeepEnsemble(net, Categorical(), prior, members=2, num_data=48)
    own = dict(net.named_parameters())
    assert torch.equal(ensemble.prior.pretrained, ensemble.bank.layout.flatten(own))
    build = lambda: nn.Sequential(net[0], nn.ReLU(), nn.Linear(16, 3))  # noqa: E731
    DeepEnsemble(build, Categorical(), {"0.*": prior, "*": Laplace()}, members=2)
