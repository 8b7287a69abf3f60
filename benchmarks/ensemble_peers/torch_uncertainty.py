"""torch-uncertainty: ``deep_ensembles`` with targets repeated for each member, and its routines.

The bare step trains the benchmark's own networks with the plain loss. ``RegressionRoutine`` wants
networks that give a distribution: there ``Trainer.fit`` trains the library's own perceptron.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.ensemble_peers.contender import MEMBERS, Network
from benchmarks.peers.contender import Contender, Fit, Step, train_loader

__all__ = ["CONTENDER"]


def make_step(network: Network) -> Step:
    from torch_uncertainty.methods import deep_ensembles
    from torch_uncertainty.transforms import RepeatTarget

    model = deep_ensembles(
        network.make_net(),
        num_estimators=MEMBERS,
        task="regression" if network.regression else "classification",
        probabilistic=False,
    )
    optimizer = torch.optim.Adam(model.parameters())
    repeat = RepeatTarget(MEMBERS)
    batch = network.batch()

    def step() -> Any:
        inputs, targets = repeat(batch)
        loss = network.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_fit(network: Network) -> Fit:
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.losses import DistributionNLLLoss
    from torch_uncertainty.methods import deep_ensembles
    from torch_uncertainty.models.mlp import mlp
    from torch_uncertainty.routines import ClassificationRoutine, RegressionRoutine
    from torch_uncertainty.transforms import RepeatTarget

    repeat = RepeatTarget(MEMBERS)
    if network.regression:
        net = mlp(*network.input_shape, 1, hidden_dims=[50], dist_family="normal")
        model = deep_ensembles(net, num_estimators=MEMBERS, task="regression", probabilistic=True)
        routine: Any = RegressionRoutine(
            model,
            output_dim=1,
            loss=DistributionNLLLoss(),
            dist_family="normal",
            is_ensemble=True,
            format_batch_fn=repeat,
            optim_recipe=torch.optim.Adam(model.parameters()),
        )
    else:
        model = deep_ensembles(network.make_net(), num_estimators=MEMBERS)
        routine = ClassificationRoutine(
            model,
            num_classes=10,
            loss=nn.CrossEntropyLoss(),
            is_ensemble=True,
            format_batch_fn=repeat,
            optim_recipe=torch.optim.Adam(model.parameters()),
        )
    return Fit("lightning.pytorch", routine, train_loader(network.batch()), TUTrainer)


CONTENDER = Contender("torch-uncertainty", "torch_uncertainty", make_step, make_fit)
