"""Ensembles and plain training to compare them with, for several test files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_bnn import DeepEnsemble
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from tests.nets import SequenceLSTM, loader, make_data, mlp
from tests.trainers import quiet_trainer

SCALE = 0.8


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    """A small CNN with BatchNorm and a dropout layer, on the 4 numbers as an image."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


# a network and the data it is for
FACTORIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (partial(mlp, 3), "mlp"),
    "cnn": (cnn, "mlp"),
    "lstm": (partial(SequenceLSTM, 3), "lstm"),
}


def make(net: Any = batch_norm_net, **options: Any) -> DeepEnsemble:
    """Three members under the prior N(0, SCALE²)."""
    likelihood = options.pop("likelihood", None) or Categorical()
    defaults: dict[str, Any] = {"members": 3, "seed": 7, "mode": "stacked"}
    return DeepEnsemble(net, likelihood, Normal(0.0, SCALE), **{**defaults, **options})


def fit(ensemble: DeepEnsemble, steps: int = 20, **options: Any) -> Any:
    """Fit on three batches of 16 examples in a fixed order."""
    data: TensorDataset = options.pop("data", None) or make_data("mlp", "classification")
    size = options.pop("batch_size", 16)
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, **options)
    trainer.fit(ensemble, loader(data, batch_size=size))
    return trainer


def networks(ensemble: DeepEnsemble, build: Callable[[], nn.Module]) -> list[nn.Module]:
    """Plain networks with the values that the members have now."""
    draws = {name: tensor.clone() for name, tensor in ensemble.current_draws().items()}
    made = []
    for index in range(ensemble.members):
        net = build()
        net.load_state_dict({name: tensor[index] for name, tensor in draws.items()})
        made.append(net)
    return made


def train_plainly(
    net: nn.Module,
    optimizer: Any,
    data: TensorDataset,
    steps: int,
    scheduler: Any = None,
    clip: Callable[[Any], Any] | None = None,
) -> nn.Module:
    """An ordinary PyTorch loop over three batches of 16, with the energy written by hand."""
    stepper = optimizer(net.parameters())
    schedule = scheduler(stepper) if scheduler is not None else None
    kind = next(net.parameters()).dtype
    batches = list(loader(data))
    for step in range(steps):
        inputs, targets = batches[step % 3]
        stepper.zero_grad()
        outputs = net(inputs.to(kind) if inputs.is_floating_point() else inputs)
        energy = nn.functional.cross_entropy(outputs, targets)
        squares = sum((p**2).sum() for p in net.parameters())
        (energy + squares / (2 * SCALE**2 * len(data))).backward()
        if clip is not None:
            clip(net.parameters())
        stepper.step()
        if schedule is not None:
            schedule.step()
    return net


def assert_member_equals(
    ensemble: DeepEnsemble, index: int, net: nn.Module, **tolerance: Any
) -> None:
    """Weights and running statistics of a member are those of a plain network."""
    values: dict[str, Tensor] = net.state_dict()
    found = ensemble.current_draws()
    assert found.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(
            found[name][index], value, **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
