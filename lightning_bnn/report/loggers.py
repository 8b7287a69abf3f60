"""Figures and numbers of a report to whatever loggers a trainer has.

TensorBoard, Weights & Biases and MLflow show figures; other loggers get the numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_bnn.lightning import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

__all__ = ["headlines", "log_figures", "shows_figures"]

# What a strategy logs of a model already is left out.
_LOGGED = {
    "classification": (
        "adaptive_ece",
        "classwise_ece",
        "aurc",
        "coverage_at_risk",
        "excess_nll",
    ),
    "regression": ("sharpness", "epistemic_share", "bias"),
}


def headlines(numbers: Mapping[str, Any], name: str) -> dict[str, float]:
    """The few numbers of one model that are worth a curve over a run.

    For a classification adaptive and classwise calibration error, the area under the risk-coverage
    curve, the coverage at the chosen risk, and ``excess_nll``, by how much the NLL exceeds what the
    model itself expects (positive: over-confident). For a regression sharpness, the epistemic share
    and the bias. For each out-of-distribution data set, ``auroc_<name>`` by entropy, or by standard
    deviation.

    Args:
        numbers: The document of a report.
        name: The model.

    Example:
        >>> scalars = {"aurc": 0.1, "adaptive_ece": None, "excess_nll": 0.02}
        >>> block = {"name": "net", "scalars": scalars, "shift": {}}
        >>> headlines({"task": "classification", "models": [block]}, "net")
        {'aurc': 0.1, 'excess_nll': 0.02}
    """
    block = next(each for each in numbers["models"] if each["name"] == name)
    values = {key: block["scalars"].get(key) for key in _LOGGED[numbers["task"]]}
    for place, shift in block["shift"].items():
        score = next(iter(shift["by"].values()))  # by entropy, or by standard deviation
        values[f"auroc_{place}"] = score["auroc"]
    return {key: float(value) for key, value in values.items() if value is not None}


def shows_figures(logger: Logger) -> bool:
    """Whether a logger shows figures: there is no use in drawing them for others.

    Example:
        >>> from pytorch_lightning.loggers import CSVLogger
        >>> shows_figures(CSVLogger("logs"))
        False
    """
    return isinstance(logger, (TensorBoardLogger, WandbLogger, MLFlowLogger))


def log_figures(
    loggers: Iterable[Logger], figures: Mapping[str, Any], prefix: str, step: int
) -> None:
    """Send matplotlib figures to every logger that shows them.

    Args:
        loggers: The trainer's loggers.
        figures: Figures by name.
        prefix: What comes before the names, such as ``"val"``.
        step: The step of the run.

    Example:
        >>> from pytorch_lightning.loggers import CSVLogger
        >>> log_figures([CSVLogger("logs")], {}, "val", step=0)  # shows none
    """
    for logger in loggers:
        for name, figure in figures.items():
            key = f"{prefix}/{name}"
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(key, figure, global_step=step, close=False)
            elif isinstance(logger, WandbLogger):
                logger.log_image(key, [figure], step=step)
            elif isinstance(logger, MLFlowLogger):
                # an artifact has no step of its own, so that its name has it
                path = f"{prefix}/{name}-{step:08d}.png"
                logger.experiment.log_figure(logger.run_id, figure, path)
