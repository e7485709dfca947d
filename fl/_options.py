"""Types of options with a range, and the check of a dataclass's options against their types."""

from __future__ import annotations

import functools
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from distillkit._utils import check

__all__ = [
    "AtLeastTwo",
    "Decay",
    "Fraction",
    "NonNegative",
    "NonNegativeInt",
    "Positive",
    "PositiveInt",
    "check_options",
]

Positive = Annotated[float, functools.partial(check.real_number, above=0.0)]
NonNegative = Annotated[float, functools.partial(check.real_number, least=0.0)]
Fraction = Annotated[float, functools.partial(check.real_number, least=0.0, most=1.0)]
"""A number in [0, 1]."""
Decay = Annotated[float, functools.partial(check.real_number, least=0.0, below=1.0)]
"""A number in [0, 1), such as a momentum."""
PositiveInt = Annotated[int, check.positive_int]
NonNegativeInt = Annotated[int, functools.partial(check.positive_int, least=0)]
AtLeastTwo = Annotated[int, functools.partial(check.positive_int, least=2)]


def check_options(options: Any) -> None:
    """Check the fields of a dataclass against their types: the types of this module, `Literal` and `bool`.

    `None` passes where the type allows it. Fields of other types are not checked.

    Args:
        options: an instance of a dataclass.

    Raises:
        TypeError, ValueError: a value of another type or out of range; the field is named.
    """
    kind: type = type(options)
    hints = _hints(kind)
    for field in fields(options):
        if field.init:
            _check_value(getattr(options, field.name), field.name, hints.get(field.name))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a class's fields; nothing for a class in a function, whose types are out of reach."""
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError:
        return {}


def _check_value(value: Any, name: str, hint: Any) -> None:
    if get_origin(hint) in (Union, UnionType):
        alternatives = [part for part in get_args(hint) if part is not type(None)]
        if len(alternatives) == 1 and value is not None:
            _check_value(value, name, alternatives[0])
    elif get_origin(hint) is Annotated:
        get_args(hint)[1](value, name)
    elif get_origin(hint) is Literal:
        check.one_of(value, name, get_args(hint))
    elif hint is bool:
        check.boolean(value, name)
