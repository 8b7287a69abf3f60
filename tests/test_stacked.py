"""M sets of weights through one network: stacked, as a loop, and by measuring."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bnn import stacked as stacked_module
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.stacked import StackedModule, call_network

MEMBERS = 3


class Sequence(nn.Module):
    """An Embedding and a layer over it that returns one tensor."""

    def __init__(self, body, size=8):
        super().__init__()
        self.embedding = nn.Embedding(11, size)
        self.body = body
        self.head = nn.Linear(size, 2)

    def forward(self, tokens):
        hidden = self.body(self.embedding(tokens))
        return self.head((hidden[0] if isinstance(hidden, tuple) else hidden)[:, -1])


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )


def transformer():
    return Sequence(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))


def lstm():
    return Sequence(nn.LSTM(8, 8, batch_first=True))


def tokens():
    return torch.randint(11, (5, 6))


NETS = {
    "mlp": (mlp, lambda: torch.randn(5, 3)),
    "cnn": (cnn, lambda: torch.randn(5, 2, 6, 6)),
    "transformer": (transformer, tokens),
    "embedding": (lambda: Sequence(nn.Identity()), tokens),
    "tied": (TiedHead, tokens),
}


def members_of(net, make):
    """Every parameter and buffer of MEMBERS networks that were made apart, stacked by name."""
    nets = [make() for _ in range(MEMBERS)]
    names = [name for name, _ in (*net.named_parameters(), *net.named_buffers())]
    states = [one.state_dict() for one in nets]
    return nets, {name: torch.stack([state[name] for state in states]) for name in names}


def require_gradients(net, tensors):
    for name, _ in net.named_parameters():
        tensors[name].requires_grad_()
    return tensors


@pytest.mark.parametrize("mode", ["stacked", "loop", "auto"])
@pytest.mark.parametrize("name", NETS)
def test_every_way_equals_separate_networks(name, mode):
    """Outputs, gradients and buffers, in training mode."""
    make, data = NETS[name]
    net, inputs = make(), data()
    nets, tensors = members_of(net, make)
    require_gradients(net, tensors)
    outputs = StackedModule(net, mode)(tensors, inputs)
    expected = torch.stack([one(inputs) for one in nets])
    torch.testing.assert_close(outputs, expected)
    factors = torch.arange(1.0, MEMBERS + 1)  # so that a mix-up of members shows
    (factors @ outputs.square().flatten(1).sum(1)).backward()
    (factors @ expected.square().flatten(1).sum(1)).backward()
    for key, tensor in tensors.items():
        for index, one in enumerate(nets):
            own = dict((*one.named_parameters(), *one.named_buffers()))[key]
            torch.testing.assert_close(tensor[index], own, check_dtype=True)
            if tensor.requires_grad:
                torch.testing.assert_close(tensor.grad[index], own.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["transformer", "cnn"])
def test_inference_can_be_stacked_too(name):
    """Transformer layers have a shortcut for it that has no batching rule."""
    make, data = NETS[name]
    net, inputs = make().eval(), data()
    nets, tensors = members_of(net, make)
    with torch.no_grad():
        expected = torch.stack([one.eval()(inputs) for one in nets])
        for mode in ("stacked", "loop"):
            torch.testing.assert_close(StackedModule(net, mode)(tensors, inputs), expected)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("mode", ["stacked", "loop"])
def test_batch_norm_trains_like_separate_networks(mode):
    """Five steps of SGD: weights and running statistics of each member are its own."""
    torch.manual_seed(1)
    net = cnn()
    nets, tensors = members_of(net, cnn)
    require_gradients(net, tensors)
    run = StackedModule(net, mode)
    trained = [tensors[name] for name, _ in net.named_parameters()]
    together = torch.optim.SGD(trained, lr=0.1)
    apart = [torch.optim.SGD(one.parameters(), lr=0.1) for one in nets]
    for _ in range(5):
        inputs, targets = torch.randn(8, 2, 6, 6), torch.randn(8, 2)
        together.zero_grad()
        # summed over members, so that none feels the others
        (run(tensors, inputs) - targets).square().mean((1, 2)).sum().backward()
        together.step()
        for one, optimizer in zip(nets, apart, strict=True):
            optimizer.zero_grad()
            (one(inputs) - targets).square().mean().backward()
            optimizer.step()
    assert tensors["1.num_batches_tracked"].tolist() == [5] * MEMBERS
    for name, tensor in tensors.items():
        expected = torch.stack([one.state_dict()[name] for one in nets])
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)
    assert net.state_dict()["1.num_batches_tracked"] == 0


def test_an_lstm_has_no_batching_rule():
    """Measuring takes the loop, silently; told to stack, the error says what to do."""
    net = lstm()
    nets, tensors = members_of(net, lstm)
    inputs = tokens()
    run = StackedModule(net)
    torch.testing.assert_close(run(tensors, inputs), torch.stack([one(inputs) for one in nets]))
    assert run.mode == "loop"
    with pytest.raises(
        ConfigurationError, match=r"Sequence cannot run stacked: .*'loop' or 'auto'"
    ):
        StackedModule(net, "stacked")(tensors, inputs)


class Branches(nn.Module):
    """Control flow that depends on a weight."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs):
        return inputs * self.gain if self.gain > 0 else inputs * 0


def test_control_flow_that_depends_on_weights():
    gains = torch.tensor([2.0, -2.0])
    run = StackedModule(Branches())
    assert run({"gain": gains}, torch.ones(2)).tolist() == [[2.0, 2.0], [0.0, 0.0]]
    assert run.mode == "loop"
    with pytest.raises(ConfigurationError, match="Branches cannot run stacked"):
        StackedModule(Branches(), "stacked")({"gain": gains}, torch.ones(2))


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_leaves_no_trace(monkeypatch, fails):
    """Not in the buffers given, in those of the network, in its weights or in the generator."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    _, tensors = members_of(net, lambda: copy.deepcopy(net))
    shared = {"3.running_var": torch.ones(4)}
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        del tensors[f"3.{name}"]  # shared, or the network's own
    if fails:
        monkeypatch.setattr(StackedModule, "_stacked", StackedModule._loop)
    run = StackedModule(net)
    before = copy.deepcopy((tensors, shared, dict(net.state_dict()), torch.get_rng_state()))
    run._faster(tensors, torch.randn(6, 3, generator=torch.Generator()), shared, False)
    after = (tensors, shared, dict(net.state_dict()), torch.get_rng_state())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    # and these buffers are ones that a run does change
    run._loop(tensors, torch.randn(6, 3), shared, False)
    assert not torch.equal(tensors["1.running_mean"], before[0]["1.running_mean"])
    assert not torch.equal(shared["3.running_var"], before[1]["3.running_var"])
    assert net.state_dict()["3.num_batches_tracked"] == MEMBERS


def test_one_member_is_not_measured():
    net = mlp()
    run = StackedModule(net)
    tensors = {name: tensor[None] for name, tensor in net.state_dict().items()}
    inputs = torch.randn(5, 3)
    torch.testing.assert_close(run(tensors, inputs)[0], net(inputs))
    assert run.mode == "auto"


def test_dropout_differs_between_members():
    net = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5))
    tensors = {k: v.expand(2, *v.shape) for k, v in net.state_dict().items()}
    for mode in ("stacked", "loop"):
        first, second = StackedModule(net, mode)(tensors, torch.randn(5, 3))
        assert not torch.equal(first == 0, second == 0)


@pytest.mark.parametrize("mode", ["stacked", "loop"])
def test_shared_tensors_and_the_networks_own(mode):
    net = mlp()
    weights = torch.randn(MEMBERS, 16, 3)
    bias = torch.randn(2)
    inputs = torch.randn(5, 3)
    outputs = StackedModule(net, mode)({"0.weight": weights}, inputs, {"2.bias": bias})
    with torch.no_grad():
        net[2].bias.copy_(bias)
        for weight, output in zip(weights, outputs, strict=True):
            net[0].weight.copy_(weight)
            torch.testing.assert_close(net(inputs), output)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, one, other=2.0, *, third=0.0):
        return self.gain * (one - other + third)


@pytest.mark.parametrize("mode", ["stacked", "loop"])
def test_inputs_of_every_form(mode):
    run = StackedModule(Pair(), mode)
    gain = {"gain": torch.tensor([1.0, 10.0])}
    one, other = torch.full((2,), 5.0), torch.full((2,), 3.0)
    for inputs, expected in (
        (one, 3.0),
        ((one,), 3.0),
        ((one, other), 2.0),
        ([one, other], 2.0),
        ({"one": one, "other": other}, 2.0),
        ({"one": one, "third": other}, 6.0),
    ):
        assert run(gain, inputs)[:, 0].tolist() == [expected, 10 * expected]
    with pytest.raises(ConfigurationError, match=r"a tensor, a list .* mapping .* got int"):
        run(gain, 3)


@pytest.mark.parametrize("mode", ["stacked", "loop", "auto"])
def test_a_network_must_return_one_tensor(mode):
    net = nn.LSTM(3, 4)
    tensors = {name: tensor.expand(2, *tensor.shape) for name, tensor in net.state_dict().items()}
    if mode == "stacked":  # the batching rule is asked for before there is an output
        net, tensors = nn.Sequential(nn.Identity()), {"unused": torch.zeros(2, 1)}
        net.forward = lambda inputs: (inputs, inputs)
    with pytest.raises(ConfigurationError, match=r"must return one tensor; \w+ returned tuple"):
        StackedModule(net, mode)(tensors, torch.randn(5, 2, 3))
    with pytest.raises(ConfigurationError, match="returned tuple"):
        call_network(net, {}, torch.randn(5, 2, 3))


@pytest.mark.parametrize("mode", ["stacked", "loop", "auto"])
def test_an_error_of_the_network_is_the_networks_own(mode):
    net = mlp()
    _, tensors = members_of(net, mlp)
    with pytest.raises(RuntimeError, match=r"shapes|size") as caught:
        StackedModule(net, mode)(tensors, torch.randn(5, 4))
    assert not isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(
    ("stacked", "message"),
    [
        ({"0.weight": torch.zeros(2, 16, 3), "0.bias": torch.zeros(3, 16)}, r"0.bias': \(3, 16\)"),
        ({}, "{}"),
    ],
)
def test_tensors_without_a_common_leading_axis(stacked, message):
    with pytest.raises(ConfigurationError, match=f"one common leading axis.*{message}"):
        StackedModule(mlp())(stacked, torch.randn(5, 3))


def test_unknown_mode():
    with pytest.raises(ConfigurationError, match="'auto', 'stacked' or 'loop'; got 'vmap'"):
        StackedModule(mlp(), "vmap")


# -------------------------------------------------------------------- inputs of its own


@pytest.mark.parametrize("mode", ["stacked", "loop", "auto"])
@pytest.mark.parametrize("name", NETS)
def test_members_with_inputs_of_their_own(name, mode):
    """Outputs and gradients are those of separate networks on separate batches."""
    make, data = NETS[name]
    net = make()
    nets, tensors = members_of(net, make)
    require_gradients(net, tensors)
    batches = [data() for _ in range(MEMBERS)]
    outputs = StackedModule(net, mode)(tensors, torch.stack(batches), own_inputs=True)
    expected = torch.stack([one(batch) for one, batch in zip(nets, batches, strict=True)])
    torch.testing.assert_close(outputs, expected)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    for key, _ in net.named_parameters():
        own = torch.stack([dict(one.named_parameters())[key].grad for one in nets])
        torch.testing.assert_close(tensors[key].grad, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["stacked", "loop"])
@pytest.mark.parametrize("make", [mlp, lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU())])
def test_gradients_reach_own_inputs(make, mode):
    """As adversarial training needs them."""
    net = make()
    nets, tensors = members_of(net, make)
    inputs = torch.randn(MEMBERS, 5, 3, requires_grad=True)
    StackedModule(net, mode)(tensors, inputs, own_inputs=True).square().sum().backward()
    for one, own, gradient in zip(nets, inputs.detach(), inputs.grad, strict=True):
        own.requires_grad_()
        one(own).square().sum().backward()
        torch.testing.assert_close(gradient, own.grad)


# -------------------------------------------------------------------- what it says

# named, because the demo turns it down for its process
RANK_ZERO = "pytorch_lightning.utilities.rank_zero"


def test_the_choice_is_said_once_and_in_both_times(monkeypatch, caplog):
    monkeypatch.setattr(stacked_module, "_seconds", lambda *ways: [0.001, 0.0025])
    net = mlp()
    _, tensors = members_of(net, mlp)
    require_gradients(net, tensors)
    run = StackedModule(net)
    with caplog.at_level(logging.INFO, RANK_ZERO):
        for _ in range(3):
            run(tensors, torch.randn(5, 3))
    assert run.mode == "stacked"
    said = [record.getMessage() for record in caplog.records]
    expected = "3 sets of weights of Sequential run stacked: 1.00 ms a pass, 2.50 ms as a loop."
    assert said == [expected]
    assert caplog.records[0].levelno == logging.INFO


def test_a_loop_is_said_with_its_reason(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, RANK_ZERO):
        net = lstm()
        _, tensors = members_of(net, lstm)
        StackedModule(net)(require_gradients(net, tensors), tokens())
        monkeypatch.setattr(stacked_module, "_seconds", lambda *ways: [0.0025, 0.001])
        net = mlp()
        _, tensors = members_of(net, mlp)
        StackedModule(net)(require_gradients(net, tensors), torch.randn(5, 3))
    failed, slower = [record.getMessage() for record in caplog.records]
    assert failed.startswith("3 sets of weights of Sequence run as a loop, because stacked they f")
    assert failed.endswith("fail: Batching rule not implemented for aten::lstm.input.")
    assert slower.endswith("Sequential run as a loop: 1.00 ms a pass, 2.50 ms stacked.")


class Centred(nn.Module):
    """Changes its inputs in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        x -= 0.5
        return self.layer(x)


def leaky():
    return nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(2, 1))


@pytest.mark.parametrize("mode", ["stacked", "loop", "auto"])
@pytest.mark.parametrize("make", [Centred, leaky])
@pytest.mark.parametrize("count", [1, 3])
def test_shared_inputs_are_not_changed(make, mode, count):
    stacked = {
        name: torch.stack([p.detach()] * count).requires_grad_()
        for name, p in make().named_parameters()
    }
    own = torch.randn(count, 4, 2)
    for inputs, own_inputs in (
        (torch.randn(4, 2), False),
        ([torch.randn(4, 2)], False),
        (own, True),
    ):
        with pytest.raises(ConfigurationError, match="changes its inputs in place, and all memb"):
            StackedModule(make(), mode)(stacked, inputs, own_inputs=own_inputs)


def test_inputs_of_inference():
    with torch.inference_mode():
        inputs = torch.randn(4, 2)
        outputs = StackedModule(nn.Linear(2, 1), "loop")({"bias": torch.zeros(2, 1)}, inputs)
    assert outputs.shape == (2, 4, 1)


class Checkpointed(nn.Module):
    """Computes its middle again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x):
        return checkpoint(self.middle, self.first(x), use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
@pytest.mark.parametrize("mode", ["loop", "auto"])
def test_gradient_checkpointing_is_refused(mode):
    net = Checkpointed()
    stacked = {
        name: torch.stack([p.detach()] * 2).requires_grad_() for name, p in net.named_parameters()
    }
    run = StackedModule(net, mode)
    with torch.no_grad():
        run(stacked, torch.randn(4, 2))
    with pytest.raises(ConfigurationError, match="Checkpointed uses gradient checkpointing"):
        run(stacked, torch.randn(4, 2))
