"""Report section on a run's claim of differential privacy: a check of the ledger, and an audit of the claim."""

from __future__ import annotations

import math
import operator
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attacks.audit import ClaimTest, NoiseAudit, audit_claim, epsilon_lower_bound, max_lower_bound
from attacks.reporting._evidence import Evidence
from attacks.reporting._page import Section
from attacks.reporting._recorded_run import RecordedRun
from distillkit._utils.tables import Table
from distillkit.privacy import Ledger

_CONSTANT_REASONS = ("failed; the reason is in its own log", "did not answer before its deadline", "lost")
"""Beginnings of reasons that do not depend on records."""


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


def claim_section(found: Evidence, audit: Audit | None) -> Section:
    """Return the section on the charges in the privacy ledger, the claimed epsilon, and its audit.

    Args:
        found: the report's evidence. The number of each client's replies is compared with the charges in the ledger.
        audit: evidence from the user with which the claim is tested; None if the user passed none.
    """
    run, section = found.run, Section("The claimed epsilon")
    claim = run.history[-1].get("privacy") if run.history else None
    if claim is None and run.published_set is not None and "epsilon" in run.published_set.info:
        claim = {k: v for k, v in run.published_set.info.items() if k in ("epsilon", "delta", "relation", "reason")}
    stated, charged = claim is not None, (run.path / "ledger.jsonl").exists()
    claim = claim or {}
    if not stated and not charged:
        section.add("No epsilon is claimed: there is no ledger. A failed attack does not replace a guarantee.")
    else:
        _add_claim(section, claim)
        if charged:
            _add_ledger(section, found, claim)
        else:
            section.missing.append("the charges: the ledger is not in the folder")
        _add_exact_numbers(section, run)
    if audit is not None:
        _add_audit(section, audit, claim)
    elif stated or charged:
        section.add(
            "The claim was not audited. It may be false without any trace in this folder: noise that is charged but "
            "not drawn or too small, a clip that has no effect, a record that is counted twice."
        )
        section.missing.append(
            "whether the claimed epsilon holds: give audit=Audit(inside, outside, claim), outcomes of a few hundred "
            "fresh runs with and without one record, and noise=audit_noise(...), a count of its noise"
        )
    return section


def _add_claim(section: Section, claim: dict[str, Any]) -> None:
    if claim.get("epsilon") is not None:
        at = f"at delta {claim.get('delta', float('nan')):g} ({claim.get('relation', '')})"
        section.add(f"Claimed: epsilon {claim['epsilon']:.4g} {at}, as the run recorded it.")
        if condition := claim.get("valid_if"):
            section.add(f"It holds if {condition}.")
    elif claim:
        section.add(f"No guarantee holds: {claim.get('reason') or 'the run records no reason'}.")
        if claim.get("nominal_epsilon") is not None:
            section.add(f"With secret noise it would be epsilon {claim['nominal_epsilon']:.4g}.")
    section.add(*(f"Remark: {remark}" for remark in claim.get("remarks", [])))
    for entry, facts in claim.get("assumed_public", {}).items():
        section.add(f"Assumed public by {entry}: {', '.join(map(str, facts))}.")


def _add_ledger(section: Section, found: Evidence, claim: dict[str, Any]) -> None:
    """Compute epsilon again from a copy of the run's ledger, list its charges, and compare both with the run."""
    run = found.run
    with tempfile.TemporaryDirectory() as folder:
        for path in run.path.glob("ledger.jsonl*"):
            if path.suffix in (".jsonl", ".head"):
                shutil.copyfile(path, Path(folder) / path.name)
        try:
            ledger = Ledger(Path(folder) / "ledger.jsonl")
            again, events, delta = ledger.guarantee(delta=claim.get("delta")), ledger.events, ledger.delta
        except ValueError as error:
            words = str(error).replace(folder, str(run.path))
            section.add(f"The ledger is not intact: {words}.")
            section.leak("claim", f"nothing supports its claim, because its ledger is not intact: {words}")
            return
    section.add(f"Computed again from the ledger: {again}.")
    claimed, wrong = claim.get("epsilon"), []
    if claimed is not None and again.epsilon is None:
        wrong.append(f"it claims epsilon {claimed:.4g}, but by its ledger there is no guarantee: {again.reason}")
    elif claimed is not None and again.nominal > claimed * (1 + 1e-3):
        wrong.append(f"it claims epsilon {claimed:.4g}, but the charges in its ledger compose to {again.nominal:.4g}")
    recorded = run.config.get("privacy") or {}
    deltas = {d for d in (claim.get("delta"), recorded.get("delta"), delta) if d is not None}
    if len(deltas) > 1:
        wrong.append(f"its claim, config.json and ledger state different values of delta, {sorted(deltas)}")
    if claimed is not None and recorded.get("secret") is not None:
        wrong.append("its noise was drawn from the seed in config.json, so it is known")
    for name, worst, better in (("sigma", max, operator.gt), ("rate", min, operator.lt)):
        options, charged = run.options(name), [getattr(event, name) for event in events]
        if options and charged and better(worst(charged), worst(options)):
            method = f"the {name} of its method is {worst(options):g} (config.json)"
            wrong.append(f"it charged releases of {name} {worst(charged):g}, but {method}")
    for words in wrong:
        section.add(f"Contradiction: {words}.")
        section.leak("claim", words)
    _add_charges(section, events, found.observed.replies)


def _add_charges(section: Section, events: Sequence[Any], replies: dict[int, int]) -> None:
    """List the charges of a ledger, and check that each client was charged for all of its replies."""
    releases, paid = Counter[tuple[str, ...]](), Counter[str]()
    clients: dict[tuple[str, ...], set[str]] = {}
    for event in events:
        kind = (event.mechanism, f"{event.sigma:.4g}", f"{event.rate:.4g}", event.relation)
        releases[kind] += event.count
        paid[str(event.client)] += event.count
        clients.setdefault(kind, set()).add(str(event.client))
    cells = [(*kind, str(count), str(len(clients[kind]))) for kind, count in releases.items()]
    section.add(Table(("mechanism", "sigma", "rate", "neighbours", "releases", "clients"), cells, left=1))
    surplus = {client: paid[str(client)] + paid["*"] - count for client, count in replies.items()}
    uncharged = [client for client, left in surplus.items() if left < 0]
    if uncharged:
        worst = min(uncharged, key=surplus.__getitem__)
        charges = replies[worst] + surplus[worst]
        words = f"client {worst} sent {replies[worst]} replies and was charged for {charges} releases"
        section.add(f"Replies without a charge: {words} ({len(uncharged)} clients in total have such replies).")
        section.leak("claim", f"its ledger is incomplete: {words}, so epsilon does not cover all that was sent")
    elif surplus:
        least = f"as many releases as it sent replies (the smallest surplus is {min(surplus.values())})"
        draws = "whether each release was noised with as many draws as were charged: see attacks.audit"
        section.add(
            f"Each of {len(surplus)} clients was charged for at least {least}. The folder does not show {draws}."
        )


def _add_exact_numbers(section: Section, run: RecordedRun) -> None:
    """Add the values in the history that clients sent without added noise. Epsilon does not cover these values."""
    rows, found = run.history, []
    reasons = {str(why) for row in rows for why in (row.get("failed") or {}).values()}
    if telling := sorted(why for why in reasons if not why.startswith(_CONSTANT_REASONS)):
        found.append(f"the reasons of {len(telling)} failures, such as {telling[0][:80]!r}")
    if own := sorted({k for row in rows for k in row if k.startswith(("accuracy_clients", "accuracy_personal"))}):
        found.append(f"results on the clients' own test images ({', '.join(own)})")
    if noted := sorted({k for row in rows for k in row.get("noted") or {}}):
        found.append(f"sums of exact counts ({', '.join(noted)})")
    if any(row.get("empty") for row in rows):
        found.append("which clients have no images (empty)")
    if found:
        section.leak("claim", f"its history holds what epsilon does not cover: {'; '.join(found)}")
    section.add(*(f"Not covered by epsilon, but in the history: {words}." for words in found))


def _add_audit(section: Section, audit: Audit, claim: dict[str, Any]) -> None:
    """Test a claim with the results of audits, and compute a lower bound on epsilon."""
    if audit.noise is not None:
        section.add(f"Noise of {audit.mechanism}, drawn compared with charged: {audit.noise}.")
        if not audit.noise.holds:
            section.leak("claim", f"the noise of {audit.mechanism} differs from what was charged: {audit.noise}")
    verdict = audit.verdict()
    if verdict is None or audit.inside is None or audit.outside is None:
        section.missing.append("whether the drawn noise hides a record: give outcomes to Audit too")
        return
    epsilon, delta = max(audit.claim)
    bound = epsilon_lower_bound(audit.inside, audit.outside, delta, confidence=audit.confidence)
    most = max_lower_bound(min(len(audit.inside), len(audit.outside)), confidence=audit.confidence)
    runs = f"{len(audit.inside)} runs of {audit.mechanism} with a record and {len(audit.outside)} without"
    shown = f"epsilon at least {bound:.3g} at delta {delta:g}; claimed is at most {epsilon:.3g}"
    section.add(f"Audited with {runs}: the claim is {verdict}.")
    section.add(f"These runs show {shown}. The largest bound that so many runs can show is {most:.3g}.")
    own = claim.get("epsilon")
    if own is not None and not any(math.isclose(own, e, rel_tol=1e-3) for e, _ in audit.claim):
        section.add(f"The epsilon of this run, {own:.4g}, is not among the audited claims.")
        section.missing.append(f"whether the run's own epsilon {own:.4g} holds: a different claim was audited")
    words = f"the claimed epsilon {verdict.epsilon:.3g} (delta {verdict.delta:.2g}) of {audit.mechanism} is {verdict}"
    if verdict.refuted:
        section.leak("claim", words)
    else:
        section.negatives.append(("claim", f"{words} ({runs})"))
