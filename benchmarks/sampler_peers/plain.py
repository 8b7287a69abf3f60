"""The plain step: the deterministic network, its loss, torch.optim.SGD as it comes."""

from __future__ import annotations

import torch

from benchmarks.peers.contender import Contender
from benchmarks.sampler_peers.contender import LEARNING_RATE, Network, Step, optimizer_step

__all__ = ["PLAIN"]


def make_step(network: Network) -> Step:
    net = network.make_net()
    return optimizer_step(network, net, torch.optim.SGD(net.parameters(), lr=LEARNING_RATE))


PLAIN = Contender("plain SGD", "torch", make_step)
