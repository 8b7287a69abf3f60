"""Export: a network as one file that runs without this package, and without the network's code.

Two formats, told apart by the file's suffix:

* ``.pt2``: a program of ``torch.export``, for any process that has PyTorch
  (``torch.export.load(path).module()(inputs)``) or for a compiler of such programs;
* ``.onnx``: an ONNX graph with its weights, for ONNX Runtime and other engines.

A posterior is exported as its mean network: one forward pass, without uncertainty. Zeros that
pruning has left are stored like other weights; ``compact(posterior)`` before the export takes
removed units out, so that the file is smaller and runs faster.

The size of a batch stays open. What was made is read back from the very bytes that will be the file
and compared with the network on the example and on one row of it; only then it gets its name.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.errors import ConfigurationError, DataError, LightningBNNError
from lightning_bnn.network import copy_network
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.pruning.functions import mean_network
from lightning_bnn.storage.files import write_atomic

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["check_export_name", "export_network"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional, by keyword
Run = Callable[[Arguments], list[Any]]  # the outputs of a batch, as a flat list


def export_network(
    model: WeightPosterior | nn.Module, path: str | PathLike[str], example_inputs: Any
) -> Path:
    """Write a network as a ``.pt2`` or an ``.onnx`` file that needs nothing of this package.

    Args:
        model: A posterior, whose mean network is written, or any network; it is not changed. The
            program is that of the evaluation mode, on the CPU.
        path: A local file; its suffix says the format. One that is there already is replaced.
        example_inputs: A batch as ``posterior.predict`` takes it: a tensor, a tuple of positional
            or a mapping of keyword arguments. Its first tensor says how many rows a batch has;
            the first axis of every tensor of this length is the batch.

    Returns:
        The path of the file.

    Raises:
        ConfigurationError: The suffix is another one, packages are missing, or the network cannot
            be exported: its program depends on values or on the size of the batch, or computes
            something else than the network.
        DataError: The example has no batch, or the network does not take it.

    Example:
        >>> import tempfile
        >>> net = nn.Sequential(nn.Linear(2, 1), nn.Tanh())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = export_network(net, f"{folder}/net.pt2", torch.zeros(4, 2))
        ...     program = torch.export.load(path).module()
        >>> torch.equal(program(torch.ones(9, 2)), net(torch.ones(9, 2)))
        True
    """
    path = check_export_name(path)
    net = mean_network(model) if isinstance(model, WeightPosterior) else copy_network(model)
    net.eval().requires_grad_(False).cpu()
    batches = _batches(example_inputs)
    shapes = [list(tensor.shape) for tensor in _tensors(batches[0])]
    name = type(net).__name__
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's and ONNX's own calls
        # before the tracing, which may leave something behind on a network
        words = f"{name} fails on inputs of the shapes {shapes}, made from the example:"
        with _explained(words, DataError):
            expected = [tree_leaves(net(*args, **kwargs)) for args, kwargs in batches]
        words = (
            f"{name} cannot be exported with an open batch size: its forward must not branch on "
            "the values of tensors, nor fix the number of rows (write x.flatten(1), not "
            "x.view(64, -1))."
        )
        with _explained(words):
            program = _program(net, batches[0])
        data, run = _torch_file(program) if path.suffix == ".pt2" else _onnx_file(program)
        words = (
            f"{path.name} was not written: the exported program does not give what the network "
            "gives on an example batch. A network that draws random numbers in evaluation mode, or "
            "that treats a batch of one row differently (squeeze() instead of squeeze(-1)), cannot "
            "be exported."
        )
        with _explained(words):
            for batch, outputs in zip(batches, expected, strict=True):
                _compare(run(batch), outputs)
    write_atomic(path, data)
    return path


def check_export_name(path: str | PathLike[str]) -> Path:
    """The file of an exported network.

    Raises:
        ConfigurationError: It is a URL, its suffix is no format, or packages are missing.

    Example:
        >>> check_export_name("net.pt2").suffix
        '.pt2'
    """
    if "://" in fspath(path) or Path(path).suffix not in (".pt2", ".onnx"):
        raise ConfigurationError(
            "A network is exported to a local file that ends in .pt2 (torch.export) or .onnx; got "
            f"{fspath(path)!r}."
        )
    if Path(path).suffix == ".onnx":
        try:
            import onnx  # noqa: F401 (optional extras, as is the next)
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "The export to ONNX needs packages that are not installed: pip install "
                f"'lightning-bnn[export]' ({error})."
            ) from error
    return Path(path)


def _batches(inputs: Any) -> list[Arguments]:
    """The example, of at least two rows; and one row of it."""
    example: Arguments = ((inputs,), {})
    if isinstance(inputs, Mapping):
        example = ((), dict(inputs))
    elif isinstance(inputs, (tuple, list)):
        example = (tuple(inputs), {})
    shapes = [list(tensor.shape) for tensor in _tensors(example)]
    if not shapes or not shapes[0] or not shapes[0][0]:
        raise DataError(
            "The example needs a tensor whose first axis is a batch of at least one row; got "
            f"tensors of the shapes {shapes}."
        )
    rows = shapes[0][0]

    def resized(leaf: Any, count: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        values = leaf.detach().cpu()
        # a copy in each case: the tracing tells tensors apart by identity
        return values[torch.arange(count) % rows] if leaf.shape[:1] == (rows,) else values.clone()

    # a batch of one would be traced as if it were always one
    return [tree_map(partial(resized, count=count), example) for count in (max(rows, 2), 1)]


def _program(net: nn.Module, batch: Arguments) -> ExportedProgram:
    """The network as a program in which the size of the batch is open."""
    tensors = _tensors(batch)
    axis = torch.export.Dim("batch", min=1)
    shapes = torch.export.ShapesCollection()
    for tensor in tensors:
        if tensor.shape[:1] == tensors[0].shape[:1]:
            shapes[tensor] = {0: axis}
    return torch.export.export(net, *batch, dynamic_shapes=shapes)


def _torch_file(program: ExportedProgram) -> tuple[bytes, Run]:
    """The bytes of a ``.pt2`` file, and how they run."""
    buffer = io.BytesIO()
    # the example would be stored as well: data of the user's, perhaps private
    program.example_inputs = None
    torch.export.save(program, buffer)
    module = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    return buffer.getvalue(), lambda batch: tree_leaves(module(*batch[0], **batch[1]))


def _onnx_file(program: ExportedProgram) -> tuple[bytes, Run]:
    """The bytes of an ``.onnx`` file, and how they run (in the reference of ONNX itself)."""
    from onnx.reference import ReferenceEvaluator  # an optional extra

    with _explained("The network cannot be written as ONNX; .pt2 may do instead."):
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
        made = cast("torch.onnx.ONNXProgram", exported)  # None only from the old exporter
        data = made.model_proto.SerializeToString()
    evaluator = ReferenceEvaluator(data)

    def run(batch: Arguments) -> list[Any]:
        arrays = (tensor.numpy() for tensor in _tensors(batch))
        feeds = dict(zip(evaluator.input_names, arrays, strict=True))
        return [torch.as_tensor(array) for array in evaluator.run(None, feeds)]

    return data, run


def _compare(outputs: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise unless a program's outputs are those of the network, up to rounding."""
    for output, wanted in zip(outputs, expected, strict=True):
        if isinstance(wanted, Tensor):
            scale = wanted.double().nan_to_num(0, 0, 0).abs().amax()
            # half of the digits: another order of sums is fine, another function is not
            digits = torch.finfo(wanted.dtype).eps ** 0.5 if wanted.is_floating_point() else 0
            atol = digits * float(scale)
            torch.testing.assert_close(output, wanted, rtol=0, atol=atol, equal_nan=True)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _explained(words: str, kind: type[LightningBNNError] = ConfigurationError) -> Iterator[None]:
    """Say what failed and why: networks, tracers and exporters raise errors of any class."""
    try:
        yield
    except Exception as error:
        raise kind(f"{words} {type(error).__name__}: {str(error).strip()[:800]}") from error
