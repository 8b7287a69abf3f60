"""Small fits that the tests of collectors share: six steps an epoch, and what happens in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bnn import SGMCMC
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.samplers import SGLD
from tests.trainers import quiet_trainer

EXAMPLES, BATCH = 24, 4


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(EXAMPLES, 3, generator=generator), torch.randn(EXAMPLES, 1, generator=generator)
    )


def loader(**options: Any) -> DataLoader:
    return DataLoader(data(), **{"batch_size": BATCH, "shuffle": True, **options})


class Endless(IterableDataset):
    """The same examples, of which nobody knows the number."""

    def __iter__(self) -> Any:
        return iter(data())


def network(batch_norm: bool = True) -> nn.Module:
    torch.manual_seed(2)
    middle = [nn.BatchNorm1d(4)] if batch_norm else []
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.ReLU(), nn.Linear(4, 1))


def chains(batch_norm: bool = True, **options: Any) -> SGMCMC:
    defaults = {"chains": 2, "sampler": partial(SGLD, lr=0.01), "seed": 3, "mode": "loop"}
    return SGMCMC(network(batch_norm), Gaussian(0.5), **{**defaults, **options})


class Plain(pl.LightningModule):
    """A LightningModule that knows nothing of this package."""

    def __init__(self, batch_norm: bool = True, manual: bool = False, skip: int = -1) -> None:
        super().__init__()
        self.body = network(batch_norm)
        self.automatic_optimization = not manual
        self.skip = skip  # the batch at which a hook ends each epoch
        self.scheduler: Any = None
        self.scheduling: dict[str, Any] = {"interval": "step"}

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skip else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self(batch[0]) - batch[1]).square().mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        for _ in range(2):
            self.optimizers().step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if self.scheduler is None:
            return optimizer
        schedule = {"scheduler": self.scheduler(optimizer), **self.scheduling}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def with_scheduler(module: Plain, scheduler: Any, **scheduling: Any) -> Plain:
    module.scheduler = scheduler
    module.scheduling.update(scheduling)
    return module


class After(Callback):
    """Do something after a step, or after every batch."""

    def __init__(self, step: int | None, action: Callable[[Any, Any], Any]) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.step in (None, trainer.global_step):
            self.action(trainer, pl_module)


def save(path: Path, step: int) -> After:
    """A checkpoint after a step."""
    return After(step, lambda trainer, module: trainer.save_checkpoint(path))


def stop(step: int) -> After:
    """A crash after a step."""

    def crash(trainer: Any, module: Any) -> None:
        raise InterruptedError

    return After(step, crash)


def spoil(step: int, row: int, column: int) -> After:
    """A weight of one member that is not finite any more."""

    def write(trainer: Any, module: Any) -> None:
        module.weights.data[row, column] = torch.nan

    return After(step, write)


class Recorder(Callback):
    """The weights right after every step, by name (members, ...), and the learning rates."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.rates: dict[int, float] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates[trainer.global_step] = float(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step in self.weights:
            return  # a batch that is accumulated moves BatchNorm's statistics only
        if isinstance(pl_module, Plain):
            current = {k: v[None] for k, v in pl_module.state_dict().items()}
        else:
            current = pl_module.current_draws()
        self.weights[trainer.global_step] = {k: v.detach().clone() for k, v in current.items()}


class Freeze(Callback):
    """A BatchNorm layer is in evaluation mode while training, as in fine-tuning."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        net = pl_module.body if isinstance(pl_module, Plain) else pl_module.net
        net[self.layer].eval()


def fit(
    module: Any, *callbacks: Callback, ckpt: Any = None, batches: Any = None, **options: Any
) -> pl.Trainer:
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 2, **options})
    torch.manual_seed(5)
    trainer.fit(module, loader() if batches is None else batches, ckpt_path=ckpt)
    return trainer
