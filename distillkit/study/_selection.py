"""Choosing among tries: by a rule that is written down, from numbers that stay beside the choice."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["RULES", "chosen", "scored"]

RULES = {"last": "accuracy_last", "own": "accuracy_own"}
"""What a rule looks at: the accuracy on the validation part after the last round, or the clients' own tests."""


def scored(lines: Sequence[Mapping[str, Any]], rule: str) -> dict[str, Any]:
    """What one try came to: its settings, its score and that of each seed. None for a seed whose run failed.

    Args:
        lines: of its runs, one a seed.
        rule: a key of `RULES`.
    """
    scores = [line.get(RULES[rule]) for line in lines]
    known = [score for score in scores if score is not None]
    score = statistics.fmean(known) if len(known) == len(scores) else None
    errors = [line["error"] for line in lines if "error" in line]
    found = {
        "settings": lines[0]["settings"],
        "score": score,
        "scores": scores,
        "runs": [line["run"] for line in lines],
    }
    return {**found, **({"errors": errors} if errors else {})}


def chosen(tries: Sequence[Mapping[str, Any]], what: str) -> int:
    """The number of the best try; of equals the first. A try one of whose runs failed has no score and is never it.

    Args:
        tries: as `scored` gives them.
        what: whose tries they are, for the message.

    Raises:
        ValueError: none of them has a score.
    """
    known = [(number, t["score"]) for number, t in enumerate(tries) if t["score"] is not None]
    if not known:
        why = next((t["errors"][0] for t in tries if t.get("errors")), "there was nothing to test")
        raise ValueError(f"{what} has no try with a score: {why}")
    return max(known, key=lambda pair: pair[1])[0]
