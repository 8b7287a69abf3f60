r"""Random numbers as a function of (member, example), with nothing to store.

A number that belongs to an example and a member must be the same in every epoch, on every rank, in
any order of the batches, and for the member alone. So it is not drawn but computed: the member's
seed plus a multiple of the example's index goes through the finaliser of SplitMix64 (Steele, Lea
and Flood, 2014, *Fast Splittable Pseudorandom Number Generators*),

.. math::
    z = s + (i + 1)\gamma,\quad
    z \leftarrow (z \oplus (z \gg 30))\,a,\quad
    z \leftarrow (z \oplus (z \gg 27))\,b,\quad
    z \leftarrow z \oplus (z \gg 31),

in 64-bit integers that wrap around, which every device computes alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["exponentials", "normals", "split_mix", "stream_seeds", "uniforms"]


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_A = _signed(0xBF58476D1CE4E5B9)
_B = _signed(0x94D049BB133111EB)


def _mixed(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)) * _A
    words = (words ^ _shifted(words, 27)) * _B
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, by: int) -> Tensor:
    """A logical shift to the right: that of signed integers drags the sign along."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def split_mix(seed: int, count: int) -> Tensor:
    """The first outputs of SplitMix64 from a seed, as signed integers.

    Example:
        >>> split_mix(1234567, 2)
        tensor([6457827717110365317, 3203168211198807973])
    """
    return _mixed(_signed(seed % 2**64) + torch.arange(1, count + 1, device="cpu") * _GAMMA)


def stream_seeds(seeds: Tensor, stream: int) -> Tensor:
    """Other seeds from the same ones, for another purpose.

    Example:
        >>> seeds = torch.tensor([1, 2])
        >>> torch.equal(stream_seeds(seeds, 0), stream_seeds(seeds, 1))
        False
    """
    return _mixed(_mixed(seeds) + _signed((stream + 1) * _GAMMA % 2**64))


def uniforms(seeds: Tensor, indices: Tensor, count: int = 1) -> Tensor:
    """Numbers in (0, 1) for each member and example, float64.

    Args:
        seeds: One seed for each member, (M,) int64.
        indices: The examples' indices, int64: (B,) for all members, or (M, B).
        count: How many numbers each gets.

    Returns:
        A tensor (M, B, count).

    Example:
        >>> both = uniforms(torch.tensor([5, 6]), torch.tensor([0, 1, 2]))
        >>> alone = uniforms(torch.tensor([6]), torch.tensor([2, 0]))
        >>> torch.equal(both[1, [2, 0]], alone[0])
        True
    """
    words = seeds[:, None] + (indices + 1) * _GAMMA
    counts = torch.arange(1, count + 1, device=words.device)
    words = _mixed(_mixed(words)[..., None] + counts * _GAMMA)
    # the upper 53 bits and a half: never 0, never 1
    return (_shifted(words, 11).double() + 0.5) * 2.0**-53


def exponentials(seeds: Tensor, indices: Tensor) -> Tensor:
    """Numbers of the distribution Exp(1) for each member and example, (M, B) float64.

    Example:
        >>> exponentials(torch.tensor([5]), torch.arange(10_000)).mean().round(decimals=1)
        tensor(1., dtype=torch.float64)
    """
    return -uniforms(seeds, indices).squeeze(-1).log()


def normals(seeds: Tensor, indices: Tensor, count: int = 1) -> Tensor:
    """Numbers of N(0, 1) for each member and example, (M, B, count) float64, by Box and Muller.

    Example:
        >>> normals(torch.tensor([5, 6]), torch.arange(4), 3).shape
        torch.Size([2, 4, 3])
    """
    pairs = -(-count // 2)
    radius, angle = uniforms(seeds, indices, 2 * pairs).chunk(2, dim=-1)
    radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)[..., :count]
