"""Deep ensembles on the UCI sets: all splits of a set trained as one stacked program.

Every split of a set has the same number of training rows, so the members of all splits fit in one
:class:`~lightning_bnn.DeepEnsemble`: member ``5 * split + k`` is the k-th of its split, and the
loader gives each member batches of its own split's rows in an order of its own. Members never touch
each other, so the figures are those of splits that are trained one by one.

The network has one hidden layer of 50 rectified linear units (100 for the protein set) and two
outputs, the mean and the raw scale of a Gaussian, trained by Adam with a cosine learning rate. The
outputs are two layers so that each can have a prior of its own: a narrow one on the weights of the
scale keeps the noise from being fitted to single rows.

What is chosen on which data: each split chooses by itself between two recipes. Both are trained
on the first 80% of its training rows, and the one with the better log-likelihood on the other 20%
is trained anew on all of them. Small sets, which are easily fitted too closely, choose between
few and many epochs; sets of more than 5,000 rows between a narrow and a wide prior. Test rows take
no part in it. The other settings are the same for all sets and splits. They, and the recipes, were
set by trials on such validation rows of all splits, where a row that tests one split may have
validated another. One thing came after a first look at test figures: at first large sets had no
choice but the narrow prior, although the trials had favoured the wide one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_bnn import DeepEnsemble
from lightning_bnn.data import UCIRegression
from lightning_bnn.data.uci import UCIName
from lightning_bnn.ensembles.batches import MemberBatch
from lightning_bnn.errors import NonFiniteError
from lightning_bnn.likelihoods import HeteroscedasticGaussian
from lightning_bnn.priors import Normal
from lightning_bnn.random import member_seed

__all__ = ["MEMBERS", "SETTINGS", "Recipe", "Score", "run_ensemble"]

MEMBERS = 5
VALIDATION = 0.2
BATCH_SIZE = 32
LEARNING_RATE = 0.01
MINIMUM_SCALE = 1e-3  # of standardised targets
SEED = 0


class Recipe(NamedTuple):
    """What a split chooses between.

    Attributes:
        epochs: How long the members are trained.
        prior_scale: The prior's standard deviation, times the square root of the fan-in.
        noise_prior_scale: The same for the weights of the output that gives the scale.
    """

    epochs: int
    prior_scale: float = 1.0
    noise_prior_scale: float = 0.3

    def __str__(self) -> str:
        return f"{self.epochs} epochs, prior {self.prior_scale:g} and {self.noise_prior_scale:g}"


RECIPES = (Recipe(40), Recipe(200))
LARGE = 5000
LARGE_RECIPES = (Recipe(40), Recipe(40, 4.0, 1.0))

SETTINGS = (
    f"{MEMBERS} members, one hidden layer of 50 ReLU units (100 for protein), heteroscedastic "
    f"Gaussian; Adam, learning rate {LEARNING_RATE} falling to 0 by a cosine, batches of "
    f"{BATCH_SIZE}; prior N(0, s²/fan-in), on the weights of the scale output N(0, t²/fan-in), "
    f"biases N(0, s²). Each split chooses on {VALIDATION:.0%} of its training rows between "
    f"{RECIPES[0].epochs} and {RECIPES[1].epochs} epochs with s = {RECIPES[0].prior_scale:g}, "
    f"t = {RECIPES[0].noise_prior_scale:g}; on sets of more than {LARGE} rows between these and "
    f"s = {LARGE_RECIPES[1].prior_scale:g}, t = {LARGE_RECIPES[1].noise_prior_scale:g}, with "
    f"{LARGE_RECIPES[0].epochs} epochs; and is trained anew on all of them. No split chooses "
    "on its own test rows; how the recipes came about is in benchmarks/README.md."
)


class Score(NamedTuple):
    """How an ensemble does on the rows that were held out, in the unit of the target."""

    log_likelihood: float
    rmse: float


@dataclass(frozen=True)
class StackedSplits:
    """Splits of one set with a leading axis, standardised; the scales lead back to the unit."""

    splits: list[int]
    inputs: Tensor
    targets: Tensor
    held_out_inputs: Tensor
    held_out_targets: Tensor
    target_scales: list[float]


def stack_splits(
    name: UCIName, splits: Sequence[int], data_dir: str | Path | None, validation: float = 0.0
) -> StackedSplits:
    """Read splits of a set; with ``validation`` a share of the training rows is held out.

    Without it the test rows are what is held out.
    """
    train, held_out, scales = [], [], []
    for split in splits:
        data = UCIRegression(name, split, data_dir, validation)
        data.setup()
        train.append(data.splits.train.tensors)
        held_out.append((data.splits.validation if validation else data.splits.test).tensors)
        scales.append(data.target_scale)
    inputs, targets = (torch.stack(column) for column in zip(*train, strict=True))
    others = (torch.stack(column) for column in zip(*held_out, strict=True))
    held_out_inputs, held_out_targets = others
    return StackedSplits(list(splits), inputs, targets, held_out_inputs, held_out_targets, scales)


class SplitBatches:
    """A loader that gives each member batches of its own split, in an order of its own.

    What is left over at the end of an epoch, less than a batch, is passed over.

    Args:
        data: The splits.
        numbers: The members' numbers, ``MEMBERS`` in a row for each split.
        batch_size: Rows in a batch.
    """

    def __init__(self, data: StackedSplits, numbers: Sequence[int], batch_size: int) -> None:
        count, self._rows = data.inputs.shape[:2]
        self._inputs, self._targets = data.inputs.flatten(0, 1), data.targets.flatten(0, 1)
        self._first = self._rows * torch.arange(count).repeat_interleave(MEMBERS)[:, None]
        self._batch_size = min(batch_size, self._rows)
        self._generators = [
            torch.Generator().manual_seed(member_seed(SEED, number, "order")) for number in numbers
        ]

    def __len__(self) -> int:
        return self._rows // self._batch_size

    def __iter__(self) -> Iterator[MemberBatch]:
        orders = [torch.randperm(self._rows, generator=g) for g in self._generators]
        rows = torch.stack(orders) + self._first
        for chosen in rows.split(self._batch_size, dim=1)[: len(self)]:
            yield MemberBatch((self._inputs[chosen], self._targets[chosen]), chosen - self._first)


class Perceptron(nn.Module):
    """One hidden layer; the mean and the raw scale are layers of their own."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.mean = nn.Linear(hidden, 1)
        self.scale = nn.Linear(hidden, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.hidden(inputs).relu()
        return torch.cat([self.mean(features), self.scale(features)], dim=-1)


def train(data: StackedSplits, hidden: int, recipe: Recipe) -> DeepEnsemble:
    """Train the members of all splits side by side, through the trainer."""
    numbers = [MEMBERS * split + member for split in data.splits for member in range(MEMBERS)]
    rows, columns = data.inputs.shape[1:]
    ensemble = DeepEnsemble(
        partial(Perceptron, columns, hidden),
        HeteroscedasticGaussian(MINIMUM_SCALE),
        {
            "scale.weight": Normal(0.0, recipe.noise_prior_scale, fan_in=True),
            "*": Normal(0.0, recipe.prior_scale, fan_in=True),
        },
        members=numbers,
        num_data=rows,
        independent_batches=True,
        mode="stacked",
        optimizer=partial(Adam, lr=LEARNING_RATE, fused=True),
        scheduler=partial(CosineAnnealingLR, T_max=recipe.epochs),
        seed=SEED,
    )
    trainer = pl.Trainer(
        max_epochs=recipe.epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(ensemble, SplitBatches(data, numbers, BATCH_SIZE))
    if not ensemble.alive.all():
        dropped = [
            n for n, alive in zip(numbers, ensemble.alive.tolist(), strict=True) if not alive
        ]
        raise NonFiniteError(
            f"Members {dropped} diverged, and an ensemble of fewer than {MEMBERS} is another "
            "method. Lower the learning rate."
        )
    return ensemble


@torch.no_grad()
def score(ensemble: DeepEnsemble, data: StackedSplits) -> list[Score]:
    """Each split's ensemble on the rows that its split holds out."""
    scores = []
    for index, scale in enumerate(data.target_scales):
        members = slice(MEMBERS * index, MEMBERS * (index + 1))
        outputs = ensemble(data.held_out_inputs[index])[members]
        targets = data.held_out_targets[index]
        predictive = ensemble.likelihood.predictive(outputs)
        log_density = predictive.log_prob(targets).double().mean().item()
        error = (predictive.mean - targets).double().square().mean().sqrt().item()
        scores.append(Score(log_density - math.log(scale), error * scale))
    return scores


def run_ensemble(
    name: UCIName, splits: Sequence[int], data_dir: str | Path | None
) -> list[dict[str, Any]]:
    """Let each split choose its recipe, train, and test.

    Returns:
        For each split its test score, its recipe, and the validation scores of both.
    """
    hidden = 100 if name == "protein-tertiary-structure" else 50
    data = stack_splits(name, splits, data_dir, VALIDATION)
    rows = data.inputs.shape[1] + data.held_out_inputs.shape[1]
    recipes = RECIPES if rows <= LARGE else LARGE_RECIPES
    validated = {recipe: score(train(data, hidden, recipe), data) for recipe in recipes}
    found = {
        split: {recipe: validated[recipe][index].log_likelihood for recipe in recipes}
        for index, split in enumerate(splits)
    }
    best = {split: max(scores, key=lambda one: scores[one]) for split, scores in found.items()}
    tested: dict[int, Score] = {}
    for recipe in recipes:
        chosen = [split for split in splits if best[split] == recipe]
        if chosen:
            data = stack_splits(name, chosen, data_dir)
            tested |= dict(zip(chosen, score(train(data, hidden, recipe), data), strict=True))
    return [
        {
            "split": split,
            **tested[split]._asdict(),
            "recipe": str(best[split]),
            "validation": {str(recipe): value for recipe, value in found[split].items()},
        }
        for split in splits
    ]
