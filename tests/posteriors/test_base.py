"""What all posteriors share: predicting in chunks, bounded memory, files, bad input."""

import weakref

import pytest
import torch
from torch import nn

from lightning_bnn import DrawsPosterior, GaussianPosterior, Posterior
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.posteriors import weights
from lightning_bnn.storage import store
from tests.posteriors.common import generator, network


def make(net, likelihood=None, names=None, scale=0.3):
    parameters = dict(net.named_parameters())
    mean = {name: parameters[name].detach() for name in names or parameters}
    sd = {name: torch.full_like(tensor, scale) for name, tensor in mean.items()}
    return GaussianPosterior(net, likelihood or Gaussian(0.3), mean, sd)


def load_all(stored):
    return {name: stored.load(name) for name in stored.blob_names}


# ---------------------------------------------------------------- predicting


@pytest.mark.parametrize("count", [1, 7, 8, 21])
def test_predict_equals_running_each_draw_by_hand(count):
    net = network()
    net(torch.randn(9, 3))
    posterior = make(net)
    inputs = torch.randn(5, 3)
    found = posterior.predict(inputs, draws=count, seed=3).outputs
    draws = posterior.sample(count, generator(3))
    net.eval()
    for index in range(count):
        one = {name: tensor[index] for name, tensor in draws.items()}
        expected = torch.func.functional_call(net, one, inputs)
        torch.testing.assert_close(found[index], expected, rtol=1e-5, atol=1e-5)
    assert not found.requires_grad


def test_the_seed_decides_and_batches_are_seen_by_the_same_functions():
    posterior = make(network())
    inputs = torch.randn(6, 3)
    state = torch.get_rng_state()
    whole = posterior.predict(inputs, draws=5)
    parts = [posterior.predict(part, draws=5) for part in inputs.split(2)]
    torch.testing.assert_close(torch.cat([part.outputs for part in parts], 1), whole.outputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(posterior.predict(inputs, draws=5, seed=1).outputs, whole.outputs)
    assert posterior.predict(inputs).draws == posterior.default_draws == 32


def test_the_draws_are_made_once_where_they_are_small(monkeypatch):
    count, posterior = 5, make(network())
    made = []
    draws = posterior.draws
    monkeypatch.setattr(posterior, "draws", lambda *a, **k: made.append(a) or draws(*a, **k))
    inputs = torch.randn(4, 3)
    for _ in range(3):
        posterior.predict(inputs, draws=count)
    assert len(made) == 1
    posterior.predict(inputs, draws=count, seed=1)
    posterior.predict(inputs, draws=count + 1)
    assert len(made) == 3
    monkeypatch.setattr(weights, "CACHE_BYTES", 0)
    posterior._cache = None
    before = posterior.predict(inputs, draws=count).outputs
    assert posterior._cache is None
    torch.testing.assert_close(posterior.predict(inputs, draws=count).outputs, before)
    assert len(made) == 5


@pytest.mark.parametrize("kind", ["gaussian", "draws"])
def test_memory_does_not_grow_with_the_number_of_draws(monkeypatch, kind):
    """512 draws of a million weights would be 2 GB: at most one chunk of eight is alive.

    The network here is small, and the limit under which draws are kept as much smaller.
    """
    net = nn.Linear(100, 10, bias=False)
    assert weights.CACHE_BYTES < 512 * 4 * 2**20
    monkeypatch.setattr(weights, "CACHE_BYTES", 512 * 4 * 1000 - 1)
    posterior = make(net)
    if kind == "draws":
        posterior = DrawsPosterior(net, Gaussian(0.3), [{"weight": net.weight}] * 4)
    alive, most = weakref.WeakSet(), []
    draws = posterior.draws

    def tracked(*arguments, **options):
        for piece in draws(*arguments, **options):
            tensor = piece["weight"]
            alive.add(tensor if tensor._base is None else tensor._base)
            most.append(sum(len(tensor) for tensor in alive))
            yield piece
            del piece, tensor

    monkeypatch.setattr(posterior, "draws", tracked)
    monkeypatch.setattr(posterior._stacked, "mode", "loop")
    assert posterior.predict(torch.randn(2, 100), draws=512).draws == 512
    assert len(most) == 64
    assert max(most) == 8
    monkeypatch.setattr(weights, "CACHE_BYTES", 512 * 4 * 1000)
    posterior.predict(torch.randn(2, 100), draws=512)
    assert sum(len(tensor) for tensor in alive) == 512


def test_it_predicts_in_evaluation_mode_and_changes_nothing():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    net.train()
    posterior = make(net, scale=1e-6)
    inputs = torch.randn(5, 3)
    outputs = posterior.predict(inputs, draws=3).outputs
    torch.testing.assert_close(outputs[0], net.eval()(inputs), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(outputs[0], outputs[2], rtol=1e-3, atol=1e-3)
    assert posterior.fixed["1.num_batches_tracked"] == 0
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_it_does_not_hang_on_the_users_network():
    net = network()
    likelihood = Gaussian(0.3, learn=True)
    posterior = make(net, likelihood, names=["3.weight"])
    inputs = torch.randn(5, 3)
    before = posterior.predict(inputs)
    with torch.no_grad():
        for tensor in (*net.parameters(), likelihood.log_scale, net[1].running_var):
            tensor.fill_(2.0)
    posterior._cache = None
    after = posterior.predict(inputs)
    torch.testing.assert_close(after.outputs, before.outputs)
    torch.testing.assert_close(after.scales, before.scales)


def test_fixed_is_completed_and_checked():
    net = network()
    posterior = GaussianPosterior(
        net,
        Gaussian(0.1),
        {"3.bias": torch.zeros(2)},
        {"3.bias": torch.ones(2)},
        {"0.bias": torch.full((4,), 7.0)},
    )
    assert set(posterior.fixed) == set(net.state_dict()) - {"3.bias"}
    assert posterior.fixed["0.bias"].tolist() == [7.0] * 4
    assert torch.equal(posterior.fixed["0.weight"], net[0].weight)
    for fixed, message in (
        ({"0.bais": torch.ones(4)}, "fixed names '0.bais'"),
        ({"0.bias": torch.ones(5)}, r"fixed has '0.bias' in the shape \[5\]"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            DrawsPosterior(net, Gaussian(0.1), [{"3.bias": torch.zeros(2)}], fixed)


# ---------------------------------------------------------------- tied, frozen, not saved


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, tokens):
        return self.scale * self.head(self.embedding(tokens).mean(1))


def test_tied_weights_and_buffers_that_are_not_saved(tmp_path):
    net = Tied()
    posterior = make(net, Categorical())
    assert list(posterior.sample(1)) == ["embedding.weight"]
    assert posterior.fixed == {}
    tokens = torch.randint(7, (5, 3))
    found = posterior.predict(tokens, draws=3).outputs
    draws = posterior.sample(3, generator(0))["embedding.weight"]
    for weight, output in zip(draws, found, strict=True):
        torch.testing.assert_close(output, 2 * weight[tokens].mean(1) @ weight.T)
    posterior.save(tmp_path)
    torch.testing.assert_close(
        Posterior.load(tmp_path, Tied()).predict(tokens, draws=3).outputs, found
    )
    with pytest.raises(ConfigurationError, match=r"'head.weight'.*tied weight .* first name"):
        DrawsPosterior(net, Categorical(), [{"head.weight": torch.zeros(7, 4)}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(tmp_path, dtype):
    net = network().to(dtype)
    posterior = make(net)
    posterior.save(tmp_path)
    given = torch.randn(3, 3)  # as data are, whatever the precision of the fit was
    inputs = given.to(dtype)
    loaded = Posterior.load(tmp_path, network())
    assert loaded.mean["0.weight"].dtype == dtype
    assert loaded.predict(inputs, draws=2).outputs.dtype == dtype
    found = loaded.predict(given, draws=2).outputs
    assert torch.equal(found, loaded.predict(inputs, draws=2).outputs)
    assert given.dtype == torch.float32


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)),
            r"tensor 0 is '0.weight' of shape \[4, 3\], but '0.weight' of shape \[5, 3\] in the",
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)),
            r"tensor 6 is '1.running_mean' of shape \[4\], but missing in the given one",
        ),
    ],
)
def test_another_network_is_named_by_its_first_difference(tmp_path, other, message):
    make(network()).save(tmp_path)
    with pytest.raises(PosteriorFormatError, match=f"{tmp_path} is of another network: {message}"):
        Posterior.load(tmp_path, other())


class Own(Gaussian):
    """A likelihood of the user's own."""


def test_a_likelihood_of_ones_own_must_be_given(tmp_path):
    posterior = make(network(), Own(0.2, learn=True))
    with torch.no_grad():
        posterior.likelihood.log_scale.fill_(-3.0)
    posterior.save(tmp_path)
    with pytest.raises(PosteriorFormatError, match=r"likelihood '.*\.Own', .* Pass likelihood="):
        Posterior.load(tmp_path, network())
    given = Own(1.0, learn=True)
    loaded = Posterior.load(tmp_path, network(), likelihood=given)
    assert type(loaded.likelihood) is Own
    assert loaded.likelihood.log_scale == -3
    assert given.log_scale == 0  # the user's object is not changed
    for wrong in (Gaussian(0.2), Gaussian([0.2, 0.3], learn=True), Categorical()):
        with pytest.raises(PosteriorFormatError, match=r"has learned \['log_scale'\]; .*Pass like"):
            Posterior.load(tmp_path, network(), likelihood=wrong)


@pytest.mark.parametrize("name", ["__name__", "base", "os"])
def test_only_likelihoods_are_made_by_name(tmp_path, name):
    make(nn.Linear(2, 1)).save(tmp_path)
    stored = store.read(tmp_path)
    fields = {**stored.fields, "likelihood": {"name": name, "config": {"a": 1}}}
    store.write(tmp_path, kind=stored.kind, blobs=load_all(stored), fields=fields)
    with pytest.raises(PosteriorFormatError, match=f"likelihood '{name}'"):
        Posterior.load(tmp_path, nn.Linear(2, 1))


def test_kinds_are_known_by_their_names(tmp_path):
    class Named(GaussianPosterior):
        """Has no kind of its own: it does not take the place of that which it derives from."""

    make(nn.Linear(2, 1)).save(tmp_path)
    assert type(Posterior.load(tmp_path, nn.Linear(2, 1))) is GaussianPosterior
    store.write(tmp_path, kind="flow", blobs={}, fields={})
    known = r"\['average', 'draws', 'dropout', 'gaussian', 'laplace', 'linear', 'low_rank'"
    with pytest.raises(PosteriorFormatError, match=f"kind 'flow'; this version knows {known}"):
        Posterior.load(tmp_path, network())


def test_a_likelihood_given_beside_the_posterior_must_be_its_own(tmp_path):
    net = nn.Linear(1, 1)
    make(net, Gaussian(0.1)).save(tmp_path)
    assert Posterior.load(tmp_path, net, Gaussian(0.1)).likelihood.config()["scale"] == 0.1
    with pytest.raises(PosteriorFormatError, match=r"made with Gaussian.*0\.1.*given.*5\.0"):
        Posterior.load(tmp_path, net, Gaussian(5.0))
