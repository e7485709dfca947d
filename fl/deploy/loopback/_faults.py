"""Faults between the server and its clients, on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from distillkit._utils import check
from distillkit.rng import derive

__all__ = ["Faults"]


@dataclass(frozen=True)
class Faults:
    """Shares of the clients' results that are lost, repeated or delayed.

    Each fault is drawn from (seed, verb, round, client), so a run can be repeated exactly.

    Args:
        lose: share of results that never arrive; their clients are recorded as failed. The same share of notices of
            committed rounds is lost.
        repeat: share of results that arrive twice; the second copy is recognised and dropped.
        delay: share of results that arrive after the end of their exchange; their clients are recorded as failed, and
            the late results are dropped.
        seed: seed of the faults.

    Raises:
        ValueError: a share is outside [0, 1], or the shares add up to more than 1.
    """

    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lose", "repeat", "delay"):
            check.real_number(getattr(self, name), name, least=0.0, most=1.0)
        if self.lose + self.repeat + self.delay > 1:
            raise ValueError(
                f"lose, repeat and delay are shares of the same results and must be at most 1 in all, got {self.lose}, "
                f"{self.repeat} and {self.delay}"
            )
        check.positive_int(self.seed, "seed", least=0)

    @property
    def faulty(self) -> bool:
        """Whether any faults are requested."""
        return self.lose + self.repeat + self.delay > 0

    def fate(self, verb: str, round_number: int, client: int) -> Literal["arrives", "lost", "twice", "late"]:
        """Return what happens to one result.

        Args:
            verb: name of the exchange ("answer", "local", "evaluate"); "settle" for the notice of a committed round.
            round_number: number of the round.
            client: index of the client.
        """
        if not self.faulty:
            return "arrives"
        drawn = float(torch.rand((), generator=derive(self.seed, "loopback", verb, round_number, client)))
        if drawn < self.lose:
            return "lost"
        if drawn < self.lose + self.repeat:
            return "twice"
        return "late" if drawn < self.lose + self.repeat + self.delay else "arrives"
