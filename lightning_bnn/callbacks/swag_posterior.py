"""Posteriors from the moments of snapshots: Gaussians, stored draws of them, or the mean alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_bnn.callbacks.draw_rule import check_count
from lightning_bnn.callbacks.swag_running import RunningMoments
from lightning_bnn.callbacks.swag_source import SnapshotSource
from lightning_bnn.callbacks.training_batches import single_loader, training_batches
from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.network import copy_network
from lightning_bnn.posteriors import (
    DrawsPosterior,
    LowRankPosterior,
    MixturePosterior,
    WeightPosterior,
)
from lightning_bnn.posteriors.batch_norm import recompute_batch_norm
from lightning_bnn.posteriors.draws import unstack
from lightning_bnn.posteriors.weights import Weights
from lightning_bnn.selection import FlatLayout

__all__ = ["FreshStatistics", "check_rank", "gaussians", "mixture", "stored", "usable_rank"]


def check_rank(rank: int) -> None:
    """Raise unless a rank is 0 or at least 2.

    Example:
        >>> check_rank(1)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: rank= is at least 2, ...; got 1.
    """
    check_count("rank", rank, 0)
    if rank == 1:
        raise ConfigurationError(
            "rank= is at least 2, as a covariance needs two deviations, or 0 for the diagonal "
            "alone; got 1."
        )


def usable_rank(moments: RunningMoments, wanted: int | None) -> int:
    """How many deviations a posterior takes: as many as are wanted, by default all that are kept.

    Example:
        >>> moments = RunningMoments.of(torch.zeros(1), rank=5).add(torch.ones(1), rank=5)
        >>> usable_rank(moments, None)
        2
    """
    there = len(moments.deviations)
    if moments.count < 2:
        raise ConfigurationError(
            "A Gaussian needs at least 2 snapshots, and 1 was taken. Train longer, or take "
            "average(), the mean alone."
        )
    if wanted is None:
        return there
    check_rank(wanted)
    if wanted and not there:
        raise ConfigurationError(
            f"rank={wanted} needs deviations, and SWAGMoments(rank=0) keeps none. Leave rank= of "
            f"posterior() out, or make the callback with rank={wanted} and train again."
        )
    if wanted > there:
        raise ConfigurationError(
            f"rank={wanted} needs as many deviations; {moments.count} snapshots were taken, and "
            f"the last {there} deviations are kept. Pass rank={there} to posterior() to use what "
            "there is, or train longer."
        )
    return wanted


def gaussians(
    source: SnapshotSource,
    moments: RunningMoments,
    names: Sequence[str],
    last: Mapping[str, Any],
    rank: int,
    scale: float,
) -> dict[int, LowRankPosterior]:
    """One Gaussian for each member that was not dropped, by its place.

    Args:
        source: Gives the network, the likelihood and the weights that are not averaged.
        moments: Of the flat weights, (members, P).
        names: The averaged weights, in the order in which they lie in the flat ones.
        last: What the source had beside the weights at the last snapshot.
        rank: How many of the deviations to use, the last ones.
        scale: What the covariances are multiplied by.
    """
    current = {**source.current(), **last["buffers"]}
    layout = FlatLayout({name: current[name][0] for name in names})
    net, dtype = source.net, moments.mean.dtype
    if current[names[0]].dtype != dtype:  # the moments of bfloat16 weights are float32
        net = copy_network(net).to(dtype)
        current = {k: t.to(dtype) if t.is_floating_point() else t for k, t in current.items()}
    variance = moments.variance
    made = {}
    for place in last["alive"]:
        if not moments.mean[place].isfinite().all():
            continue  # it diverged in the last step, before it was dropped
        columns = [deviation[place] for deviation in moments.deviations[-rank:]] if rank else []
        rest = {name: tensor[place] for name, tensor in current.items() if name not in names}
        likelihood = deepcopy(source.likelihood(place))
        likelihood.load_state_dict(last["learned"][place])
        made[place] = LowRankPosterior(
            net,
            likelihood,
            layout.views(moments.mean[place]),
            layout.views(variance[place]),
            layout.views(torch.stack(columns)) if columns else None,
            {name: tensor.to("cpu") for name, tensor in rest.items()},
            scale,
        ).to("cpu")
    if not made:
        raise NonFiniteError(
            "All members have diverged: the mean of no member's weights is finite."
        )
    return made


def mixture(components: Sequence[WeightPosterior], members: int) -> WeightPosterior:
    """The posterior of a single network itself, of an ensemble the mixture of its members."""
    return components[0] if members == 1 else MixturePosterior(components)


def stored(like: WeightPosterior, weights: Weights) -> DrawsPosterior:
    """Stacked weights as stored draws, with the network and the likelihood of a posterior."""
    return DrawsPosterior(like.net, like.likelihood, unstack(weights), like.fixed)


class FreshStatistics:
    """BatchNorm's statistics for draws, recomputed from the training data of a fit.

    Args:
        batches: The number of training batches; None for one pass over the data.
    """

    def __init__(self, batches: int | None) -> None:
        self.batches = batches
        self._trainer: pl.Trainer | None = None
        self._loader: Any = None
        self._length = 0.0

    def keep(self, trainer: pl.Trainer) -> None:
        """Keep the training data: the trainer drops them when it validates or tests."""
        if trainer.train_dataloader is not None:
            self._trainer, self._loader = trainer, trainer.train_dataloader
            self._length = trainer.num_training_batches

    def check(self, source: SnapshotSource, batch: Any) -> None:
        """Raise if statistics could not be recomputed after training on such batches."""
        self._count()
        single_loader(self._loader)
        if batch is not None:  # with a training step that takes the iterator none is known yet
            source.inputs(batch, 0)

    def _count(self) -> int:
        count = self._length if self.batches is None else self.batches
        if count == float("inf"):
            raise ConfigurationError(
                "BatchNorm's statistics are recomputed from one pass over the training data, which "
                "have no length. Pass refresh_batch_norm= with a number of batches."
            )
        return int(count)

    def compute(
        self,
        source: SnapshotSource,
        layers: Sequence[str],
        place: int,
        posterior: WeightPosterior,
        weights: Weights,
    ) -> Weights:
        """The same weights, for each draw with statistics from the training data.

        Args:
            source: Tells inputs from targets.
            layers: The names of the layers that get new statistics.
            place: The place of the member, which may have seen data of its own.
            posterior: Gives the network, and the tensors that are the same in all draws.
            weights: Parameters with a leading axis of draws.
        """
        if not layers:
            return weights
        trainer = self._trainer
        if trainer is None:
            raise ConfigurationError(
                "The network has BatchNorm, whose statistics are recomputed for each draw from the "
                "training data, and SWAGMoments has seen none since it was made. Ask after a fit "
                "(one with ckpt_path= of a finished run loads the data and trains no further), or "
                "take gaussian(), which leaves the statistics as they are."
            )
        device = trainer.strategy.root_device
        net = copy_network(posterior.net).to(device)
        net.load_state_dict(posterior.fixed, strict=False)
        dtype = next(iter(weights.values())).dtype

        def cast(leaf: Any) -> Any:
            # a trainer in bfloat16 gives such inputs, and the moments are not
            floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if floating else leaf

        with (
            training_batches(trainer, self._count(), seed=0, loader=self._loader) as seen,
            trainer.precision_plugin.forward_context(),
        ):
            moved = {name: tensor.to(device) for name, tensor in weights.items()}
            inputs = (tree_map(cast, source.inputs(batch, place)) for batch in seen)
            fresh = recompute_batch_norm(net, moved, inputs, layers)
        return {name: tensor.to("cpu") for name, tensor in fresh.items()}
