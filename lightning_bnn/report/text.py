"""Numbers as the page writes them: a real minus sign, commas between thousands, a dash for none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["count", "fixed", "percent", "ranges", "short"]


def fixed(value: float | None, decimals: int) -> str:
    """A number with so many decimals, and a dash where there is none.

    Example:
        >>> fixed(-1234.5, 2), fixed(None, 2), fixed(-0.0001, 2)
        ('−1,234.50', '–', '0.00')
    """
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:,.{decimals}f}"
    return text.lstrip("-") if not text.strip("-0.,") else text.replace("-", "−")


def short(value: float | None) -> str:
    """A number with about three digits that count, whatever its size.

    Example:
        >>> short(0.012345), short(1234.5), short(3), short(1e-7)
        ('0.0123', '1,234', '3', '1.0e−7')
    """
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if value == round(value) and size < 1e9:
        return fixed(value, 0)
    if size < 5e-5 or size >= 1e7:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits}e{int(power):+d}".replace("-", "−")
    return fixed(value, min(5, max(0, 2 - math.floor(math.log10(size)))))


def percent(value: float | None, decimals: int = 1) -> str:
    """A share in percent.

    Example:
        >>> percent(0.1234), percent(None)
        ('12.3%', '–')
    """
    text = fixed(None if value is None else 100 * value, decimals)
    return text if text == "–" else f"{text}%"


def count(value: float | None) -> str:
    """A whole number.

    Example:
        >>> count(1234.0)
        '1,234'
    """
    return fixed(value, 0)


def ranges(
    lower: Iterable[float],
    upper: Iterable[float],
    write: Callable[[float], str] = short,
    outside: Iterable[Any] | None = None,
) -> list[str]:
    """From and to of several ranges; marked where what belongs to one lies outside of it.

    Example:
        >>> ranges([0, 1], [1, 2.5], outside=[False, True])
        ['0 to 1', '1 to 2.50 (outside)']
    """
    texts = [f"{write(low)} to {write(high)}" for low, high in zip(lower, upper, strict=True)]
    marks = [False] * len(texts) if outside is None else outside
    return [text + " (outside)" * bool(mark) for text, mark in zip(texts, marks, strict=True)]
