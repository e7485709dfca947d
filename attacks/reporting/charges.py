"""The section on a claim of privacy: what was charged, what was sent for it, and what an audit says of the claim."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attacks.audit import Balance, Verdict, ceiling, many_run, refutes
from attacks.reporting.folder import RunFolder
from attacks.reporting.page import Section, Table
from attacks.reporting.records import Sent
from attacks.reporting.verdict import Outcome

__all__ = ["Audit", "charged"]

_NONE = "None is claimed: there is no ledger. No attack that fails can stand in for one."


@dataclass(frozen=True, eq=False)
class Audit:
    """Outcomes of many runs of a mechanism, and a count of its noise, which say whether its claim can be true.

    For `report(audit=...)`: the outcomes with the claim, the count, or both.

    Args:
        inside, outside: scores of each run, [n] and [m] or [n, d] and [m, d], with a record and without it, higher
            where it seems present; every run draws everything afresh. See `attacks.audit.refutes`.
        claim: the (epsilon, delta) pairs that the mechanism claims, best its whole profile.
        noise: the noise that was drawn held against what was charged, `attacks.audit.noise_balance`.
        of: what was run, in words: the run itself, or which part of it.
        confidence: of the test, in (0, 1).

    Raises:
        TypeError, ValueError: as `attacks.audit.refutes`, and neither outcomes nor a count.
    """

    inside: Tensor | None = None
    outside: Tensor | None = None
    claim: Sequence[tuple[float, float]] = ()
    noise: Balance | None = None
    of: str = "the run"
    confidence: float = 0.99

    def __post_init__(self) -> None:
        if not isinstance(self.of, str) or not self.of.strip():
            raise TypeError(f"of must be words that say what was run, got {self.of!r}")
        if self.noise is not None and not isinstance(self.noise, Balance):
            raise TypeError(f"noise must be what noise_balance returned, got {type(self.noise).__name__}")
        self.verdict()

    def verdict(self) -> Verdict | None:
        """What `refutes` says of the outcomes; None without any.

        Raises:
            TypeError, ValueError: see the class.
        """
        if self.inside is None and self.outside is None and self.noise is not None:
            return None
        if self.inside is None or self.outside is None:
            raise ValueError("inside and outside must both be given, scores of runs with and without one record")
        return refutes(self.inside, self.outside, self.claim, confidence=self.confidence)


def charged(run: RunFolder, sent: Sent, audit: Audit | None, outcome: Outcome) -> Section:
    """What was charged to the ledger, the epsilon that the run claims, and what an audit says of it.

    Args:
        run: the folder.
        sent: what was sent.
        audit: outcomes of many runs; None where nobody made them.
        outcome: gets what is refuted, and what is missing.
    """
    section = Section("The claimed epsilon")
    claim = run.rows[-1].get("privacy") if run.rows else None
    if claim is None and run.published is not None and "epsilon" in run.published.info:
        claim = {k: v for k, v in run.published.info.items() if k in ("epsilon", "delta", "relation", "reason")}
    if claim is None and run.ledger is None:
        section.parts.append(_NONE)
    else:
        section.parts += _claimed(claim or {})
        if run.ledger is None:
            outcome.missing.append("what was charged: the ledger is not in the folder")
        else:
            section.parts += _ledger(run.ledger, sent, outcome)
    if audit is not None:
        section.parts += _audited(audit, claim or {}, outcome)
    elif section.parts[0] != _NONE:
        section.parts.append(
            "The claim was not audited. It may be false without any trace in this folder: noise that is charged and "
            "not drawn, or too small, a clip that does not clip, a record that is counted twice."
        )
        outcome.missing.append(
            "whether the claimed epsilon holds: give audit=Audit(inside, outside, claim), outcomes of a few hundred "
            "fresh runs with and without one record, and noise=noise_balance(...), a count of its noise"
        )
    return section


def _claimed(claim: dict[str, Any]) -> list[str | Table]:
    parts: list[str | Table] = []
    if claim.get("epsilon") is not None:
        parts.append(
            f"Claimed: epsilon {claim['epsilon']:.4g} at delta {claim.get('delta', float('nan')):g} "
            f"({claim.get('relation', '')}), as the run recorded it."
        )
    elif claim:
        parts.append(f"No guarantee holds: {claim.get('reason') or 'the run gives no reason'}.")
        if claim.get("nominal_epsilon") is not None:
            parts.append(f"With noise that nobody knows it would be epsilon {claim['nominal_epsilon']:.4g}.")
    parts += [f"Remark: {remark}" for remark in claim.get("remarks", [])]
    for entry, facts in claim.get("assumed_public", {}).items():
        parts.append(f"Taken to be public by {entry}: {', '.join(map(str, facts))}.")
    return parts


def _ledger(lines: list[dict[str, Any]], sent: Sent, outcome: Outcome) -> list[str | Table]:
    """What was charged, and whether everybody who sent something paid for it."""
    parts: list[str | Table] = [f"Void: {line['void']}" for line in lines if "void" in line]
    totals: dict[tuple[str, ...], tuple[int, set[str]]] = {}
    paid: Counter[str] = Counter()
    for line in lines:
        event = line.get("event")
        if isinstance(event, dict):
            sizes = [f"{float(event.get(name, math.nan)):.4g}" for name in ("sigma", "rate")]
            key = (str(event.get("mechanism", "")), *sizes, str(event.get("relation", "")))
            number, who = totals.get(key, (0, set()))
            client, count = str(event.get("client", "*")), int(event.get("count", 1))
            totals[key] = (number + count, who | {client})
            paid[client] += count
    rows = [[*key, str(releases), str(len(who))] for key, (releases, who) in totals.items()]
    parts.append(Table(["mechanism", "sigma", "rate", "neighbours", "releases", "clients"], rows))
    owing = {c: (n, paid[str(c)] + paid["*"]) for c, n in sent.replies.items() if n > paid[str(c)] + paid["*"]}
    if owing:
        debtor, (replies, charges) = max(owing.items(), key=lambda one: one[1][0] - one[1][1])
        words = f"client {debtor} sent {replies} replies and was charged for {charges} releases"
        parts.append(f"Replies that nobody paid for: {words} ({len(owing)} clients in all owe some).")
        outcome.find(
            "claim", f"its ledger is short: {words}, so that the claimed epsilon is not about all that was sent"
        )
    elif sent.replies:
        least = min(paid[str(c)] + paid["*"] - n for c, n in sent.replies.items())
        parts.append(
            f"Each of {len(sent.replies)} clients was charged for at least as many releases as it sent replies (at "
            f"least {least} more). Whether each release was noised, and with as many draws as were charged, the folder "
            "does not say: see attacks.audit."
        )
    return parts


def _audited(audit: Audit, claim: dict[str, Any], outcome: Outcome) -> list[str | Table]:
    """The count of noise, the test of the claimed profile, and the plain bound that most bugs slip under beside it."""
    parts: list[str | Table] = []
    if audit.noise is not None:
        parts.append(f"Noise of {audit.of}, counted and held against what was charged: {audit.noise}.")
        if not audit.noise.holds:
            outcome.find("claim", f"the noise of {audit.of} is not what was charged: {audit.noise}")
    verdict = audit.verdict()
    if verdict is None or audit.inside is None or audit.outside is None:
        outcome.missing.append("whether the noise that was drawn hides a record: give outcomes to Audit too")
        return parts
    epsilon, delta = max(audit.claim)
    bound = many_run(audit.inside, audit.outside, delta, confidence=audit.confidence)
    most = ceiling(min(len(audit.inside), len(audit.outside)), confidence=audit.confidence)
    runs = f"{len(audit.inside)} runs of {audit.of} with a record and {len(audit.outside)} without"
    parts += [
        f"Audited with {runs}: the claim is {verdict}.",
        f"Epsilon is at least {bound:.3g} at delta {delta:g} by these runs, and claimed to be at most {epsilon:.3g}; "
        f"so many runs could show {most:.3g} at most.",
    ]
    own = claim.get("epsilon")
    if own is not None and not any(math.isclose(own, e, rel_tol=1e-3) for e, _ in audit.claim):
        parts.append(f"The epsilon of this run, {own:.4g}, is not among the claims that were audited.")
        outcome.missing.append(f"whether the run's own epsilon {own:.4g} holds: the audited claim is another one")
    words = f"epsilon {verdict.epsilon:.3g} (delta {verdict.delta:.2g})"
    if verdict.refuted:
        outcome.find("claim", f"the claimed {words} of {audit.of} is {verdict}")
    else:
        outcome.clear("claim", f"the claimed {words} of {audit.of} is {verdict} ({runs})")
    return parts
