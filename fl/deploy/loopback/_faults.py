"""Faults, such as lost results, that the loopback backend injects between the server and its clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from distillkit._utils import check
from distillkit.rng import derive

__all__ = ["Faults"]


@dataclass(frozen=True)
class Faults:
    """Options of fault injection: the shares of the clients' results that are lost, repeated or delayed.

    See `Loopback` for the fields.
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
        """True if any faults are injected, that is, `lose`, `repeat` or `delay` is above 0."""
        return self.lose + self.repeat + self.delay > 0

    def fate(self, verb: str, round_number: int, client: int) -> Literal["arrives", "lost", "twice", "late"]:
        """Draw the fault of one message.

        The message is a client's result, or the message that tells a client that a round is complete. The drawn fault
        depends only on the arguments and the seed.

        Args:
            verb: name of the function whose result is sent, such as "local"; or "settle" for the message that a round
                is complete.
            round_number: index of the round.
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
