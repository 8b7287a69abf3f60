"""Which Lightning is meant: ``pytorch_lightning``, or ``lightning.pytorch`` of the unified package.

Both hold the same classes, and a trainer of one refuses modules, callbacks and data modules of the
other. This package derives its classes from the one that the program has imported first; where it
has imported neither, from ``pytorch_lightning``. The environment variable
``LIGHTNING_BNN_LIGHTNING``, with one of the two names, overrides both. Everything that this package
uses of Lightning is imported here and nowhere else.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "PACKAGE",
    "BasePredictionWriter",
    "CSVLogger",
    "Checkpoint",
    "ClusterEnvironment",
    "EMAWeightAveraging",
    "GradientAccumulationScheduler",
    "LightningArgumentParser",
    "LightningCLI",
    "LightningEnvironment",
    "Logger",
    "MLFlowLogger",
    "MisconfigurationException",
    "ModelCheckpoint",
    "ProgressBar",
    "RunningStage",
    "SaveConfigCallback",
    "StochasticWeightAveraging",
    "TensorBoardLogger",
    "TorchCheckpointIO",
    "TrainerFn",
    "TrainerStatus",
    "WandbLogger",
    "WeightAveraging",
    "apply_to_collection",
    "get_filesystem",
    "is_overridden",
    "move_data_to_device",
    "pl",
    "pl_load",
    "rank_zero_debug",
    "rank_zero_info",
    "rank_zero_warn",
    "sized_len",
]

_NAMES = ("pytorch_lightning", "lightning.pytorch")
_VARIABLE = "LIGHTNING_BNN_LIGHTNING"


def _choose() -> str:
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        if chosen not in _NAMES:
            raise ImportError(f"{_VARIABLE} is {' or '.join(_NAMES)}; got {chosen!r}.")
        return chosen
    # sys.modules keeps the order in which modules were imported
    return next((name for name in sys.modules if name in _NAMES), _NAMES[0])


PACKAGE = _choose()
_FABRIC = "lightning_fabric" if _NAMES[0] == PACKAGE else "lightning.fabric"


if TYPE_CHECKING:
    import pytorch_lightning as pl
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning_fabric.utilities.cloud_io import _load as pl_load
    from lightning_fabric.utilities.cloud_io import get_filesystem
    from lightning_fabric.utilities.data import sized_len
    from lightning_utilities.core.apply_func import apply_to_collection
    from pytorch_lightning.callbacks import (
        BasePredictionWriter,
        Checkpoint,
        EMAWeightAveraging,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        ProgressBar,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
    from pytorch_lightning.loggers import (
        CSVLogger,
        Logger,
        MLFlowLogger,
        TensorBoardLogger,
        WandbLogger,
    )
    from pytorch_lightning.plugins.environments import ClusterEnvironment, LightningEnvironment
    from pytorch_lightning.trainer.states import RunningStage, TrainerFn, TrainerStatus
    from pytorch_lightning.utilities import move_data_to_device
    from pytorch_lightning.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.rank_zero import (
        rank_zero_debug,
        rank_zero_info,
        rank_zero_warn,
    )
else:
    pl = import_module(PACKAGE)
    _HOMES = {
        "apply_to_collection": "lightning_utilities.core.apply_func",
        "get_filesystem": f"{_FABRIC}.utilities.cloud_io",
        "sized_len": f"{_FABRIC}.utilities.data",
        "TorchCheckpointIO": f"{_FABRIC}.plugins.io.torch_io",
        "BasePredictionWriter": f"{PACKAGE}.callbacks",
        "Checkpoint": f"{PACKAGE}.callbacks",
        "EMAWeightAveraging": f"{PACKAGE}.callbacks",
        "GradientAccumulationScheduler": f"{PACKAGE}.callbacks",
        "ModelCheckpoint": f"{PACKAGE}.callbacks",
        "ProgressBar": f"{PACKAGE}.callbacks",
        "StochasticWeightAveraging": f"{PACKAGE}.callbacks",
        "WeightAveraging": f"{PACKAGE}.callbacks",
        "LightningArgumentParser": f"{PACKAGE}.cli",
        "LightningCLI": f"{PACKAGE}.cli",
        "SaveConfigCallback": f"{PACKAGE}.cli",
        "CSVLogger": f"{PACKAGE}.loggers",
        "Logger": f"{PACKAGE}.loggers",
        "MLFlowLogger": f"{PACKAGE}.loggers",
        "TensorBoardLogger": f"{PACKAGE}.loggers",
        "WandbLogger": f"{PACKAGE}.loggers",
        "ClusterEnvironment": f"{PACKAGE}.plugins.environments",
        "LightningEnvironment": f"{PACKAGE}.plugins.environments",
        "RunningStage": f"{PACKAGE}.trainer.states",
        "TrainerFn": f"{PACKAGE}.trainer.states",
        "TrainerStatus": f"{PACKAGE}.trainer.states",
        "move_data_to_device": f"{PACKAGE}.utilities",
        "MisconfigurationException": f"{PACKAGE}.utilities.exceptions",
        "is_overridden": f"{PACKAGE}.utilities.model_helpers",
        "rank_zero_debug": f"{PACKAGE}.utilities.rank_zero",
        "rank_zero_info": f"{PACKAGE}.utilities.rank_zero",
        "rank_zero_warn": f"{PACKAGE}.utilities.rank_zero",
    }

    def __getattr__(name: str) -> object:
        # only what is asked for: the command line and the loggers take long to import
        if name == "pl_load":
            return vars(import_module(f"{_FABRIC}.utilities.cloud_io"))["_load"]
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
