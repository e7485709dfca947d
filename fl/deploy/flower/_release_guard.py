"""Checks of the messages to and from a node, by the node owner's policy and the privacy ledger.

A `ReleaseGuard` checks one request and its reply. Its methods are called in this order: `require_request` checks the
request by the policy, `branch` returns the ledger that is charged for the request, and `reply_parts` builds the reply
without information that must not leave the node.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distillkit.privacy import BudgetExhausted
from distillkit.privacy._child_ledger import ChildLedger
from fl._codec import Parts, to_parts
from fl.deploy._wire import Job, result_parts
from fl.deploy.flower._node_ledger import NodeLedger
from fl.deploy.flower._policy import Policy, PolicyRefusal
from fl.engine._transport import ClientResult
from fl.message import Message
from fl.method import Method

__all__ = ["WITHHELD", "ReleaseGuard", "refusal_parts"]

WITHHELD = "the message is in the node's log, because its owner has set a policy"

_RELEASING_VERBS = ("local", "answer")
"""Functions of a method that compute a reply from private images. All others only use values released before."""


class ReleaseGuard:
    """Check of a request to a node, and of the reply, against the node owner's policy and the privacy ledger.

    Args:
        method: the node's method.
        policy: the node owner's policy; None: everything is allowed.
        ledger: ledger of the node's training set; None if the method is not private.
    """

    def __init__(self, method: Method, policy: Policy | None, ledger: NodeLedger | None) -> None:
        self._method, self._policy, self._ledger = method, policy, ledger
        self._strict = policy is not None and policy.budget is not None

    def require_request(self, verb: str, app: str | None) -> None:
        """Check a request against the node owner's policy, before any part of it is stored or computed."""
        if self._policy is not None:
            self._policy.require_request(self._method, verb, app)

    def branch(self, job: Job) -> ChildLedger | None:
        """Return the ledger in which the client records its private releases while it runs a request.

        The result is None if the method is not private. The returned ledger starts from an extract of the run's ledger
        that the server sent with the request. Each release is written to the node's own ledger first.
        """
        if self._ledger is None:
            return None
        if job.ledger is None:
            raise ValueError("the method is private, and the server's request has no ledger")
        return self._ledger.branch(job.ledger)

    def ledger_report(self, position: Any) -> dict[str, str]:
        """Return the ledger lines that the server has not seen, as JSON in a dictionary of strings for a reply."""
        if self._ledger is None:
            raise ValueError("this node runs no private method, and keeps no ledger")
        return self._ledger.report(position)

    def reply_parts(self, job: Job, result: ClientResult | BudgetExhausted, position: Any) -> Parts:
        """Return the message parts of the reply to a request, without information that must not leave the node."""
        version, ledger = job.header.version, self._ledger
        if ledger is None:
            return result_parts(version, result) if isinstance(result, ClientResult) else refusal_parts(str(result))
        try:
            metadata = ledger.report(position)
        except ValueError as error:
            return refusal_parts(str(error))
        if ledger.refused:
            return refusal_parts(ledger.refused, metadata)
        if isinstance(result, BudgetExhausted):
            return to_parts(Message(), {**metadata, "exhausted": json.dumps([str(result), result.remaining])})
        if self._strict:
            try:
                result = self._remove_unprotected(job, result, ledger)
            except PolicyRefusal as error:
                return refusal_parts(str(error), metadata)
        return result_parts(version, result, metadata=metadata)

    def _remove_unprotected(self, job: Job, result: ClientResult, ledger: NodeLedger) -> ClientResult:
        """Return a copy of the result without the details of the error, the client's notes and the client's CPU time.

        The privacy guarantee does not cover these three values.
        """
        if result.error is not None:
            logging.getLogger(__name__).warning("client %d %s", job.client, result.error)
            kind = result.error.split(":")[0]
            result = replace(result, error=f"{kind} ({WITHHELD})")
        elif result.reply is not None and job.header.verb in _RELEASING_VERBS and not ledger.charged:
            raise PolicyRefusal("its policy has a finite epsilon, and the method charged nothing for its reply")
        return replace(result, notes={}, seconds=0.0)


def refusal_parts(reason: str, metadata: Mapping[str, str] | None = None) -> Parts:
    """Return the message parts of a reply with which a node refuses a request."""
    return to_parts(Message(), {**(metadata or {}), "refused": reason[:500]})
