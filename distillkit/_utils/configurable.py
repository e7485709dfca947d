"""Base class of objects that record their constructor arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self


class Configurable:
    """Base class that records constructor arguments, so that `distillkit.serialization` can rebuild the object.

    Use it for classes that are not dataclasses. The base classes of federated methods and their add-ons already inherit
    from it. If the class of your own augmentation or network has an `__init__`, inherit from `Configurable`. Objects of
    the class can then be rebuilt from the file `config.json` of a run. The constructor must have no side effects,
    because it may be called when this file is read.
    """

    __slots__ = ("_init_arguments",)  # kept out of `vars(self)`, which subclasses may use to list their options
    _init_arguments: tuple[Sequence[Any], Mapping[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Create the object, and record its constructor arguments."""
        if cls.__init__ is object.__init__ and (args or options):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        created = super().__new__(cls)
        object.__setattr__(created, "_init_arguments", (args, options))
        return created

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes and the constructor arguments that `__new__` recorded, for copies and pickles."""
        return {**self.__dict__, "_init_arguments": self._init_arguments}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the attributes and the recorded constructor arguments from a result of `__getstate__`."""
        state = dict(state)
        object.__setattr__(self, "_init_arguments", state.pop("_init_arguments"))
        restore = getattr(super(), "__setstate__", self.__dict__.update)
        restore(state)

    def init_arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the positional and keyword arguments that rebuild this object.

        By default, they are the arguments that were recorded when the object was created.

        Override this method if the constructor copies an argument that the caller may change later, such as a network.
        The override returns the copy instead of the original.
        """
        return self._init_arguments
