"""Two sections of a report that need only the data that an adversary observes in a run, and a class for these data.

One section describes the adversaries. The other section states which classes each client has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.inversion import class_bounds
from attacks.reporting._findings import Findings
from attacks.reporting._recorded_run import RecordedRun
from attacks.reporting._rendering import Section, Table
from distillkit.sets import LabeledImages

__all__ = ["ObservedData", "adversary_section", "class_section"]

_ROWS = 20


@dataclass(frozen=True, eq=False)
class ObservedData:
    """Images, updates and counts that an adversary of a run observes.

    Attributes:
        rounds: pixels of all images sent in each round, [M, C, H, W]; a published set counts as one round.
        sets: pairs of a client's index and a set that the client sent.
        updates: a triple for each update: the client's index, the change of the last layer's bias, and the client's
            number of records (None if the client did not send this number).
        replies: number of training requests to which each client replied, by client index.
    """

    rounds: list[Tensor]
    sets: list[tuple[int, LabeledImages]]
    updates: list[tuple[int, Tensor, int | None]]
    replies: dict[int, int]

    @staticmethod
    def from_run(run: RecordedRun) -> ObservedData:
        """Return the data in a run's transcript and in its published set.

        If the run has no transcript or no published set, only the other data are returned.
        """
        rounds: dict[int, list[Tensor]] = {}
        sets, updates, replies = [], [], dict[int, int]()
        for message in run.messages():
            if message.direction == "down":
                continue
            if message.exchange == "local":
                replies[message.client] = replies.get(message.client, 0) + 1
            for data in message.sets.values():
                if len(data):
                    rounds.setdefault(message.round, []).append(data.pixels().float())
                    sets.append((message.client, data))
            samples = next((v for k, v in message.values.items() if k.endswith(".samples")), None)
            size = int(samples) if isinstance(samples, float | int) and samples == int(samples) > 0 else None
            for key, value in message.values.items():
                if key.endswith(".update") and isinstance(value, dict):
                    biases = [t for n, t in value.items() if n.endswith("bias") and t.ndim == 1]
                    updates += [(message.client, biases[-1], size)] if biases else []
        if run.published_set is not None:
            rounds.setdefault(0, []).append(run.published_set.pixels().float())
        return ObservedData([torch.cat(rounds[r]) for r in sorted(rounds)], sets, updates, replies)


def adversary_section(run: RecordedRun) -> Section:
    """Return the section that lists what each adversary, such as the server, sees of a run.

    For each adversary, the section also names the files in the run's folder that contain what the adversary sees.

    Args:
        run: the recorded run.
    """
    kept = "the transcript" if run.transcript else "not in the folder"
    models = ", ".join(p.name for p in run.models.values()) or "not in the folder"
    if run.published_set is not None and not run.history:
        rows = [["recipients of the published set", "its images and labels", "set.safetensors"]]
    else:
        observer = "an observer of sums only (secure aggregation)"
        rows = [
            ["the server", "every message of every client", kept],
            [observer, "the sum of a round's replies", "not attacked separately"],
            ["recipients of the models", "the global model, the last or all", models],
        ]
    facts = [f"{n}: {run.config[n]}" for n in ("method", "task", "clients", "rounds", "seed") if n in run.config]
    section = Section("Who sees what", [Table(["adversary", "sees", "attacked here"], rows)])
    if facts:
        section.parts.insert(0, "; ".join(facts))
    recorded = run.config.get("transcript")
    if run.transcript and isinstance(recorded, dict):
        section.parts.append(
            f'The transcript holds what the adversary "{recorded.get("adversary")}" sees: {recorded.get("sees")}.'
        )
    if run.transcript and "privacy" in run.config:
        section.parts.append(
            "This is a private run. If the server adds the noise (client-level privacy), the messages show more than "
            "the models do, and the claimed epsilon does not cover them."
        )
    return section


def class_section(run: RecordedRun, observed: ObservedData, findings: Findings) -> Section:
    """Return the section on the classes that each client certainly has or does not have.

    The section uses the labels of the sets that clients send, and the change of the last layer's bias in their updates.

    Args:
        run: the recorded run.
        observed: sets and updates of the clients.
        findings: findings of the report, to which the result is added.
    """
    section = Section("Which classes clients hold")
    count = _num_classes(run, observed) or 0
    private = "privacy" in run.config
    facts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    assumptions: dict[str, None] = {}
    refused: list[str] = []
    for client, data in observed.sets:
        if count > 1 and data.labels.ndim == 1 and not private:
            found = class_bounds(count, labels=data.labels)
            facts.setdefault(client, []).append((found.present, found.absent))
            assumptions.update(dict.fromkeys(found.grounds))
    for client, bias, size in observed.updates if _plain_sgd(run) else []:
        if count < 2 or len(bias) != count:
            continue
        try:
            found = class_bounds(count, bias_change=bias, size=size)
        except ValueError as error:
            refused.append(str(error))
            continue
        facts.setdefault(client, []).append((found.present, found.absent))
        assumptions.update(dict.fromkeys(g for g in found.grounds if not g.endswith("records in all")))
    if not facts:
        other = "private messages" if private else "messages other than sets and plain updates"
        why = other if run.transcript else "no transcript"
        findings.missing.append(f"which classes each client holds: {why}; see attacks.inversion.class_bounds")
        section.parts.append(
            f"No certain conclusion ({why}). This is no protection: the classes may still be estimated."
        )
        return section
    rows, certain = [], 0
    for client in sorted(facts):
        present = torch.stack([p for p, _ in facts[client]]).any(0)
        absent = torch.stack([a for _, a in facts[client]]).any(0) & ~present
        certain += int(present.sum() + absent.sum())
        rows.append([str(client), _indices(present), _indices(absent), str(count - int(present.sum() + absent.sum()))])
    if certain:
        findings.add_leak(
            "classes",
            "its messages reveal with certainty whether a client holds a class in "
            f"{100 * certain / (len(facts) * count):.0f} % of all cases",
        )
    section.parts += [
        f"Inferred from the messages without looking at any image, assuming: {'; '.join(assumptions)}.",
        Table(["client", "certainly holds", "certainly lacks", "unknown"], rows[:_ROWS]),
    ]
    if len(rows) > _ROWS:
        section.parts.append(f"{len(rows) - _ROWS} more clients are not shown; the share above includes them.")
    if refused:
        section.parts.append(f"{len(refused)} updates allow no certain conclusion: {refused[0]}.")
    return section


def _indices(mask: Tensor) -> str:
    return ", ".join(map(str, mask.nonzero().flatten().tolist())) or "none"


def _num_classes(run: RecordedRun, observed: ObservedData) -> int | None:
    labels = run.config.get("labels")
    recorded = labels.get("with", {}).get("num_classes") if isinstance(labels, dict) else None
    known = {data.num_classes for _, data in observed.sets} | ({recorded} if isinstance(recorded, int) else set())
    return known.pop() if len(known) == 1 else None


def _plain_sgd(run: RecordedRun) -> bool:
    """Return whether clients trained by plain SGD on cross-entropy without add-ons.

    With such training, the sign of the change of the output layer's bias reliably shows which classes were present.
    """
    recipe = run.config.get("recipe")
    if not isinstance(recipe, dict) or set(recipe) != {"object", "with"} or recipe["object"] != "fl:FedAvg":
        return False
    options = run.settings
    optimizer = run.client_optimizer
    plain = optimizer.get("name") == "sgd" and not optimizer.get("weight_decay") and options.get("objective") is None
    return plain and options.get("phases") is None and str(run.config.get("task", "")).startswith("Classification(")
