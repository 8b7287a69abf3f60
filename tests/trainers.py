"""A quiet trainer for tests."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A Trainer on one CPU that draws and writes nothing unless told."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **options})
