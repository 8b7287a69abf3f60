"""torchbnn: its ``BayesLinear`` and ``BayesConv2d`` in place of torch's, and ``BKLLoss``.

Its own converter is deprecated and does not descend into nested blocks, so the layers are swapped
here. BatchNorm stays deterministic (it has a Bayesian one, which would cost it more).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.contender import NUM_DATA, Contender, Problem, Step, replace_layers

__all__ = ["CONTENDER"]


def make_step(problem: Problem) -> Step:
    import torchbnn

    def linear(layer: nn.Linear) -> nn.Module:
        return torchbnn.BayesLinear(
            0.0, 0.1, layer.in_features, layer.out_features, bias=layer.bias is not None
        )

    def conv2d(layer: nn.Conv2d) -> nn.Module:
        return torchbnn.BayesConv2d(
            0.0,
            0.1,
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
            bias=layer.bias is not None,
        )

    net = problem.make_net()
    replace_layers(net, linear, conv2d)
    kl_loss = torchbnn.BKLLoss(reduction="sum", last_layer_only=False)
    optimizer = torch.optim.Adam(net.parameters())
    inputs, targets = problem.batch()

    def step() -> Any:
        loss = cross_entropy(net(inputs), targets) + kl_loss(net) / NUM_DATA
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


CONTENDER = Contender("torchbnn", "torchbnn", make_step, converts_layers=True)
