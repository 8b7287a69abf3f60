"""lightning-bnn's IVON: the strategy ``IVONBNN``, and the optimizer ``IVON`` in a plain loop."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.contender import NUM_DATA, Contender, Fit, Problem, Step, train_loader
from benchmarks.peers.ours import bare_step

__all__ = ["CONTENDER", "PLAIN_LOOP"]


def make_module(problem: Problem) -> Any:
    from lightning_bnn import IVONBNN
    from lightning_bnn.likelihoods import Categorical
    from lightning_bnn.priors import Normal

    return IVONBNN(
        problem.make_net(),
        likelihood=Categorical(),
        prior=Normal(0.0, 0.1),
        num_data=NUM_DATA,
        scheduler=None,  # a plain step, as the others take it
    )


def make_step(problem: Problem) -> Step:
    bnn = make_module(problem)
    return bare_step(bnn, bnn.configure_optimizers(), problem)


def make_fit(problem: Problem) -> Fit:
    return Fit("pytorch_lightning", make_module(problem), train_loader(problem.batch()))


def make_plain_loop(problem: Problem) -> Step:
    from lightning_bnn import IVON

    net = problem.make_net()
    optimizer = IVON(net.parameters(), lr=0.1, num_data=NUM_DATA, prior_scale=0.1)
    inputs, targets = problem.batch()

    def step() -> Any:
        optimizer.zero_grad()
        with optimizer.sampled_params():
            loss = problem.loss(net(inputs), targets)
            loss.backward()
        optimizer.step()
        return loss

    return step


CONTENDER = Contender("lightning-bnn, IVON", "lightning_bnn", make_step, make_fit)
PLAIN_LOOP = Contender("lightning-bnn, IVON alone", "lightning_bnn", make_plain_loop)
