"""A report of posteriors or networks on the same data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.lightning import is_overridden, pl, rank_zero_warn
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import Posterior
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.document import Report, make_report
from lightning_bnn.report.gather import (
    batch_inputs,
    check_models,
    first_batch,
    flat_loaders,
    gather,
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
            folders of saved posteriors of known layers; or a single posterior.
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
    models = _make_all(given, likelihood)
    loader = data_loader(data)
    if validation is None and isinstance(data, pl.LightningDataModule):
        validation = validation_loader(data)
    elif validation is not None:
        validation = _check_loader(validation, "validation")
    if ood is not None and not isinstance(ood, Mapping):
        ood = {"ood": ood}
    others = {name: data_loader(each, f"ood[{name!r}]") for name, each in (ood or {}).items()}
    alone = {name: partial(_predict, posterior, draws=1) for name, posterior in models.items()}
    check_models(alone, _split(first_batch(loader, "data"))[0], others, class_names=class_names)
    for section in sections:
        if section.needs_posterior:
            section.check(models)

    def predict(inputs: Any) -> dict[str, Any]:
        return {name: _predict(posterior, inputs, draws) for name, posterior in models.items()}

    statistics = {name: Statistics(bins=bins, sections=sections) for name in models}
    gather(loader, statistics, _split, predict, bar="report: test data")
    for place, other in others.items():
        inputs_alone = lambda batch: (batch_inputs(batch), None)  # noqa: E731
        gather(other, statistics, inputs_alone, predict, place, f"report: {place}")
    if validation is not None and next(iter(statistics.values())).task == "classification":
        fitted = {name: Statistics(bins=bins) for name in models}
        gather(validation, fitted, _split, predict, bar="report: validation data")
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

    def is_bare(name: str) -> bool:
        return isinstance(given[name], nn.Module) and not isinstance(given[name], Strategy)

    made: dict[str, Posterior] = {}
    for name in sorted(given, key=is_bare):
        if likelihood is None and is_bare(name) and made:
            likelihood = next(iter(made.values())).likelihood
        made[name] = make_posterior(given[name], name, None, likelihood)
    return {name: made[name] for name in given}


def _predict(posterior: Posterior, inputs: Any, draws: int | None) -> Any:
    return posterior.predict(inputs, draws)


def _split(batch: Any) -> tuple[Any, Any]:
    try:
        return split_batch(batch)
    except DataError as error:
        keys = f" with {list(batch)}" if isinstance(batch, Mapping) else ""
        raise DataError(
            f"report_posteriors expected batches of (inputs, targets); got {type(batch).__name__}"
            f"{keys}. Pass a loader of pairs, such as [(b['x'], b['y']) for b in loader]."
        ) from error


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
    wrong = isinstance(data, (Tensor, Dataset, Mapping, str, Iterator))
    several = isinstance(data, (list, tuple)) and any(isinstance(x, DataLoader) for x in data)
    if wrong or several or not isinstance(data, Iterable):
        raise ConfigurationError(
            f"{what} is expected to be a loader that can be read several times, or a data module; "
            f"got {type(data).__name__}. Pass one DataLoader, such as DataLoader(dataset, 128); "
            "several of ood= go by name: ood={'near': loader, ...}."
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
            f"A report has no temperature from validation data, but from halves of the test data: "
            f"{type(data).__name__} gave none ({type(error).__name__}: {error}). Let "
            "setup('validate') make them, or pass validation= to report_posteriors.",
            category=UserWarning,
        )
        return None
