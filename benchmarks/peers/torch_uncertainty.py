"""torch-uncertainty: its Bayesian layers, ``ELBOLoss`` and ``ClassificationRoutine``.

The MLP is its own ``bayesian_mlp``. It has no Bayesian resnet, so for resnet18 its layers are
swapped in here; BatchNorm stays deterministic. The KL is its one-sample estimate under its default
prior.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.peers.contender import (
    NUM_DATA,
    Contender,
    Fit,
    Problem,
    Step,
    replace_layers,
    train_loader,
)

__all__ = ["CONTENDER"]


def make_model(problem: Problem) -> nn.Module:
    if problem.name == "mlp":
        from torch_uncertainty.models.mlp import bayesian_mlp

        return bayesian_mlp(784, 10, hidden_dims=[400, 400], num_samples=1)

    from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear
    from torch_uncertainty.methods import StochasticModel

    def linear(layer: nn.Linear) -> nn.Module:
        return BayesLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)

    def conv2d(layer: nn.Conv2d) -> nn.Module:
        return BayesConv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
            bias=layer.bias is not None,
        )

    net = problem.make_net()
    replace_layers(net, linear, conv2d)
    return StochasticModel(net, num_samples=1)


def make_step(problem: Problem) -> Step:
    from torch_uncertainty.losses import ELBOLoss

    model = make_model(problem)
    elbo = ELBOLoss(model, nn.CrossEntropyLoss(), kl_weight=1 / NUM_DATA, num_samples=1)
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = problem.batch()

    def step() -> Any:
        loss = elbo(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_fit(problem: Problem) -> Fit:
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.losses import ELBOLoss
    from torch_uncertainty.routines import ClassificationRoutine

    model = make_model(problem)
    routine = ClassificationRoutine(
        model=model,
        num_classes=10,
        loss=ELBOLoss(None, nn.CrossEntropyLoss(), kl_weight=1 / NUM_DATA, num_samples=1),
        optim_recipe=torch.optim.Adam(model.parameters()),
        is_ensemble=True,
    )
    return Fit("lightning.pytorch", routine, train_loader(problem.batch()), TUTrainer)


CONTENDER = Contender(
    "torch-uncertainty", "torch_uncertainty", make_step, make_fit, slow=True, converts_layers=True
)
