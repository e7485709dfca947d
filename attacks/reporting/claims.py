"""Sections on what needs no records: who saw what, and which classes clients hold."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.inversion import held_classes
from attacks.reporting.folder import RunFolder
from attacks.reporting.page import Section, Table
from attacks.reporting.records import Sent
from attacks.reporting.verdict import Outcome

__all__ = ["held", "saw"]

_ROWS = 20


def saw(run: RunFolder) -> Section:
    """What each adversary sees of this run, and whether the folder has it.

    Args:
        run: the folder.
    """
    kept = "the transcript" if run.transcript else "not in the folder"
    models = ", ".join(p.name for p in run.models.values()) or "not in the folder"
    if run.published is not None and not run.rows:
        rows = [["whoever gets the published set", "its images and labels", "set.safetensors"]]
    else:
        rows = [
            ["the server", "every message of every client, one by one", kept],
            ["whoever sees sums alone (secure aggregation)", "a round's replies added up", "not attacked by itself"],
            ["whoever gets the models", "the global model, the last or all", models],
        ]
    facts = [f"{n}: {run.config[n]}" for n in ("method", "task", "clients", "rounds", "seed") if n in run.config]
    section = Section("Who sees what", [Table(["adversary", "sees", "looked at"], rows)])
    if facts:
        section.parts.insert(0, "; ".join(facts))
    said = run.config.get("transcript")
    if run.transcript and isinstance(said, dict):
        section.parts.append(f'The transcript is what the adversary "{said.get("adversary")}" has: {said.get("sees")}.')
    if run.transcript and "privacy" in run.config:
        section.parts.append(
            "This is a private run. If its noise is added by the server (client-level privacy), the messages are more "
            "than whoever gets the models sees, and the claimed epsilon is not about them."
        )
    return section


def held(run: RunFolder, sent: Sent, outcome: Outcome) -> Section:
    """Which classes clients certainly hold or lack, after the labels of their sets and the biases of their updates.

    Args:
        run: the folder.
        sent: what was sent.
        outcome: gets the finding.
    """
    section = Section("Which classes clients hold")
    count = _classes(run, sent) or 0
    private = "privacy" in run.config
    facts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    grounds: dict[str, None] = {}
    refused: list[str] = []
    for client, made in sent.sets:
        if count > 1 and made.labels.ndim == 1 and not private:
            found = held_classes(count, labels=made.labels)
            facts.setdefault(client, []).append((found.present, found.absent))
            grounds.update(dict.fromkeys(found.grounds))
    plain = _plain_sgd(run)
    for client, bias, size in sent.updates if plain else []:
        if count < 2 or len(bias) != count:
            continue
        try:
            found = held_classes(count, bias_change=bias, size=size)
        except ValueError as error:
            refused.append(str(error))
            continue
        facts.setdefault(client, []).append((found.present, found.absent))
        grounds.update(dict.fromkeys(g for g in found.grounds if not g.endswith("records in all")))
    if not facts:
        other = "private messages" if private else "other messages than sets and plain updates"
        why = other if run.transcript else "no transcript"
        outcome.missing.append(f"which classes each client holds: {why}; see attacks.inversion.held_classes")
        section.parts.append(f"Nothing certain was read off ({why}). That is no protection: likelihoods remain.")
        return section
    rows, certain = [], 0
    for client in sorted(facts):
        present = torch.stack([p for p, _ in facts[client]]).any(0)
        absent = torch.stack([a for _, a in facts[client]]).any(0) & ~present
        certain += int(present.sum() + absent.sum())
        rows.append([str(client), _numbers(present), _numbers(absent), str(count - int(present.sum() + absent.sum()))])
    share = certain / (len(facts) * count)
    if certain:
        outcome.find(
            "classes",
            f"its messages say for certain whether a client holds a class in {100 * share:.0f} % of all cases",
        )
    section.parts += [
        f"Read off the messages without a look at any image, given: {'; '.join(grounds)}.",
        Table(["client", "certainly holds", "certainly lacks", "open"], rows[:_ROWS]),
    ]
    if len(rows) > _ROWS:
        section.parts.append(f"And so on for {len(rows) - _ROWS} more clients; the share at the head is of all.")
    if refused:
        section.parts.append(f"Of {len(refused)} updates nothing certain follows: {refused[0]}.")
    return section


def _numbers(which: Tensor) -> str:
    return ", ".join(map(str, which.nonzero().flatten().tolist())) or "none"


def _classes(run: RunFolder, sent: Sent) -> int | None:
    labels = run.config.get("labels")
    said = labels.get("with", {}).get("num_classes") if isinstance(labels, dict) else None
    known = {made.num_classes for _, made in sent.sets} | ({said} if isinstance(said, int) else set())
    return known.pop() if len(known) == 1 else None


def _plain_sgd(run: RunFolder) -> bool:
    """Whether updates are of plain SGD on cross-entropy, without add-ons: what the sign of a bias's change needs."""
    recipe = run.config.get("recipe")
    if not isinstance(recipe, dict) or set(recipe) != {"object", "with"} or recipe["object"] != "fl:FedAvg":
        return False
    own = run.settings
    plain = own.get("optimizer") == "sgd" and not own.get("weight_decay") and own.get("objective") is None
    return plain and own.get("phases") is None and str(run.config.get("task", "")).startswith("Classification(")
