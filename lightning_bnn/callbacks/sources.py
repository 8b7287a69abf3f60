"""Where callbacks take weights from: a strategy, or any LightningModule seen as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn.lightning import pl
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import copy_network, network_tensors, plain_network
from lightning_bnn.posteriors.batch_norm import recompute_batch_norm
from lightning_bnn.posteriors.weights import Weights
from lightning_bnn.selection import trainable_names
from lightning_bnn.strategies import Strategy
from lightning_bnn.strategies.base import cyclical_schedule
from lightning_bnn.strategies.training_batches import training_batches
from lightning_bnn.target import split_batch

__all__ = [
    "PlainModule",
    "Source",
    "copy_to_cpu",
    "not_finite",
    "source_of",
    "with_training_statistics",
]


class PlainModule:
    """A LightningModule that is no strategy, with what callbacks ask of a strategy.

    It has a single network, whose weights are the only row.

    Args:
        module: The LightningModule.
        net_name: The name of its attribute that is the network, or ``"self"``.
        likelihood: How outputs of the network give targets; by default the module's attribute of
            that name, if it is one.

    Example:
        >>> class Model(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 1)
        >>> source = PlainModule(Model())
        >>> {name: tuple(tensor.shape) for name, tensor in source.current_draws().items()}
        {'layer.weight': (1, 1, 2), 'layer.bias': (1, 1)}
        >>> PlainModule(Model(), "layer").trained
        ['weight', 'bias']
    """

    drops_diverged = False
    settling_steps = 0
    sampling_steps = None
    in_cycles = False

    def __init__(
        self,
        module: pl.LightningModule,
        net_name: str = "self",
        likelihood: Likelihood | None = None,
    ) -> None:
        self.module, self.net_name = module, net_name
        known = getattr(module, "likelihood", None) if likelihood is None else likelihood
        self.likelihood = known if isinstance(known, Likelihood) else None
        self.ids, self.alive = [0], torch.ones(1, dtype=torch.bool)

    def go_back_to_best(self) -> list[int]:
        """It keeps no weights."""
        return []

    @property
    def net(self) -> nn.Module:
        """The network."""
        name = "" if self.net_name == "self" else self.net_name
        return plain_network(self.module.get_submodule(name))

    @property
    def trained(self) -> list[str]:
        """The names of the network's parameters that are not frozen."""
        return trainable_names(self.net)

    @property
    def sampling(self) -> bool:
        """Whether the last step was one of sampling, not of exploration."""
        schedule = cyclical_schedule(self.module.trainer)  # it stands at the next step already
        return schedule is None or schedule.samples_at(schedule.last_epoch - 1)

    @property
    def ended_cycle(self) -> bool:
        """Whether the last step was the last of a cycle of a cyclical schedule."""
        schedule = cyclical_schedule(self.module.trainer)
        return schedule is not None and schedule.ends_cycle(schedule.last_epoch - 1)

    def current_draws(self) -> Weights:
        """The network's weights and buffers as they stand, with a leading axis of one."""
        return {name: tensor.detach()[None] for name, tensor in network_tensors(self.net).items()}

    def likelihood_of(self, row: int) -> Likelihood:
        """The likelihood."""
        assert self.likelihood is not None
        return self.likelihood

    def inputs_of(self, batch: Any, row: int) -> Any:
        """The inputs of a batch: of a pair, or as the module's method ``split`` says."""
        split = getattr(self.module, "split", None)
        return (split if callable(split) else split_batch)(batch)[0]


Source = Strategy | PlainModule


def source_of(module: pl.LightningModule) -> Source:
    """A strategy itself, or any other module as one."""
    return module if isinstance(module, Strategy) else PlainModule(module)


def not_finite(weights: Mapping[str, Tensor]) -> dict[int, str]:
    """By row, the name of the first tensor that holds NaN or infinity.

    Example:
        >>> not_finite({"a": torch.zeros(2, 1), "b": torch.tensor([[0.0], [torch.inf]])})
        {1: 'b'}
    """
    rows: dict[int, str] = {}
    for name, tensor in weights.items():
        finite = tensor.isfinite().reshape(len(tensor), -1).all(1).tolist()
        rows = {**{row: name for row, good in enumerate(finite) if not good}, **rows}
    return rows


def with_training_statistics(
    source: Source,
    weights: Weights,
    layers: Collection[str],
    trainer: pl.Trainer,
    limit: int,
    seed: int = 0,
    row: int = 0,
    loader: Any = None,
    fixed: Mapping[str, Tensor] | None = None,
) -> Weights:
    """Draws, each with BatchNorm's statistics recomputed for it from the training data.

    Args:
        source: Has the network, and tells the inputs of a batch.
        weights: Parameters and buffers with a leading axis of draws.
        layers: The names of the layers that get new statistics.
        trainer: Has the data.
        limit: The most batches.
        seed: Decides the order of the data.
        row: The member whose inputs are seen.
        loader: The training data, where the trainer may have dropped them.
        fixed: Values of what is not in ``weights``; by default those of the network.
    """
    net = copy_network(source.net)  # the training may be using it
    net.load_state_dict(fixed or {}, strict=False)
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())

    def cast(leaf: Any) -> Any:
        # a trainer in bfloat16 gives such inputs, and averaged weights are not
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    with (
        training_batches(trainer, limit, seed, loader) as batches,
        trainer.precision_plugin.forward_context(),
    ):
        device = trainer.strategy.root_device
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
        inputs = (tree_map(cast, source.inputs_of(batch, row)) for batch in batches)
        return recompute_batch_norm(net.to(device, dtype), weights, inputs, layers)


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> Weights:
    """Copies that outlive the next step."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
