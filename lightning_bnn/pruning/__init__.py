"""Pruning by the signal-to-noise ratio: weights that carry no information are removed."""

from lightning_bnn.pruning.compact import compact
from lightning_bnn.pruning.curve import PruneCurve, PruningResult, prune_curve
from lightning_bnn.pruning.export import export_network
from lightning_bnn.pruning.functions import masked, mean_network, prune, sparsity, support
from lightning_bnn.pruning.masks import pruning_masks
from lightning_bnn.pruning.signal import signal_to_noise

__all__ = [
    "PruneCurve",
    "PruningResult",
    "compact",
    "export_network",
    "masked",
    "mean_network",
    "prune",
    "prune_curve",
    "pruning_masks",
    "signal_to_noise",
    "sparsity",
    "support",
]
