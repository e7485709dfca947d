"""Events that a ledger records, and the guarantees that a ledger gives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from distillkit._utils import check
from distillkit.privacy._sealed import Sealed
from distillkit.privacy.accounting._ranges import MOST_RELEASES, check_sigma
from distillkit.privacy.errors import NotAccountable

ALL_CLIENTS = "*"
"""Value of `Event.client` for releases that involve the records of all clients."""

ADD_OR_REMOVE_RECORD = "add or remove one record"
"""Neighboring relation: one set has a record more than the other."""
REPLACE_RECORD = "replace one record"
"""Neighboring relation: two sets of equal size differ in one record."""
ADD_OR_REMOVE_CLIENT = "add or remove one client"
"""Neighboring relation: one run has all records of a client more than the other."""
_RELATIONS = (ADD_OR_REMOVE_RECORD, REPLACE_RECORD, ADD_OR_REMOVE_CLIENT)
_SAMPLINGS = ("everything", "poisson")


PLANNED = "number, sigma and rate of the releases were not chosen by looking at released values"
"""Condition of an epsilon that was computed from the releases so far."""


def client_id(client: int | str) -> str:
    """Return a client's id as a string, as a ledger stores it. The ids 1 and "1" are therefore the same client.

    Args:
        client: client index or name.

    Raises:
        TypeError: `client` is neither an integer nor a string.
    """
    if isinstance(client, bool) or not isinstance(client, str | Integral):
        raise TypeError(f"client must be an integer or a string, got {type(client).__name__}")
    return str(client)


def check_relation(relation: str, mechanism: str = "") -> str:
    """Check that a neighboring relation is known, and return it.

    Args:
        relation: the relation.
        mechanism: name of the mechanism, for the error message.

    Raises:
        NotAccountable: the relation is unknown.
    """
    if relation not in _RELATIONS:
        who = f"{mechanism}: " if mechanism else ""
        raise NotAccountable(f"{who}relation must be one of {_RELATIONS}, got {relation!r}")
    return relation


@dataclass(frozen=True)
class Event(Sealed):
    """Charge to a ledger for `count` Gaussian releases with the same noise and sample rate.

    The functions of this package create their own events. For your own mechanism, create an event and pass it to
    `Ledger.spend` before the noise is drawn.

    Args:
        mechanism: name of the mechanism, for readers of the ledger. It has no effect on the cost.
        sigma: noise standard deviation / sensitivity under `relation`. 0 is allowed and means that no guarantee holds.
        rate: sample rate, the probability with which a record takes part; 1 if all records take part. If the rate
            differs between records or classes, give the largest rate.
        count: number of releases.
        client: index or name of the client whose records are used, stored as a string. The default, `ALL_CLIENTS`,
            charges every client, which is always safe.
        round: federated round of the release, for readers of the ledger. It has no effect on the cost.
        sampling: sampling method: `"poisson"` (each record is drawn independently), or `"everything"` (rate 1).
            Default: `"everything"` at rate 1, otherwise `"poisson"`.
        relation: the neighboring relation: `"add or remove one record"`, `"replace one record"` (at rate 1
            only) or `"add or remove one client"`.
        seeded: whether the noise is drawn from a seed; if so, no guarantee holds.

    Raises:
        NotAccountable: the sampling is not supported, no accountant covers the relation at this rate, or sigma is
            positive but too small or too large.
        TypeError, ValueError: an argument has the wrong type or is out of range.
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
        check.instance(self.mechanism, str, "mechanism", "a string")
        check.boolean(self.seeded, "seeded")
        # Convert NumPy's numbers to Python's, which the ledger's JSON file can hold.
        object.__setattr__(self, "round", int(check.instance(self.round, Integral, "round", "an integer")))
        object.__setattr__(self, "sigma", check_sigma(self.sigma))
        object.__setattr__(self, "rate", check.real_number(self.rate, "rate", above=0.0, most=1.0))
        object.__setattr__(self, "count", check.positive_int(self.count, "count", most=MOST_RELEASES))
        object.__setattr__(self, "client", client_id(self.client))
        if not self.sampling:
            object.__setattr__(self, "sampling", "everything" if self.rate == 1 else "poisson")
        if self.sampling not in _SAMPLINGS or (self.sampling == "everything" and self.rate < 1):
            raise NotAccountable(
                f"{self.mechanism}: sampling {self.sampling!r} at rate {self.rate:g} has no accountant here. Draw "
                "every record independently (sampling='poisson'); or account each pass over shuffled or fixed batches "
                "as one event of rate 1; amplification holds for Poisson sampling only"
            )
        check_relation(self.relation, self.mechanism)
        if self.relation == REPLACE_RECORD and self.rate < 1:
            raise NotAccountable(
                f"{self.mechanism}: Poisson amplification is proved for {ADD_OR_REMOVE_RECORD!r}, not for "
                f"{REPLACE_RECORD!r}; state sigma under the first of these relations, or use rate 1"
            )


@dataclass(frozen=True)
class Guarantee:
    """Guarantee of a ledger for a client's records: an epsilon at a given delta, or the reason why no guarantee holds.

    `Ledger.guarantee` returns it. Its string form is a sentence for a report.

    Epsilon covers the releases so far. It holds if number, sigma and rate of the releases were fixed in advance. If the
    decision to stop depended on released values or on epsilon, only the budget holds. If sigma or rate were chosen by
    looking at released values, delta can be many times larger; see `Ledger` for when the budget holds.

    Attributes:
        epsilon: upper bound on the epsilon of the releases so far, or None if no guarantee holds.
        reason: reason why no guarantee holds, or "".
        nominal: epsilon that follows from the noise scale, even if the noise was drawn from a known seed. It is used
            for planning and budgets.
        delta, relation: delta and neighboring relation of the guarantee; the relation is "" if nothing was charged.
        accountant: name of the accountant that computed epsilon as an upper bound; see `compose`.
        remarks: limits of the guarantee, such as tuning on the private data.
        assumptions: for each function that charged the ledger, the names of the inputs and statements that it takes as
            public and true (`ASSUMPTIONS`). Epsilon does not cover them.
        budget: the ledger's budget, an epsilon that holds at the same delta, even if the decision to stop depended on
            released values. None if the ledger has no budget, or if the budget does not hold.
    """

    epsilon: float | None
    delta: float
    relation: str
    nominal: float
    accountant: str
    reason: str = ""
    remarks: tuple[str, ...] = ()
    assumptions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    budget: float | None = None

    def info(self) -> dict[str, Any]:
        """Return the guarantee as JSON values, for the `info` of an image set or for a run's history."""
        values: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta, "relation": self.relation}
        if self.epsilon is None:
            nominal = self.nominal if math.isfinite(self.nominal) else None
            values |= {"reason": self.reason, "nominal_epsilon": nominal}
        else:
            values |= {"accountant": self.accountant, "valid_if": PLANNED}
            values |= {} if self.budget is None else {"budget": self.budget}
        if self.remarks:
            values["remarks"] = list(self.remarks)
        if self.assumptions:
            values["assumed_public"] = {entry: list(facts) for entry, facts in self.assumptions.items()}
        return values

    def __str__(self) -> str:
        if self.epsilon is None:
            return f"no guarantee: {self.reason}"
        notes = "" if self.nominal == 0 else f", if {PLANNED}"
        notes += (
            "" if self.budget is None else f"; the budget of {self.budget:g} holds however the releases are stopped"
        )
        notes += "".join(f"; {r}" for r in self.remarks)
        assumed = dict.fromkeys(name for facts in self.assumptions.values() for name in facts)
        notes += f"; assumes (PUBLIC_INPUTS): {', '.join(assumed)}" if assumed and self.nominal else ""
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:g} ({self.relation or 'nothing spent'}){notes}"
