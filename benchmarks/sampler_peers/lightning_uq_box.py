"""lightning-uq-box: the ``SGLD`` optimizer of its SGLD modules; it has no SGHMC.

It must be given a closure that computes the gradients.
"""

from __future__ import annotations

from typing import Any

from benchmarks.sampler_peers.contender import LEARNING_RATE, Library, Network, Step

__all__ = ["LIBRARY"]


def make_step(network: Network, sampler: str) -> Step:
    from lightning_uq_box.uq_methods.sgld import SGLD

    net = network.make_net()
    optimizer = SGLD(net.parameters(), lr=LEARNING_RATE, noise_factor=0.01)
    inputs, targets = network.batch()

    def closure() -> Any:
        loss = network.loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


LIBRARY = Library("lightning-uq-box", "lightning_uq_box", make_step, samplers=("SGLD",))
