"""All checks that a client's reply must pass on its own: notes, schema, evaluation sums and computed entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distillkit.privacy import BudgetExhausted
from fl.aggregation import BadReply, EntrySpec, Schema, check_reply
from fl.engine._contract import ChangedInput, Unchanged, checked_message, checked_schema
from fl.engine._devices import placed
from fl.engine._transport import ClientResult
from fl.message import Entry, Message
from fl.method import Method
from fl.participants import Interrupted, Server
from fl.task import LabelTask

Entries = Mapping[str, Entry[Any]]

_MOST_NOTES, _LARGEST_NOTE = 100, 1e15
"""Largest number of a client's notes, and of characters in a name; largest magnitude of a note."""


def validate(
    method: Method, entries: Entries, server: Server, verb: str, result: ClientResult
) -> tuple[str | None, Message, Schema]:
    """Check a client's reply on the server's thread; return the reason why it is not used, the reply and its schema."""
    client = result.client
    function = {"answer": "expect_answer", "local": "expect", "evaluate": "expect_evaluation"}.get(verb)
    with Unchanged(method, function or "expect_exchange", {}, server):
        found = getattr(method, function)(server, client) if function else method.expect_exchange(server, verb, client)
    schema = checked_schema(method, function or "expect_exchange", found)
    try:
        return None, _checked_reply(method, entries, server, verb, result, schema), schema
    except BadReply as error:
        return str(error)[:300], Message(), schema
    except (Interrupted, BudgetExhausted, ChangedInput):
        raise
    except Exception as error:  # a reply may hold anything, so any error in a check means an invalid reply
        return f"cannot be used: {type(error).__name__}: {error}"[:300], Message(), schema


def _checked_reply(
    method: Method, entries: Entries, server: Server, verb: str, result: ClientResult, schema: Schema
) -> Message:
    """Check a client's reply against its schema, and return it with the entries that `Method.read_reply` computes.

    A reply to an evaluation request may be empty.
    """
    reply = result.reply
    if verb == "evaluate" and (reply is None or (isinstance(reply, Message) and not len(reply))):
        return Message()
    if verb != "evaluate":
        _check_notes(result.notes)
    reply = check_reply(placed(reply, server.device), entries, schema)
    if verb == "evaluate":
        _check_sums(reply, server.task)
    if verb != "local":
        return reply
    with Unchanged(method, "read_reply", {"reply": reply}, server):
        read = method.read_reply(server, reply)
    derived = checked_message(method, "read_reply", read)
    if not len(derived):
        return reply
    reply = Message.unchecked({**dict(reply.items()), **dict(derived.items())})
    return check_reply(reply, entries, {**schema, **{key: EntrySpec.finite(value) for key, value in derived.items()}})


def _check_notes(notes: Mapping[str, Any]) -> None:
    if len(notes) > _MOST_NOTES:
        raise BadReply(f"has {len(notes)} notes, at most {_MOST_NOTES} are allowed")
    for name, number in notes.items():
        if not isinstance(name, str) or len(name) > _MOST_NOTES:
            raise BadReply(f"its note {str(name)[:40]!r} must have a name of at most {_MOST_NOTES} characters")
        if not isinstance(number, int | float) or not -_LARGEST_NOTE <= number <= _LARGEST_NOTE:
            raise BadReply(f"its note {name!r} is not a finite number of at most {_LARGEST_NOTE:g}")


def _check_sums(reply: Message, task: LabelTask) -> None:
    for key, group in reply.items():
        if not isinstance(group, dict):
            raise BadReply(f"{key} must map names to `LabelTask.sums` of an evaluation, got {type(group).__name__}")
        for sums in group.values():
            task.check_sums(sums)
