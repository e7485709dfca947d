"""Checks whether a method's server needs only sums over its clients, as `ClientDP` and secure sums require."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distillkit.privacy import PrivacyError
from fl.aggregation import EntrySpec, Schema
from fl.averaging.addon import overrides
from fl.averaging.fedavg import FedAvg
from fl.message import Entry, declared_entries
from fl.method import Method


def query_sender(method: Method) -> str | None:
    """Return the name of the method or add-on that queries the clients before round 1, or None if there is no query."""
    addons = method.addons if isinstance(method, FedAvg) else ()
    return next((a.name for a in addons if a.has_query), type(method).__name__) if method.has_query else None


def reply_reader(method: Method) -> str | None:
    """Return the name of the method or add-on whose server code reads single replies; None if there is none."""
    addons = method.addons if isinstance(method, FedAvg) else ()
    itself = type(method).read_reply not in (Method.read_reply, FedAvg.read_reply)
    return next((a.name for a in addons if overrides(a, "read_reply")), type(method).__name__ if itself else None)


def require_sums(method: Method, clips: Mapping[Entry[Any], float]) -> None:
    """Raise PrivacyError if a method needs more from its clients than sums of clipped values.

    Args:
        method: method whose options and entries are checked.
        clips: the largest l2 norm of each clipped entry.
    """
    name, addons = type(method).__name__, method.addons if isinstance(method, FedAvg) else ()
    entries = {e.key: e for e in method.entries()}
    weights = {e.by.key for e in clips if e.by is not None}
    for entry in clips:
        if entry.key not in entries:
            raise PrivacyError(f"clip names {entry.key}, which {name} does not have; give clip={{entry: C}}")
        if entry.rule not in ("mean", "sum"):
            raise PrivacyError(
                f"{entry.key} cannot be noised: its rule is {entry.rule!r}, not a sum over clients; clip entries "
                "that combine by 'mean' or 'sum'"
            )
        if entry.key in weights:
            raise PrivacyError(
                f"{entry.key} cannot be clipped: it is the weight of another entry, and becomes 1; leave it out"
            )
    if method.private:
        raise PrivacyError(
            f"{name} protects single records already; one ledger cannot cover records and whole clients: use "
            "only one of the two"
        )
    if who := query_sender(method):
        raise PrivacyError(
            f"{who} queries every client before round 1, and the answers would not be noised: leave it out"
        )
    if isinstance(method, FedAvg) and len(method.networks.names) > 1:
        raise PrivacyError(
            "with several architectures, the number of clients of each would be needed: use one architecture"
        )
    if isinstance(method, FedAvg) and method.settings.weights == "samples":
        raise PrivacyError("the number of a client's images is private: give weights='uniform', got 'samples'")
    if method.exchanges != ("local",):
        raise PrivacyError(f"{name} has the exchanges {', '.join(method.exchanges)}; only replies of 'local' get noise")
    if who := reply_reader(method):
        raise PrivacyError(
            f"{who} reads single replies on the server (read_reply), where they have no noise: leave it out"
        )
    for entry in entries.values():
        if entry.rule == "union":
            raise PrivacyError(
                f"{entry.key} keeps each client's rows separate, so there is no sum to noise: leave its owner out"
            )
    for addon in (a for a in addons if not overrides(a, "answer")):
        for entry in declared_entries(addon):
            if entry.rule != "first" and entry not in clips and entry.key not in weights:
                maximum = "is a maximum, to which no noise can be added:"
                reason = maximum if entry.rule == "max" else "has no clip: give clip={entry: C} for it too, or"
                raise PrivacyError(f"{entry.key} {reason} leave its owner out")


def require_shapes(schema: Schema, clips: Mapping[Entry[Any], float]) -> None:
    """Raise PrivacyError unless noise can be added to everything in a reply.

    Every entry in `clips` must be in the schema and have a fixed shape. The only other values that a reply may have are
    the client's weights in the averages of these entries, each a single number.

    Args:
        schema: schema of a reply.
        clips: for each entry to which noise is added, the l2 norm to which it is clipped.
    """
    weights = {e.by.key: e.key for e in clips if e.by is not None}
    for entry in clips:
        if entry.key not in schema:
            raise PrivacyError(
                f"`expect` must describe {entry.key}, which is clipped: noise needs its shape even if no client replies"
            )
        if not _fixed(schema[entry.key]):
            raise PrivacyError(
                f"{entry.key} must be float32 or float64, and have a fixed shape, because noise is added to it"
            )
    for key, like in schema.items():
        if key in weights and isinstance(like.value, Tensor | dict):
            raise PrivacyError(
                f"{key} holds a weight for each row of {weights[key]}, but weights must be 1: send sums and "
                "counts, both clipped"
            )
        if key in (FedAvg.buffers.key, FedAvg.counters.key):
            raise PrivacyError(
                f"{key}, batch-norm statistics, cannot be noised: give buffers='drop', or a network without them "
                "(norm='instance')"
            )
        if key not in weights and key not in {e.key for e in clips}:
            raise PrivacyError(f"replies hold {key}, which has no clip: give clip={{entry: C}} for it too")


def _fixed(like: EntrySpec) -> bool:
    group = like.value if isinstance(like.value, dict) else {"": like.value}
    wide = (torch.float32, torch.float64)
    return like.max_rows is None and all(
        t.dtype in wide if isinstance(t, Tensor) else isinstance(t, float) for t in group.values()
    )
