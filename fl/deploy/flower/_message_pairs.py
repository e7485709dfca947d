"""Two messages in one, so that both go to a node in one trip: what they have in common travels once."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from fl._codec import Parts

__all__ = ["join", "split"]

_COMMON = "common"
_MARKS = ("0:", "1:")
"""Before the names of what belongs to the first message, and to the second."""


def join(first: Parts, second: Parts) -> tuple[Parts, list[str]]:
    """Put the parts of two messages into one.

    Args:
        first, second: as `fl._codec.to_parts` gives them.

    Returns:
        The parts; the names of the tensors that are the same in both, to the bit, and so are there once.
    """
    common = [name for name, tensor in second[0].items() if name in first[0] and _same(tensor, first[0][name])]
    lacking = {name: tensor for name, tensor in second[0].items() if name not in common}
    tensors = {mark + n: t for mark, found in zip(_MARKS, (first[0], lacking), strict=True) for n, t in found.items()}
    strings = {mark + n: s for mark, (_, said) in zip(_MARKS, (first, second), strict=True) for n, s in said.items()}
    return (tensors, {**strings, _COMMON: json.dumps(common)}), common


def split(parts: Parts) -> list[Parts]:
    """The messages in the parts of what came: those of the two that `join` put together, or of a single one.

    Raises:
        ValueError: these are two, and not as `join` puts them.
    """
    tensors, strings = parts
    if _COMMON not in strings:
        return [parts]
    first, second = (
        (
            {n.removeprefix(mark): t for n, t in tensors.items() if n.startswith(mark)},
            {n.removeprefix(mark): s for n, s in strings.items() if n.startswith(mark)},
        )
        for mark in _MARKS
    )
    try:
        second[0].update({name: first[0][name] for name in json.loads(strings[_COMMON])})
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not two messages: {type(error).__name__}: {error}") from error
    return [first, second]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
