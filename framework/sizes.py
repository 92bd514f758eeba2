"""Sizes and other numbers in texts."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(size: float) -> str:
    """`1.50 MiB`: three digits, in powers of 1024, as memories are sold."""
    value, unit = float(size), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits if unit else 0}f} {_UNITS[unit]}"


def number_text(value: float) -> str:
    """Four significant digits, but all of those before the point: `0.0003142`, `2.5`.

    Numbers from 1000 on have commas: `12,345`.
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def counted(count: int, what: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {what}{'' if count == 1 else 's'}"
