"""lightning-bnn: its samplers as bare optimizers, and the ``SGMCMC`` strategy's own path.

The strategy's step is more than the peers': it has the gradient of a Normal prior and checks the
batch. With ``chains=8`` it moves eight chains; ``one_after_another`` is what these would cost
alone, each warm in its caches, as eight runs of one process would be.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.sampler_peers.contender import (
    LEARNING_RATE,
    NUM_DATA,
    Library,
    Network,
    Step,
    optimizer_step,
)

__all__ = ["CHAINS", "LIBRARY", "STRATEGY", "one_after_another", "strategy_step"]

CHAINS = 8


def make_step(network: Network, sampler: str) -> Step:
    from lightning_bnn import samplers

    net = network.make_net()
    optimizer = find(samplers, sampler)(net.parameters(), lr=LEARNING_RATE, num_data=NUM_DATA)
    return optimizer_step(network, net, optimizer)


def strategy_step(network: Network, sampler: str, chains: int = 1) -> Step:
    """One step of all chains, the stacked module choosing how they run."""
    from lightning_bnn import SGMCMC, samplers
    from lightning_bnn.likelihoods import Categorical, Gaussian
    from lightning_bnn.priors import Normal

    bnn = SGMCMC(
        network.make_net(),
        likelihood=Gaussian(scale=1.0) if network.regression else Categorical(),
        prior=Normal(0.0, 1.0),
        sampler=partial(find(samplers, sampler), lr=LEARNING_RATE),
        chains=chains,
        num_data=NUM_DATA,
        seed=0,
    )
    optimizer: Any = bnn.configure_optimizers()
    batch = network.batch()

    def step() -> Any:
        loss = bnn.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def one_after_another(network: Network, sampler: str) -> Step:
    """As many steps of one chain as a stacked step has chains."""
    one = strategy_step(network, sampler)

    def step() -> Any:
        for _ in range(CHAINS):
            loss = one()
        return loss

    return step


def find(module: Any, name: str) -> Any:
    if not hasattr(module, name):
        raise ImportError(f"{module.__name__} has no {name}")
    return getattr(module, name)


LIBRARY = Library("lightning-bnn", "lightning_bnn", make_step, peer=False)
STRATEGY = Library("lightning-bnn, SGMCMC", "lightning_bnn", strategy_step, peer=False)
