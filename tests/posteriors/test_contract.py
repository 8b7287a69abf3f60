"""What every posterior does, whatever its kind; the last of them has no weights at all."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import Self

from lightning_bnn import (
    DrawsPosterior,
    GaussianPosterior,
    LaplacePosterior,
    LinearPosterior,
    LowRankPosterior,
    MixturePosterior,
    Posterior,
    Predictive,
    WeightPosterior,
)
from lightning_bnn.curvature import Covariance
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import MatrixNormalPosterior, RankOnePosterior
from lightning_bnn.posteriors.laplace import PredictiveKind
from lightning_bnn.posteriors.matrices import factor_sides
from lightning_bnn.report import report_posteriors
from lightning_bnn.selection import FlatLayout

INPUTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
LAST = ("3.weight", "3.bias")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def tensors(names: tuple[str, ...] = (), lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
    parameters = network().named_parameters()
    return {k: torch.randn(*lead, *p.shape) for k, p in parameters if not names or k in names}


def used_network() -> nn.Module:
    """One whose running statistics are not those that it was made with."""
    net = network()
    net(torch.randn(16, 3))
    return net


def gaussian(names: tuple[str, ...] = (), scale: float = 0.3) -> GaussianPosterior:
    sd = {name: tensor.abs() + 0.1 for name, tensor in tensors(names).items()}
    return GaussianPosterior(used_network(), Gaussian(scale, learn=True), tensors(names), sd)


def low_rank(rank: int = 5, names: tuple[str, ...] = ()) -> LowRankPosterior:
    variance = {name: tensor.square() for name, tensor in tensors(names).items()}
    deviations = tensors(names, (rank,)) if rank else None
    likelihood = Gaussian(0.2)
    return LowRankPosterior(
        used_network(), likelihood, tensors(names), variance, deviations, scale=0.7
    )


def linear() -> LinearPosterior:
    likelihood = Gaussian([0.1, 0.2], learn=True)
    return LinearPosterior(used_network(), likelihood, tensors(LAST), tensors(LAST, (5,)))


def matrix_normal(names: tuple[str, ...] = ()) -> MatrixNormalPosterior:
    sd = {name: tensor.abs() + 0.1 for name, tensor in tensors(names).items()}
    sides = {"3.weight.rows": torch.randn(2, 2), "3.weight.columns": torch.randn(4, 4)}
    factors = {name: nn.functional.normalize(root, dim=1) for name, root in sides.items()}
    return MatrixNormalPosterior(used_network(), Gaussian(0.2), tensors(names), sd, factors)


def rank_one(names: tuple[str, ...] = ()) -> RankOnePosterior:
    shared = tensors(names)
    lengths = {k: n for name, one in shared.items() for k, n in factor_sides(name, one.shape)}
    factors = {name: 1 + 0.3 * torch.randn(3, length) for name, length in lengths.items()}
    sd = {name: 0.1 + 0.2 * torch.rand(3, length) for name, length in lengths.items()}
    return RankOnePosterior(used_network(), Gaussian(0.2), shared, factors, sd)


def draws(chains: int = 2, names: tuple[str, ...] = ()) -> DrawsPosterior:
    sets = [tensors(names) for _ in range(12)]
    return DrawsPosterior(used_network(), Gaussian([0.1, 0.2], learn=True), sets, chains=chains)


def draws_with_buffers() -> DrawsPosterior:
    states = [dict(used_network().state_dict()) for _ in range(12)]
    return DrawsPosterior(network(), Gaussian(0.1, learn=True), states)


def laplace_posterior(structure: str, predictive: PredictiveKind = "draws") -> LaplacePosterior:
    net, mean = used_network(), tensors(LAST)
    tensors_of = {
        "diagonal": {"sd": torch.rand(10) + 0.1},
        "full": {"root": torch.randn(10, 10).triu()},
        "kron": {
            "3.left": torch.randn(2, 2),
            "3.right": torch.randn(5, 5),
            "3.scale": torch.rand(2, 5),
        },
        "low rank": {
            "sd": torch.rand(10) + 0.1,
            "vectors": torch.linalg.qr(torch.randn(10, 3)).Q.T.contiguous(),
            "shrunk": torch.rand(3),
        },
    }
    covariance = Covariance.kinds[structure](FlatLayout(mean), tensors_of[structure])
    return LaplacePosterior(net, Gaussian(0.2), mean, covariance, None, predictive, -12.5)


KINDS: dict[str, Callable[[], WeightPosterior]] = {
    "gaussian": gaussian,
    "gaussian, last layer": lambda: gaussian(LAST),
    "low rank": low_rank,
    "low rank, last layer": lambda: low_rank(2, LAST),
    "diagonal": lambda: low_rank(0),
    "linear": linear,
    "laplace, diagonal": partial(laplace_posterior, "diagonal"),
    "laplace, full": partial(laplace_posterior, "full", "linearised"),
    "laplace, kron": partial(laplace_posterior, "kron", "linearised"),
    "laplace, low rank": partial(laplace_posterior, "low rank", "linearised"),
    "laplace, masked": lambda: laplace_posterior("kron", "linearised").map(
        lambda name, tensor: tensor.masked_fill(torch.ones_like(tensor).cumsum(-1) == 2, 0)
    ),
    "matrix normal": matrix_normal,
    "matrix normal, last layer": lambda: matrix_normal(LAST),
    "rank one": rank_one,
    "rank one, last layer": lambda: rank_one(LAST),
    "draws": draws,
    "draws, last layer": lambda: draws(3, LAST),
    "draws with buffers": draws_with_buffers,
    "mixture": lambda: MixturePosterior([gaussian(LAST, 0.1), gaussian(LAST, 0.4), draws()]),
    "nested mixture": lambda: MixturePosterior(
        [gaussian(), MixturePosterior([draws(), gaussian()])]
    ),
}


@pytest.fixture(params=KINDS)
def posterior(request: pytest.FixtureRequest) -> WeightPosterior:
    torch.manual_seed(0)
    return KINDS[request.param]()


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def all_tensors(posterior: Posterior) -> list[Tensor]:
    held = [tensor for blob in posterior.blobs().values() for tensor in blob.values()]
    return [*held, *posterior.likelihood.state_dict().values()]


def test_it_says_what_it_is(posterior):
    shown, total = repr(posterior), sum(p.numel() for p in posterior.net.parameters())
    assert shown.startswith(f"{type(posterior).__name__}({type(posterior.net).__name__}, ")
    inferred = sum(posterior.net.get_parameter(name).numel() for name in posterior.varying)
    assert f"{inferred} of {total} parameters inferred" in shown
    if isinstance(posterior, DrawsPosterior):
        assert f", {len(posterior)} draws, " in shown
    if isinstance(posterior, MixturePosterior):
        assert f", {len(posterior.components)} components, " in shown
    assert shown.endswith(f"{posterior.likelihood!r})")


def test_it_comes_back_from_the_disk(posterior, tmp_path):
    posterior.save(tmp_path)
    loaded = Posterior.load(tmp_path, network())
    assert type(loaded) is type(posterior)
    assert loaded.entry() == posterior.entry()
    assert loaded.default_draws == posterior.default_draws
    assert loaded.varying == posterior.varying
    assert equal(loaded.sample(14, generator()), posterior.sample(14, generator()))
    one, other = (p.predict(INPUTS, draws=9) for p in (posterior, loaded))
    torch.testing.assert_close(other.outputs, one.outputs, rtol=1e-5, atol=1e-5)
    assert torch.equal(other.scales, one.scales)


def test_chunks_do_not_change_the_numbers(posterior):
    whole = posterior.sample(19, generator())
    for chunk in (1, 3, 8, 100):
        pieces = list(posterior.draws(19, generator(), chunk))
        assert max(len(next(iter(piece.values()))) for piece in pieces) <= chunk
        assert equal({name: torch.cat([p[name] for p in pieces]) for name in pieces[0]}, whole)


def test_the_covariance_matrix_is_that_of_draws(posterior):
    """Each number within 6 sd of that of 500 draws: a false alarm has a chance below 10⁻⁴."""
    names = posterior.varying
    covariance, moments = posterior.covariance_matrix(), posterior.moments()
    variance = torch.cat([moments.variance[name].flatten() for name in names]).double()
    torch.testing.assert_close(covariance, covariance.T)
    sampled = posterior.correlations == "estimated" and isinstance(posterior, RankOnePosterior)
    if not sampled:
        torch.testing.assert_close(covariance.diagonal(), variance, rtol=1e-4, atol=1e-7)
    count = len(posterior) * 100 if isinstance(posterior, DrawsPosterior) else 500
    draws = posterior.sample(count, generator())
    found = torch.cov(torch.cat([draws[name].flatten(1) for name in names], 1).double().T)
    spread = covariance.diagonal()[:, None] * covariance.diagonal() + covariance.square()
    most = 6 * (spread / count).sqrt() * (3 if posterior.correlations == "estimated" else 1)
    if not isinstance(posterior, DrawsPosterior):
        assert bool(((found - covariance).abs() <= most + 1e-7).all())
    else:  # n - 1 in the place of n
        share = (len(posterior) - 1) / len(posterior) * count / (count - 1)
        torch.testing.assert_close(found, covariance * share, rtol=1e-5, atol=1e-6)
    if posterior.correlations == "none":
        assert torch.equal(covariance, covariance.diagonal().diag())
    part = posterior.covariance_of(names[-1:])
    torch.testing.assert_close(part, covariance[-len(part) :, -len(part) :])


def test_predictions_are_of_the_draws_of_the_seed(posterior):
    state = torch.get_rng_state()
    outputs = posterior.predict(INPUTS, draws=7, seed=4).outputs
    assert torch.equal(posterior.predict(INPUTS, draws=7, seed=4).outputs, outputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(outputs) == 7
    for count in (0, -1):
        with pytest.raises(ConfigurationError, match=f"at least 1; got {count}"):
            posterior.predict(INPUTS, draws=count)
        with pytest.raises(ConfigurationError, match=f"at least 1; got {count}"):
            posterior.sample(count)


def test_the_moments_are_those_of_what_varies(posterior):
    moments = posterior.moments()
    assert list(moments.mean) == list(moments.variance) == posterior.varying
    assert posterior.has_variance
    sampled = posterior.sample(12_000, generator())
    for name in posterior.varying:
        mean, sd = moments.mean[name], moments.variance[name].sqrt()
        # standard errors; the seed is fixed, and draws are each given equally often
        error = (sampled[name].mean(0) - mean) / (sd + 1e-6) * 12_000**0.5
        assert error.abs().max() < 5, name
        torch.testing.assert_close(posterior.mean[name].float(), mean)
        torch.testing.assert_close(sampled[name].std(0), sd, rtol=0.15, atol=1e-4)


def test_map_changes_every_tensor_of_a_copy(posterior):
    posterior.mode = "loop"
    expected = posterior.sample(6, generator())
    same = posterior.map(lambda name, tensor: tensor)
    assert type(same) is type(posterior)
    assert same.mode == "loop"
    assert same.entry() == posterior.entry()
    assert equal(same.sample(6, generator()), expected)
    zero = posterior.map(lambda name, tensor: torch.zeros_like(tensor))
    assert not any(tensor.any() for tensor in zero.sample(6, generator()).values())
    for tensor in all_tensors(same):
        tensor.zero_()
    assert equal(posterior.sample(6, generator()), expected)


def test_it_moves_copies_and_travels(posterior):
    outputs = posterior.predict(INPUTS, draws=5).outputs
    for other in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        torch.testing.assert_close(other.predict(INPUTS, draws=5).outputs, outputs)
    assert posterior.to("cpu") is posterior
    posterior.to("meta")
    assert all(tensor.is_meta for tensor in all_tensors(posterior))
    assert posterior.device.type == "meta"


class Memory(Posterior):
    """Predicts what it has seen nearest to an input; there are no weights."""

    kind = "test-memory"

    def __init__(
        self, likelihood: Gaussian, inputs: Tensor, targets: Tensor, spread: float
    ) -> None:
        super().__init__(likelihood)
        self.inputs, self.targets, self.spread = inputs, targets, spread

    def predict(self, inputs: Any, draws: int | None = None, seed: int = 0) -> Predictive:
        nearest = self.targets[torch.cdist(inputs, self.inputs).argmin(1)]
        shape = (draws or self.default_draws, *nearest.shape)
        noise = torch.randn(shape, generator=generator(seed))
        return self.likelihood.predictive(nearest + self.spread * noise)

    def blobs(self) -> dict[str, Any]:
        return {"seen": {"inputs": self.inputs, "targets": self.targets}}

    def entry(self) -> dict[str, Any]:
        return {"spread": self.spread}

    @classmethod
    def from_stored(cls, stored: Any, entry: Any, net: Any, likelihood: Any, prefix: str) -> Self:
        return cls(likelihood, **stored.load(f"{prefix}seen"), spread=entry["spread"])


def test_a_posterior_without_weights_is_one_class(tmp_path):
    targets = INPUTS[:, :1].clone()
    memory = Memory(Gaussian(0.1, learn=True), INPUTS.clone(), targets, spread=0.5)
    memory.save(tmp_path)
    loaded = Posterior.load(tmp_path)
    assert type(loaded) is Memory
    one, other = memory.predict(INPUTS, 8), loaded.predict(INPUTS, 8)
    assert torch.equal(one.outputs, other.outputs)
    assert Predictive.mix([one, other]).draws == 16
    data = DataLoader(TensorDataset(INPUTS, targets), batch_size=3)
    report = report_posteriors({"memory": loaded}, data, bins=3)
    assert report.save(tmp_path / "page.html")
    assert loaded.to("meta").device.type == "meta"
    with pytest.raises(PosteriorFormatError, match="is a Memory; expected a WeightPosterior"):
        WeightPosterior.load(tmp_path)


class Own(nn.Sequential):
    """A network that no recipe makes."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs)


def test_a_network_of_known_layers_need_not_be_given(posterior, tmp_path):
    posterior.save(tmp_path)
    state = torch.get_rng_state()
    loaded = Posterior.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    one, other = (each.predict(INPUTS, 4, seed=1).outputs for each in (posterior, loaded))
    torch.testing.assert_close(one, other)


def test_a_network_of_the_users_own_has_to_be_given(tmp_path):
    net = Own(nn.Linear(3, 2))
    mean = {name: tensor.detach() for name, tensor in net.named_parameters()}
    GaussianPosterior(net, Gaussian(), mean, mean).save(tmp_path)
    with pytest.raises(ConfigurationError, match=r"a network of your own\. Pass net="):
        Posterior.load(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"of": "os.system", "with": {"command": "id"}}, "not on the list"),
        ({"of": "torch.nn.Linear", "with": {"in_features": 9**9, "out_features": 9**9}}, "itself"),
        ({"of": "torch.nn.Linear", "with": {"in_features": 3, "out_features": 2}}, "itself"),
        (7, "itself|recipe"),
    ],
)
def test_a_forged_recipe_is_refused(recipe, words, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_bnn.posteriors.weights.network_recipe", lambda net: recipe)
    gaussian().save(tmp_path)
    with pytest.raises(PosteriorFormatError, match=words):
        Posterior.load(tmp_path)


def test_a_recipe_of_a_network_that_is_much_larger_than_its_file_is_refused(tmp_path, monkeypatch):
    large = {"of": "torch.nn.Linear", "with": {"in_features": 10**6, "out_features": 10**6}}
    monkeypatch.setattr("lightning_bnn.posteriors.weights.network_recipe", lambda net: large)
    shapes = [["weight", [10**6, 10**6]], ["bias", [10**6]]]
    monkeypatch.setattr("lightning_bnn.posteriors.weights.describe", lambda net: shapes)
    gaussian().save(tmp_path)
    with pytest.raises(PosteriorFormatError, match="blobs only"):
        Posterior.load(tmp_path)
