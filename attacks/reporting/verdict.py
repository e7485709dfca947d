"""The sentence at the head of a report, from what its sections found."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Outcome", "sentence"]


@dataclass
class Outcome:
    """What the sections of a report found; they fill it in.

    Attributes:
        leaks: what was found, a phrase each.
        looked: what was looked at without a finding, with the resolution, a phrase each.
        missing: what could not be told, and what to give for it.
        sends_records: whether images that were sent or published began as private records.
        shares: shares of records recovered, in words; "" where it was not counted.
    """

    leaks: list[str] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    sends_records: bool = False
    shares: str = ""


def sentence(outcome: Outcome) -> str:
    """The verdict. It never says that anything protects.

    Args:
        outcome: of all sections.
    """
    if outcome.sends_records:
        first = f"This run sends private records: its images start from real ones{outcome.shares}."
        rest = f" Besides, {_joined(outcome.leaks)}." if outcome.leaks else ""
        return first + rest + _besides(outcome)
    if outcome.leaks:
        found = _joined(outcome.leaks)
        return f"This run leaks: {found}.{_besides(outcome)}"
    if outcome.looked:
        return (
            f"No leak found at this resolution: {_joined(outcome.looked)}. Smaller leaks, and attacks that were not "
            "tried, are not ruled out."
        )
    return "Nothing can be said yet: nothing that records could be recognised in was looked at (see the last section)."


def _besides(outcome: Outcome) -> str:
    return f" No other leak was found at this resolution: {_joined(outcome.looked)}." if outcome.looked else ""


def _joined(phrases: list[str]) -> str:
    return "; ".join(phrases)
