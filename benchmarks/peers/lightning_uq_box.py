"""lightning-uq-box: ``BNN_VI_ELBO_Classification``, a LightningModule that converts the network.

One draw per step (its default is 10). The bare loop calls its ELBO and steps the optimizer that it
configures; its training metrics run only in ``Trainer.fit``, where it computes them itself.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.peers.contender import NUM_DATA, Contender, Fit, Problem, Step, train_loader

__all__ = ["CONTENDER"]


def make_module(problem: Problem) -> Any:
    from lightning_uq_box.uq_methods import BNN_VI_ELBO_Classification

    return BNN_VI_ELBO_Classification(
        problem.make_net(),
        criterion=nn.CrossEntropyLoss(),
        task="multiclass",
        beta=1.0,
        num_mc_samples_train=1,
    )


def make_step(problem: Problem) -> Step:
    module = make_module(problem)
    module.num_training_points = NUM_DATA  # the Trainer would have set it
    optimizer = module.configure_optimizers()["optimizer"]
    inputs, targets = problem.batch()

    def step() -> Any:
        loss, _ = module.compute_elbo_loss(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_fit(problem: Problem) -> Fit:
    from lightning.pytorch import LightningDataModule

    inputs, targets = problem.batch()
    loader = train_loader({"input": inputs, "target": targets})

    class Data(LightningDataModule):  # the module asks the data module for the number of examples
        def train_dataloader(self) -> Any:
            return loader

    return Fit("lightning.pytorch", make_module(problem), Data())


CONTENDER = Contender(
    "lightning-uq-box", "lightning_uq_box", make_step, make_fit, slow=True, converts_layers=True
)
