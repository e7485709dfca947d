"""The server's mirror of the nodes' ledgers: what they charged stands in the run's, so that it can state epsilon."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distillkit.privacy import BudgetExhausted, Ledger
from distillkit.privacy._child_ledger import mirror_lines, mirrored_count
from fl.deploy.flower._handshake import Hello

__all__ = ["asked_of", "enter", "exhausted"]

_MOST = 100_000
"""Lines that one answer may have charged: a thousand rounds of a hundred releases each, of which no server was told."""


def asked_of(ledger: Ledger | None, hello: Hello) -> dict[str, Any] | None:
    """What a node is told of its ledger: its name, and how many of its lines the server has seen.

    Args:
        ledger: of a private run, or None.
        hello: what the node said of itself.
    """
    return None if ledger is None else {"name": hello.ledger, "seen": mirrored_count(ledger, hello.ledger)}


def enter(ledger: Ledger, hello: Hello, facts: Mapping[str, str]) -> None:
    """Take over what a node says that it charged; on disk when this returns, and each line once.

    Args:
        ledger: of the run.
        hello: what the node said of itself.
        facts: of its answer, which may come from anywhere.

    Raises:
        ValueError: it says nothing, or something else; or it is another ledger, or lines are missing.
    """
    try:
        said = json.loads(facts["account"])
        name, since, lines = said["name"], said["since"], [(number, line) for number, line in said["lines"]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it does not say what it charged: {type(error).__name__}: {error}") from error
    if name != hello.ledger:
        raise ValueError("it charged another ledger than it had when it said hello")
    if len(lines) > _MOST:
        raise ValueError(f"it says that it charged {len(lines)} releases, more than {_MOST}")
    numbers = [number for number, _ in lines]
    ordered = all(type(n) is int and n > 0 for n in numbers) and numbers == sorted(set(numbers))
    if type(since) is not int or not ordered:
        raise ValueError("what it charged is not in order")
    if since > mirrored_count(ledger, name):
        raise ValueError("lines of its ledger are missing")
    if not all(isinstance(line, dict) for _, line in lines):
        raise ValueError("what it charged must be maps")
    mirror_lines(ledger, name, hello.partition, lines)


def exhausted(facts: Mapping[str, str]) -> BudgetExhausted:
    """That a client's release would exceed the budget of the run, as its node says it.

    Args:
        facts: of its answer, which may come from anywhere.

    Raises:
        ValueError: it says something else.
    """
    try:
        why, fits = json.loads(facts["exhausted"])
        return BudgetExhausted(str(why)[:500], remaining=int(fits))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"it says of the budget what cannot be read: {error}") from error
