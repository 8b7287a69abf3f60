"""Do the chains of a run agree? R-hat and ESS over all of them, wherever they ran or still run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytorch_lightning as pl

from lightning_bnn.diagnostics import Diagnosis, diagnose
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import DrawsPosterior, MixturePosterior

__all__ = ["diagnose_chains", "training_data"]

_LEAST_DRAWS = 4  # with fewer there is no R-hat


def diagnose_chains(
    posterior: MixturePosterior, chains: int, inputs: Any, **options: Any
) -> Diagnosis:
    """The diagnosis of the chains that have some draws by now.

    Args:
        posterior: What there is of the run.
        chains: How many chains the run has in all.
        inputs: Where to watch predictions: a loader, a batch or a tensor.
        options: As for :func:`lightning_bnn.diagnostics.diagnose`.

    Raises:
        ConfigurationError: No chain has enough draws.
    """
    parts = [
        part
        for part in posterior.components
        if isinstance(part, DrawsPosterior) and len(part) >= _LEAST_DRAWS * part.chains
    ]
    if not parts:
        raise ConfigurationError(
            f"No member of the run has {_LEAST_DRAWS} draws yet, so that there is nothing to "
            "compare. For chains the trainer needs SampleCollector(dirpath='draws'); members of "
            "ensembles and of variational inference are no chains."
        )
    found = diagnose(MixturePosterior(parts), inputs, **options)
    if len(parts) < chains:
        missing = chains - len(parts)
        said = f"{missing} of {chains} chains have fewer than {_LEAST_DRAWS} draws: left out."
        found = replace(found, notes=(*found.notes, said))
    return found


def training_data(data: Any) -> Any:
    """The training loader of what a recipe has made."""
    if not isinstance(data, pl.LightningDataModule):
        return data
    data.prepare_data()
    data.setup("fit")
    return data.train_dataloader()
