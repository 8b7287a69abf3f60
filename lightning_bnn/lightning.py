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
    "Checkpoint",
    "ClusterEnvironment",
    "GradientAccumulationScheduler",
    "LightningArgumentParser",
    "LightningCLI",
    "LightningEnvironment",
    "MisconfigurationException",
    "ModelCheckpoint",
    "ProgressBar",
    "RunningStage",
    "SaveConfigCallback",
    "TrainerFn",
    "TrainerStatus",
    "WeightAveraging",
    "get_filesystem",
    "in_this_package",
    "is_overridden",
    "move_data_to_device",
    "pl",
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


def in_this_package(class_path: str) -> str:
    """The dotted name of a class of either Lightning in the one that is used.

    Example:
        >>> in_this_package("lightning.pytorch.loggers.CSVLogger").endswith(".loggers.CSVLogger")
        True
    """
    for name in _NAMES:
        if class_path.startswith(f"{name}."):
            return PACKAGE + class_path.removeprefix(name)
    return class_path


if TYPE_CHECKING:
    import pytorch_lightning as pl
    from lightning_fabric.utilities.cloud_io import get_filesystem
    from lightning_fabric.utilities.data import sized_len
    from pytorch_lightning.callbacks import (
        BasePredictionWriter,
        Checkpoint,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        ProgressBar,
        WeightAveraging,
    )
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
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
        f"{_FABRIC}.utilities.cloud_io": ["get_filesystem"],
        f"{_FABRIC}.utilities.data": ["sized_len"],
        f"{PACKAGE}.callbacks": [
            "BasePredictionWriter",
            "Checkpoint",
            "GradientAccumulationScheduler",
            "ModelCheckpoint",
            "ProgressBar",
            "WeightAveraging",
        ],
        f"{PACKAGE}.cli": ["LightningArgumentParser", "LightningCLI", "SaveConfigCallback"],
        f"{PACKAGE}.plugins.environments": ["ClusterEnvironment", "LightningEnvironment"],
        f"{PACKAGE}.trainer.states": ["RunningStage", "TrainerFn", "TrainerStatus"],
        f"{PACKAGE}.utilities": ["move_data_to_device"],
        f"{PACKAGE}.utilities.exceptions": ["MisconfigurationException"],
        f"{PACKAGE}.utilities.model_helpers": ["is_overridden"],
        f"{PACKAGE}.utilities.rank_zero": ["rank_zero_debug", "rank_zero_info", "rank_zero_warn"],
    }
    for _home, _exports in _HOMES.items():
        globals().update({_name: getattr(import_module(_home), _name) for _name in _exports})
