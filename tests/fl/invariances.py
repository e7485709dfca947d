"""Bitwise comparison of runs, and a network with batch norm."""

from __future__ import annotations

import torch

from distillkit import LabeledImages
from fl import Run
from fl.message import Message
from tests.fl.federations import Tiny


def tensors(state: Message) -> dict[str, torch.Tensor]:
    """Return every tensor of a message, by key and name."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[key] = value
        elif isinstance(value, dict):
            found |= {f"{key}/{n}": t for n, t in value.items()}
        elif isinstance(value, LabeledImages):
            found[f"{key}/images"] = value.images
    return found


def assert_same(one: Run, other: Run) -> None:
    """Check that the whole states of two servers are bitwise equal."""
    mine, others = tensors(one.server.state), tensors(other.server.state)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        assert torch.equal(value, others[name]), name


def network(outputs: int) -> Tiny:
    return Tiny(outputs, norm=True)
