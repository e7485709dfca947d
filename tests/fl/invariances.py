"""Invariances of every add-on: bitwise equal results for any workers, interruptions and order of arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distillkit import LabeledImages
from fl import FedAvg, Run, simulate
from fl.averaging.addon import AddOn
from fl.message import Message
from tests.fl.federations import Tiny, federation


class Idle(AddOn):
    """Add-on that does nothing, under a key that sorts first."""

    key = "A"


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


def assert_invariant(
    make: Callable[[], list[AddOn]], folder: Path, clients: list[LabeledImages] | None = None, **options: Any
) -> None:
    """Check bitwise equality with one worker, with three, resumed in the middle, and in another order."""
    held = clients or federation()

    def play(addons: list[AddOn], rounds: int = 4, **how: Any) -> Run:
        momentum = 0.0 if "adam" in repr(options.get("optimizer")) else 0.9
        method = FedAvg(*addons, **{"factory": network, "lr": 0.05, "momentum": momentum, "batch": 6, **options})
        return simulate(method, held, rounds=rounds, participation=min(3, len(held)), seed=5, progress=False, **how)

    whole = play(make())
    assert_same(whole, play(make(), workers=3))
    play(make(), rounds=2, out=folder / "run")
    assert_same(whole, play(make(), out=folder / "run", resume=True, workers=2))
    assert_same(whole, play([*reversed(make()), Idle()]))
