"""Which message of a run a report inverts, and how the folder says that it is replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attacks.inversion import FedAvgUpdate, Victim
from attacks.reporting.folder import RunFolder
from attacks.transcript import Seen
from distillkit._utils import check

__all__ = ["Inversion", "fedavg", "not_plain", "pair", "sizes"]


@dataclass(frozen=True, eq=False)
class Inversion:
    """Which message a report inverts, and how long it may look. For `report(invert=...)`.

    One client's message of one round stands for all: the least records, the easiest prey.

    Args:
        owners: for each client the numbers of its records among `members`, int64 [n_k] each, as
            `fl.study.load(folder).assign().owners` has them. Without them nobody can say whether what comes back is the
            client's. The attack does not see them.
        victim: `victim(down, up)`: of what the client got and what it sent in a round's training
            (`attacks.transcript.Seen`), the message with its replay. None: an update of plain FedAvg, whose replay the
            folder and `network` tell.
        client: whose message; None for the client with the fewest records.
        round: of which round; None for the first that it answered.
        largest: more records in a message than this are not tried, as hardly anything comes back of so many at once.
        steps, restarts: of `invert_message`.
        known_labels: whether the attack is told the labels of the client's records, which `members` must then have, in
            place of reading them off the message: what comes back at most to one who learned them elsewhere.
        total_variation: of `invert_message`; 0.01 suits small images of figures, the paper's 0.1 photographs.
        seconds: a search that by its first steps would take longer is left out, and the report says what it would take.

    Raises:
        TypeError, ValueError: options of another type or out of range.
    """

    owners: Sequence[Tensor] | None = None
    victim: Callable[[Seen, Seen], Victim] | None = None
    client: int | None = None
    round: int | None = None
    largest: int = 16
    steps: int = 300
    restarts: int = 1
    known_labels: bool = False
    total_variation: float = 0.01
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.owners is not None:
            for own in check.sequence(self.owners, "owners", "index tensors, one a client"):
                if not isinstance(own, Tensor) or own.ndim != 1 or own.is_floating_point() or own.dtype == torch.bool:
                    raise TypeError(f"owners must be int tensors of members' numbers, one a client, got {own!r:.60}")
        if self.victim is not None:
            check.callable_with(self.victim, "victim", ("down", "up"), "a function of both messages to a Victim")
        for name in ("largest", "steps", "restarts"):
            check.positive_int(getattr(self, name), name)
        for name, least in (("client", 0), ("round", 1)):
            if getattr(self, name) is not None:
                check.positive_int(getattr(self, name), name, least=least)
        if check.boolean(self.known_labels, "known_labels") and self.owners is None:
            raise ValueError("known_labels are those of the client's records: give owners too")
        check.real_number(self.total_variation, "total_variation", least=0)
        check.real_number(self.seconds, "seconds", above=0)


def sizes(run: RunFolder, invert: Inversion) -> dict[int, int]:
    """How many records stand behind each client's message; empty if nobody says.

    Args:
        run: the folder, with a transcript.
        invert: its `owners` are believed first, then the weights of plain averaging.
    """
    answered, said = set(), {}
    for message in run.messages():
        if message.direction == "up" and message.exchange == "local" and invert.round in (None, message.round):
            answered.add(message.client)
            weight = next((v for k, v in message.values.items() if k.endswith(".samples")), None)
            if isinstance(weight, float | int) and run.settings.get("weights") == "samples":
                said[message.client] = int(weight)
    if invert.owners is not None:
        said = {c: len(own) for c, own in enumerate(invert.owners) if len(own)}
    return {c: n for c, n in said.items() if c in answered and n}


def pair(run: RunFolder, client: int, number: int | None) -> tuple[Seen, Seen]:
    """What a client got and what it sent in the training of a round.

    Args:
        run: the folder.
        client: whose.
        number: of the round; None for the first that it answered.

    Raises:
        ValueError: it answered in no such round.
    """
    down = None
    for message in run.messages():
        if message.client == client and message.exchange == "local" and number in (None, message.round):
            if message.direction == "down":
                down = message
            elif down is not None and down.round == message.round:
                return down, message
    raise ValueError(f"round must be one that client {client} answered, got {number}")


def not_plain(run: RunFolder) -> str:
    """Why the folder alone does not say how an update is replayed; "" if it does: plain FedAvg by SGD.

    Args:
        run: the folder.
    """
    recipe, own = run.config.get("recipe"), run.settings
    if not isinstance(recipe, dict) or recipe.get("object") != "fl:FedAvg" or set(recipe) != {"object", "with"}:
        return "the folder does not say how its messages are replayed (it is not plain FedAvg's)"
    odd = [n for n in ("augment", "objective", "phases", "assign") if own.get(n) is not None]
    odd += ["optimizer"] if own.get("optimizer") != "sgd" else []
    odd += ["personal"] if (own.get("personal") or {}).get("tuple") else []
    odd += ["optimizer_state"] if own.get("optimizer_state") == "client" else []
    if odd:
        return f"the run's {', '.join(odd)} cannot be replayed from the folder"
    return "" if str(run.config.get("task", "")).startswith("Classification(") else "its labels are no classes"


def fedavg(run: RunFolder, network: nn.Module, down: Seen, up: Seen, count: int) -> FedAvgUpdate:
    """An update of plain FedAvg with its replay, by the options that the folder tells.

    Args:
        run: the folder.
        network: of the run's architecture.
        down, up: what the client got, and what it sent.
        count: how many records it holds.

    Raises:
        ValueError: a network whose weights have other names or shapes.
    """
    weights, update = down.values["FedAvg.model"], up.values["FedAvg.update"]
    assert isinstance(weights, dict)
    assert isinstance(update, dict)
    model = copy.deepcopy(network).cpu().train()
    own = model.state_dict()
    if set(own) != set(weights) or any(own[n].shape != t.shape for n, t in weights.items()):
        raise ValueError(
            f"network must be of the run's architecture: its weights have other names or shapes than those sent to "
            f"client {down.client} in round {down.round}; build it as the run did"
        )
    model.load_state_dict(weights)
    said = run.settings
    batch = min(int(said["batch"]), count)
    passes = torch.arange(count).split(batch)
    taken: dict[str, Any] = {"epochs": said.get("epochs") or 1, "batch": batch if batch < count else None}
    if said.get("steps") is not None:
        taken = {"order": [passes[step % len(passes)] for step in range(said["steps"])]}
    return FedAvgUpdate(
        model,
        [update[name] for name, _ in model.named_parameters()],
        lr=said["lr"] * (said.get("lr_decay") or 1.0) ** (up.round - 1),
        momentum=said.get("momentum") or 0.0,
        weight_decay=said.get("weight_decay") or 0.0,
        **taken,
    )
