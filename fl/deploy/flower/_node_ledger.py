"""A node's privacy ledger, and the copy of its lines in the run's ledger on the server.

Every request states how many lines of the node's ledger the server has seen (`ledger_position`). Every reply contains
the lines that the server has not seen (`NodeLedger.report`). The server copies them to the run's ledger
(`mirror_report`), from which it computes epsilon.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillkit.privacy import BudgetExhausted, Event, Ledger
from distillkit.privacy._child_ledger import ChildLedger, ledger_lines, mirror_lines
from distillkit.privacy._journal import Journal
from fl.deploy._fields import read_fields
from fl.deploy.flower._handshake import NodeInfo
from fl.deploy.flower._policy import Policy, PolicyRefusal


class NodeLedger:
    """Privacy ledger of one training set on a node, which counts the charges of all runs.

    Each training set has its own file, which is never rolled back. If the client had another training set before, the
    two sets may have records in common. Therefore charges to the earlier set are copied to this ledger. If a new
    training set has no record in common with earlier ones, use another folder to start without charges.

    Args:
        folder: folder of the node's ledgers.
        partition: index of the node's partition, which is the index of its client.
        name: keyed fingerprint of the training set, which is the name of the ledger's file.
        policy: the owner's policy; None: all charges are accepted and recorded.

    Attributes:
        name: argument of the constructor.
        ledger: the `Ledger` object.
        refused: reason why the policy refused the last charge; "" if it did not.
        charged: whether anything was charged through this object.
    """

    def __init__(self, folder: Path, partition: int, name: str, policy: Policy | None) -> None:
        self.name, self.refused, self.charged, self._policy = name, "", False, policy
        self.ledger = Ledger(folder / f"{name}.jsonl", disjoint=False)
        self.ledger.budget = None  # the owner may change the policy, but not the ledger's first line
        if policy is not None:
            self.ledger.delta, self.ledger.budget = policy.delta, policy.budget
        history = Journal(folder / f"partition-{partition}.names")
        with history.transaction():
            names = [line["data"] for _, line in history.unread()]
            if name not in names:
                history.append({"data": name})
        for other in names:
            if other != name:
                lines = ledger_lines(Ledger(folder / f"{other}.jsonl", disjoint=False), self.ledger.mirrored(other))
                own = [(number, line) for number, line in lines if "from" not in line]
                mirror_lines(self.ledger, other, partition, own)

    def branch(self, state: Mapping[str, Any]) -> ChildLedger:
        """Return a copy of the run's ledger, to which the client's releases are charged.

        Each charge to the copy is first checked against the policy of the node's owner, and then written to this node's
        own ledger.
        """
        return ChildLedger(state, self._charge)

    def _charge(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Check new ledger lines against the node owner's policy and its budget, and write them to this ledger.

        This happens before any noise is drawn.
        """
        events = [Event(**line["event"]) for line in lines if "event" in line]
        try:
            if self._policy is not None:
                self._policy.require_events(events)
            self.ledger.spend(*events)
        except BudgetExhausted as error:  # the node's budget, which does not end the run
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

    def report(self, position: str | Mapping[str, Any] | None) -> dict[str, str]:
        """Return the ledger lines after the server's untrusted `ledger_position`, as strings for a reply."""
        asked = read_fields("ledger position", position)
        seen = asked["seen"] if asked["name"] == self.name else 0
        lines = ledger_lines(self.ledger)
        last = lines[-1][0] if lines else 0
        if last < seen:
            raise ValueError(
                f"its ledger has {last} lines, and had {seen}: restore the file; without all charges there is no valid "
                "epsilon"
            )
        new = [[number, line] for number, line in lines if number > seen]
        return {"ledger": json.dumps({"name": self.name, "since": seen, "lines": new})}


def ledger_position(ledger: Ledger | None, info: NodeInfo) -> dict[str, Any] | None:
    """Return the name of a node's privacy ledger, and the number of its lines that the server has already copied.

    The server copies the lines of all nodes' ledgers to the run's own ledger. The result is None if the method is not
    private.
    """
    return None if ledger is None else {"name": info.ledger, "seen": ledger.mirrored(info.ledger)}


def mirror_report(ledger: Ledger, info: NodeInfo, metadata: Mapping[str, str]) -> None:
    """Copy lines of a node's ledger from the node's report into the run's ledger on the server.

    Lines that were copied before are skipped. The lines are on disk when the function returns.
    """
    report = read_fields("ledger report", metadata.get("ledger", ""))
    name, since, lines = report["name"], report["since"], [(number, line) for number, line in report["lines"]]
    if name != info.ledger:
        raise ValueError("its ledger report names another ledger than its handshake")
    numbers = [number for number, _ in lines]
    if not all(type(n) is int and 0 < n < 2**53 for n in numbers) or numbers != sorted(set(numbers)):
        raise ValueError("the lines of its ledger report are not in order")
    if since > ledger.mirrored(name):
        raise ValueError("lines are missing in its ledger report")
    if not all(isinstance(line, dict) for _, line in lines):
        raise ValueError("the lines of its ledger report must be objects")
    mirror_lines(ledger, name, info.partition, lines)
