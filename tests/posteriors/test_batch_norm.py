"""Running statistics of draws, against the mean over batches computed by hand."""

import copy

import pytest
import torch
from torch import nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors.batch_norm import (
    batch_norm_layers,
    recompute_batch_norm,
    training_batch_norm,
)


class Net(nn.Module):
    """Convolutions, two kinds of BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4, momentum=0.3)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)
        self.last = nn.BatchNorm1d(3, affine=False)

    def forward(self, inputs):
        hidden = self.dropout(self.norm(self.convolution(inputs)).relu().mean((2, 3)))
        return self.last(self.head(hidden))


def batches(count=5, size=6):
    return [torch.randn(size, 2, 5, 5) * (1 + i) + i for i in range(count)]


def stacked_weights(net, draws=3):
    own = network_tensors(net)
    return {
        name: torch.stack([t + 0.3 * torch.randn(t.shape) if t.is_floating_point() else t
                           for _ in range(draws)]).detach()
        for name, t in own.items()
    }  # fmt: skip


def test_the_mean_over_batches_for_each_draw():
    net, data = Net(), batches()
    weights = stacked_weights(net)
    fresh = recompute_batch_norm(net, weights, iter(data))
    assert fresh.keys() == weights.keys()
    for draw in range(3):
        # by hand, layer after layer, with the batch's own statistics as in training
        one = Net().eval()
        one.load_state_dict({name: tensor[draw] for name, tensor in weights.items()})
        sums = {"norm": [], "last": []}
        for batch in data:
            hidden = one.convolution(batch)
            flat = hidden.transpose(0, 1).flatten(1)
            sums["norm"].append((flat.mean(1), flat.var(1)))
            scaled = (hidden - flat.mean(1)[:, None, None]) / (
                flat.var(1, unbiased=False)[:, None, None] + 1e-5
            ).sqrt()
            scaled = scaled * one.norm.weight[:, None, None] + one.norm.bias[:, None, None]
            out = one.head(scaled.relu().mean((2, 3)))
            sums["last"].append((out.mean(0), out.var(0)))
        for layer, pairs in sums.items():
            for statistic, values in zip(
                ("running_mean", "running_var"), zip(*pairs, strict=True), strict=True
            ):
                expected = torch.stack(values).mean(0)
                torch.testing.assert_close(fresh[f"{layer}.{statistic}"][draw], expected)
            assert fresh[f"{layer}.num_batches_tracked"][draw] == 5
    for name in ("convolution.weight", "norm.weight", "head.bias"):
        assert fresh[name] is weights[name]


def test_nothing_else_changes():
    net, data = Net(), batches()
    net.norm.eval()
    net(data[0])
    before = copy.deepcopy(net.state_dict())
    flags = [module.training for module in net.modules()]
    weights = stacked_weights(net)
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    state = torch.get_rng_state()
    recompute_batch_norm(net, weights, data)
    assert torch.equal(torch.get_rng_state(), state)  # dropout is off
    assert [module.training for module in net.modules()] == flags
    assert (net.norm.momentum, net.last.momentum) == (0.3, 0.1)
    assert not net.norm._forward_pre_hooks
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    for name, tensor in weights.items():
        assert torch.equal(tensor, copies[name])


def test_sync_batch_norm_counts_this_process_alone(tmp_path):
    plain = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    weights = stacked_weights(plain)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    data = [torch.randn(4, 3) for _ in range(3)]
    expected = recompute_batch_norm(plain, weights, data)
    # in a group of processes the layer itself would wait for the others
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        found = recompute_batch_norm(synced, weights, data)
    finally:
        torch.distributed.destroy_process_group()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name])
    assert "forward" not in vars(synced[1])


class Half(nn.Module):
    """One of its layers always runs as in evaluation, before the other."""

    def __init__(self):
        super().__init__()
        self.fixed = nn.BatchNorm1d(3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs):
        self.fixed.eval()
        outputs = self.norm(self.fixed(inputs))
        self.fixed.train()
        return outputs


def test_a_layer_that_runs_as_in_evaluation_keeps_its_statistics():
    net = Half()
    net.fixed.running_var.fill_(4.0)
    given = {"fixed.running_mean": torch.randn(2, 3), "norm.weight": torch.ones(2, 3)}
    inputs = torch.randn(8, 3)
    fresh = recompute_batch_norm(net, given, [inputs, inputs])
    assert torch.equal(fresh["fixed.running_mean"], given["fixed.running_mean"])
    assert torch.equal(fresh["fixed.running_var"], torch.full((2, 3), 4.0))
    assert fresh["norm.num_batches_tracked"].tolist() == [2, 2]
    for draw in range(2):  # what comes after it has seen its outputs
        hidden = (inputs - given["fixed.running_mean"][draw]) / (4.0 + 1e-5) ** 0.5
        torch.testing.assert_close(fresh["norm.running_mean"][draw], hidden.mean(0))


def test_only_the_named_layers_change():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    net[0].eval()
    assert training_batch_norm(net) == ["1"]
    inputs = torch.randn(8, 3) + 5
    fresh = recompute_batch_norm(net, {"1.weight": torch.ones(1, 3)}, [inputs], ["1"])
    assert fresh.keys() == {"1.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    torch.testing.assert_close(fresh["1.running_mean"][0], inputs.mean(0) / (1 + 1e-5) ** 0.5)


def test_statistics_that_are_not_finite_are_replaced():
    net = nn.BatchNorm1d(2)
    given = {"running_mean": torch.tensor([[torch.nan, torch.inf]])}
    inputs = torch.randn(8, 2)
    fresh = recompute_batch_norm(net, given, [inputs])
    torch.testing.assert_close(fresh["running_mean"][0], inputs.mean(0))


def test_what_cannot_be():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ConfigurationError, match="Sequential has no BatchNorm layer"):
        batch_norm_layers(net)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(ConfigurationError, match="at least one batch"):
        recompute_batch_norm(net, {"0.weight": torch.zeros(1, 2, 3)}, [])
