"""A copy of a network whose layers have other sizes.

Layers are changed in place in the copy, so that whatever else they carry (stride, padding, dtype,
device, mode, hooks, attributes of your own) is kept. Only layers whose sizes are known to be all
that depends on their width can be changed: ``Linear``, ``Conv1d`` to ``Conv3d`` and ``BatchNorm1d``
to ``BatchNorm3d``, and no subclasses of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network, network_tensors

__all__ = ["BATCH_NORMS", "CONVOLUTIONS", "LAYERS", "is_depthwise", "resized", "why_not_resizable"]

CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
BATCH_NORMS: dict[type[nn.Module], int] = {
    nn.BatchNorm1d: 1,
    nn.BatchNorm2d: 2,
    nn.BatchNorm3d: 3,
}
LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS, *BATCH_NORMS)


def is_depthwise(layer: nn.Module) -> bool:
    """Whether a layer is a convolution with one filter of its own for each channel.

    Example:
        >>> is_depthwise(nn.Conv2d(4, 4, 3, groups=4)), is_depthwise(nn.Conv2d(4, 8, 3, groups=4))
        (True, False)
    """
    return (
        isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        and layer.groups > 1
        and layer.groups == layer.in_channels == layer.out_channels
    )


def why_not_resizable(layer: nn.Module) -> str | None:
    """Why a layer cannot get another size, or None if it can.

    Example:
        >>> why_not_resizable(nn.Linear(2, 3)) is None
        True
        >>> why_not_resizable(nn.Embedding(2, 3))
        'Embedding is not one of Linear, Conv1d to Conv3d, BatchNorm1d to BatchNorm3d'
    """
    if parametrize.is_parametrized(layer):
        return "it is parametrised; call torch.nn.utils.parametrize.remove_parametrizations first"
    if prune.is_pruned(layer):
        return "it is pruned by torch.nn.utils.prune; call torch.nn.utils.prune.remove first"
    if type(layer) not in LAYERS:
        if isinstance(layer, LAYERS):
            kind = next(kind for kind in LAYERS if isinstance(layer, kind))
            return f"{type(layer).__name__} is a subclass of {kind.__name__} with rules of its own"
        return (
            f"{type(layer).__name__} is not one of Linear, Conv1d to Conv3d, BatchNorm1d to "
            "BatchNorm3d"
        )
    if type(layer) in CONVOLUTIONS and layer.groups != 1 and not is_depthwise(layer):
        return f"it is a convolution of {layer.groups} groups"
    return None


def resized(net: nn.Module, shapes: Mapping[str, Sequence[int]]) -> nn.Module:
    """A copy of a network whose layers have parameters and buffers of the given shapes.

    Tensors that change are zeros in the copy (running variances are ones); the others keep their
    values. A layer's sizes (``in_features``, ``out_channels``, ...) follow from its tensors.

    Args:
        net: The network; it is left as it is.
        shapes: The shape of each parameter or saved buffer, by name. Those left out stay.

    Raises:
        ConfigurationError: A name is unknown, a layer that would change is of another kind, or
            the shapes of one layer do not fit together.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> resized(net, {"0.weight": (3, 2), "0.bias": (3,), "2.weight": (1, 3)})
        Sequential(
          (0): Linear(in_features=2, out_features=3, bias=True)
          (1): ReLU()
          (2): Linear(in_features=3, out_features=1, bias=True)
        )
    """
    copied = copy_network(net)
    own = network_tensors(copied)
    changes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if name not in own:
            raise ConfigurationError(
                f"shapes names {name!r}, which is not a parameter or saved buffer of the network. "
                f"Its names begin with {list(own)[:3]}."
            )
        if tuple(shape) != tuple(own[name].shape):
            layer, _, key = name.rpartition(".")
            changes.setdefault(layer, {})[key] = tuple(shape)
    for layer, wanted in changes.items():
        _resize(layer, copied.get_submodule(layer), wanted)
    return copied


def _resize(name: str, layer: nn.Module, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Give one layer tensors of other shapes, and sizes that say so."""
    reason = why_not_resizable(layer)
    if reason is not None:
        raise ConfigurationError(f"The layer {name!r} cannot get another size: {reason}.")
    tensors = {**layer._parameters, **layer._buffers}
    before = {key: tuple(t.shape) for key, t in tensors.items() if t is not None and t.ndim}
    after = {**before, **wanted}
    shape = next(iter(wanted.values())) if type(layer) in BATCH_NORMS else after["weight"]
    fitting = dict.fromkeys(before, shape[:1])
    if type(layer) not in BATCH_NORMS:
        # the input channels of a depthwise filter are 1, and a kernel is what it was
        free = 1 if is_depthwise(layer) else 2
        fitting["weight"] = shape[:free] + before["weight"][free:]
    if after != fitting or min((size for s in after.values() for size in s), default=0) < 1:
        raise ConfigurationError(
            f"The layer {name!r} ({type(layer).__name__}) has tensors of the shapes {before}; the "
            f"new shapes {after} do not fit together. Only the numbers of its units and of its "
            "inputs can change, at least one each, and in all of its tensors."
        )
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = shape
    elif isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        depthwise = is_depthwise(layer)
        layer.out_channels, layer.in_channels = shape[:2]
        if depthwise:
            layer.in_channels = layer.groups = layer.out_channels
    else:
        layer.num_features = shape[0]  # type: ignore[assignment]
    for key, size in wanted.items():
        old = tensors[key]
        assert old is not None  # it has a shape
        make = torch.ones if key == "running_var" else torch.zeros
        new: Tensor = make(size, dtype=old.dtype, device=old.device)
        if key in layer._parameters:
            layer._parameters[key] = nn.Parameter(new, old.requires_grad)
        else:
            layer._buffers[key] = new
