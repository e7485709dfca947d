"""Options of weight averaging as they are given, checked and brought to one form."""

from __future__ import annotations

from collections.abc import Sequence

from fl.batches import Phase

__all__ = ["local_phases", "patterns"]


def local_phases(epochs: int | None, steps: int | None, phases: Sequence[Phase] | None) -> tuple[Phase, ...]:
    """The parts of a local training, from `epochs` or `steps` (default: one epoch), or from `phases`.

    Raises:
        TypeError: `phases` holds something else than phases, or nothing.
        ValueError: two of the three are given.
    """
    if phases is None:
        if epochs is not None and steps is not None:
            raise ValueError(f"give epochs or steps, not both: got epochs={epochs}, steps={steps}")
        return (Phase(1 if epochs is None else epochs, steps),)
    if epochs is not None or steps is not None:
        raise ValueError(
            f"give epochs or steps, or phases that have their own, not both: got epochs={epochs}, steps={steps} beside "
            "phases"
        )
    given = tuple(phases) if isinstance(phases, Sequence) else (phases,)
    wrong = [type(p).__name__ for p in given if not isinstance(p, Phase)]
    if wrong or not given:
        raise TypeError(f"phases must be a list of `fl.Phase` objects, got {wrong[0] if wrong else 'an empty one'}")
    return given


def patterns(personal: str | Sequence[str]) -> tuple[str, ...]:
    """The patterns of `personal` as a tuple, from one pattern, several, or none.

    Raises:
        TypeError: something else than strings.
    """
    given = (personal,) if isinstance(personal, str) else tuple(personal) if isinstance(personal, Sequence) else (None,)
    if not all(isinstance(p, str) for p in given):
        raise TypeError(f"personal must be patterns of parameter names, as 'classifier.*', got {personal!r}")
    return tuple(p for p in given if p is not None)
