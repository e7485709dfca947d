"""What stands between a client and what leaves its node: the owner's policy, and the ledger of the data."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distillkit.privacy import BudgetExhausted
from distillkit.privacy._child_ledger import ChildLedger
from fl._codec import Parts, to_parts
from fl.deploy._wire import Job, answer_parts
from fl.deploy.flower._node_ledger import Account
from fl.deploy.flower.policy import Policy, PolicyRefusal
from fl.engine._transport import ClientResult
from fl.message import Message
from fl.method import Method

__all__ = ["WITHHELD", "Guard"]

WITHHELD = "what was said stays in its log, for its owner has set a policy"

_RELEASING = ("local", "answer")
"""The verbs in which a method reads private images; others go on with what these have released."""


class Guard:
    """Decides on one message to a node, before it is worked on and before the answer leaves.

    Args:
        method: what the node runs.
        policy: what its owner allows; None: everything.
        account: the ledger of the data; None if the method is not private.
    """

    def __init__(self, method: Method, policy: Policy | None, account: Account | None) -> None:
        self._method, self._policy, self._account = method, policy, account
        self._strict = policy is not None and policy.budget is not None

    def require_request(self, job: Job, app: str | None) -> None:
        """Refuse what the policy does not allow, before the client computes anything.

        Args:
            job: what is asked.
            app: the hash of the code that asks.

        Raises:
            PolicyRefusal: naming the key of the policy's file.
        """
        if self._policy is not None:
            self._policy.require_request(self._method, job.header.verb, app)

    def branch(self, job: Job) -> ChildLedger | None:
        """The ledger that the client charges for a `job`: the node's own before the run's.

        Raises:
            ValueError: the method is private, and the server keeps no ledger.
        """
        if self._account is None:
            return None
        if job.ledger is None:
            raise ValueError("the method is private, and the server says nothing of a ledger")
        return self._account.branch(job.ledger)

    def said(self, asked: Any) -> dict[str, str]:
        """The lines of the node's ledger that the server has not seen; see `Account.said`.

        Args:
            asked: what it has seen, as it says.

        Raises:
            ValueError: there is no ledger, or it has lost lines, or the server does not say.
        """
        if self._account is None:
            raise ValueError("this node runs no private method, and keeps no ledger")
        return self._account.said(asked)

    def parts(self, job: Job, found: ClientResult | BudgetExhausted, asked: Any) -> Parts:
        """What leaves the node.

        Args:
            job: what was asked.
            found: what came of it.
            asked: what the server has seen of the node's ledger, as it says; nothing but a refusal leaves a private
                method's node if it does not say.
        """
        account = self._account
        if account is None:
            return (
                answer_parts(job.header.version, found) if isinstance(found, ClientResult) else _refused(str(found), {})
            )
        try:
            facts = account.said(asked)
        except ValueError as error:
            return _refused(str(error), {})
        if account.refused:
            return _refused(account.refused, facts)
        if isinstance(found, BudgetExhausted):
            return to_parts(Message(), {**facts, "exhausted": json.dumps([str(found), found.remaining])})
        if self._strict:
            try:
                found = self._covered(job, found, account)
            except PolicyRefusal as error:
                return _refused(str(error), facts)
        return answer_parts(job.header.version, found, facts=facts)

    def _covered(self, job: Job, found: ClientResult, account: Account) -> ClientResult:
        """The answer without what no epsilon covers: its reply was charged for, or does not leave."""
        if found.error is not None:
            logging.getLogger(__name__).warning("client %d %s", job.client, found.error)
            kind = found.error.split(":")[0]
            found = replace(found, error=f"{kind} ({WITHHELD})")
        elif found.reply is not None and job.header.verb in _RELEASING and not account.charged:
            raise PolicyRefusal(
                "its policy has a finite epsilon, and the method charged nothing for what it would send"
            )
        return replace(found, notes={}, seconds=0.0)


def _refused(why: str, facts: Mapping[str, str]) -> Parts:
    return to_parts(Message(), {**facts, "refused": why[:500]})
