"""The plain step: the deterministic network, its loss, torch.optim.Adam as it comes."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from benchmarks.peers.contender import Contender, Fit, Problem, Step, train_loader

__all__ = ["FUSED", "PLAIN", "PLAIN_LIGHTNING"]


def make_step(problem: Problem, fused: bool | None = None) -> Step:
    net = problem.make_net()
    optimizer = torch.optim.Adam(net.parameters(), fused=fused)
    inputs, targets = problem.batch()

    def step() -> Any:
        loss = problem.loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_plain_fit(lightning: str, problem: Problem) -> Fit:
    class Plain(importlib.import_module(lightning).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = problem.make_net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, targets = batch
            loss = problem.loss(self.net(inputs), targets)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    return Fit(lightning, Plain(), train_loader(problem.batch()))


PLAIN = Contender(
    "plain Adam",
    "pytorch_lightning",
    make_step,
    lambda problem: make_plain_fit("pytorch_lightning", problem),
)

# The same with Adam's fused kernel, which this library takes by default on a CPU.
FUSED = Contender("plain Adam, fused", "torch", lambda problem: make_step(problem, fused=True))

# Some peers are built on the package `lightning`, the same code under another name. They are
# compared with a plain module of that package.
PLAIN_LIGHTNING = Contender(
    "plain Adam (lightning)",
    "lightning",
    make_step,
    lambda problem: make_plain_fit("lightning.pytorch", problem),
)
