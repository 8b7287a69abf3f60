"""The posterior of a network with dropout: its masks, its moments, and how its draws run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from lightning_bnn import Posterior, mc_dropout
from lightning_bnn.dropout import DropoutLayer
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.posteriors import DropoutPosterior
from tests.nets import SequenceTransformer, make_data

DRAWS = 4000
ROWS = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def outputs(posterior: Posterior, inputs: Any = ROWS, draws: int = 9, seed: int = 3) -> Tensor:
    return posterior.predict(inputs, draws, seed).outputs


# ---------------------------------------------------------------- truth

IMAGES = torch.rand(2, 4, 3, 3, generator=torch.Generator().manual_seed(0)) + 0.5
OWN: dict[str, tuple[nn.Module, float]] = {
    # a layer of rate p, and the variance of its noise
    "Dropout": (nn.Dropout(0.3), 0.3 / 0.7),
    "Dropout2d": (nn.Dropout2d(0.2), 0.2 / 0.8),
    "in place": (nn.Dropout(0.3, inplace=True), 0.3 / 0.7),
    "StochasticDepth": (StochasticDepth(0.4, "row"), 0.4 / 0.6),
}


@pytest.mark.parametrize("name", OWN)
def test_the_first_two_moments_of_a_layers_output(name: str) -> None:
    """E[x m] = x and var[x m] = x² p/(1 − p).

    4000 draws: the standard error of a mean is sd/63. Of the variance v of [u ≥ p]/(1 − p) it is
    v √((κ − 1)/4000), κ its kurtosis, at most 0.045 v here; of 72 numbers none is beyond 5 standard
    errors but for a false alarm in 10⁴.
    """
    layer, variance = OWN[name]
    found = outputs(mc_dropout(nn.Sequential(layer), Gaussian()), IMAGES, DRAWS).double()
    sd = IMAGES.double() * variance**0.5
    assert ((found.mean(0) - IMAGES).abs() < 5 * sd / DRAWS**0.5).all()
    torch.testing.assert_close(found.var(0), sd**2, rtol=0.23, atol=0)


def test_the_first_two_moments_of_gaussian_dropout() -> None:
    layer = DropoutLayer("", 0.5, "gaussian", "elements")  # variance 1, kurtosis 3
    found = outputs(DropoutPosterior(nn.Dropout(), Gaussian(), [layer]), ROWS, DRAWS).double()
    assert ((found.mean(0) - ROWS).abs() < 5 * ROWS.abs() / DRAWS**0.5).all()
    torch.testing.assert_close(found.var(0), ROWS.double() ** 2, rtol=5 * 0.0224, atol=0)
    noise = found[:, 0, 0] / ROWS[0, 0]
    assert torch.isclose(((noise - 1) ** 4).mean(), torch.tensor(3.0).double(), atol=0.8)


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)])
def test_alpha_dropout_keeps_mean_0_and_variance_1(layer: nn.Module) -> None:
    """Over draws and inputs of N(0, 1), 400,000 numbers; the bounds are 5 standard errors."""
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(2))
    inputs = (inputs - inputs.mean(0)) / inputs.std(0, correction=0)
    found = outputs(mc_dropout(nn.Sequential(layer), Gaussian()), inputs, 1000).double()
    assert abs(found.mean()) < 0.05
    assert abs(found.var() - 1) < 0.08
    # of zeros PyTorch's layer makes two numbers, and so do draws
    torch.manual_seed(0)
    zeros = torch.zeros(1000, 4)
    ours = outputs(mc_dropout(nn.Sequential(layer), Gaussian()), zeros, 100).unique()
    torch.testing.assert_close(ours, layer.train()(zeros).unique())


def test_the_moments_of_a_linear_layer_after_dropout() -> None:
    """var[w · (x m)] = p/(1 − p) Σ w² x², with a standard error of at most 3.5 % at 4000 draws."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout(0.25), nn.Linear(3, 2))
    found = outputs(mc_dropout(net, Gaussian()), ROWS, DRAWS).double()
    weight, bias = (p.detach().double() for p in net[1].parameters())
    variance = ROWS.double() ** 2 @ weight.T**2 / 3
    mean = ROWS.double() @ weight.T + bias
    assert ((found.mean(0) - mean).abs() < 5 * (variance / DRAWS).sqrt()).all()
    torch.testing.assert_close(found.var(0), variance, rtol=0.175, atol=0)


# ---------------------------------------------------------------- a draw is a function


class TimeFirst(nn.Module):
    """Exchanges axes before its dropout layer, as ``batch_first=False`` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:  # (batch, time, 3)
        return self.head(self.drop(inputs.transpose(0, 1))).transpose(0, 1).sum(1)


class Folded(TimeFirst):
    """Lays examples and positions along one axis."""

    def forward(self, inputs: Tensor) -> Tensor:
        flat = self.drop(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
        return self.head(flat).sum(1)


class Residual(nn.Module):
    """What was dropped is added to what was not, and the layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.drop(self.body(inputs))
        return self.head(hidden + self.drop(hidden.relu()))


class Positions(TimeFirst):
    """Drops what is the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs + self.drop(self.table)).sum(1)


class Padded(nn.Module):
    """A Transformer encoder that is told what is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        padding = (torch.arange(5) > 2).expand(len(inputs), 5)
        hidden = self.encoder(self.embed(inputs), src_key_padding_mask=padding)
        return self.head(hidden[:, :3].mean(1))


class Keywords(TimeFirst):
    """Two arguments, of which one is the same for all examples."""

    def forward(self, inputs: Tensor, weights: Tensor) -> Tensor:
        return self.head(input=(self.drop(inputs) * weights)).sum(1)


def sequential(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


SERIES = make_data("lstm", "regression").tensors[0]
PICTURES = make_data("resnet", "regression").tensors[0]
NETS: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    # a network, a batch, and how its draws run: 0 after one pass, 1 as one batch, 2 in turn
    "mlp": (
        sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2), nn.Dropout(0.1)),
        ROWS, 0,
    ),
    "conv": (
        sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.5), nn.Flatten(),
                   nn.Dropout(), nn.Linear(784, 2)), PICTURES, 0,
    ),
    "transformer": (lambda: SequenceTransformer(2), SERIES, 1),
    "padded": (Padded, SERIES, 1),
    "time first": (TimeFirst, SERIES, 0),
    "folded": (Folded, SERIES, 1),
    "positions along the axis of examples": (
        sequential(nn.Flatten(0, 1), nn.Dropout(), nn.Unflatten(0, (-1, 5)), nn.Flatten(),
                   nn.Linear(15, 2)), SERIES, 0,
    ),
    "residual": (Residual, ROWS, 1),
    "positions": (Positions, SERIES, 2),
    "own statistics": (
        sequential(nn.Linear(3, 2), nn.Dropout(0.3), nn.BatchNorm1d(2, track_running_stats=False)),
        ROWS, 2,
    ),
    "keywords": (Keywords, {"inputs": SERIES, "weights": torch.rand(5, 1)}, 0),
}  # fmt: skip


def some(inputs: Any, rows: int) -> Any:
    if isinstance(inputs, dict):
        return {"inputs": inputs["inputs"][:rows], "weights": inputs["weights"]}
    return inputs[:rows]


@pytest.fixture(params=NETS)
def case(request: pytest.FixtureRequest) -> tuple[str, Posterior, Any]:
    torch.manual_seed(0)
    make, inputs, _ = NETS[request.param]
    return request.param, mc_dropout(make(), Gaussian([0.1, 0.2], learn=True)), inputs


def test_a_mask_is_shared_by_all_batches(case):
    name, posterior, inputs = case
    state = torch.get_rng_state()
    whole = outputs(posterior, inputs, 11)
    assert whole.std(0).max() > 0.01
    close = {"rtol": 1e-4, "atol": 1e-5}
    if name != "own statistics":  # its examples see each other
        for rows in (5, 1):
            part = outputs(posterior, some(inputs, rows), 11)
            torch.testing.assert_close(part, whole[:, :rows], **close)
    torch.testing.assert_close(outputs(posterior, inputs, 3), whole[:3], **close)
    torch.testing.assert_close(outputs(posterior, inputs, 1), whole[:1], **close)
    assert not torch.allclose(outputs(posterior, inputs, 11, seed=4), whole)
    assert torch.equal(outputs(posterior, inputs, 11), whole)
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_run_together_where_that_is_right(case):
    name, posterior, inputs = case
    first = outputs(posterior, inputs, 11)
    assert posterior._way == NETS[name][2]
    posterior._way = 2
    torch.testing.assert_close(outputs(posterior, inputs, 11), first, rtol=1e-4, atol=1e-5)


def test_it_comes_back_from_the_disk(case, tmp_path):
    name, posterior, inputs = case
    posterior.save(tmp_path)
    loaded = Posterior.load(tmp_path, NETS[name][0]())
    assert type(loaded) is DropoutPosterior
    assert loaded.rates == posterior.rates
    torch.testing.assert_close(outputs(loaded, inputs), outputs(posterior, inputs))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.other = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([self.drop(inputs), self.drop(inputs), self.other(inputs)], 1)


def test_layers_and_calls_have_masks_of_their_own():
    """Of 64 numbers each; masks of p = 1/2 are independent of each other and of other draws."""
    masks = outputs(mc_dropout(Twice(), Gaussian()), torch.ones(2, 64), 20) > 0
    assert torch.equal(masks[:, 0], masks[:, 1])  # the same for both examples
    rows = masks[:, 0].flatten(0, 1).double() * 2 - 1  # 60 masks
    correlation = rows @ rows.T / 64 - torch.eye(60)
    assert correlation.abs().max() < 0.7  # 5.6 standard errors


def test_what_comes_before_the_first_layer_runs_once():
    sizes: list[int] = []
    body = nn.Linear(3, 4)
    body.register_forward_hook(lambda module, inputs, outputs: sizes.append(len(outputs)))
    posterior = mc_dropout(nn.Sequential(body, nn.Dropout(0.5), nn.Linear(4, 2)), Gaussian())
    outputs(posterior, ROWS, 8)
    sizes.clear()
    posterior.net[0]._forward_hooks.update(body._forward_hooks)
    outputs(posterior, ROWS, 16)
    assert sizes == [6, 6]  # for eight draws at a time


def test_the_networks_own_state_is_left_alone():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    posterior = mc_dropout(net, Categorical())
    own = {name: tensor.clone() for name, tensor in posterior.net.state_dict().items()}
    expected = outputs(posterior)
    net[0].weight.data.zero_()
    assert torch.equal(outputs(posterior), expected)
    assert net.training
    assert net[2].p == 0.5
    assert all(torch.equal(own[k], v) for k, v in posterior.net.state_dict().items())
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items() if k != "0.weight")
    assert not any(module._forward_pre_hooks for module in posterior.net.modules())


def test_the_masks_are_those_of_other_batches_and_precisions():
    """The numbers do not depend on what was asked before, or on the network's precision."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    posterior = mc_dropout(net, Gaussian())
    dropped = outputs(posterior, ROWS, 20) == 0
    assert torch.equal(outputs(mc_dropout(net.double(), Gaussian()), ROWS, 20) == 0, dropped)
    fresh = mc_dropout(net, Gaussian())
    outputs(fresh, ROWS[:2], 7, seed=9)
    assert torch.equal(outputs(fresh, ROWS, 20) == 0, dropped)


# ---------------------------------------------------------------- errors


def test_networks_without_dropout_are_refused():
    with pytest.raises(ConfigurationError, match=r"no dropout layer .* MCDropoutBNN"):
        mc_dropout(nn.LSTM(3, 3, num_layers=2, dropout=0.5), Gaussian())
    with pytest.raises(ConfigurationError, match="only dropout layers whose rate is 0"):
        mc_dropout(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)), Gaussian())
    with pytest.raises(ConfigurationError, match="drops all of its inputs"):
        mc_dropout(nn.Sequential(nn.Dropout(1.0)), Gaussian())
    with pytest.raises(ConfigurationError, match=r"torch\.nn\.Module; got int"):
        mc_dropout(3, Gaussian())


class Always(nn.Dropout):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.dropout(inputs, self.p, True)


def test_a_dropout_layer_with_a_forward_of_its_own_is_refused():
    with pytest.raises(ConfigurationError, match="Always, a Dropout with a forward of its own"):
        mc_dropout(nn.Sequential(Always(0.5)), Gaussian())


def test_files_that_name_other_layers_are_refused(tmp_path, monkeypatch):
    posterior = mc_dropout(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), Gaussian())
    posterior.layers = [DropoutLayer("7", 0.5, "bernoulli", "elements")]
    posterior.save(tmp_path)
    with pytest.raises(ConfigurationError, match="module of the network"):
        Posterior.load(tmp_path)
    posterior.layers = [DropoutLayer("1", 0.5, "cauchy", "elements")]
    posterior.save(tmp_path)
    with pytest.raises(PosteriorFormatError, match="cauchy"):
        Posterior.load(tmp_path)


def test_errors_of_the_network_itself_are_shown():
    posterior = mc_dropout(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), Gaussian())
    with pytest.raises(RuntimeError, match="shapes"):
        posterior.predict(torch.zeros(2, 5), draws=4)
    outputs(posterior)
    assert posterior._way == 0
    with pytest.raises(ConfigurationError, match="at least 1; got 0"):
        posterior.predict(ROWS, draws=0)
    with pytest.raises(ConfigurationError, match="64 bits"):
        posterior.predict(ROWS, draws=1, seed="x")


def test_it_moves_to_a_device() -> None:
    """The layers are names and rates, which stay as they are."""
    posterior = DropoutPosterior(
        nn.Dropout(), Gaussian(), [DropoutLayer("", 0.5, "bernoulli", "elements")]
    )
    before = outputs(posterior)
    assert posterior.to("cpu") is posterior
    assert torch.equal(outputs(posterior), before)
    net = nn.Sequential(nn.Linear(3, 2), nn.Dropout(), nn.Linear(2, 1))
    assert mc_dropout(net, Gaussian()).to("meta").device.type == "meta"
