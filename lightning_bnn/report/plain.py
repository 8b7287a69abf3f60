"""Numbers as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """Arrays as lists, NumPy's numbers as Python's, and what is not finite as None.

    Example:
        >>> plain({"a": np.array([1.0, np.nan]), "b": np.int64(3), "c": float("inf")})
        {'a': [1.0, None], 'b': 3, 'c': None}
    """
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, np.ndarray):
        listed = value.tolist()
        if value.dtype.kind != "f" or np.isfinite(value).all():
            return listed
        return plain(listed)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
