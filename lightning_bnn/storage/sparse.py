"""Sparse storage: a tensor with many zeros as its other values and the gaps between them.

The tensor is flattened. Its *values* are the numbers whose bits are not all zero (so -0.0, NaNs
with their payloads and denormals are values), in order, in its own dtype. Its *gaps* are bytes,
read one after the other from the tensor's start:

* a byte b < 255 skips b zeros and then takes the next value;
* the byte 255 skips 255 zeros and takes no value.

After the last byte fewer than 255 numbers are left, and all of them are zero. So there is one
encoding of each tensor, and the size of a tensor follows from its gaps but for the last bytes: what
is read can be checked before memory is taken for it. With a share d of values among n numbers, the
gaps take about n (d + (1 - d) / 255) bytes at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["decode", "encode"]

_SKIP = 255
# About what a file and its manifest need to name two tensors in the place of one; it decides only
# which form is written, and either can be read.
_NAMING = 128
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def encode(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """The values and the gaps of a tensor, or None where they would not save a quarter of it.

    That there are two tensors to be named in the place of one counts too.

    Args:
        tensor: A dense tensor on the CPU; only floating-point numbers are encoded.

    Example:
        >>> tensor = torch.zeros(2000)
        >>> tensor[[3, 300]] = torch.tensor([0.5, 7.0])
        >>> values, gaps = encode(tensor)
        >>> values, gaps
        (tensor([0.5000, 7.0000]), tensor([  3, 255,  41, 255, 255, 255, 255, 255, 255],
               dtype=torch.uint8))
        >>> torch.equal(decode(values, gaps, tensor.shape), tensor)
        True
    """
    flat = tensor.reshape(-1)
    if flat.dtype not in _BITS:
        return None
    width, size = flat.element_size(), flat.numel()
    bits = flat.view(_BITS[flat.dtype])
    allowed = size * width * 3 // 4 - _NAMING
    # the least that it can take: most tensors are dense, and done with here
    if int(torch.count_nonzero(bits)) * (width + 1) > allowed:
        return None
    places = bits.nonzero().squeeze(1)
    ends = places.new_tensor([-1]), places.new_tensor([size])
    zeros = places.diff(prepend=ends[0], append=ends[1]).sub_(1)  # before each value and the end
    following = zeros.div(_SKIP, rounding_mode="floor").add_(1).cumsum(0)
    gaps = torch.full((int(following[-1]) - 1,), _SKIP, dtype=torch.uint8)
    gaps[following[:-1] - 1] = (zeros[:-1] % _SKIP).to(torch.uint8)
    if len(places) * width + len(gaps) > allowed:
        return None
    return flat[places], gaps


def decode(values: Tensor, gaps: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor of a shape that was encoded as these values and gaps.

    Raises:
        ValueError: Their numbers do not fit the shape.
    """
    takes = gaps != _SKIP
    taken = int(takes.sum())
    if taken != len(values):
        raise ValueError(f"the gaps take {taken} values, but there are {len(values)}")
    size, end = math.prod(shape), int(gaps.sum()) + taken  # a shape may be forged, and huge
    if not 0 <= size - end < _SKIP:
        raise ValueError(f"the gaps end after {end} numbers, but the tensor has {size}")
    bits = values.view(_BITS[values.dtype])
    flat = bits.new_zeros(size)
    flat[(gaps + takes).cumsum(0)[takes] - 1] = bits  # at most 255 each: no byte overflows
    return flat.view(values.dtype).reshape(shape)
