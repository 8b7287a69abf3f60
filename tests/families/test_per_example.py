"""Flipout and local reparameterisation against explicit weights and analytic variances."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev

from lightning_bnn import VariationalBNN
from lightning_bnn.families.per_example import PerExampleNoise
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.random import NormalStream

# layer, and the shape of one example
LAYERS = {
    "Linear": (lambda: nn.Linear(3, 2), (3,)),
    "Linear on a sequence": (lambda: nn.Linear(3, 2), (4, 3)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 7)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=(2, 1)), (2, 5, 6)),
    "Conv2d same": (lambda: nn.Conv2d(2, 2, (3, 1), padding="same"), (2, 4, 4)),
    "Conv2d reflect": (lambda: nn.Conv2d(2, 2, 3, padding=2, padding_mode="reflect"), (2, 4, 4)),
    "Conv3d": (lambda: nn.Conv3d(2, 2, 2, padding=1, groups=2), (2, 2, 3, 2)),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (4, 4),
    ),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 3, dilation=2), (2, 3, 3)),
    "ConvTranspose2d size": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), (2, 3, 3)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 2, 1, 2)),
}
# keyword arguments of the call
OPTIONS = {"ConvTranspose2d size": {"output_size": [6, 6]}}
every_layer = pytest.mark.parametrize("name", LAYERS)


def make(name, bias=True):
    layer = LAYERS[name][0]().double()
    if not bias:
        layer.register_parameter("bias", None)
    sd = {key: torch.rand_like(p).add(0.2).detach() for key, p in layer.named_parameters()}
    return layer.requires_grad_(False), sd, LAYERS[name][1], OPTIONS.get(name, {})


def normal_like(tensors, generator=None):
    return {
        key: torch.empty_like(tensor).normal_(generator=generator)
        for key, tensor in tensors.items()
    }


def run(layer, kind, sd, noise, inputs, options, seed=0, names=None):
    per_example = PerExampleNoise(layer, names or list(sd), kind)
    with per_example.active(sd, noise, torch.Generator().manual_seed(seed)):
        return layer(inputs, **options)


def analytic_variance(layer, sd, inputs, options):
    """Outputs are linear in the weights: Var = J² σ², with J the derivative by the weights."""
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(layer, w, inputs, options))(weights)
    return sum(
        (jacobian[name].square() * sd[name].square()).flatten(inputs.dim()).sum(-1) for name in sd
    )


@every_layer
@pytest.mark.parametrize("bias", [True, False])
def test_flipout_is_an_explicit_weight_for_each_example(name, bias):
    """ΔW of example b is σε ∘ r sᵀ (by group); the layer at W + ΔW gives the same output."""
    layer, sd, shape, options = make(name, bias)
    batch = 5
    inputs, noise = torch.randn(batch, *shape).double(), normal_like(sd)
    found = run(layer, "flipout", sd, noise, inputs, options, seed=7)

    generator = torch.Generator().manual_seed(7)
    transposed, groups = "Transpose" in name, getattr(layer, "groups", 1)
    convolution = "Conv" in name
    channels_in = layer.in_channels if convolution else layer.in_features
    channels_out = layer.out_channels if convolution else layer.out_features
    positions = len(shape) - 1
    # the signs as the estimator draws them: of the inputs, then of the outputs
    ones = [1] * positions
    sign_shapes = [
        (batch, n, *ones) if convolution else (batch, *ones, n) for n in (channels_in, channels_out)
    ]
    s, r = (
        torch.empty(size).double().bernoulli_(0.5, generator=generator).mul(2).sub(1)
        .reshape(batch, -1)
        for size in sign_shapes
    )  # fmt: skip
    for b in range(batch):
        row, column = (s[b], r[b]) if transposed else (r[b], s[b])
        blocks = column.view(groups, 1, -1).expand(-1, len(row) // groups, -1)
        signs = row[:, None] * blocks.reshape(len(row), -1)
        signs = signs.reshape(*signs.shape, *[1] * (layer.weight.dim() - 2))
        explicit = {"weight": layer.weight + sd["weight"] * noise["weight"] * signs}
        if bias:
            explicit["bias"] = layer.bias + sd["bias"] * noise["bias"] * r[b]
        expected = functional_call(layer, explicit, (inputs[b : b + 1],), options)
        torch.testing.assert_close(found[b : b + 1], expected, rtol=0, atol=1e-12)


@every_layer
def test_local_scale_is_exact(name):
    """With the standard normal numbers known, the noise is √Var times them, to rounding."""
    layer, sd, shape, options = make(name)
    inputs = torch.randn(3, *shape).double()
    variance = analytic_variance(layer, sd, inputs, options)
    numbers = torch.empty_like(variance).normal_(generator=torch.Generator().manual_seed(5))
    found = run(layer, "local", sd, sd, inputs, options, seed=5)
    expected = layer(inputs, **options) + variance.sqrt() * numbers
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["flipout", "local"])
@pytest.mark.parametrize("name", ["Linear", "Conv2d", "ConvTranspose2d size"])
def test_biases(kind, name):
    """A bias that is a point estimate, or not there, adds no noise; a Bayesian one does."""
    layer, sd, shape, options = make(name)
    zeros = torch.zeros(4, *shape).double()
    exact = layer(zeros, **options)
    noise = normal_like(sd)
    only_weight = run(layer, kind, {"weight": sd["weight"]}, noise, zeros, options)
    torch.testing.assert_close(only_weight, exact)
    assert PerExampleNoise(layer, ["weight"], kind).covered == {"weight"}
    both = run(layer, kind, sd, noise, zeros, options)
    assert (both - exact).abs().min() > 0
    if kind == "flipout":
        size = (sd["bias"] * noise["bias"]).abs()
        change = (both - exact).abs().transpose(1, -1)
        torch.testing.assert_close(change, size.expand_as(change))
    # a Bayesian bias under a weight that is not keeps the draw of the batch
    assert PerExampleNoise(layer, ["bias"], kind).covered == set()


@pytest.mark.parametrize("kind", ["flipout", "local"])
def test_gradients_reach_mean_scale_and_input_and_survive_zeros(kind):
    layer = nn.Linear(3, 2)
    sd = {k: torch.full_like(p, 0.1).requires_grad_() for k, p in layer.named_parameters()}
    inputs = torch.randn(4, 3)
    inputs[0] = 0.0
    inputs.requires_grad_()
    only_weight = {"weight": sd["weight"]}
    outputs = run(layer, kind, only_weight, normal_like(sd), inputs, {})
    outputs.square().sum().backward()
    for tensor in (inputs, layer.weight, layer.bias, sd["weight"]):
        assert tensor.grad.isfinite().all()
        assert tensor.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["flipout", "local"])
@pytest.mark.parametrize("name", ["Linear", "Conv1d", "ConvTranspose1d"])
def test_unbatched_inputs_and_keyword_inputs(kind, name):
    layer, sd, shape, _ = make(name)
    noise = normal_like(sd)
    alone = run(layer, kind, sd, noise, torch.ones(shape).double(), {}, seed=2)
    assert alone.shape == layer(torch.ones(shape).double()).shape
    inputs = torch.randn(2, *shape).double()
    positional = run(layer, kind, sd, noise, inputs, {}, seed=2)
    per_example = PerExampleNoise(layer, list(sd), kind)
    with per_example.active(sd, noise, torch.Generator().manual_seed(2)):
        assert torch.equal(layer(input=inputs), positional)


@pytest.mark.parametrize("kind", ["flipout", "local"])
def test_hooks_of_the_user(kind):
    """They run once: before the layer on its input, after it on the noisy output."""
    layer, sd, shape, _ = make("Linear")
    noise, inputs = normal_like(sd), torch.randn(4, *shape).double()
    plain = run(layer, kind, sd, noise, 3 * inputs, {})
    calls = []
    layer.register_forward_pre_hook(lambda module, arguments: (3 * arguments[0],))
    layer.register_forward_hook(lambda module, arguments, output: calls.append(output) or -output)
    found = run(layer, kind, sd, noise, inputs, {})
    torch.testing.assert_close(found, -plain)
    assert len(calls) == 1
    assert torch.equal(calls[0], -found)


def test_nothing_is_left_behind():
    layer, sd, shape, _ = make("Linear")
    inputs = torch.randn(4, *shape).double()
    per_example = PerExampleNoise(layer, list(sd), "local")
    with (
        pytest.raises(ZeroDivisionError),
        per_example.active(sd, sd, torch.Generator()),
    ):
        raise ZeroDivisionError
    assert torch.equal(layer(inputs), F.linear(inputs, layer.weight, layer.bias))
    assert not layer._forward_hooks


# ---------------------------------------------------------------- networks


class Twice(nn.Module):
    """Calls one layer twice on the same input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs):
        return torch.cat([self.layer(inputs), self.layer(inputs)], 1)


class Reads(nn.Module):
    """Uses a layer's weight without calling the layer; another layer is not used at all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.called = nn.Linear(2, 1)
        self.unused = nn.Linear(3, 2)

    def forward(self, inputs):
        return self.called(F.linear(inputs, self.layer.weight))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight
        self.last = nn.Linear(3, 1)

    def forward(self, inputs):
        return self.last(self.other(self.one(inputs)))


class Special(nn.Linear):
    """A subclass may compute something else, so it keeps the draw of the batch."""

    def forward(self, inputs):
        return super().forward(inputs) ** 2


def noisy_outputs(net, inputs, estimator, times=2):
    bnn = VariationalBNN(net, Gaussian(1.0), estimator=estimator, initial_scale=0.5, num_data=9)
    outputs = [bnn._run_draw(0, inputs)[0].detach() for _ in range(times)]
    return bnn, outputs


def test_a_layer_called_twice_keeps_its_weights_under_flipout():
    inputs = torch.randn(5, 3)
    for estimator, alike in (("flipout", True), ("local", False)):
        _, (first, second) = noisy_outputs(Twice(), inputs, estimator)
        assert torch.equal(first[:, :2], first[:, 2:]) is alike
        assert not torch.equal(first, second)


@pytest.mark.parametrize("estimator", ["flipout", "local"])
def test_a_weight_that_is_read_and_not_called_takes_the_draw_of_the_batch(estimator):
    net = Reads()
    names = [name for name, _ in net.named_parameters()]
    assert PerExampleNoise(net, names, estimator).covered == set(names)
    bnn, outputs = noisy_outputs(net, torch.randn(5, 3), estimator)
    assert bnn._per_example.covered == {"called.weight", "called.bias"}
    # silence the layer that is called: what noise is left comes from the weight that is read
    with torch.no_grad():
        for name, view in bnn.family.layout.views(bnn.family.rho.data).items():
            if name.startswith("called"):
                view.fill_(-30)
    first, second = (bnn._run_draw(0, torch.ones(5, 3))[0] for _ in range(2))
    assert not torch.allclose(first, second)
    torch.testing.assert_close(first, first[:1].expand(5, 1))  # one draw for all examples
    assert not torch.equal(*outputs)


def test_the_pass_that_finds_a_layer_unreached_is_done_again():
    """The very first outputs have all their noise, from the same noise as a later pass."""
    net, inputs = Reads(), torch.randn(5, 3)
    bnn, (first,) = noisy_outputs(net, inputs, "flipout", times=1)
    again = VariationalBNN(net, Gaussian(1.0), estimator="flipout", initial_scale=0.5, num_data=9)
    again.noise.set_extra_state({**bnn.noise.get_extra_state()})
    again.noise.stream = NormalStream(bnn.noise.stream.seed)
    again._per_example = PerExampleNoise(again.net, ["called.weight", "called.bias"], "flipout")
    assert torch.equal(again._run_draw(0, inputs)[0], first)


@pytest.mark.parametrize(
    ("net", "inputs", "covered"),
    [
        (Tied(), torch.randn(5, 3), {"last.weight", "last.bias"}),
        (nn.Sequential(Special(3, 2), nn.Linear(2, 1)), torch.ones(5, 3), {"1.weight", "1.bias"}),
        (
            nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.Linear(3, 1)),
            torch.arange(4),
            {"2.weight", "2.bias"},
        ),
        (
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            torch.randn(3, 2, 4),
            {f"linear{i}.{part}" for i in (1, 2) for part in ("weight", "bias")},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("estimator", ["flipout", "local"])
def test_which_weights_are_covered(net, inputs, covered, estimator):
    bnn, outputs = noisy_outputs(net, inputs, estimator)
    assert bnn._per_example.covered == covered
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("estimator", ["flipout", "local"])
def test_only_chosen_layers_are_noisy(estimator):
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    bnn = VariationalBNN(net, Gaussian(1.0), bayesian="2.*", estimator=estimator, num_data=9)
    assert bnn._per_example.covered == {"2.weight", "2.bias"}
    bnn.loss((torch.randn(4, 3), torch.randn(4, 1))).backward()
    assert bnn.net[0].weight.grad.abs().sum() > 0
