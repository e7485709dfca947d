"""Options of weight averaging as they are given, checked and brought to one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from distillkit import check
from distillkit.plausible import warn
from fl.batches import Phase

__all__ = ["learning_rate", "local_phases", "patterns", "require_assigned", "require_assignment"]


def learning_rate(value: float, name: str) -> float:
    """Return a rate at which networks are trained, if it is positive; one far beyond all custom is warned of."""
    rate = check.real_number(value, name, above=0.0)
    if rate > 10:
        warn(f"{name}={rate:g} is far beyond the rates that train networks (0.001 to 1)")
    return rate


def local_phases(epochs: int | None, steps: int | None, phases: Sequence[Phase] | None) -> tuple[Phase, ...]:
    """The parts of a local training, from `epochs` or `steps` (default: one epoch), or from `phases`.

    Raises:
        TypeError: `phases` holds something else.
        ValueError: two of them.
    """
    if phases is None:
        if epochs is not None and steps is not None:
            raise ValueError(f"give epochs or steps, not both: got epochs={epochs}, steps={steps}")
        return (Phase(1 if epochs is None else epochs, steps),)
    if epochs is not None or steps is not None:
        raise ValueError("give epochs or steps, or phases that have their own, not both")
    given = tuple(phases) if isinstance(phases, Sequence) else (phases,)
    wrong = [type(p).__name__ for p in given if not isinstance(p, Phase)]
    if wrong or not given:
        raise TypeError(f"phases must be a list of `fl.Phase` objects, got {wrong[0] if wrong else 'an empty one'}")
    return given


def patterns(personal: str | Sequence[str]) -> tuple[str, ...]:
    """`personal` as a tuple.

    Raises:
        TypeError: something else than strings.
    """
    given = (personal,) if isinstance(personal, str) else tuple(personal) if isinstance(personal, Sequence) else (None,)
    if not all(isinstance(p, str) for p in given):
        raise TypeError(f"personal must be patterns of parameter names, as 'classifier.*', got {personal!r}")
    return tuple(p for p in given if p is not None)


def require_assignment(assign: object, networks: Sequence[str]) -> None:
    """Refuse an `assign` where there is one architecture, its lack where there are several, and another kind.

    Raises:
        TypeError: neither a mapping nor a function of the client's number.
        ValueError: with one architecture, or missing with several.
    """
    if (len(networks) > 1) != (assign is not None):
        raise ValueError("assign must say which client has which architecture if and only if there are several")
    if assign is not None and not isinstance(assign, Mapping):
        check.callable_with(assign, "assign", ["client"], "a mapping client number -> architecture, or a function")


def require_assigned(assign: object, architecture: Callable[[int], str], clients: int) -> None:
    """Look up the architectures of the clients that there are: of all in a mapping, of a function's first thousand.

    Raises:
        ValueError: of `architecture`, for the first client without one.
    """
    if assign is None:
        return
    most = len(assign) + 1 if isinstance(assign, Mapping) else 1000
    for client in range(min(clients, most)):
        architecture(client)
