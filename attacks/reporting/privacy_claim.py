"""Report section on a run's claim of differential privacy: a check of the ledger, and an audit of the claim."""

from __future__ import annotations

import math
import operator
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attacks.audit import ClaimTest, NoiseAudit, audit_claim, epsilon_lower_bound, max_lower_bound
from attacks.reporting._findings import Findings
from attacks.reporting._recorded_run import RecordedRun
from attacks.reporting._rendering import Section, Table
from attacks.reporting._section_messages import ObservedData
from distillkit.privacy import Ledger

__all__ = ["Audit"]

_CONSTANT_REASONS = ("failed; the reason is in its own log", "did not answer before its deadline", "lost")
"""Beginnings of reasons that do not depend on records."""

_NONE = "No epsilon is claimed: there is no ledger. A failed attack does not replace a guarantee."


@dataclass(frozen=True, eq=False)
class Audit:
    """Evidence for `report(audit=...)` with which the report tests a privacy claim.

    Pass the scores of many runs of the mechanism (`inside`, `outside` and `claim`), a comparison of the drawn noise
    with the recorded noise (`noise`), or both.

    Args:
        inside: scores of the runs with one chosen record, [n] or [n, d], higher if the record seems present. Every run
            must draw new randomness. See `attacks.audit.audit_claim`.
        outside: scores of the runs without this record, [m] or [m, d].
        claim: (epsilon, delta) pairs that the mechanism claims, preferably many pairs of its privacy profile.
        noise: result of `attacks.audit.audit_noise`, which compares the noise that the run drew with the noise
            that its privacy ledger recorded.
        mechanism: description of the audited mechanism, which is the run itself or a part of it.
        confidence: confidence of the test, in (0, 1).

    Raises:
        TypeError, ValueError: the scores or the claim are not valid (see `attacks.audit.audit_claim`), or neither
            scores nor a comparison of noise were given.
    """

    inside: Tensor | None = None
    outside: Tensor | None = None
    claim: Sequence[tuple[float, float]] = ()
    noise: NoiseAudit | None = None
    mechanism: str = "the run"
    confidence: float = 0.99

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, str) or not self.mechanism.strip():
            raise TypeError(f"mechanism must describe what was run, got {self.mechanism!r}")
        if self.noise is not None and not isinstance(self.noise, NoiseAudit):
            raise TypeError(f"noise must be the result of audit_noise, got {type(self.noise).__name__}")
        self.verdict()

    def verdict(self) -> ClaimTest | None:
        """Test the attribute `claim` by `audit_claim` with the scores `inside` and `outside`, and return the result.

        The result is None if no scores were given.

        Raises:
            TypeError, ValueError: the scores or the claim are not valid; see `attacks.audit.audit_claim`.
        """
        if self.inside is None and self.outside is None and self.noise is not None:
            return None
        if self.inside is None or self.outside is None:
            raise ValueError("inside and outside must both be given: scores of runs with one record and without it")
        return audit_claim(self.inside, self.outside, self.claim, confidence=self.confidence)


def claim_section(run: RecordedRun, observed: ObservedData, audit: Audit | None, findings: Findings) -> Section:
    """Return the section on the charges in the privacy ledger, the claimed epsilon, and its audit.

    Args:
        run: the recorded run.
        observed: data that an adversary observes. The number of each client's replies is compared with the charges in
            the ledger.
        audit: evidence from the user with which the claim is tested; None if the user passed none.
        findings: findings of the report, to which the findings of this section are added.
    """
    section = Section("The claimed epsilon")
    claim = run.history[-1].get("privacy") if run.history else None
    if claim is None and run.published_set is not None and "epsilon" in run.published_set.info:
        claim = {k: v for k, v in run.published_set.info.items() if k in ("epsilon", "delta", "relation", "reason")}
    if claim is None and run.ledger is None:
        section.parts.append(_NONE)
    else:
        section.parts += _claimed(claim or {})
        if run.ledger is None:
            findings.missing.append("the charges: the ledger is not in the folder")
        else:
            section.parts += [*_recomputed(run, claim or {}, findings), *_ledger(run.ledger, observed, findings)]
        section.parts += _exact_numbers(run, findings)
    if audit is not None:
        section.parts += _audited(audit, claim or {}, findings)
    elif section.parts[0] != _NONE:
        section.parts.append(
            "The claim was not audited. It may be false without any trace in this folder: noise that is charged but "
            "not drawn or too small, a clip that has no effect, a record that is counted twice."
        )
        findings.missing.append(
            "whether the claimed epsilon holds: give audit=Audit(inside, outside, claim), outcomes of a few hundred "
            "fresh runs with and without one record, and noise=audit_noise(...), a count of its noise"
        )
    return section


def _claimed(claim: dict[str, Any]) -> list[str | Table]:
    parts: list[str | Table] = []
    if claim.get("epsilon") is not None:
        parts.append(
            f"Claimed: epsilon {claim['epsilon']:.4g} at delta {claim.get('delta', float('nan')):g} "
            f"({claim.get('relation', '')}), as the run recorded it."
        )
        if condition := claim.get("valid_if"):
            parts.append(f"It holds if {condition}.")
    elif claim:
        parts.append(f"No guarantee holds: {claim.get('reason') or 'the run records no reason'}.")
        if claim.get("nominal_epsilon") is not None:
            parts.append(f"With secret noise it would be epsilon {claim['nominal_epsilon']:.4g}.")
    parts += [f"Remark: {remark}" for remark in claim.get("remarks", [])]
    for entry, facts in claim.get("assumed_public", {}).items():
        parts.append(f"Assumed public by {entry}: {', '.join(map(str, facts))}.")
    return parts


def _recomputed(run: RecordedRun, claim: dict[str, Any], findings: Findings) -> list[str | Table]:
    """Compute epsilon again from the run's ledger, and compare the result with the claim and with `config.json`.

    The ledger's files are copied to a temporary folder, and the copy is read.

    Args:
        run: the recorded run, with a ledger.
        claim: privacy guarantee that the run states, from the last row of its history or from the metadata of the set
            that it published.
        findings: findings of the report, to which contradictions are added.

    Returns:
        Texts and tables for the report.
    """
    with tempfile.TemporaryDirectory() as folder:
        for path in run.path.glob("ledger.jsonl*"):
            if path.suffix in (".jsonl", ".head"):
                shutil.copyfile(path, Path(folder) / path.name)
        try:
            ledger = Ledger(Path(folder) / "ledger.jsonl")
            found, events, delta = ledger.guarantee(delta=claim.get("delta")), ledger.events, ledger.delta
        except ValueError as error:
            words = str(error).replace(folder, str(run.path))
            findings.add_leak("claim", f"nothing supports its claim, because its ledger is not intact: {words}")
            return [f"The ledger is not intact: {words}."]
    wrong, claimed = [], claim.get("epsilon")
    if claimed is not None and found.epsilon is None:
        wrong.append(f"it claims epsilon {claimed:.4g}, but by its ledger there is no guarantee: {found.reason}")
    elif claimed is not None and found.nominal > claimed * (1 + 1e-3):
        wrong.append(f"it claims epsilon {claimed:.4g}, but the charges in its ledger compose to {found.nominal:.4g}")
    recorded = run.config.get("privacy") or {}
    deltas = {d for d in (claim.get("delta"), recorded.get("delta"), delta) if d is not None}
    if len(deltas) > 1:
        wrong.append(f"its claim, config.json and ledger state different values of delta, {sorted(deltas)}")
    if claimed is not None and recorded.get("secret") is not None:
        wrong.append("its noise was drawn from the seed in config.json, so it is known")
    method = str(run.config.get("method", ""))
    for name, worst, best in (("sigma", max, operator.gt), ("rate", min, operator.lt)):
        options = [float(v) for v in re.findall(rf"\b{name}\w*=([0-9.][0-9.eE+-]*)", method)]
        charged = [getattr(event, name) for event in events]
        if options and charged and best(worst(charged), worst([*options, *([1.0] if name == "rate" else [])])):
            wrong.append(
                f"it charged releases of {name} {worst(charged):g}, but the {name} of its method is "
                f"{worst(options):g} (config.json)"
            )
    for words in wrong:
        findings.add_leak("claim", words)
    return [f"Computed again from the ledger: {found}.", *(f"Contradiction: {words}." for words in wrong)]


def _exact_numbers(run: RecordedRun, findings: Findings) -> list[str | Table]:
    """Find values in the history that clients sent without added noise. Epsilon does not cover these values.

    Args:
        run: the recorded run.
        findings: findings of the report, to which these values are added as a leak.

    Returns:
        Sentences for the report, one for each kind of value.
    """
    rows = run.history
    reasons = {str(why) for row in rows for why in (row.get("failed") or {}).values()}
    telling = sorted(why for why in reasons if not why.startswith(_CONSTANT_REASONS))
    own = sorted({k for row in rows for k in row if k.startswith(("accuracy_clients", "accuracy_personal"))})
    noted = sorted({k for row in rows for k in row.get("noted") or {}})
    found = [
        *([f"the reasons of {len(telling)} failures, such as {telling[0][:80]!r}"] if telling else []),
        *([f"results on the clients' own test images ({', '.join(own)})"] if own else []),
        *([f"sums of exact counts ({', '.join(noted)})"] if noted else []),
        *(["which clients have no images (empty)"] if any(row.get("empty") for row in rows) else []),
    ]
    if found:
        findings.add_leak("claim", f"its history holds what epsilon does not cover: {'; '.join(found)}")
    return [f"Not covered by epsilon, but in the history: {words}." for words in found]


def _ledger(lines: list[dict[str, Any]], observed: ObservedData, findings: Findings) -> list[str | Table]:
    """Summarize the charges in the ledger, and check that each client was charged for all of its replies.

    Args:
        lines: lines of the ledger.
        observed: numbers of replies of the clients.
        findings: findings of the report, to which replies without a charge are added.

    Returns:
        Texts and a table for the report.
    """
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
    uncharged = {c: (n, paid[str(c)] + paid["*"]) for c, n in observed.replies.items() if n > paid[str(c)] + paid["*"]}
    if uncharged:
        worst, (replies, charges) = max(uncharged.items(), key=lambda one: one[1][0] - one[1][1])
        words = f"client {worst} sent {replies} replies and was charged for {charges} releases"
        parts.append(f"Replies without a charge: {words} ({len(uncharged)} clients in total have such replies).")
        findings.add_leak(
            "claim",
            f"its ledger is incomplete: {words}, so the claimed epsilon does not cover everything that was sent",
        )
    elif observed.replies:
        least = min(paid[str(c)] + paid["*"] - n for c, n in observed.replies.items())
        parts.append(
            f"Each of {len(observed.replies)} clients was charged for at least as many releases as it sent replies "
            f"(the smallest surplus is {least}). The folder does not show whether each release was noised with as many "
            "draws as were charged: see attacks.audit."
        )
    return parts


def _audited(audit: Audit, claim: dict[str, Any], findings: Findings) -> list[str | Table]:
    """Test a claim with the results of audits, and compute a lower bound on epsilon.

    Args:
        audit: results of audits that the user passed to `report`.
        claim: privacy guarantee that the run states.
        findings: findings of the report, to which the results are added.

    Returns:
        Texts for the report.
    """
    parts: list[str | Table] = []
    if audit.noise is not None:
        parts.append(f"Noise of {audit.mechanism}, drawn compared with charged: {audit.noise}.")
        if not audit.noise.holds:
            findings.add_leak("claim", f"the noise of {audit.mechanism} differs from what was charged: {audit.noise}")
    verdict = audit.verdict()
    if verdict is None or audit.inside is None or audit.outside is None:
        findings.missing.append("whether the drawn noise hides a record: give outcomes to Audit too")
        return parts
    epsilon, delta = max(audit.claim)
    bound = epsilon_lower_bound(audit.inside, audit.outside, delta, confidence=audit.confidence)
    most = max_lower_bound(min(len(audit.inside), len(audit.outside)), confidence=audit.confidence)
    runs = f"{len(audit.inside)} runs of {audit.mechanism} with a record and {len(audit.outside)} without"
    parts += [
        f"Audited with {runs}: the claim is {verdict}.",
        f"These runs show epsilon at least {bound:.3g} at delta {delta:g}; claimed is at most {epsilon:.3g}. The "
        f"largest bound that so many runs can show is {most:.3g}.",
    ]
    own = claim.get("epsilon")
    if own is not None and not any(math.isclose(own, e, rel_tol=1e-3) for e, _ in audit.claim):
        parts.append(f"The epsilon of this run, {own:.4g}, is not among the audited claims.")
        findings.missing.append(f"whether the run's own epsilon {own:.4g} holds: a different claim was audited")
    words = f"epsilon {verdict.epsilon:.3g} (delta {verdict.delta:.2g})"
    if verdict.refuted:
        findings.add_leak("claim", f"the claimed {words} of {audit.mechanism} is {verdict}")
    else:
        findings.add_negative("claim", f"the claimed {words} of {audit.mechanism} is {verdict} ({runs})")
    return parts
