"""The sentence at the head of a report, and the short lists below it, from what its sections found."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["KINDS", "Outcome", "sentence"]

KINDS = ("claim", "inversion", "images", "shadows", "model", "classes")
"""What a finding is about, the gravest first: a claim of privacy that is refuted, records rebuilt from an update,
members recognised by images, by attacks with shadows, by one threshold on the last model, and classes that are told."""


_CLEAR = ("images", "shadows", "inversion", "model", "classes", "claim")
"""In which order to say what was looked for in vain: what would have shown most first."""


@dataclass
class Outcome:
    """What the sections of a report found; they fill it in.

    Attributes:
        missing: what could not be told, and what to give for it.
        sends_records: whether images that were sent or published began as private records.
        recovered: which share of the records the sent images show, in words; "" where it was not counted.
    """

    missing: list[str] = field(default_factory=list)
    sends_records: bool = False
    recovered: str = ""
    _found: list[tuple[str, str]] = field(default_factory=list)
    _clear: list[tuple[str, str]] = field(default_factory=list)

    def find(self, kind: str, phrase: str) -> None:
        """Note a leak.

        Args:
            kind: one of `KINDS`.
            phrase: with its number; goes on from "This run leaks: ".
        """
        self._found.append((kind, phrase))

    def clear(self, kind: str, phrase: str) -> None:
        """Note that nothing was found.

        Args:
            kind: one of `KINDS`.
            phrase: what was tried, with the size of the leak that would have been noticed.
        """
        self._clear.append((kind, phrase))

    @property
    def leaks(self) -> list[str]:
        """What was found, the gravest first."""
        return _ordered(self._found, KINDS)

    @property
    def looked(self) -> list[str]:
        """What was looked at without a finding."""
        return _ordered(self._clear, _CLEAR)

    @property
    def also(self) -> list[str]:
        """What was found besides that which the sentence says."""
        return self.leaks if self.sends_records else self.leaks[1:]


def sentence(outcome: Outcome) -> str:
    """The verdict: one sentence with the worst finding. It never says that anything protects.

    Args:
        outcome: of all sections.
    """
    if outcome.sends_records:
        number = f", and {outcome.recovered}" if outcome.recovered else ""
        return f"This run sends private records: its images start from real ones{number}."
    if outcome.leaks:
        return f"This run leaks: {outcome.leaks[0]}."
    if outcome.looked:
        return f"No leak found at this resolution: {outcome.looked[0]}; smaller ones and other attacks remain possible."
    return "Nothing can be said yet: nothing that records could be recognised in was looked at (see the last section)."


def _ordered(noted: list[tuple[str, str]], kinds: tuple[str, ...]) -> list[str]:
    return [phrase for _, phrase in sorted(noted, key=lambda one: kinds.index(one[0]))]
