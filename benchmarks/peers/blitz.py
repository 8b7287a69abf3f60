"""BLiTZ: its Bayesian layers in a class decorated with ``variational_estimator``; ``sample_elbo``.

It has no converter, so the layers are swapped here. BatchNorm stays deterministic. The KL is its
one-sample estimate under its default prior.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.contender import NUM_DATA, Contender, Problem, Step, replace_layers

__all__ = ["CONTENDER"]


def make_step(problem: Problem) -> Step:
    from blitz.modules import BayesianConv2d, BayesianLinear
    from blitz.utils import variational_estimator

    def linear(layer: nn.Linear) -> nn.Module:
        return BayesianLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)

    def conv2d(layer: nn.Conv2d) -> nn.Module:
        return BayesianConv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            groups=layer.groups,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            bias=layer.bias is not None,
        )

    @variational_estimator
    class BayesianNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = problem.make_net()
            replace_layers(self.net, linear, conv2d)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs)

    net: Any = BayesianNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters())
    inputs, targets = problem.batch()

    def step() -> Any:
        optimizer.zero_grad()
        loss = net.sample_elbo(
            inputs=inputs,
            labels=targets,
            criterion=criterion,
            sample_nbr=1,
            complexity_cost_weight=1 / NUM_DATA,
        )
        loss.backward()
        optimizer.step()
        return loss

    return step


CONTENDER = Contender("blitz-bayesian-pytorch", "blitz", make_step, slow=True, converts_layers=True)
