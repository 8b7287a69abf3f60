"""posteriors: ``posteriors.vi.diag`` over all weights, with torchopt's Adam.

Its gradient transform does not allow BatchNorm to write into the network, so the running
statistics go in as copies and come back as the auxiliary output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.peers.contender import NUM_DATA, Contender, Problem, Step

__all__ = ["CONTENDER"]


def make_step(problem: Problem) -> Step:
    import posteriors
    import torchopt

    net = problem.make_net()
    batch = problem.batch()
    buffers = dict(net.named_buffers())

    def log_posterior(parameters: Any, batch: Any) -> tuple[Any, Any]:
        inputs, targets = batch
        statistics = {name: buffer.clone() for name, buffer in buffers.items()}
        outputs = torch.func.functional_call(net, {**parameters, **statistics}, inputs)
        log_prior = posteriors.diag_normal_log_prob(parameters, sd_diag=0.1) / NUM_DATA
        return log_prior - cross_entropy(outputs, targets), statistics

    transform = posteriors.vi.diag.build(
        log_posterior, torchopt.adam(lr=1e-3), temperature=1 / NUM_DATA, init_log_sds=-3.0
    )
    state = transform.init(dict(net.named_parameters()))

    def step() -> Any:
        nonlocal state, buffers
        state, buffers = transform.update(state, batch)
        return state.nelbo

    return step


CONTENDER = Contender("posteriors", "posteriors", make_step, slow=True)
