"""Base class of the classes on which every stated epsilon relies."""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any


class Sealed:
    """Base of classes without subclasses outside this package, and whose methods no object replaces.

    A method of one's own that adds no noise, seeds it or charges nothing would make every stated epsilon false. With
    `__slots__` in a class, its objects have no `__dict__` that could hold such a method.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        if not cls.__module__.startswith("distillkit.privacy."):
            base = next(b.__name__ for b in cls.__mro__[1:] if issubclass(b, Sealed))
            raise TypeError(
                f"{cls.__name__} must not be a subclass of {base}: a method of its own that adds no noise or charges "
                f"nothing would make every stated epsilon false; use {base} itself, and call it from your own class"
            )
        super().__init_subclass__(**options)

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(getattr(type(self), name, None), MemberDescriptorType | None):
            raise AttributeError(f"{type(self).__name__}.{name} cannot be replaced: a stated epsilon relies on it")
        super().__setattr__(name, value)
