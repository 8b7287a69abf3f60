"""bayesian-torch: ``dnn_to_bnn`` with reparameterisation layers, and ``get_kl_loss``.

BatchNorm stays deterministic, as its converter leaves it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.peers.contender import NUM_DATA, Contender, Problem, Step

__all__ = ["CONTENDER"]


def make_step(problem: Problem) -> Step:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net = problem.make_net()
    dnn_to_bnn(
        net,
        {
            "prior_mu": 0.0,
            "prior_sigma": 1.0,
            "posterior_mu_init": 0.0,
            "posterior_rho_init": -3.0,
            "type": "Reparameterization",
            "moped_enable": False,
            "moped_delta": 0.5,
        },
    )
    optimizer = torch.optim.Adam(net.parameters())
    inputs, targets = problem.batch()

    def step() -> Any:
        outputs = net(inputs)
        loss = cross_entropy(outputs, targets) + get_kl_loss(net) / NUM_DATA
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


CONTENDER = Contender("bayesian-torch", "bayesian_torch", make_step, converts_layers=True)
