"""A report of posteriors or networks on the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import Posterior
from lightning_bnn.report.document import Report
from lightning_bnn.report.gather import (
    add,
    add_outside,
    batch_inputs,
    check_predicts,
    inputs_for,
    numbered_batches,
    undisturbed,
)
from lightning_bnn.report.networks import make_posterior, name_all
from lightning_bnn.report.numbers import report_numbers
from lightning_bnn.report.outside import Outside
from lightning_bnn.report.statistics import Statistics
from lightning_bnn.strategies.base import Strategy
from lightning_bnn.target import split_batch

__all__ = ["data_loader", "report_posteriors", "validation_loader"]


def report_posteriors(
    posteriors: Any,
    data: Any,
    *,
    ood: Mapping[str, Any] | None = None,
    validation: Any = None,
    draws: int | None = None,
    likelihood: Likelihood | None = None,
    class_names: Sequence[str] | None = None,
    bins: int = 15,
    risk: float = 0.05,
    title: str = "Calibration report",
    source: str = "test",
) -> Report:
    """How far the predictions of posteriors can be trusted, side by side on the same data.

    Args:
        posteriors: A mapping from names to posteriors, strategies, plain networks (one draw) or
            folders of saved posteriors whose fit left its configuration; or a single posterior.
        data: A loader of (inputs, targets), or a data module, whose test data are taken.
        ood: Loaders or data modules from elsewhere, by name. Their batches may hold inputs alone.
        validation: A loader of the data that the temperature is fitted on. That of a data module is
            found by itself.
        draws: Draws of each posterior; by default what suits it.
        likelihood: How a plain network's outputs give targets; by default that of the first
            posterior.
        class_names: Names of the classes.
        bins: Bins of the reliability diagram.
        risk: The share of errors to allow; the report tells how much can be answered with it.
        title: The heading of the page.
        source: What the data are.

    Returns:
        The report: ``.save("report.html")`` writes the page and its numbers.

    Raises:
        ConfigurationError: The models predict different things.
        DataError: Data that do not go through a network.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_bnn.likelihoods import Categorical
        >>> data = DataLoader(TensorDataset(torch.randn(60, 4), torch.arange(60) % 3), 20)
        >>> made = report_posteriors({"net": nn.Linear(4, 3)}, data, likelihood=Categorical())
        >>> made
        Report(models=['net'], examples=60, task='classes')
    """
    single = isinstance(posteriors, Posterior)
    given = {"posterior": posteriors} if single else name_all(posteriors, "posteriors")
    if not given:
        raise ConfigurationError("posteriors= holds no model: pass at least one, by name.")
    models = _make_all(given, likelihood)
    loader = data_loader(data)
    if validation is None and isinstance(data, pl.LightningDataModule):
        validation = validation_loader(data)
    elsewhere = {name: data_loader(one) for name, one in (ood or {}).items()}
    _check(models, loader, elsewhere, draws)

    statistics = _statistics(models, loader, draws, bins)
    outside: dict[str, dict[str, Outside]] = {name: {} for name in models}
    for place, other in elsewhere.items():
        with undisturbed(other):
            for batch, number in numbered_batches(other):
                made = {n: _predict(p, batch_inputs(batch), draws) for n, p in models.items()}
                numbers = number(len(next(iter(made.values()))))
                for name, predictive in made.items():
                    add_outside(outside[name].setdefault(place, Outside()), predictive, numbers)
    first = next(iter(statistics.values()))
    fitted = None
    if validation is not None and first.task == "classes":
        fitted = _statistics(models, validation, draws, bins)
    return Report(
        report_numbers(
            statistics,
            outside=outside if elsewhere else None,
            validation=fitted,
            title=title,
            source=source,
            class_names=class_names,
            risk=risk,
        )
    )


def _make_all(given: Mapping[str, Any], likelihood: Likelihood | None) -> dict[str, Posterior]:
    """Posteriors of all; those that bring a likelihood first, for the networks that need one."""
    bare = {name for name, one in given.items() if _is_network(one)}
    found = {n: make_posterior(v, n, None, likelihood) for n, v in given.items() if n not in bare}
    if likelihood is None and found:
        likelihood = next(iter(found.values())).likelihood
    for name in bare:
        found[name] = make_posterior(given[name], name, None, likelihood)
    return {name: found[name] for name in given}


def _is_network(value: Any) -> bool:
    return isinstance(value, nn.Module) and not isinstance(value, Strategy)


def _predict(posterior: Posterior, inputs: Any, draws: int | None) -> Any:
    return posterior.predict(inputs_for(posterior, inputs), draws)


def _statistics(
    models: Mapping[str, Posterior], loader: Any, draws: int | None, bins: int
) -> dict[str, Statistics]:
    found = {name: Statistics(bins=bins) for name in models}
    with undisturbed(loader):
        for batch, number in numbered_batches(loader):
            inputs, targets = split_batch(batch)
            numbers = number(len(targets))
            for name, posterior in models.items():
                predictive = _predict(posterior, inputs, draws)
                posterior.likelihood.check(predictive.outputs[0].cpu(), targets.cpu())
                add(found[name], predictive, targets, numbers, inputs)
    return found


def _check(
    models: Mapping[str, Posterior], loader: Any, elsewhere: Mapping[str, Any], draws: int | None
) -> None:
    """Try every model on a batch of everything, before any work is done."""
    inputs, _ = split_batch(_first(loader, "data"))
    kinds = {
        name: check_predicts(
            lambda x, p=posterior: _predict(p, x, 1),  # type: ignore[misc]
            inputs,
            f"data, tried on {name!r},",
            "Pass the data that it was made for.",
        )
        for name, posterior in models.items()
    }
    first = next(iter(kinds))
    for name, kind in kinds.items():
        if kind != kinds[first]:
            raise ConfigurationError(
                f"{first!r} predicts a {kinds[first]} and {name!r} a {kind}: only models of one "
                "task can be compared. Make a report of each."
            )
    expected = tuple(inputs.shape[1:]) if hasattr(inputs, "shape") else "those of data="
    for place, other in elsewhere.items():
        strange = batch_inputs(_first(other, f"ood[{place!r}]"))
        for posterior in models.values():
            check_predicts(
                lambda x, p=posterior: _predict(p, x, 1),  # type: ignore[misc]
                strange,
                f"ood[{place!r}]",
                f"Inputs of the shape {expected} per example are expected.",
            )


def _first(loader: Any, what: str) -> Any:
    with undisturbed(loader):
        for batch in loader:
            return batch
    raise DataError(f"{what} is empty: its loader gives no batch.")


def data_loader(data: Any) -> Any:
    """A loader as it is, or that of a data module's test data."""
    if not isinstance(data, pl.LightningDataModule):
        return data
    data.prepare_data()
    data.setup("test")
    return data.test_dataloader()


def validation_loader(data: pl.LightningDataModule) -> Any:
    """The loader of a data module's validation data; None if it has none."""
    if not is_overridden("val_dataloader", data):
        return None
    try:
        data.setup("validate")
    except ConfigurationError:
        return None  # data of ours that say that they hold no validation rows
    return data.val_dataloader()
