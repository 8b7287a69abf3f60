"""lightning-bnn: ``DeepEnsemble`` with a Normal prior, choosing how to run, or told to."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.ensemble_peers.contender import MEMBERS, Network
from benchmarks.peers.contender import NUM_DATA, Contender, Fit, Step, train_loader
from benchmarks.peers.ours import bare_step

__all__ = ["AUTO", "LOOP", "STACKED"]


def make_module(network: Network, mode: str) -> Any:
    from lightning_bnn import DeepEnsemble
    from lightning_bnn.likelihoods import Categorical, HeteroscedasticGaussian
    from lightning_bnn.priors import Normal

    return DeepEnsemble(
        network.make_net,
        likelihood=HeteroscedasticGaussian() if network.regression else Categorical(),
        prior=Normal(0.0, 1.0),
        members=MEMBERS,
        num_data=NUM_DATA,
        mode=mode,
        scheduler=None,  # a plain step, as the others take it
        seed=0,
    )


def make_step(network: Network, mode: str) -> Step:
    bnn = make_module(network, mode)
    return bare_step(bnn, bnn.configure_optimizers(), network)


def make_fit(network: Network) -> Fit:
    return Fit("pytorch_lightning", make_module(network, "auto"), train_loader(network.batch()))


def contender(name: str, mode: str, **more: Any) -> Contender:
    return Contender(name, "lightning_bnn", partial(make_step, mode=mode), **more)


AUTO = contender("lightning-bnn", "auto", make_fit=make_fit)
STACKED = contender("lightning-bnn, stacked", "stacked")
LOOP = contender("lightning-bnn, loop", "loop")
