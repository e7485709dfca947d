"""Objects that know what they were built with, so that a run's record can say them and they can be built again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

__all__ = ["Recorded"]


class Recorded:
    """What remembers the arguments that it was built with; `distillkit.recipes` says them in JSON.

    A base for classes that are no dataclasses: methods, add-ons and filters have it already. Write
    `class Cropped(Recorded)` for an augmentation or a network of your own with an `__init__`, and a run's `config.json`
    is enough to build it again. Its constructor must do nothing but build: a record may call it.
    """

    __slots__ = ("_given",)  # and not among `vars`, from which a class may take its options
    _given: tuple[Sequence[Any], Mapping[str, Any]]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """The new object, with what it is built with written down."""
        if cls.__init__ is object.__init__ and (args or options):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        made = super().__new__(cls)
        object.__setattr__(made, "_given", (args, options))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: the attributes, and what it was built with."""
        return {**self.__dict__, "_given": self._given}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Fill the copy."""
        state = dict(state)
        object.__setattr__(self, "_given", state.pop("_given"))
        restore = getattr(super(), "__setstate__", self.__dict__.update)
        restore(state)

    def built_with(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Arguments by position and by name that build this object again: those that it was built with.

        Override it in a class that copies what it is given, which may change behind its back.
        """
        return self._given
