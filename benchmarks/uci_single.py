"""One network on the UCI sets: a Laplace approximation or IVON, split by split, as they come.

The network has one hidden layer of 50 rectified linear units (100 for the protein set).
:class:`~lightning_bnn.LaplaceBNN` and :class:`~lightning_bnn.IVONBNN` have all their defaults: the
prior and its scales, the learning rate and its schedule, the structure of the curvature, the
predictive and its 32 draws. What is not theirs to say is the likelihood and the length of the fit.

What is chosen on which data: on sets of up to 5,000 rows each split chooses by itself between
three recipes: one noise scale for all targets, or one that is a function of the inputs, the latter
in a short or a long fit. All are trained on the first 80% of its training rows, and the one with
the best log-likelihood on the other 20% is trained anew on all of them. Larger sets, which take
longer and are not easily fitted too closely, have one recipe and no choice. Test rows take no part
in it. No fit has validation data of its own, so that none stops early or goes back to earlier
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from benchmarks.uci_ensemble import LARGE, MINIMUM_SCALE, VALIDATION, Score
from lightning_bnn import IVONBNN, LaplaceBNN
from lightning_bnn.data import UCIRegression
from lightning_bnn.data.uci import UCIName
from lightning_bnn.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood
from lightning_bnn.nets import MLP
from lightning_bnn.posteriors import Posterior
from lightning_bnn.strategies import Strategy

__all__ = ["STRATEGIES", "Recipe", "run_single", "score", "settings", "train"]

STRATEGIES: dict[str, Callable[..., Strategy]] = {"laplace": LaplaceBNN, "ivon": IVONBNN}
LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "one noise": lambda: Gaussian(learn=True),
    "noise of inputs": lambda: HeteroscedasticGaussian(MINIMUM_SCALE),
}
BATCH_SIZE, LARGE_BATCH_SIZE = 32, 128
ROWS = 1000  # of one prediction


class Recipe(NamedTuple):
    """What a split chooses between.

    Attributes:
        noise: Which likelihood.
        steps: The length of the fit, which is rounded to whole epochs.
    """

    noise: str
    steps: int

    def __str__(self) -> str:
        return f"{self.noise}, {self.steps} steps"


RECIPES = (
    Recipe("one noise", 2000),
    Recipe("noise of inputs", 500),
    Recipe("noise of inputs", 2000),
)
LARGE_RECIPES = (Recipe("noise of inputs", 2500),)


def settings(method: str) -> str:
    """What is kept beside the figures of a method."""
    return (
        f"{STRATEGIES[method].__name__} with its defaults, one hidden layer of 50 ReLU units (100 "
        f"for protein), batches of {BATCH_SIZE}. Each split chooses on {VALIDATION:.0%} of its "
        f"training rows between: {'; '.join(map(str, RECIPES))}; and is trained anew on all of "
        f"them. Sets of more than {LARGE} rows: {LARGE_RECIPES[0]}, batches of {LARGE_BATCH_SIZE}, "
        "no choice. One noise is Gaussian(learn=True), noise of inputs "
        f"HeteroscedasticGaussian({MINIMUM_SCALE:g}). No split chooses on its own test rows; how "
        "the recipes came about is in benchmarks/README.md."
    )


def read(
    name: UCIName, split: int, data_dir: str | Path | None, validation: float = 0.0
) -> UCIRegression:
    """A split of a set, with a share of the training rows held out, or none."""
    data = UCIRegression(name, split, data_dir, validation, BATCH_SIZE)
    data.setup()
    if len(data.splits.train) + len(data.splits.validation) > LARGE:
        data.batch_size = LARGE_BATCH_SIZE
    return data


def train(method: str, data: UCIRegression, recipe: Recipe) -> Posterior:
    """Fit a network to the training rows of a split; the split decides its seed."""
    pl.seed_everything(data.split, verbose=False)
    hidden = 100 if data.set_name == "protein-tertiary-structure" else 50
    likelihood = LIKELIHOODS[recipe.noise]()
    net = MLP(data.input_shape[0], [hidden], 1 if isinstance(likelihood, Gaussian) else 2)
    strategy = STRATEGIES[method](net, likelihood)
    strategy.log = _forget  # type: ignore[method-assign]  # takes much of a step, and is not looked at
    loader = data.train_dataloader()
    trainer = pl.Trainer(
        max_epochs=max(1, round(recipe.steps / len(loader))), accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(strategy, loader)
    return strategy.posterior()


def _forget(*arguments: Any, **options: Any) -> None:
    pass


@torch.no_grad()
def score(posterior: Posterior, data: UCIRegression) -> Score:
    """On the validation rows of a split, or on the test rows where there are none."""
    rows = data.splits.validation if len(data.splits.validation) else data.splits.test
    densities, errors = [], []
    for inputs, targets in zip(*(tensor.split(ROWS) for tensor in rows.tensors), strict=True):
        predictive = posterior.predict(inputs)
        densities.append(predictive.log_prob(targets).double())
        errors.append((predictive.mean - targets).double())
    log_density, rmse = torch.cat(densities).mean(), torch.cat(errors).square().mean().sqrt()
    scale = data.target_scale
    return Score(log_density.item() - math.log(scale), rmse.item() * scale)


def run_single(
    method: str, name: UCIName, splits: Sequence[int], data_dir: str | Path | None
) -> list[dict[str, Any]]:
    """Let each split choose its recipe, train, and test.

    Returns:
        For each split its test score, its recipe, and the validation scores of all recipes.
    """
    results = []
    for split in splits:
        data = read(name, split, data_dir, VALIDATION)
        recipes = RECIPES if data.batch_size == BATCH_SIZE else LARGE_RECIPES
        validated = {
            recipe: score(train(method, data, recipe), data).log_likelihood
            for recipe in recipes
            if len(recipes) > 1
        }
        best = max(recipes, key=lambda recipe: validated.get(recipe, 0.0))
        data = read(name, split, data_dir)
        results.append(
            {
                "split": split,
                **score(train(method, data, best), data)._asdict(),
                "recipe": str(best),
                "validation": {str(recipe): value for recipe, value in validated.items()},
            }
        )
    return results
