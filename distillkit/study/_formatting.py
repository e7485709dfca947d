"""Text for numbers and curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from distillkit._utils import check
from distillkit._utils.tables import NONE

__all__ = ["Unit", "mean_std", "sparkline", "unit_of"]


def mean_std(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Return mean and sample standard deviation (n - 1) as text: "91.2 ± 0.4". For a single value, only the value is
    shown.

    Args:
        values: numbers, one per seed.
        scale: factor by which the values are multiplied, for example 100 to print fractions in per cent.
        digits: number of decimals.

    Raises:
        TypeError, ValueError: `values` is empty, or a value is not a number.
    """
    check.real_number(scale, "scale")
    check.positive_int(digits, "digits", least=0)
    scaled = [scale * v for v in _numbers(values, "values")]
    if not scaled:
        raise ValueError("values must hold at least one number, got none")
    spread = f" ± {statistics.stdev(scaled):.{digits}f}" if len(scaled) > 1 else ""
    return f"{statistics.mean(scaled):.{digits}f}{spread}"


def sparkline(accuracies: Sequence[float]) -> str:
    """Return a curve of `accuracies` in [0, 1] as one line of block characters, for a terminal."""
    known = _numbers(accuracies, "accuracies")
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(8 * a)))] for a in known)


def _numbers(values: Sequence[float], name: str) -> list[float]:
    return [check.real_number(v, f"{name}[{i}]") for i, v in enumerate(check.sequence(values, name, "numbers"))]


@dataclass(frozen=True)
class Unit:
    """Printed unit of a column.

    Attributes:
        name: name of the unit, for example "%"; empty for a plain number.
        scale: factor that converts a value from the records' unit to this unit.
        digits: number of decimals.
    """

    name: str
    scale: float
    digits: int

    def signed(self, value: float | None) -> str:
        """Format a difference with its sign; "–" for None."""
        return NONE if value is None else f"{self.scale * value:+.{self.digits}f}"


def unit_of(column: str, values: Sequence[float]) -> Unit:
    """Return the unit in which a column is printed, such as per cent for accuracies, and its number of decimals.

    Args:
        column: name of the column in the records.
        values: values in the column, which determine the number of decimals if the column has no unit.
    """
    last = column.rsplit(".", 1)[-1]
    if column.startswith("accuracy"):
        return Unit("%", 100.0, 1)
    if "bytes" in column:
        return Unit("MB", 1e-6, 2)
    if "seconds" in last:
        return Unit("s", 1.0, 1)
    largest = max((abs(v) for v in values), default=0.0)
    if all(float(v).is_integer() for v in values):
        return Unit("", 1.0, 0 if len(set(values)) <= 1 else 1)
    return Unit("", 1.0, 1 if largest >= 100 else 3)
