"""Sections of a report on what each adversary sees, and on the classes that each client has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attacks.inversion import class_bounds
from attacks.reporting._evidence import Evidence
from attacks.reporting._page import Section
from attacks.reporting._recorded_run import RecordedRun
from distillkit._utils.tables import Table

_ROWS = 20


def adversary_section(run: RecordedRun) -> Section:
    """Return the section that lists what each adversary, such as the server, sees of a run.

    For each adversary, the section also names the files in the run's folder that contain what the adversary sees.
    """
    models = ", ".join(p.name for p in run.models.values()) or "not in the folder"
    cells = [
        ("the server", "every message of every client", "the transcript" if run.transcript else "not in the folder"),
        ("an observer of sums only (secure aggregation)", "the sum of a round's replies", "not attacked separately"),
        ("recipients of the models", "the global model, the last or all", models),
    ]
    if run.published_set is not None and not run.history:
        cells = [("recipients of the published set", "its images and labels", "set.safetensors")]
    config = {**run.config, **({"rounds": len(run.history)} if run.history else {})}  # a resumed run may have more
    facts = [f"{n}: {config[n]}" for n in ("method", "task", "clients", "rounds", "seed") if n in config]
    section = Section("Who sees what", ["; ".join(facts)] if facts else [])
    if not run.transcript and run.published_set is None:
        section.missing.append(f"what was sent: the run kept no transcript; {run.transcript_hint}")
    section.add(Table(("adversary", "sees", "attacked here"), cells, left=3))
    recorded = run.config.get("transcript")
    if run.transcript and isinstance(recorded, dict):
        who, what = recorded.get("adversary"), recorded.get("sees")
        section.add(f'The transcript holds what the adversary "{who}" sees: {what}.')
    if run.transcript and "privacy" in run.config:
        section.add(
            "This is a private run. If the server adds the noise (client-level privacy), the messages show more than "
            "the models do, and the claimed epsilon does not cover them."
        )
    return section


def class_section(found: Evidence) -> Section:
    """Return the section on the classes that each client certainly has or does not have.

    The section uses the labels of the sets that clients send, and the change of the last layer's bias in their updates.
    """
    run, section = found.run, Section("Which classes clients hold")
    counts = {data.num_classes for _, data in found.observed.sets} | {run.num_classes or 0} - {0}
    count = counts.pop() if len(counts) == 1 else 0
    facts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    assumptions: dict[str, None] = {}
    refused: list[str] = []
    private = "privacy" in run.config
    seen: list[tuple[int, dict[str, Any]]] = []
    if not private:
        seen += [(c, {"labels": data.labels}) for c, data in found.observed.sets if data.labels.ndim == 1]
    if _plain_sgd(run):
        updates = [update for update in found.observed.updates if len(update[1]) == count]
        seen += [(c, {"bias_change": bias, "size": size}) for c, bias, size in updates]
    for client, observed in seen if count > 1 else ():
        try:
            bounds = class_bounds(count, **observed)
        except ValueError as error:
            refused.append(str(error))
            continue
        facts.setdefault(client, []).append((bounds.present, bounds.absent))
        assumptions.update(dict.fromkeys(g for g in bounds.grounds if not g.endswith("records in all")))
    if not facts:
        other = "private messages" if private else "messages other than sets and plain updates"
        why = other if run.transcript else "no transcript"
        section.missing.append(f"which classes each client holds: {why}; see attacks.inversion.class_bounds")
        section.add(f"No certain conclusion ({why}). This is no protection: the classes may still be estimated.")
        return section
    cells, certain = [], 0
    for client in sorted(facts):
        present, absent = (torch.stack(masks).any(0) for masks in zip(*facts[client]))
        absent &= ~present
        known = int(present.sum() + absent.sum())
        certain += known
        cells.append((str(client), _indices(present), _indices(absent), str(count - known)))
    if certain:
        share = f"{100 * certain / (len(facts) * count):.0f} % of all cases"
        section.leak("classes", f"its messages reveal with certainty whether a client holds a class in {share}")
    section.add(
        f"Inferred from the messages without looking at any image, assuming: {'; '.join(assumptions)}.",
        Table(("client", "certainly holds", "certainly lacks", "unknown"), cells[:_ROWS], left=3),
    )
    if len(cells) > _ROWS:
        section.add(f"{len(cells) - _ROWS} more clients are not shown; the share above includes them.")
    if refused:
        section.add(f"{len(refused)} updates allow no certain conclusion: {refused[0]}.")
    return section


def _indices(mask: Tensor) -> str:
    return ", ".join(map(str, mask.nonzero().flatten().tolist())) or "none"


def _plain_sgd(run: RecordedRun) -> bool:
    """Return whether the sign of the change of the output layer's bias reliably shows which classes were present.

    This is the case if clients trained by plain SGD on cross-entropy without add-ons.
    """
    options = run.plain_fedavg
    if options is None or options["optimizer"] != "sgd" or options.get("weight_decay"):
        return False
    return options.get("objective") is None and "phases" not in options
