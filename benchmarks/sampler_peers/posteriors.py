"""posteriors: ``posteriors.sgmcmc``, functional over a dictionary of weights.

The weights go in detached: with parameters that ask for gradients every update would be recorded,
and the record would grow with the run. The temperature is 1/N for a mean log likelihood, as its
documentation recommends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.sampler_peers.contender import LEARNING_RATE, NUM_DATA, Library, Network, Step

__all__ = ["LIBRARY"]


def make_step(network: Network, sampler: str) -> Step:
    import posteriors

    net = network.make_net()
    batch = network.batch()
    nothing = torch.tensor([])  # the place of auxiliary output

    def log_posterior(parameters: Any, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        outputs = torch.func.functional_call(net, parameters, inputs)
        return -network.loss(outputs, targets), nothing

    if sampler == "SGLD":
        transform = posteriors.sgmcmc.sgld.build(
            log_posterior, lr=LEARNING_RATE, temperature=1 / NUM_DATA
        )
    else:
        transform = posteriors.sgmcmc.sghmc.build(
            log_posterior, lr=LEARNING_RATE, alpha=1.0, temperature=1 / NUM_DATA, momenta=0.0
        )
    state = transform.init({name: weight.detach() for name, weight in net.named_parameters()})

    def step() -> Any:
        nonlocal state
        state, _ = transform.update(state, batch)
        return state.log_posterior

    return step


LIBRARY = Library("posteriors", "posteriors", make_step)
