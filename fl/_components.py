"""What methods, add-ons and filters have in common: keys that outlive names, how they are written, whose is an entry.

It is for who writes one of them; who only runs them needs nothing here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, ClassVar

from distillkit._utils.configurable import Configurable
from fl._options import check_options
from fl.message import Entry, declared_entries

__all__ = [
    "Component",
    "KeyedObject",
    "constructor_call",
    "identity",
    "require_distinct",
    "require_own_entries",
    "require_plain_options",
    "stable_repr",
]


class KeyedObject(Configurable):
    """What a run's records know by a key that outlives the name of its class: the base of methods and their parts.

    Attributes:
        key: what its entries' keys begin with, what its random draws are derived from, its place in an order, and what
            the record of a run calls it. A class that states none has its own name, never its parent's key. State the
            old name when you rename a class, `key = "OldName"`, and no run, checkpoint or transcript changes.
        old_options: the names of renamed options in records: name -> old name, or several, the oldest first.
    """

    key: ClassVar[str] = "Keyed"
    old_options: ClassVar[Mapping[str, str | tuple[str, ...]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        stated = vars(cls).get("key", cls.__name__)
        if not isinstance(stated, str) or not ("key" not in vars(cls) or stated.isidentifier()):
            raise TypeError(f"{cls.__name__}.key must be a name, as {cls.__name__!r}, got {stated!r}")
        cls.key = stated

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """What tells this object from others of its class: arguments by position, and by name.

        `repr` shows them, and the record of a run holds them, so that it goes on with the same ones or not at all. A
        class that says None has a `__repr__` of its own for both, as a dataclass does.
        """
        return None

    def __repr__(self) -> str:
        return stable_repr(self) if self.arguments() is not None else super().__repr__()


class Component(KeyedObject):
    """What goes into a method, or around one, and is none by itself: the base of add-ons and filters."""

    def __post_init__(self) -> None:
        """Check the options of a dataclass against their types (`fl._options`)."""
        if is_dataclass(self):
            check_options(self)

    @property
    def name(self) -> str:
        """What it is called in errors, warnings and remarks: its class's name."""
        return type(self).__name__

    @classmethod
    def usage_example(cls, part: str) -> str:
        """How a method with this part is written, as `FedAvg(part, ...)`, for the error where it is given alone.

        Args:
            part: how the part is written.
        """
        raise NotImplementedError


def stable_repr(value: Any) -> str:
    """`repr(value)`, but the same in every process: functions by name instead of by address."""
    return _said(value, pinned=False)


def identity(value: Any) -> str:
    """`stable_repr(value)`, but with pinned names (`KeyedObject`): it stays when classes and options are renamed."""
    return _said(value, pinned=True)


def _said(value: Any, *, pinned: bool) -> str:
    say = functools.partial(_said, pinned=pinned)
    given: Sequence[Any] = ()
    named: Mapping[str, Any] = {}
    if (
        isinstance(value, KeyedObject)
        and type(value).__repr__ is KeyedObject.__repr__
        and value.arguments() is not None
    ):
        given, named = value.arguments() or ((), {})
    elif isinstance(value, functools.partial):
        given, named = (value.func, *value.args), value.keywords
    elif is_dataclass(value) and hasattr(type(value).__repr__, "__wrapped__"):  # one that `dataclass` wrote
        named = {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
    else:
        name = getattr(value, "__qualname__", None)
        return f"{value.__module__}.{name}" if callable(value) and name else repr(value)
    title = type(value).__qualname__
    if pinned and isinstance(value, KeyedObject):
        title = title if value.key == type(value).__name__ else value.key
        named = {_oldest(value.old_options.get(option, option)): v for option, v in named.items()}
    return f"{title}({', '.join([*map(say, given), *(f'{k}={say(v)}' for k, v in named.items())])})"


def constructor_call(part: Component) -> str:
    """How a part was built, for a message: the options that are no defaults; a tensor and the like as `...`."""
    if not is_dataclass(part):
        return f"{part.name}(...)"
    given = {f.name: getattr(part, f.name) for f in fields(part) if f.init and _chosen(f, getattr(part, f.name))}
    said = [f"{n}={v!r}" if isinstance(v, int | float | str | None) else f"{n}=..." for n, v in given.items()]
    return f"{part.name}({', '.join(said)})"


def _chosen(option: Field[Any], value: Any) -> bool:
    default = option.default if option.default_factory is MISSING else option.default_factory()
    return type(value) is not type(default) or (value is not default and bool(value != default))


def require_plain_options(part: KeyedObject, base: type[KeyedObject]) -> None:
    """Refuse what has an option that bears the name of something else that all of its kind have.

    An annotated attribute of a dataclass is an option: `reads: str = "nothing"` lets users turn off what a guarantee
    rests on, and `loss: float = 0.1` takes the place of a hook.

    Args:
        part: an add-on, a filter or a method.
        base: `AddOn`, `Filter` or `Method`, whose attributes and hooks are meant.

    Raises:
        TypeError: naming the option, and what to write instead.
    """
    options: list[str] = [f.name for f in fields(part)] if is_dataclass(part) else []
    for name in options:
        said = f"{type(part).__name__}.{name}"
        if callable(getattr(base, name, None)):
            raise TypeError(f"{said} is a hook and cannot be an option too: rename the option")
        if hasattr(base, name):
            raise TypeError(
                f"{said} is no option, but its annotation makes it one: write `{name} = ...` without a type (or with "
                "ClassVar[...]), or a property that works it out from an option of another name"
            )


def require_distinct(components: Sequence[Component], rule: str) -> None:
    """Refuse two components of one class or with one key.

    Args:
        components: the add-ons or filters of a method.
        rule: which says how often one may stand there, for the message.

    Raises:
        ValueError: naming both.
    """
    for first, second in itertools.combinations(components, 2):
        if type(first) is type(second):
            raise ValueError(f"{first.name} is given twice; {rule}: leave one out")
        if first.key == second.key:
            raise ValueError(f"{first.name} and {second.name} have the same key, {first.key!r}: state another in one")


def require_own_entries(parts: Sequence[KeyedObject]) -> None:
    """Refuse a method two of whose parts would keep values, or send them, under one key.

    Args:
        parts: the method, its add-ons, the filters around it. An entry of another class, to which an attribute only
            gives a second name (`samples = FedAvg.samples`), is not a part's own.

    Raises:
        ValueError: naming both parts and the key.
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
                    f"{one} and {other} share the entry {entry.name}, which one inherits from the other or both from "
                    "their base: each needs one of its own, declared in its own class"
                )
            raise ValueError(
                f"{known.owner} and {entry.owner} both have an entry with the key {entry.key!r}, and {one} and {other} "
                "would write over each other: rename a class, or state another `key` in it"
            )


def _oldest(names: str | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else names[0]
