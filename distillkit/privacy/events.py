"""What a ledger records (`Event`), and what it can promise (`Guarantee`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from distillkit._utils import check
from distillkit.privacy._clients import ALL_CLIENTS, client_id
from distillkit.privacy.errors import NotAccountable

__all__ = ["ADD_OR_REMOVE_CLIENT", "ADD_OR_REMOVE_RECORD", "REPLACE_RECORD", "Event", "Guarantee"]


"""The client of an event that touches the records of all clients."""

ADD_OR_REMOVE_RECORD, REPLACE_RECORD, ADD_OR_REMOVE_CLIENT = (
    "add or remove one record",
    "replace one record",
    "add or remove one client",
)
_RELATIONS = (ADD_OR_REMOVE_RECORD, REPLACE_RECORD, ADD_OR_REMOVE_CLIENT)
_SAMPLINGS = ("everything", "poisson")


@dataclass(frozen=True)
class Event:
    """What a ledger is charged: `count` Gaussian releases of the same kind, described by what decides their cost.

    The components here make their own; make one for a mechanism of your own, and hand it to `Ledger.spend` before the
    noise is drawn.

    Args:
        mechanism: what released, for the reader.
        sigma: noise standard deviation / sensitivity under `relation`. 0 is allowed and means no guarantee.
        rate: with which probability a record takes part, the largest over all records (over the classes, if each
            class has its own). 1 if all do.
        count: how many releases.
        client: whose records, a number or a name, kept as a string (1 is "1"). Default `ALL_CLIENTS`, which is always
            safe.
        round: when, for the reader.
        sampling: `"poisson"` (each record independently), or `"everything"` (rate 1). Default by the rate.
        relation: which data sets count as neighbours: `"add or remove one record"`, `"replace one record"` (at rate 1
            only) or `"add or remove one client"`.
        seeded: the noise is known to whoever knows a seed, so that no guarantee holds.

    Raises:
        NotAccountable: another kind of sampling, or a relation that no accountant here covers at this rate.
        TypeError, ValueError: numbers out of range.
    """

    mechanism: str
    sigma: float
    rate: float = 1.0
    count: int = 1
    client: int | str = ALL_CLIENTS
    round: int = 0
    sampling: str = ""
    relation: str = ADD_OR_REMOVE_RECORD
    seeded: bool = False

    def __post_init__(self) -> None:
        # Python's own numbers, which the ledger's file can hold: NumPy's are taken, and are no JSON.
        object.__setattr__(self, "sigma", check.real_number(self.sigma, "sigma", least=0.0))
        object.__setattr__(self, "rate", check.real_number(self.rate, "rate", above=0.0, most=1.0))
        object.__setattr__(self, "count", check.positive_int(self.count, "count"))
        object.__setattr__(self, "client", client_id(self.client))
        if not self.sampling:
            object.__setattr__(self, "sampling", "everything" if self.rate == 1 else "poisson")
        if self.sampling not in _SAMPLINGS or (self.sampling == "everything" and self.rate < 1):
            raise NotAccountable(
                f"{self.mechanism}: sampling {self.sampling!r} at rate {self.rate:g} has no accountant here. Draw "
                "every record independently (sampling='poisson'); or account each pass over shuffled or fixed batches "
                "as one event of rate 1; amplification holds for Poisson sampling only"
            )
        if self.relation not in _RELATIONS:
            raise NotAccountable(f"{self.mechanism}: relation must be one of {_RELATIONS}, got {self.relation!r}")
        if self.relation == REPLACE_RECORD and self.rate < 1:
            raise NotAccountable(
                f"{self.mechanism}: Poisson amplification is proved for {ADD_OR_REMOVE_RECORD!r}, not for "
                f"{REPLACE_RECORD!r}; state the sensitivity under the former, or take rate 1"
            )


@dataclass(frozen=True)
class Guarantee:
    """What a ledger can promise for somebody's records: an epsilon at a delta, or why there is none.

    Made by `Ledger.guarantee`. Printed, it is a sentence for a report.

    Attributes:
        epsilon: the guarantee, or None where none holds.
        reason: why none holds, or "".
        nominal: epsilon of the noise as it was scaled, secret or not; for planning and for budgets.
        delta, relation: what epsilon refers to: its delta, and which data sets count as neighbours ("" if nothing was
            spent).
        accountant: how epsilon was computed, an upper bound each; see `compose`.
        remarks: what the reader must know besides, such as tuning on the private data.
        assumed: what is taken to be public, by entry point (`ASSUMPTIONS`); epsilon does not cover it.
    """

    epsilon: float | None
    delta: float
    relation: str
    nominal: float
    accountant: str
    reason: str = ""
    remarks: tuple[str, ...] = ()
    assumed: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def info(self) -> dict[str, Any]:
        """The guarantee as JSON values, for a set's `info` or a run's history: what holds, or why nothing does."""
        values: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta, "relation": self.relation}
        if self.epsilon is None:
            nominal = self.nominal if math.isfinite(self.nominal) else None
            values |= {"reason": self.reason, "nominal_epsilon": nominal}
        else:
            values["accountant"] = self.accountant
        if self.remarks:
            values["remarks"] = list(self.remarks)
        if self.assumed:
            values["assumed_public"] = {entry: list(facts) for entry, facts in self.assumed.items()}
        return values

    def __str__(self) -> str:
        if self.epsilon is None:
            return f"no guarantee: {self.reason}"
        notes = "".join(f"; {r}" for r in self.remarks)
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:g} ({self.relation or 'nothing spent'}){notes}"
