"""Faults on demand between the server and its clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from distillkit._utils import check
from distillkit.rng import derive

__all__ = ["Faults"]


@dataclass(frozen=True)
class Faults:
    """Shares of the clients' results that go astray, drawn from (seed, verb, round, client), so that they repeat.

    Args:
        lose: never arrive; the client is recorded as failed. The notice of a committed round is lost as often.
        repeat: arrive twice; the second is recognised and dropped.
        delay: arrive after their exchange is over; the client is recorded as failed, and the result is dropped when it
            comes.
        seed: of the faults.

    Raises:
        ValueError: shares outside [0, 1], or more than 1 in all.
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
            verb: the exchange ("answer", "local", "evaluate"); "settle" for the notice of a committed round.
            round_number: the round.
            client: the client's number.
        """
        if not self.faulty:
            return "arrives"
        drawn = float(torch.rand((), generator=derive(self.seed, "loopback", verb, round_number, client)))
        if drawn < self.lose:
            return "lost"
        if drawn < self.lose + self.repeat:
            return "twice"
        return "late" if drawn < self.lose + self.repeat + self.delay else "arrives"
