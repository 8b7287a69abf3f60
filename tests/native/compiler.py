"""Tests of compiled code: left out only where it cannot be compiled, never where it fails to be."""

from __future__ import annotations

import os

import pytest

from lightning_bnn.native import library

__all__ = ["needs_compiler"]

needs_compiler = pytest.mark.skipif(
    library._compiler() is None or os.environ.get("LIGHTNING_BNN_COMPILE") == "0",
    reason="needs a C compiler",
)
