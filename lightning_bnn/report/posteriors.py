"""A report of posteriors or networks on the same data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import Posterior
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.document import Report, make_report
from lightning_bnn.report.gather import (
    batch_inputs,
    check_predicts,
    flat_loaders,
    gather,
    gather_ood,
    inputs_for,
    undisturbed,
)
from lightning_bnn.report.networks import make_posterior, name_all
from lightning_bnn.report.sections import Section
from lightning_bnn.report.statistics import Statistics
from lightning_bnn.strategies.base import Strategy
from lightning_bnn.target import split_batch

__all__ = ["data_loader", "report_posteriors", "validation_loader"]


def report_posteriors(
    posteriors: Any,
    data: Any,
    *,
    ood: Any = None,
    validation: Any = None,
    draws: int | None = None,
    likelihood: Likelihood | None = None,
    class_names: Sequence[str] | None = None,
    bins: int = 15,
    risk: float = 0.05,
    title: str = "Calibration report",
    source: str = "test",
    sections: Sequence[Section] = (),
) -> Report:
    """How far the predictions of posteriors can be trusted, side by side on the same data.

    Args:
        posteriors: A mapping from names to posteriors, strategies, plain networks (one draw) or
            folders of saved posteriors whose fit left its configuration; or a single posterior.
        data: A loader of (inputs, targets), or a data module, whose test data are taken.
        ood: Loaders or data modules of out-of-distribution data, by name, or one of them. Their
            batches may hold inputs alone.
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
        sections: Further parts of the page, such as
            :class:`lightning_bnn.pruning.section.Pruning`, or of your own.

    Returns:
        The report: ``.save("report.html")`` writes the page and its numbers.

    Raises:
        ConfigurationError: The models predict different things, or a section cannot be made.
        DataError: Data that do not go through a network.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_bnn.likelihoods import Categorical
        >>> data = DataLoader(TensorDataset(torch.randn(60, 4), torch.arange(60) % 3), 20)
        >>> made = report_posteriors({"net": nn.Linear(4, 3)}, data, likelihood=Categorical())
        >>> made
        Report(models=['net'], examples=60, task='classification')
    """
    single = isinstance(posteriors, Posterior)
    given = {"posterior": posteriors} if single else name_all(posteriors, "posteriors")
    if not given:
        raise ConfigurationError("posteriors= holds no model: pass at least one, by name.")
    models = _make_all(given, likelihood)
    loader = data_loader(data)
    if validation is None and isinstance(data, pl.LightningDataModule):
        validation = validation_loader(data)
    elif validation is not None:
        validation = _check_loader(validation, "validation")
    if ood is not None and not isinstance(ood, Mapping):
        ood = {"ood": ood}
    others = {name: data_loader(each, f"ood[{name!r}]") for name, each in (ood or {}).items()}
    _check(models, loader, others, draws)
    for section in sections:
        if section.needs_posterior:
            section.check(models)

    def predict(inputs: Any) -> dict[str, Any]:
        return {name: _predict(posterior, inputs, draws) for name, posterior in models.items()}

    statistics = {name: Statistics(bins=bins, sections=sections) for name in models}
    gather(loader, statistics, _split, predict)
    gather_ood(others, statistics, batch_inputs, predict)
    if validation is not None and next(iter(statistics.values())).task == "classification":
        fitted = {name: Statistics(bins=bins) for name in models}
        gather(validation, fitted, _split, predict)
        for name, model in fitted.items():
            # a data module may have no validation rows
            statistics[name].validation = model if model.examples else None
    for name, posterior in models.items():
        for section in statistics[name].sections:
            if section.needs_posterior:
                section.measure(name, posterior, loader, draws)
    return make_report(statistics, title=title, source=source, class_names=class_names, risk=risk)


def _make_all(given: Mapping[str, Any], likelihood: Likelihood | None) -> dict[str, Posterior]:
    """Posteriors of all; those that bring a likelihood first, for the networks that need one."""
    bare = {
        name
        for name, value in given.items()
        if isinstance(value, nn.Module) and not isinstance(value, Strategy)
    }
    made = {n: make_posterior(v, n, None, likelihood) for n, v in given.items() if n not in bare}
    if likelihood is None and made:
        likelihood = next(iter(made.values())).likelihood
    for name in bare:
        made[name] = make_posterior(given[name], name, None, likelihood)
    return {name: made[name] for name in given}


def _predict(posterior: Posterior, inputs: Any, draws: int | None) -> Any:
    return posterior.predict(inputs_for(posterior, inputs), draws)


def _split(batch: Any) -> tuple[Any, Any]:
    try:
        return split_batch(batch)
    except DataError as error:
        keys = f" with {list(batch)}" if isinstance(batch, Mapping) else ""
        raise DataError(
            f"report_posteriors expected batches of (inputs, targets); got {type(batch).__name__}"
            f"{keys}. Pass a loader of pairs, such as [(b['x'], b['y']) for b in loader], or use "
            "CalibrationReport, which asks the strategy's split()."
        ) from error


def _check(
    models: Mapping[str, Posterior], loader: Any, others: Mapping[str, Any], draws: int | None
) -> None:
    """Try every model on a batch of everything, before any work is done."""
    inputs, _ = _split(_first(loader, "data"))
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
    for place, other in others.items():
        inputs = batch_inputs(_first(other, f"ood[{place!r}]"))
        for posterior in models.values():
            check_predicts(
                lambda x, p=posterior: _predict(p, x, 1),  # type: ignore[misc]
                inputs,
                f"ood[{place!r}]",
                f"Inputs of the shape {expected} per example are expected.",
            )


def _first(loader: Any, what: str) -> Any:
    with undisturbed(loader):
        for batch in loader:
            return batch
    raise DataError(f"{what} is empty: its loader gives no batch.")


def data_loader(data: Any, what: str = "data") -> Any:
    """A loader as it is, or that of a data module's test data.

    Args:
        data: A loader, any other iterable of batches that can be read several times, or a data
            module.
        what: What it is, for errors.

    Raises:
        ConfigurationError: It is something else.
    """
    if isinstance(data, pl.LightningDataModule):
        data.prepare_data()
        data.setup("test")
        data = data.test_dataloader()
    return _check_loader(data, what)


def _check_loader(data: Any, what: str) -> Any:
    fix = None
    if isinstance(data, Iterator):
        fix = "It can be read only once: pass the loader itself, or a list of its batches."
    elif isinstance(data, Tensor):
        fix = "Pass DataLoader(tensor, batch_size=128)."
    elif isinstance(data, Dataset):
        fix = "Pass DataLoader(dataset, batch_size=128)."
    elif isinstance(data, (list, tuple, Mapping)):
        inner = list(data.values() if isinstance(data, Mapping) else data)
        if isinstance(data, Mapping) or any(isinstance(each, DataLoader) for each in inner):
            fix = "Pass one loader. Several of ood= go by name: ood={'near': loader, ...}."
    elif not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        fix = "Pass a DataLoader or a data module."
    if fix is not None:
        raise ConfigurationError(
            f"{what} is expected to be a loader or a data module; got {type(data).__name__}. {fix}"
        )
    return data


def validation_loader(data: pl.LightningDataModule) -> Any:
    """The first loader of a data module's validation data; None, with a warning, if it fails.

    Data that are set up already are taken as they are: another setup might split them anew.
    """
    if not is_overridden("val_dataloader", data):
        return None
    try:
        with isolated_random_state():
            try:
                loaders = data.val_dataloader()
            except Exception:  # not set up for it yet
                data.setup("validate")
                loaders = data.val_dataloader()
        return next(iter(flat_loaders(loaders)), None)
    except ConfigurationError:
        return None  # data of ours that say that they hold no validation rows
    except Exception as error:
        rank_zero_warn(
            f"A report has no temperature from validation data: {type(data).__name__} gave none "
            f"({type(error).__name__}: {error}). It is fitted on halves of the test data, each for "
            "the other. Let setup('validate') make the validation data, or pass validation= to "
            "report_posteriors.",
            category=UserWarning,
        )
        return None
