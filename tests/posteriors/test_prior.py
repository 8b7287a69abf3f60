"""A posterior as a prior: what it takes of networks, files and options, and what it refuses."""

from __future__ import annotations

import pickle
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import (
    IVONBNN,
    SGMCMC,
    BayesianLinear,
    DeepEnsemble,
    DrawsPosterior,
    GaussianPosterior,
    LaplaceBNN,
    LowRankPosterior,
    MCDropoutBNN,
    MixturePosterior,
    PolynomialRegression,
    PosteriorPrior,
    VariationalBNN,
    WeightPosterior,
    laplace,
    mc_dropout,
)
from lightning_bnn.cli import main
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import RankOne, VariationalDropout
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import prior as rules
from lightning_bnn.priors import BoundPrior, Learned, Normal
from lightning_bnn.selection import last_layer
from tests.trainers import quiet_trainer

NOISE = Gaussian(0.5)
X = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
LOADER = DataLoader(TensorDataset(X, Y), batch_size=8)
STRATEGIES: dict[str, Any] = {
    "VI": VariationalBNN,
    "rank one": lambda *a, **k: VariationalBNN(*a, family=RankOne(2), **k),
    "variational dropout": lambda *a, **k: VariationalBNN(*a, family=VariationalDropout(), **k),
    "IVON": IVONBNN,
    "SGMCMC": SGMCMC,
    "ensemble": DeepEnsemble,
    "Laplace": lambda *a, **k: LaplaceBNN(*a, structure="diagonal", **k),
    "dropout": MCDropoutBNN,
}


def network(outputs: int = 1) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs))


def tensors(net: nn.Module, seed: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn_like(one) for name, one in net.named_parameters()}


def gaussian(net: nn.Module | None = None, **sd: float) -> GaussianPosterior:
    net = network() if net is None else net
    with torch.no_grad():
        net(torch.randn(32, 2))  # its running statistics move
    spread = {name: one.abs() + 0.1 for name, one in tensors(net, 3).items()}
    return GaussianPosterior(net, NOISE, tensors(net), spread)


def low_rank(net: nn.Module | None = None) -> LowRankPosterior:
    net = network() if net is None else net
    own = tensors(net)
    columns = {name: 0.3 * torch.randn(4, *one.shape) for name, one in own.items()}
    variance = {name: torch.full_like(one, 0.1) for name, one in own.items()}
    return LowRankPosterior.from_covariance(net, NOISE, own, variance, columns)


def draws(count: int, seed: int = 0) -> DrawsPosterior:
    net = network()
    return DrawsPosterior(net, NOISE, [tensors(net, seed + k) for k in range(count)])


def bind(prior: Any, net: nn.Module | None = None) -> BoundPrior:
    net = network() if net is None else net
    own = dict(net.named_parameters())
    return BoundPrior(rules.chosen_prior(prior, list(own)), net, own)


# ---------------------------------------------------------------- where a fit begins


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fit_goes_on_where_yesterdays_ended(name: str) -> None:
    """With the means, and with the buffers of BatchNorm; chains and members begin at draws."""
    yesterday = gaussian()
    bnn = STRATEGIES[name](network(), NOISE, prior=yesterday, seed=0)
    if name in ("SGMCMC", "ensemble"):
        distance = bnn.weights.detach() - bind(yesterday).pretrained
        assert 0.7 < float((distance / bind(yesterday).scales).std()) < 1.4
        assert torch.equal(
            bnn.current_draws()["1.running_mean"][1], yesterday.fixed["1.running_mean"]
        )
    else:
        held = {**dict(bnn.net.named_parameters())}
        if hasattr(bnn, "family"):
            held |= bnn.family.layout.views(bnn.family.mean.detach())
        for key, mean in yesterday.mean.items():
            torch.testing.assert_close(held[key].detach(), mean)
        assert torch.equal(bnn.net[1].running_mean, yesterday.fixed["1.running_mean"])
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, LOADER)
    assert bnn.posterior().predict(X, 4).mean.isfinite().all()


def test_other_starts_are_those_that_are_asked_for() -> None:
    net, yesterday = network(), gaussian()
    ensemble = DeepEnsemble(net, NOISE, yesterday, start=[net] * 2, members=2)
    own = torch.cat([one.detach().flatten() for one in net.parameters()])
    assert torch.equal(ensemble.weights[0].detach(), own)
    around = SGMCMC(network(), NOISE, yesterday, start="around", chains=2, seed=0)
    assert torch.equal(around.weights[0].detach(), bind(yesterday).pretrained)
    reset = DeepEnsemble(network, NOISE, yesterday, start="reset", members=2, seed=0)
    assert float((reset.weights.detach() - bind(yesterday).pretrained).abs().mean()) > 0.3
    built = DeepEnsemble(network, NOISE, yesterday, members=2, seed=0)
    assert not torch.equal(built.weights[0], built.weights[1])
    distance = built.weights.detach() - bind(yesterday).pretrained
    assert float((distance / bind(yesterday).scales).std()) < 2


def test_what_is_frozen_stays_where_it_is_in_the_posterior() -> None:
    """A last layer on yesterday's features; the given network stays as it is."""
    fitted = network()
    head = {name: one for name, one in tensors(fitted).items() if name.startswith("3.")}
    sd = {name: torch.full_like(one, 0.1) for name, one in head.items()}
    yesterday = GaussianPosterior(fitted, NOISE, head, sd)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    before = net[0].weight.detach().clone()
    net[0].requires_grad_(False)
    net[1].requires_grad_(False)
    bnn = VariationalBNN(net, NOISE, yesterday)
    assert torch.equal(bnn.net[0].weight, fitted[0].weight)
    assert torch.equal(net[0].weight, before)


# ---------------------------------------------------------------- parts of a network


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_new_head_has_a_prior_of_its_own(name: str) -> None:
    """The body is yesterday's, with its correlations; the head is new, and of another shape."""
    yesterday, net = low_rank(), network(outputs=3)
    prior = {"3.*": Normal(0.0, 2.0), "*": yesterday}
    bnn = STRATEGIES[name](net, Gaussian(0.5), prior=prior, seed=0)
    quiet_trainer(max_epochs=1).fit(
        bnn, DataLoader(TensorDataset(X, Y.expand(-1, 3)), batch_size=8)
    )
    bound = bind(prior, network(outputs=3))
    own = [name for name, _ in net.named_parameters() if not name.startswith("3.")]
    assert bound.located == own
    covariance = yesterday.covariance_of(own)
    size = len(covariance)
    weights = torch.randn(size + 15)
    mean = torch.cat([yesterday.mean[name].flatten() for name in own])
    truth = torch.distributions.MultivariateNormal(mean.double(), covariance)
    energy = -truth.log_prob(weights[:size].double())
    energy = energy - torch.distributions.Normal(0.0, 2.0).log_prob(weights[size:]).sum()
    torch.testing.assert_close(bound.energy(weights).double(), energy, rtol=1e-4, atol=1e-3)


def test_one_posterior_under_two_patterns_keeps_what_is_between_them() -> None:
    prior = {"0.*": low_rank(), "1.*": Normal(), "*": low_rank()}
    apart = bind(prior)
    yesterday = low_rank()
    together = bind({"0.*": yesterday, "1.*": Normal(), "*": yesterday})
    assert together.coupling is not None
    assert apart.coupling is not None
    assert bool((together.coupling.matrix[:12, 12:] != 0).all())
    assert not bool(apart.coupling.matrix[:12, 12:].any())
    weights = torch.randn(25)
    names = ["0.weight", "0.bias", "3.weight", "3.bias"]
    covariance = yesterday.covariance_of(names)
    mean = torch.cat([yesterday.mean[name].flatten() for name in names]).double()
    at = torch.cat([torch.arange(12), torch.arange(20, 25)])
    truth = torch.distributions.MultivariateNormal(mean, covariance)
    energy = -truth.log_prob(weights[at].double())
    energy = energy - torch.distributions.Normal(0.0, 1.0).log_prob(weights[12:20]).sum()
    torch.testing.assert_close(together.energy(weights).double(), energy, rtol=1e-4, atol=1e-3)


def test_learned_scales_stand_beside_it() -> None:
    bnn = VariationalBNN(network(), NOISE, {"0.*": low_rank(), "*": Normal(scale=Learned())})
    bnn.target.num_data = 24
    bnn.loss((X, Y)).backward()
    assert set(bnn.prior_scales()) == {"1.weight", "1.bias", "3.weight", "3.bias"}


@pytest.mark.parametrize("make", [gaussian, low_rank])
def test_pruned_weights_are_parked_at_it(make: Any) -> None:
    """They add nothing to the KL, which is that of what is left given their means."""
    bnn = VariationalBNN(network(), NOISE, make(), num_data=24)
    keep = torch.ones(4, 2, dtype=torch.bool)
    keep[0] = False
    bnn.prune({"0.weight": keep})
    prior, family = bnn.prior, bnn.family
    draw = family.rsample(torch.randn(25))
    kl = family.kl(draw, prior)
    assert torch.equal(family.mean[:2].detach(), prior.pretrained[:2])
    torch.testing.assert_close(family.sd()[:2].detach(), prior.scales[:2])
    family.keep = None  # counted, they add nothing but what couplings' volume is
    torch.testing.assert_close(family.kl(draw, prior), kl, rtol=1e-4, atol=1e-3)


# ---------------------------------------------------------------- files and checkpoints


def test_a_saved_posterior_is_named_by_its_directory(tmp_path: Path) -> None:
    low_rank().save(tmp_path / "monday")
    truth = bind(low_rank())
    for place in (tmp_path / "monday", str(tmp_path / "monday")):
        bound = bind(PosteriorPrior(place))
        assert torch.equal(bound.coupling.matrix, truth.coupling.matrix)
    bnn = VariationalBNN(network(), NOISE, {"*": PosteriorPrior(tmp_path / "monday")})
    torch.testing.assert_close(bnn.posterior().mean["3.weight"], low_rank().mean["3.weight"])


class Mine(nn.Module):
    """A network that no recipe makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def test_a_saved_posterior_of_ones_own_network(tmp_path: Path) -> None:
    low_rank(Mine()).save(tmp_path)
    bnn = VariationalBNN(Mine(), NOISE, PosteriorPrior(tmp_path))
    torch.testing.assert_close(bnn.posterior().mean, low_rank(Mine()).mean)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_fit_has_the_prior_of_the_checkpoint(tmp_path: Path) -> None:
    """Bit by bit, whatever posterior is given beside it."""

    def fit(prior: Any, path: Path | None = None, **options: Any) -> VariationalBNN:
        bnn = VariationalBNN(network(), NOISE, prior, seed=0)
        torch.manual_seed(4)
        quiet_trainer(max_epochs=2, **options).fit(bnn, LOADER, ckpt_path=path)
        return bnn

    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    bnn = fit(low_rank(), callbacks=[saver], enable_checkpointing=True)
    other = low_rank(network())
    other = other.map(lambda name, tensor: 1.5 * tensor)
    resumed = fit(other, tmp_path / "step=2.ckpt")
    assert torch.equal(resumed.prior.coupling.matrix, bnn.prior.coupling.matrix)
    assert torch.equal(resumed.family.mean, bnn.family.mean)


def test_a_checkpoint_asks_for_the_posterior(tmp_path: Path) -> None:
    bnn = VariationalBNN(network(), NOISE, low_rank(), seed=0)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, LOADER)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.raises(ConfigurationError, match=r"prior=\.\.\."):
        VariationalBNN.load_from_checkpoint(tmp_path / "end.ckpt")
    loaded = VariationalBNN.load_from_checkpoint(tmp_path / "end.ckpt", prior=low_rank())
    one, other = (
        each.posterior().sample(3, torch.Generator().manual_seed(0)) for each in (bnn, loaded)
    )
    assert all(torch.equal(other[name], weights) for name, weights in one.items())


def test_copies_and_pickles_have_the_prior() -> None:
    bnn = DeepEnsemble(network(), NOISE, low_rank(), members=2, num_data=24, mode="loop")
    energies = bnn.energies((X, Y))
    for other in (deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        assert torch.equal(other.energies((X, Y)), energies)


def test_a_configuration_names_a_saved_posterior(tmp_path: Path) -> None:
    """The first fit saves its posterior, the second takes it."""

    def fit(name: str, prior: dict[str, Any]) -> Path:
        model = {
            "class_path": "lightning_bnn.PolynomialRegression",
            "init_args": {"order": 3, "prior": prior},
        }
        content = {
            "seed_everything": 1,
            "model": model,
            "data": {"class_path": "lightning_bnn.data.ToyRegression"},
            "trainer": {
                "max_epochs": 1, "accelerator": "cpu", "logger": False,
                "enable_checkpointing": False, "enable_progress_bar": False,
                "enable_model_summary": False, "default_root_dir": str(tmp_path / f"{name}_run"),
            },
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
        where = tmp_path / name
        config = str(tmp_path / f"{name}.yaml")
        assert main(["fit", "--config", config, "--posterior", str(where)]) == 0
        return where

    monday = fit("monday", {"class_path": "lightning_bnn.priors.Normal"})
    named = {"class_path": "lightning_bnn.PosteriorPrior", "init_args": {"posterior": str(monday)}}
    tuesday = fit("tuesday", named)
    first, second = (WeightPosterior.load(where) for where in (monday, tuesday))
    # the same data twice; the noise is found anew
    ratio = second.moments().variance["1.weight"] / first.moments().variance["1.weight"]
    assert bool((ratio < 0.9).all())


# ---------------------------------------------------------------- options and what is said


def test_power_and_the_least_sd() -> None:
    yesterday = gaussian()
    whole, half = bind(yesterday), bind(PosteriorPrior(yesterday, power=0.25))
    torch.testing.assert_close(half.scales, 2 * whole.scales)
    raised = bind(PosteriorPrior(yesterday, least_sd=0.5))
    torch.testing.assert_close(raised.scales, whole.scales.clamp(min=0.5))
    assert float(whole.scales.min()) < 0.5
    coupled = bind(PosteriorPrior(low_rank(), least_sd=2.0))
    variance = torch.cat([v.flatten() for v in low_rank().moments().variance.values()]).double()
    covariance = low_rank().covariance_matrix() + (4 - variance).clamp(min=0).diag()
    torch.testing.assert_close(
        coupled.scales.double(), torch.linalg.inv(covariance).diagonal().rsqrt(), rtol=1e-4, atol=0
    )


def test_a_single_set_of_weights_and_point_estimates_are_given_a_spread() -> None:
    point = draws(1)
    bound = bind(PosteriorPrior(point, least_sd=0.1))
    assert torch.equal(bound.scales, torch.full((25,), 0.1))
    head = laplace(network().eval(), [(X, Y)], NOISE, Normal(), bayesian=last_layer)
    bound = bind(PosteriorPrior(head, least_sd=0.01))
    assert float(bound.scales[:20].min()) == pytest.approx(0.01)
    assert float((bound.scales[20:] - 0.01).abs().min()) > 1e-4


def test_correlations_that_are_left_out_are_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind(gaussian())
        bind(low_rank())
        bind(PosteriorPrior(draws(5), covariance="diagonal"))
        bind(PosteriorPrior(draws(80), covariance="full"))
    with pytest.warns(UserWarning, match="leaves out their correlations"):
        bound = bind(draws(80))
    assert bound.coupling is None
    variance = draws(80).moments().variance
    torch.testing.assert_close(
        bound.scales, torch.cat([one.flatten() for one in variance.values()]).sqrt()
    )
    with pytest.warns(UserWarning, match="leaves out"):
        bind(MixturePosterior([gaussian(), low_rank()]))


def test_correlations_of_many_weights_are_left_out_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "_MOST", 24)
    with pytest.warns(UserWarning, match="leaves out"):
        assert bind(low_rank()).coupling is None
    assert bind(PosteriorPrior(low_rank(), covariance="full")).coupling is not None


@pytest.mark.parametrize(
    ("prior", "words"),
    [
        (lambda: mc_dropout(nn.Sequential(nn.Linear(2, 1), nn.Dropout()), NOISE), "over weights"),
        (lambda: PosteriorPrior(3), "over weights"),  # type: ignore[arg-type]
        (lambda: PosteriorPrior(gaussian(), power=0.0), "power"),
        (lambda: PosteriorPrior(gaussian(), covariance="half"), "covariance"),  # type: ignore[arg-type]
        (lambda: PosteriorPrior(gaussian(), least_sd=-1.0), "least_sd"),
        (lambda: draws(1), "of '0.weight' have no spread"),
        (lambda: gaussian(nn.Sequential(nn.Linear(2, 4))), "has no '1.weight'"),
        (lambda: gaussian(network(3)), r"'3.weight' has the shape \[3, 4\]"),
        (lambda: PosteriorPrior(draws(20), covariance="full"), "cannot be inverted"),
        (
            lambda: laplace(network().eval(), [(X, Y)], NOISE, Normal(), bayesian=last_layer),
            "no distribution of '0.weight'",
        ),
        (
            lambda: gaussian().map(lambda _, one: one.masked_fill(one.abs() < 0.2, 0)),
            "of the 8 weights of '0.weight' have no spread",
        ),
        (lambda: gaussian().map(lambda _, one: one / 0 * 0), "NaN"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["VI", "ensemble", "Laplace"])
def test_mistakes_are_named(prior: Any, words: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        STRATEGIES[name](network(), NOISE, prior=prior())


def test_mistakes_of_single_strategies_are_named() -> None:
    with pytest.raises(ConfigurationError, match="has its own"):
        LaplaceBNN(network(), NOISE, gaussian(), structure="diagonal", scales="one")
    with pytest.raises(ConfigurationError, match="has its own"):
        laplace(network(), LOADER, NOISE, gaussian(), structure="diagonal", scales="per tensor")
    net = nn.Linear(2, 3)
    with pytest.raises(ConfigurationError, match="correlates weights of different outputs"):
        BayesianLinear(net, NOISE, low_rank(net))
    BayesianLinear(net, NOISE, PosteriorPrior(low_rank(net), covariance="diagonal"))
    with pytest.raises(ConfigurationError, match=r"has no '1\.weight'"):
        PolynomialRegression(2, prior=low_rank(nn.Linear(2, 1)))
    with pytest.raises(ConfigurationError, match="matches no trainable"):
        VariationalBNN(network(), NOISE, {"body.*": gaussian(), "*": Normal()})


def test_kron_says_what_it_leaves_out() -> None:
    net = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match=r"leaves out \d+% of it"):
        laplace(net, [(torch.randn(9, 3), torch.randn(9, 2))], NOISE, low_rank(net))
