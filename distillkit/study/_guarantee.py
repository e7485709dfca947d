"""Privacy guarantee of a whole study, over all runs that read the same images, including tuning runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from distillkit.privacy import ADD_OR_REMOVE_CLIENT, Guarantee, Ledger, compose
from distillkit.study._records import read_json

EXACT = (
    "accuracies of tuning runs are exact values on held-out private records, and settings were chosen by them; epsilon "
    "covers neither: do not publish choice.json or the tuning runs, or tune on public images (tune_on=)"
)
"""Remark on what a study with private tuning runs does not cover."""

CHOSEN = "epsilon is that of this run alone, without the tuning runs and the choice of settings; see Study.guarantee"
"""Remark on the epsilon of a run whose settings may have been chosen by tuning runs."""


OTHERS = (
    "{} private runs of this study on images with another description are not included: epsilon assumes that they "
    "share no record with these images, as the same images in another size, normalization or selection would"
)
"""Remark on the private runs of a study on other images."""

DIVIDED = (
    "the runs protect whole clients, but may divide the images among clients in {} ways (by task and seed), so a "
    "person need not be the same client in all of them; state the epsilon of the runs of one task and seed"
)
"""Reason why runs with different clients have no joint guarantee for a client."""


def study_guarantee(out: Path, data: str) -> Guarantee | None:
    """Return the guarantee of all runs in a study's folder that read the given images; None if none has a ledger.

    Unfinished and failed runs are included, because they may have released results.
    """
    ledgers, num_without_ledger, tuned, others, divisions = [], 0, False, 0, set[str]()
    for path in sorted(out.rglob("config.json")):
        config, ledger = read_json(path, checked=False), path.with_name("ledger.jsonl")
        notes = config.get("notes") or {}
        if "task" not in notes:
            continue
        if json.dumps(notes["task"]["with"]["data"]) != data:
            others += ledger.exists()
        else:
            tuned |= bool(notes["validation"])
            num_without_ledger += not ledger.exists()
            if ledger.exists():
                ledgers.append(Ledger(ledger))
                divisions.add(json.dumps([notes["task"], notes.get("partition_seed", config["seed"])]))
    return total_guarantee(ledgers, num_without_ledger, tuned, others, len(divisions)) if ledgers else None


def total_guarantee(
    ledgers: Sequence[Ledger], num_without_ledger: int = 0, tuned: bool = False, others: int = 0, divisions: int = 1
) -> Guarantee:
    """Return the guarantee for one record over all runs, from the `ledgers` of the runs.

    Runs that protect whole clients have one only if their images were divided among clients in the same way in all of
    them, that is, if `divisions` is 1.

    The record may belong to different clients in different runs. For each run and each combination of sigma and sample
    rate, the number of releases is therefore taken from the client that has the most of them. Delta is the largest of
    the ledgers' deltas.
    """
    total: Counter[tuple[float, float]] = Counter()
    for ledger in ledgers:
        largest: Counter[tuple[float, float]] = Counter()
        for client in sorted({str(e.client) for e in ledger.events}):
            largest |= Counter({(sigma, rate): count for sigma, rate, count in ledger.spends(client)})
        total += largest
    single, delta = [ledger.guarantee() for ledger in ledgers], max(ledger.delta for ledger in ledgers)
    bound = compose([(*pair, count) for pair, count in total.items()], delta)
    relations = dict.fromkeys(g.relation for g in single if g.relation)
    reason = next((g.reason for g in single if g.reason), "")
    if len(relations) > 1:
        reason = reason or f"the runs are private under {' and '.join(relations)}, which one epsilon cannot cover"
    if divisions > 1 and ADD_OR_REMOVE_CLIENT in relations:
        reason = reason or DIVIDED.format(divisions)
    without = f"{num_without_ledger} further runs on the same images have no ledger, so nothing bounds what they reveal"
    remarks = [
        f"the releases of {len(ledgers)} runs together{', tuning runs included' if tuned else ''}",
        *[EXACT] * tuned,
        *[OTHERS.format(others)] * bool(others),
        *[without] * bool(num_without_ledger),
        *dict.fromkeys(remark for g in single for remark in g.remarks),
    ]
    assumptions = {entry: facts for g in single for entry, facts in g.assumptions.items()}
    epsilon, relation = None if reason else bound.epsilon, next(iter(relations), "")
    return Guarantee(epsilon, delta, relation, bound.epsilon, bound.accountant, reason, tuple(remarks), assumptions)
