"""Base classes of methods, add-ons and filters.

They give each class a key that identifies it in the record of a run (the stored options from which the run can be
resumed), and describe each object by a text in this record. Users who only run methods need nothing from this module.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, ClassVar

from distillkit._utils.configurable import Configurable
from distillkit._utils.options import check_options
from fl.message import Entry, declared_entries


class KeyedObject(Configurable):
    """Base class of objects whose class has a key, which identifies the class in records of runs even if it is renamed.

    Attributes:
        key: identifier of the class in records of runs. The keys of the entries (`Entry`) that the class declares start
            with it, random draws depend on it, and add-ons act in the order of their keys. Default: the name of the
            class; the key of a parent class is not inherited. If you rename a class, set `key = "OldName"`; existing
            runs, checkpoints and transcripts (saved messages of a run) then stay valid.
    """

    key: ClassVar[str] = "Keyed"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        stated = vars(cls).get("key", cls.__name__)
        if not isinstance(stated, str) or not ("key" not in vars(cls) or stated.isidentifier()):
            raise TypeError(f"{cls.__name__}.key must be a name, as {cls.__name__!r}, got {stated!r}")
        cls.key = stated

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """Return the positional and the named arguments that distinguish this object from other objects of its class.

        `repr` shows the arguments, and the record of a run contains them, so a run can be resumed only with equal
        arguments. Return None if the class has a `__repr__` that shows its options, as dataclasses have.
        """
        return None

    def __repr__(self) -> str:
        return stable_repr(self) if self.arguments() is not None else super().__repr__()


class Component(KeyedObject):
    """Base class of add-ons and filters, which extend a method."""

    _usage: ClassVar[str]
    """Code that builds a method with the component, whose own code replaces {}. Error messages show it."""

    def __post_init__(self) -> None:
        """Check that each option has the type and range that its annotation states, if the component is a dataclass."""
        if is_dataclass(self):
            check_options(self)

    @property
    def name(self) -> str:
        """Class name, for errors, warnings and ledger remarks."""
        return type(self).__name__


def stable_repr(value: Any) -> str:
    """Return a text form of a value. The text is the same in every process: functions appear without their address."""
    arguments = _shown_arguments(value)
    if arguments is None:
        name = getattr(value, "__qualname__", None)
        return f"{value.__module__}.{name}" if callable(value) and name else repr(value)
    given, named = arguments
    shown = ", ".join([*map(stable_repr, given), *(f"{k}={stable_repr(v)}" for k, v in named.items())])
    return f"{type(value).__qualname__}({shown})"


def without_addresses(value: Any) -> str:
    """Return the `stable_repr` of a value without memory addresses, to compare values of two processes."""
    return re.sub(" at 0x[0-9a-f]+", "", stable_repr(value))


def options_by_name(value: Any) -> Any:
    """Return a JSON value that states the options of an object by name, so that a record needs no parsing.

    An object becomes `{"object": "package:key", "args": [...], "with": {...}}`, with the arguments that `stable_repr`
    shows. Values that JSON lacks become their `stable_repr`.
    """
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return [options_by_name(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): options_by_name(one) for name, one in value.items()}
    arguments = _shown_arguments(value)
    if arguments is None:
        return stable_repr(value)
    given, named = arguments
    keyed = isinstance(value, KeyedObject) and value.key != type(value).__name__
    title = value.key if keyed else type(value).__qualname__
    found = {"object": f"{type(value).__module__.split('.')[0]}:{title}"}
    return found | {"args": options_by_name([*given]), "with": options_by_name(named)}


def _shown_arguments(value: Any) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """Return the positional and named arguments that an object's text form shows; None for values without such."""
    if isinstance(value, KeyedObject) and type(value).__repr__ is KeyedObject.__repr__:
        if (arguments := value.arguments()) is not None:
            return arguments
    elif isinstance(value, functools.partial):
        return (value.func, *value.args), value.keywords
    if is_dataclass(value) and hasattr(type(value).__repr__, "__wrapped__"):  # `dataclass` generated `__repr__`
        return (), {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
    return None


def constructor_call(part: Component) -> str:
    """Return Python code that builds a component with those of its options that differ from the defaults.

    Values other than numbers, strings and None are shown as `...`.
    """
    if not is_dataclass(part):
        return f"{part.name}(...)"
    given = {f.name: getattr(part, f.name) for f in fields(part) if f.init and _chosen(f, getattr(part, f.name))}
    options = [f"{n}={v!r}" if isinstance(v, int | float | str | None) else f"{n}=..." for n, v in given.items()]
    return f"{part.name}({', '.join(options)})"


def _chosen(option: Field[Any], value: Any) -> bool:
    default = option.default if option.default_factory is MISSING else option.default_factory()
    return type(value) is not type(default) or (value is not default and bool(value != default))


def require_plain_options(part: KeyedObject, base: type[KeyedObject]) -> None:
    """Refuse a component that has an option with the name of a method or attribute of its base class.

    A dataclass makes every annotated attribute an option. For example, `data_access: str = "none"` would let users
    change a declaration on which a privacy guarantee depends, and `loss: float = 0.1` would replace the method `loss`.

    Args:
        part: an add-on, a filter or a method.
        base: `AddOn`, `Filter` or `Method`, whose methods and attributes must not be options.

    Raises:
        TypeError: an option has the name of a method or attribute of `base`. The message names the option and says what
            to write instead.
    """
    options: list[str] = [f.name for f in fields(part)] if is_dataclass(part) else []
    for name in options:
        option = f"{type(part).__name__}.{name}"
        if callable(getattr(base, name, None)):
            raise TypeError(f"{option} is a hook and cannot be an option too: rename the option")
        if hasattr(base, name):
            raise TypeError(
                f"{option} is not an option, but its annotation makes it one: write `{name} = ...` without a type (or "
                "with ClassVar[...]), or a property that computes it from an option of another name"
            )


def require_distinct(components: Sequence[Component], rule: str) -> None:
    """Refuse two components (add-ons or filters) of the same Python class, or with the same attribute `key`.

    Args:
        components: the add-ons or filters of a method.
        rule: text of the rule that forbids two components of the same class, for the error message.

    Raises:
        ValueError: two components have the same Python class or the same `key`. The message names both.
    """
    for first, second in itertools.combinations(components, 2):
        if type(first) is type(second):
            raise ValueError(f"{first.name} is given twice; {rule}: leave one out")
        if first.key == second.key:
            raise ValueError(
                f"{first.name} and {second.name} have the same key, {first.key!r}: set another `key` in one of them"
            )


def require_own_entries(parts: Sequence[KeyedObject]) -> None:
    """Refuse a method in which two components declare message entries (`Entry`) with the same key.

    Args:
        parts: the method, its add-ons and its filters. A component may refer to an entry that another Python class
            declares (`samples = FedAvg.samples`); this does not declare a second entry.

    Raises:
        ValueError: two components declare entries with the same key, so they would overwrite each other's values. The
            message names both components and the key.
    """
    owners: dict[str, tuple[KeyedObject, Entry[Any]]] = {}
    for part in parts:
        for entry in declared_entries(part):
            if entry.owner not in {f"{kind.__module__}.{kind.__qualname__}" for kind in type(part).__mro__}:
                continue
            first, known = owners.setdefault(entry.key, (part, entry))
            if first is part:
                continue
            one, other = type(first).__name__, type(part).__name__
            if entry is known:
                raise ValueError(
                    f"{one} and {other} share the entry {entry.key}, which one inherits from the other or both from "
                    "their base: each needs one of its own, declared in its own class"
                )
            raise ValueError(
                f"{known.owner} and {entry.owner} both have an entry with the key {entry.key!r}, and {one} and {other} "
                "would overwrite each other's values: rename a class, or set another `key` in it"
            )
