"""Predictions for the tests of the report: made once, with fixed seeds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.predictive import CategoricalPredictive, GaussianPredictive
from lightning_bnn.report.document import make_report, model_block
from lightning_bnn.report.statistics import Statistics


def class_data(
    count: int = 300, classes: int = 4, draws: int = 3, sharpen: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits (S, B, K) and targets drawn from their mean probabilities, then sharpened."""
    generator = torch.Generator().manual_seed(seed)
    common = 2 * torch.randn(1, count, classes, generator=generator, dtype=torch.float64)
    logits = common + 0.5 * torch.randn(draws, count, classes, generator=generator).double()
    probabilities = logits.softmax(2).mean(0)
    targets = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return logits * sharpen, targets


def class_statistics(
    logits: Tensor, targets: Tensor, bins: int = 10, batch: int = 64, keep: int = 200_000
) -> Statistics:
    statistics = Statistics(bins=bins, keep=keep)
    for start in range(0, len(targets), batch):
        part = slice(start, start + batch)
        statistics.update(CategoricalPredictive(logits[:, part]), targets[part])
    return statistics


def regression_data(
    count: int = 300, outputs: int = 1, draws: int = 4, narrow: float = 1.0, seed: int = 0
) -> tuple[GaussianPredictive, Tensor]:
    """A predictive whose targets were drawn from it, then made narrower."""
    generator = torch.Generator().manual_seed(seed)
    shape = (draws, count, outputs)
    means = torch.randn(1, count, outputs, generator=generator, dtype=torch.float64)
    means = means + 0.3 * torch.randn(shape, generator=generator).double()
    scales = 0.5 + torch.rand(count, outputs, generator=generator, dtype=torch.float64)
    scales = scales.expand(shape)
    which = torch.randint(0, draws, (1, count, outputs), generator=generator)
    noise = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    targets = means.gather(0, which)[0] + scales[0] * noise
    centre = means.mean(0)
    return GaussianPredictive(centre + (means - centre) / narrow, scales / narrow), targets


def regression_statistics(
    predictive: GaussianPredictive, targets: Tensor, bins: int = 10, batch: int = 64
) -> Statistics:
    statistics = Statistics(bins=bins)
    for start in range(0, len(targets), batch):
        part = slice(start, start + batch)
        batch_predictive = GaussianPredictive(predictive.means[:, part], predictive.scales[:, part])
        statistics.update(batch_predictive, targets[part])
    return statistics


def outside_of(predictive: object) -> Statistics:
    outside = Statistics()
    outside.update(predictive, None)  # type: ignore[arg-type]
    return outside


def with_others(
    models: Mapping[str, Statistics],
    outside: Mapping[str, Mapping[str, Statistics]] | None = None,
    validation: Mapping[str, Statistics] | None = None,
) -> dict[str, Statistics]:
    """Copies of the statistics with out-of-distribution scores and validation data."""
    copies = {name: copy.copy(model) for name, model in models.items()}
    for name, model in copies.items():
        model.ood = dict((outside or {}).get(name, {}))
        model.validation = (validation or {}).get(name)
    return copies


def block_of(
    statistics: Statistics,
    outside: Mapping[str, Statistics] | None = None,
    validation: Statistics | None = None,
    risk: float = 0.1,
) -> dict[str, Any]:
    """The numbers of one model."""
    given = with_others({"net": statistics}, {"net": outside or {}}, {"net": validation})
    return model_block("net", given["net"], risk)


def document_of(
    models: Mapping[str, Statistics], outside: Any = None, validation: Any = None, **options: Any
) -> dict[str, Any]:
    """The document of several models."""
    return make_report(with_others(models, outside, validation), **options).numbers


def drawn_rows(count: int, replicates: int = 3) -> tuple[Any, Any]:
    """Weights of the bootstrap, and for each replicate the rows they stand for."""
    rows = np.random.default_rng(0).integers(0, count, (replicates, count))
    weights = np.stack([np.bincount(row, minlength=count) for row in rows])
    return weights.astype(np.float32), rows
