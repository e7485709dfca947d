"""Replies of a node, without information that must not leave the node."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distillkit.privacy import BudgetExhausted
from fl._codec import Parts, to_parts
from fl.deploy._wire import Job, result_parts
from fl.deploy.flower._node_ledger import NodeLedger
from fl.deploy.flower._policy import Policy
from fl.engine._transport import ClientResult
from fl.message import Message

WITHHELD = "the message is in the node's log, because its owner has set a policy"

_RELEASING_VERBS = ("local", "answer")
"""Functions of a method that compute a reply from private images. All others only use values released before."""


def reply_parts(
    job: Job,
    result: ClientResult | BudgetExhausted,
    ledger: NodeLedger | None,
    policy: Policy | None,
    position: Mapping[str, Any] | None,
) -> Parts:
    """Return the message parts of a client's reply to a request.

    Args:
        job: the request.
        result: result of the client, or the error that the run's budget is exhausted.
        ledger: ledger of the node's training set; None if the method is not private.
        policy: policy of the node's owner, if there is one.
        position: the ledger's lines that the server has seen (`ledger_position`).
    """
    if ledger is None:
        return result_parts(result) if isinstance(result, ClientResult) else refusal_parts(str(result))
    try:
        metadata = ledger.report(position)
    except ValueError as error:
        return refusal_parts(str(error))
    if ledger.refused:
        return refusal_parts(ledger.refused, metadata)
    if isinstance(result, BudgetExhausted):
        exhausted = {"reason": str(result)[:500], "remaining": min(result.remaining, 10**12)}
        return to_parts(Message(), {**metadata, "exhausted": json.dumps(exhausted)})
    if policy is None or policy.budget is None:
        return result_parts(result, metadata)
    if result.error is not None:  # the guarantee covers neither the error's text, nor notes and durations
        logging.getLogger(__name__).warning("client %d %s", job.client, result.error)
        result = replace(result, error=f"{result.error.split(':')[0]} ({WITHHELD})")
    elif result.reply is not None and job.header.verb in _RELEASING_VERBS and not ledger.charged:
        why = "its policy has a finite epsilon, and the method charged nothing for its reply"
        return refusal_parts(why, metadata)
    return result_parts(replace(result, notes={}, seconds=0.0), metadata)


def refusal_parts(reason: str, metadata: Mapping[str, str] | None = None) -> Parts:
    """Return the message parts of a reply with which a node refuses a request."""
    return to_parts(Message(), {**(metadata or {}), "refused": reason[:500]})
