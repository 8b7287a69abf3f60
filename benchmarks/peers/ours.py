"""lightning-bnn: ``VariationalBNN`` with its default estimator; all weights are Bayesian.

Its default optimizer on a CPU is PyTorch's fused Adam. ``UNFUSED`` is the same with the Adam that
the plain step and the peers use, so that both comparisons can be read off.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.contender import NUM_DATA, Contender, Fit, Problem, Step, train_loader

__all__ = ["CONTENDER", "UNFUSED"]


def make_module(problem: Problem) -> Any:
    from lightning_bnn import VariationalBNN
    from lightning_bnn.likelihoods import Categorical
    from lightning_bnn.priors import Normal

    return VariationalBNN(
        problem.make_net(),
        likelihood=Categorical(),
        prior=Normal(0.0, 0.1),
        num_data=NUM_DATA,
        scheduler=None,  # a plain step, as the others take it
    )


def make_step(problem: Problem) -> Step:
    bnn = make_module(problem)
    return bare_step(bnn, bnn.configure_optimizers(), problem)


def make_unfused_step(problem: Problem) -> Step:
    bnn = make_module(problem)
    return bare_step(bnn, torch.optim.Adam(bnn.parameters(), lr=1e-3), problem)


def bare_step(bnn: Any, optimizer: torch.optim.Optimizer, problem: Problem) -> Step:
    batch = problem.batch()

    def step() -> Any:
        loss = bnn.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_fit(problem: Problem) -> Fit:
    return Fit("pytorch_lightning", make_module(problem), train_loader(problem.batch()))


CONTENDER = Contender("lightning-bnn", "lightning_bnn", make_step, make_fit)
UNFUSED = Contender("lightning-bnn, unfused", "lightning_bnn", make_unfused_step)
