"""A node's own ledger: what all runs have charged to the data that lie there, and what its owner allows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillkit.privacy import BudgetExhausted, Event, Ledger
from distillkit.privacy._child_ledger import ChildLedger, ledger_lines, mirror_lines, mirrored_count
from distillkit.privacy._journal import Journal
from fl.deploy.flower.policy import Policy, PolicyRefusal

__all__ = ["Account"]


class Account:
    """What one data set on a node has paid, in all runs; one file for each data set, which is never rolled back.

    Where a partition held other data before, these are taken to share records with what it holds now: their charges
    count here too. A folder of its own is for records that were never in this one.

    Args:
        folder: of the node's ledgers.
        partition: which client the node is.
        name: of the data, without what a guess could be tried on.
        policy: what the owner allows; None: everything, and it is written down.

    Attributes:
        name: as given.
        refused: why the policy did not allow the last charge; None if it did.
        charged: whether anything was charged through this object.
    """

    def __init__(self, folder: Path, partition: int, name: str, policy: Policy | None) -> None:
        self.name, self.refused, self.charged, self._policy = name, "", False, policy
        options: dict[str, Any] = {} if policy is None else {"delta": policy.delta, "budget": policy.budget}
        self.ledger = Ledger(folder / f"{name}.jsonl", disjoint=False, **options)
        before = Journal(folder / f"partition-{partition}.names")
        with before.locked():
            names = [line["data"] for _, line in before.unread()[0]]
            if name not in names:
                before.append({"data": name})
        for other in names:
            if other != name:
                lines = ledger_lines(
                    Ledger(folder / f"{other}.jsonl", disjoint=False), mirrored_count(self.ledger, other)
                )
                own = [(number, line) for number, line in lines if "from" not in line]
                mirror_lines(self.ledger, other, partition, own)

    def branch(self, known: Mapping[str, Any]) -> ChildLedger:
        """The ledger that a client is given: the run's, as the server `known` it, which charges this one first."""
        return ChildLedger(known, self._charge)

    def _charge(self, lines: Sequence[Mapping[str, Any]]) -> None:
        events = [Event(**line["event"]) for line in lines if "event" in line]
        try:
            if self._policy is not None:
                self._policy.require_events(events)
            self.ledger.spend(*events)
        except BudgetExhausted as error:  # of the node, which ends no run
            self.refused = f"the budget of its policy is spent: {error}"
            raise PolicyRefusal(self.refused) from None
        except PolicyRefusal as error:
            self.refused = str(error)
            raise
        self.charged = self.charged or bool(events)
        for line in lines:
            if "void" in line:
                self.ledger.void(line["void"], client=line["client"])
            elif "remark" in line:
                self.ledger.add_remark(line["remark"])
            elif "assumed" in line:
                self.ledger.assume(line["by"], line["assumed"])

    def said(self, asked: Any) -> dict[str, str]:
        """What the server is told with every answer: the lines that it has not seen, in a string of facts.

        Args:
            asked: `name`, of the ledger that the server knows, and `seen`, how many lines of it; from the server, so
                it may be anything.

        Raises:
            ValueError: that is not what it says, or it has seen more than there is.
        """
        if not isinstance(asked, Mapping) or type(asked.get("seen")) is not int:
            raise ValueError("the method is private, and the server does not say what it has seen of its ledger")
        seen = asked["seen"] if asked.get("name") == self.name else 0
        every = ledger_lines(self.ledger)
        last = every[-1][0] if every else 0
        if last < seen:
            raise ValueError(
                f"its ledger has {last} lines, and had {seen}: restore the file, for a ledger that forgets gives no "
                "epsilon"
            )
        lines = [[number, line] for number, line in every if number > seen]
        return {"account": json.dumps({"name": self.name, "since": seen, "lines": lines})}
