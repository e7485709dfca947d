"""Types of options with a limited range, and a check of the fields of a dataclass against these types."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from distillkit._utils import check

Positive = Annotated[float, functools.partial(check.real_number, above=0.0)]
LearningRate = Annotated[float, check.learning_rate]
Temperature = Annotated[float, check.temperature]
NonNegative = Annotated[float, functools.partial(check.real_number, least=0.0)]
Fraction = Annotated[float, functools.partial(check.real_number, least=0.0, most=1.0)]
"""A number in [0, 1]."""
Decay = Annotated[float, functools.partial(check.real_number, least=0.0, below=1.0)]
"""A number in [0, 1), such as a momentum."""
PositiveInt = Annotated[int, check.positive_int]
NonNegativeInt = Annotated[int, functools.partial(check.positive_int, least=0)]
AtLeastTwo = Annotated[int, functools.partial(check.positive_int, least=2)]
Rate = Annotated[float, functools.partial(check.real_number, above=0.0, most=1.0)]
"""A number in (0, 1]."""
Share = Annotated[float, functools.partial(check.real_number, above=0.0, below=1.0)]
"""A number in (0, 1)."""


def _rounds(rounds: Any, name: str) -> tuple[int, ...]:
    return tuple(check.positive_int(n, name) for n in check.sequence(rounds, name, "rounds, from 1"))


_CLASSES: dict[Any, str] = {str: "a string", Tensor: "a Tensor", nn.Module: "an nn.Module"}

Options = Annotated[Mapping[str, Any], check.mapping]
"""Options of another object, by name."""
Rounds = Annotated[tuple[int, ...], _rounds]


def check_options(options: Any) -> dict[str, Any]:
    """Check each field of a dataclass that is annotated with `Literal`, `bool`, `str`, `Tensor`, `nn.Module` or a type
    defined in this module.

    The types defined in this module include `Positive` and `Fraction`. `None` is accepted if the type allows it. Fields
    of other types are not checked.
    """
    kind: type = type(options)
    hints = _hints(kind)
    return {f.name: _checked(getattr(options, f.name), f.name, hints.get(f.name)) for f in fields(options) if f.init}


class CheckedOptions:
    """Base class of dataclasses whose fields are checked by `check_options`, against the types that they state."""

    def __post_init__(self) -> None:
        """Check each option against its type."""
        check_options(self)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a class's fields by name.

    The mapping is empty for a class that is defined in a function, because its types cannot be resolved.
    """
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError:
        return {}


def _checked(value: Any, name: str, hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        alternatives = [part for part in get_args(hint) if part is not type(None)]
        return value if len(alternatives) > 1 or value is None else _checked(value, name, alternatives[0])
    if get_origin(hint) is Annotated:
        return get_args(hint)[1](value, name)
    if get_origin(hint) is Literal:
        return check.one_of(value, name, get_args(hint))
    if hint in _CLASSES:
        return check.instance(value, hint, name, _CLASSES[hint])
    return check.boolean(value, name) if hint is bool else value
