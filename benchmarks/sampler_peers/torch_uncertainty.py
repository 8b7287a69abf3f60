"""torch-uncertainty: the optimizers of ``torch_uncertainty.optim``.

Its SGHMC estimates a metric during burn-in; here it has none, so that only the cheaper steps
that come after it are timed.
"""

from __future__ import annotations

from benchmarks.sampler_peers.contender import (
    LEARNING_RATE,
    Library,
    Network,
    Step,
    optimizer_step,
)

__all__ = ["LIBRARY"]


def make_step(network: Network, sampler: str) -> Step:
    from torch_uncertainty.optim import SGHMC, SGLD

    net = network.make_net()
    if sampler == "SGLD":
        return optimizer_step(network, net, SGLD(net.parameters(), lr=LEARNING_RATE))
    return optimizer_step(network, net, SGHMC(net.parameters(), lr=LEARNING_RATE, burn_in_steps=0))


LIBRARY = Library("torch-uncertainty", "torch_uncertainty", make_step)
