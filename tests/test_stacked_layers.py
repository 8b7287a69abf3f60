"""Plain layers on stacked tensors: what runs there, and that it is what the networks give."""

import pytest
import torch
from torch import nn

from lightning_bnn.nets import MLP
from lightning_bnn.stacked_layers import plain_layers, run_layers

MEMBERS = 3


def deep():
    """Every kind of layer, nested, with and without parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.LayerNorm(12, elementwise_affine=False),
        nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.LayerNorm(8)),
        nn.Dropout(0.0),
        nn.Sequential(nn.Sequential(nn.Linear(8, 6, bias=False)), nn.ReLU(inplace=True)),
        nn.LayerNorm(6, bias=False),
        nn.Identity(),
        nn.Linear(6, 2),
    )


CASES = {
    "deep": (deep, (5, 3, 4)),
    "one layer": (lambda: nn.Linear(3, 2), (5, 3)),
    "positions": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (5, 2, 6, 3)),
    "one example": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), (3,)),
    "no example": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), (0, 3)),
    "norm first": (lambda: nn.Sequential(nn.LayerNorm([2, 3]), nn.Linear(3, 4)), (5, 2, 3)),
    "flat late": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.Linear(8, 1)), (5, 2, 3)),
    "flat inside": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Flatten(-3, -2), nn.Flatten(1, 2)),
        (5, 2, 2, 3),
    ),
    "flat batch": (lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 4)), (5, 2, 3)),
}


def stack(nets):
    return {
        name: torch.stack([dict(net.named_parameters())[name].detach() for net in nets])
        for name, _ in nets[0].named_parameters()
    }


@pytest.mark.parametrize("own_inputs", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_separate_networks(case, own_inputs):
    make, shape = CASES[case]
    nets = [make().double() for _ in range(MEMBERS)]
    tensors = {name: tensor.requires_grad_() for name, tensor in stack(nets).items()}
    inputs = torch.randn(*([MEMBERS] * own_inputs), *shape, dtype=torch.float64, requires_grad=True)
    layers = plain_layers(nets[0], tensors)
    assert layers is not None
    outputs = run_layers(layers, tensors, inputs.clone(), own_inputs)
    mine = inputs.detach().clone().requires_grad_()
    each = mine.unbind() if own_inputs else [mine] * MEMBERS
    expected = torch.stack([net(one) for net, one in zip(nets, each, strict=True)])
    torch.testing.assert_close(outputs, expected)
    factors = torch.arange(1.0, MEMBERS + 1).double()  # so that a mix-up of members shows
    (factors @ outputs.square().flatten(1).sum(1)).backward()
    (factors @ expected.square().flatten(1).sum(1)).backward()
    torch.testing.assert_close(inputs.grad, mine.grad)
    for name, tensor in tensors.items():
        own = torch.stack([dict(net.named_parameters())[name].grad for net in nets])
        torch.testing.assert_close(tensor.grad, own)


@pytest.mark.parametrize(
    "activation",
    [
        nn.ReLU6(), nn.LeakyReLU(0.2), nn.ELU(), nn.SELU(), nn.CELU(), nn.SiLU(), nn.Mish(),
        nn.Sigmoid(), nn.LogSigmoid(), nn.Softplus(), nn.Softsign(), nn.Hardtanh(),
        nn.Hardswish(), nn.Hardsigmoid(), nn.Tanhshrink(), nn.Softshrink(), nn.Hardshrink(),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_activations(activation):
    nets = [nn.Sequential(nn.Linear(3, 4), activation) for _ in range(MEMBERS)]
    tensors, inputs = stack(nets), torch.randn(5, 3)
    outputs = run_layers(plain_layers(nets[0], tensors), tensors, inputs, False)
    torch.testing.assert_close(outputs, torch.stack([net(inputs) for net in nets]))


@pytest.mark.parametrize("inplace", [False, True])
def test_every_member_drops_other_numbers(inplace):
    """Of the inputs, which they share, as well as of what is hidden; in evaluation none."""
    net = nn.Sequential(nn.Dropout(0.5, inplace), nn.Linear(64, 64), nn.Dropout(0.5, inplace))
    eye = torch.eye(64).expand(2, 64, 64)
    tensors = {"1.weight": eye, "1.bias": torch.zeros(2, 64)}
    layers, inputs = plain_layers(net, tensors), torch.ones(32, 64)
    outputs = run_layers(layers, tensors, inputs, False)
    assert inputs.eq(1).all()
    assert set(outputs.unique().tolist()) == {0.0, 4.0}
    assert 0.15 < outputs[0].ne(0).float().mean() < 0.35
    # kept by both with probability 1/16; 2048 entries, so 0.10 is seven standard errors away
    assert 0.03 < (outputs[0].ne(0) & outputs[1].ne(0)).float().mean() < 0.10
    net.eval()
    assert run_layers(layers, tensors, inputs, False).eq(1).all()


class Subclass(nn.Linear):
    pass


def replaced():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    net[1].forward = torch.exp
    return net


def tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    return net


def twice():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, layer)


def hooked(register):
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    getattr(net[1], register)(lambda *_: None)
    return net


OTHERS = {
    "another type": lambda: nn.Sequential(nn.Linear(3, 3), nn.PReLU()),
    "a subclass": lambda: Subclass(3, 3),
    "another container": lambda: nn.ModuleList([nn.Linear(3, 3)]),
    "a forward in its place": replaced,
    "tied weights": tied,
    "a layer twice": twice,
    "a spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    **{
        name: lambda name=name: hooked(name)
        for name in (
            "register_forward_hook",
            "register_forward_pre_hook",
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
        )
    },
}


@pytest.mark.parametrize("case", OTHERS)
def test_everything_else_is_left_to_vmap(case):
    net = OTHERS[case]()
    tensors = {name: t.detach()[None] for name, t in net.named_parameters(remove_duplicate=False)}
    assert plain_layers(net, tensors) is None


class Backwards(nn.Sequential):
    """Another forward than a Sequential's."""

    def forward(self, inputs):
        for layer in reversed(self):
            inputs = layer(inputs)
        return inputs


def test_a_sequential_by_another_name_is_one_unless_its_forward_is_another():
    net = MLP(3, [4], 2)
    tensors = {name: t.detach()[None] for name, t in net.named_parameters()}
    assert [prefix for prefix, _ in plain_layers(net, tensors)] == ["0.", "1.", "2.", "3."]
    net = Backwards(nn.Linear(3, 3), nn.Tanh())
    tensors = {name: t.detach()[None] for name, t in net.named_parameters()}
    assert plain_layers(net, tensors) is None


def test_a_parameter_that_is_not_stacked_is_left_to_vmap():
    net = nn.Linear(3, 2)
    assert plain_layers(net, {"weight": torch.zeros(2, 2, 3)}) is None


@pytest.mark.parametrize("own_inputs", [False, True])
def test_inputs_of_another_width_get_pytorchs_own_error(own_inputs):
    net = nn.Linear(3, 2)
    tensors = {name: t.detach().expand(2, *t.shape) for name, t in net.named_parameters()}
    inputs = torch.randn(2, 5, 4) if own_inputs else torch.randn(5, 4)
    with pytest.raises(RuntimeError, match=r"\(5x4 and 3x2\)"):
        run_layers(plain_layers(net, tensors), tensors, inputs, own_inputs)


def test_autocast_is_respected():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    nets = [net, net]
    tensors, inputs = stack(nets), torch.randn(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = run_layers(plain_layers(net, tensors), tensors, inputs, False)
        expected = net(inputs)
    assert outputs.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(outputs[1], expected, rtol=0.02, atol=0.02)
