"""IVON: an optimizer that is itself the mean-field posterior, in place of Adam over mean and scale.

It is listed for orientation: it minimises the same kind of bound by another update, on the
network's own weights.
"""

from __future__ import annotations

from typing import Any

from torch.nn.functional import cross_entropy

from benchmarks.peers.contender import NUM_DATA, Contender, Problem, Step

__all__ = ["CONTENDER"]


def make_step(problem: Problem) -> Step:
    import ivon

    net = problem.make_net()
    optimizer = ivon.IVON(net.parameters(), lr=0.1, ess=NUM_DATA)
    inputs, targets = problem.batch()

    def step() -> Any:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = cross_entropy(net(inputs), targets)
            loss.backward()
        optimizer.step()
        return loss

    return step


CONTENDER = Contender("ivon-opt", "ivon", make_step)
