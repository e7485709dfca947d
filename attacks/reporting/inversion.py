"""Report section on gradient inversion. It compares recovered images with the records of a client."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attacks.inversion import FedAvgUpdate, ObservedMessage, invert_message
from attacks.inversion._inputs import require_message
from attacks.matching import align, match
from attacks.metrics import psnr
from attacks.reporting._evidence import Evidence, Records, with_weights
from attacks.reporting._page import Section
from attacks.reporting._recorded_run import RecordedRun
from attacks.reporting.similarity import PSNR_LEVELS
from attacks.transcript import TranscriptMessage
from distillkit._utils import check
from distillkit._utils.batches import batch_indices, uses_batch_statistics
from distillkit._utils.options import NonNegative, NonNegativeInt, Positive, PositiveInt, check_options
from distillkit._utils.pages import image_grid
from distillkit._utils.tables import Table
from distillkit.normalization import IDENTITY
from distillkit.rng import derive

_DRAWS, _SHOWN = 99, 8
_HEADER = ("images compared with", "PSNR in dB", "aligned")


@dataclass(frozen=True, eq=False)
class Inversion:
    """Options of `report(invert=...)`: which message a report inverts, and how much effort it spends.

    A report inverts one message of one client. The default is the client with the fewest records, because it is the
    easiest target.

    Args:
        owners: indices of each client's records in the argument `members` of `report`, int64 [n_k] for client k, as
            `fl.study.load(folder).assign().owners` returns them. With them, the report can state whether the recovered
            images are the client's records. The attack itself does not use them.
        build_message: function `build_message(down, up)` that takes the messages that the client received and sent in a
            round's training (`attacks.transcript.TranscriptMessage`), and returns an `ObservedMessage`. None: the
            message is an update of plain FedAvg. The attack then uses the argument `network` of `report`, and the
            training options in the run's `config.json`.
        client: index of the client whose message is inverted; None for the client with the fewest records.
        round: round of the message; None for the first round in which the client replied.
        max_records: largest number of records for which a message is inverted. If the client computed the message from
            more records, hardly anything could be recovered, and the inversion is skipped.
        steps, restarts: arguments of `invert_message`.
        known_labels: whether the attack gets the true labels of the client's records, from `members` of `report`,
            instead of inferring them from the message. The result is then an upper bound for adversaries who do not
            know the labels.
        total_variation: argument of `invert_message`; 0.01 suits small images such as digits, and 0.1, the default of
            that function, suits photographs.
        seconds: time limit of the inversion, in seconds. The time of all steps is estimated from the first steps. If
            the estimate exceeds the limit, the inversion is skipped, and the report states the estimate.

    Raises:
        TypeError, ValueError: an option has the wrong type or is out of range.
    """

    owners: Sequence[Tensor] | None = None
    build_message: Callable[[TranscriptMessage, TranscriptMessage], ObservedMessage] | None = None
    client: NonNegativeInt | None = None
    round: PositiveInt | None = None
    max_records: PositiveInt = 16
    steps: PositiveInt = 300
    restarts: PositiveInt = 1
    known_labels: bool = False
    total_variation: NonNegative = 0.01
    seconds: Positive = 60.0

    def __post_init__(self) -> None:
        check_options(self)
        given = () if self.owners is None else self.owners
        for own in check.sequence(given, "owners", "index tensors, one per client"):
            if not isinstance(own, Tensor) or own.ndim != 1 or own.is_floating_point() or own.dtype == torch.bool:
                raise TypeError(f"owners must be int tensors of indices of members, one per client, got {own!r:.60}")
        if self.build_message is not None:
            example = "a function of both messages that returns an ObservedMessage"
            check.callable_with(self.build_message, "build_message", ("down", "up"), example)
        if self.known_labels and self.owners is None:
            raise ValueError("known_labels needs the client's records: give owners too")


def inversion_section(found: Evidence, invert: Inversion, members: Records) -> Section:
    """Invert one client's message, and return the section on the result.

    Args:
        found: the report's evidence.
        invert: choice of the message, and options of the attack.
        members: training records of the evidence, with which the recovered images are compared.
    """
    section, run = Section("Inversion of an update"), found.run

    def skipped(why: str, remedy: str) -> Section:
        section.add(f"Skipped: {why}.")
        section.missing.append(f"what the update of a single client shows: {why}; {remedy}")
        return section

    if not run.transcript:
        return skipped("the run kept no transcript", run.transcript_hint)
    if invert.build_message is None and (why := replay_obstacle(run)):
        return skipped(why, "give invert=Inversion(build_message=...), which replays its messages")
    if invert.build_message is None and found.network is None:
        return skipped("a replay needs the network", "give network=, of the run's architecture")
    counts = record_counts(run, invert)
    if not counts:
        return skipped("the messages do not state their number of records", "give invert=Inversion(owners=...)")
    client = min(counts, key=lambda c: (counts[c], c)) if invert.client is None else invert.client
    if client not in counts:
        raise ValueError(f"client must be one that holds records and answered, {sorted(counts)}, got {client}")
    count, who = counts[client], f"client {client}{'' if invert.client is not None else ' (the fewest records)'}"
    if count > invert.max_records:
        most = f"from more than {invert.max_records} this attack recovers hardly anything"
        why = f"the message of {who} covers {count} records; {most}, which says nothing of stronger attacks"
        return skipped(why, f"give invert=Inversion(max_records={count}) to try")
    own = _own(invert, client, members)
    down, up = message_pair(run, client, invert.round)
    message: ObservedMessage
    if invert.build_message is not None:
        message = invert.build_message(down, up)
        require_message(message, "the result of build_message")
    else:
        message = fedavg_update(run, found.network, down, up, count)
    normalization, labels = run.normalization or IDENTITY, None
    if invert.known_labels and own is not None:
        if members.data is None:
            raise ValueError("members must be LabeledImages if known_labels is set, to provide the labels")
        labels = members.data.labels[own]
    elif not message.ordered and found.non_members is not None:
        labels = message.read_labels(count, normalization.encode(found.non_members.selected[:64]))

    def search(steps: int, restarts: int) -> tuple[Tensor, float]:
        began, shape = time.process_time(), members.pixels.shape[1:]
        options: dict[str, Any] = {"labels": labels, "steps": steps, "restarts": restarts}
        options |= {"normalization": normalization, "total_variation": invert.total_variation}
        images = invert_message(message, shape, count, **options).images
        return images.cpu().float(), time.process_time() - began

    search(1, 1)  # warm-up
    estimate = search(5, 1)[1] / 6 * invert.steps * invert.restarts
    if estimate > invert.seconds:
        why = f"the search would take about {estimate:.0f} s, more than the {invert.seconds:g} s allowed"
        return skipped(why, f"give invert=Inversion(seconds={2 * estimate:.0f})")
    images, seconds = search(invert.steps, invert.restarts)
    labels_from = "labels known" if invert.known_labels else "labels inferred from the message"
    section.add(
        f"The message of {who} in round {up.round}, computed from {count} records, inverted as the server could do it: "
        f"by a search for images that would have caused it ({invert.steps} steps, {invert.restarts} start(s), "
        f"{seconds:.0f} s; {labels_from}). Only one message and one attack were tried, so a failure is no protection. "
        "Aligned: after the best change of brightness and contrast, which norm layers hide."
    )
    if own is None:
        _compare_nearest(section, images, members, found.non_members)
    else:
        _compare_own(section, images, own, members, found.non_members, f"{who} in round {up.round}")
    return section


def replay_obstacle(run: RecordedRun) -> str:
    """Return the reason why the run's folder does not suffice to compute the update that given images would cause.

    The result is "" if the folder suffices, which requires plain FedAvg with SGD.
    """
    options = run.plain_fedavg
    if options is None:
        return "the folder does not record how its messages are replayed (the method is not plain FedAvg on classes)"
    odd = [name for name in ("architectures", "augment", "objective", "personal", "phases") if options.get(name)]
    odd += ["optimizer"] if options["optimizer"] != "sgd" or options.get("state") == "client" else []
    return f"the run's {', '.join(odd)} cannot be replayed from the folder" if odd else ""


def record_counts(run: RecordedRun, invert: Inversion) -> dict[int, int]:
    """Return the number of records from which each client computed its message, by client index; empty if unknown.

    Args:
        run: the recorded run. Without `owners`, the numbers are the weights that its clients sent for averaging, in the
            round `invert.round`, or in their first replies.
        invert: options of the inversion, such as `owners`.
    """
    replies = [(m.round, m.client, _weight(m)) for m in run.messages() if m.exchange == "local" and m.direction == "up"]
    rounds = sorted({number for number, _, _ in replies})
    if invert.round is not None and invert.round not in rounds:
        raise ValueError(f"round must be one in which a client answered, {rounds}, got {invert.round}")
    counts = {client: weight for number, client, weight in reversed(replies) if invert.round in (None, number)}
    if invert.owners is not None:
        return {c: len(own) for c, own in enumerate(invert.owners) if c in counts and len(own)}
    weighted = (run.plain_fedavg or {}).get("weights") == "samples"
    return {c: weight for c, weight in counts.items() if weighted and weight}


def _weight(message: TranscriptMessage) -> int:
    weight = next((v for k, v in message.values.items() if k.endswith(".samples")), None)
    return int(weight) if isinstance(weight, float | int) else 0


def message_pair(run: RecordedRun, client: int, number: int | None) -> tuple[TranscriptMessage, TranscriptMessage]:
    """Return the messages that a client received and sent in the training of a round.

    Args:
        run: the recorded run, with a transcript.
        client: index of the client.
        number: index of the round; None for the first round in which the client replied.

    Raises:
        ValueError: the client did not reply in this round.
    """
    down = None
    for message in run.messages():
        if message.client == client and message.exchange == "local" and number in (None, message.round):
            if message.direction == "down":
                down = message
            elif down is not None and down.round == message.round:
                return down, message
    raise ValueError(f"round must be one that client {client} answered, got {number}")


def fedavg_update(
    run: RecordedRun, network: nn.Module | None, down: TranscriptMessage, up: TranscriptMessage, count: int
) -> FedAvgUpdate:
    """Convert a client's update in plain FedAvg to a `FedAvgUpdate`, a message that `invert_message` can attack.

    Args:
        run: the recorded run, whose options state how the client trained.
        network: network of the run's architecture, with any weights.
        down: message that the client received, with the global model.
        up: message that the client sent, with its update.
        count: number of the client's records.

    Raises:
        ValueError: the weights of `network` have other names or shapes than the weights in the message `down`.
    """
    weights, update, options = down.values["FedAvg.model"], up.values["FedAvg.update"], run.plain_fedavg
    assert isinstance(weights, dict)
    assert isinstance(update, dict)
    assert network is not None
    assert options is not None
    model = with_weights(network, weights)
    if model is None:
        sent = f"those sent to client {down.client} in round {down.round}; build it as the run did"
        raise ValueError(f"network must have the run's architecture: names or shapes of its weights differ from {sent}")
    model.train()
    batch = options["batch"]
    how: dict[str, Any] = {"epochs": options["epochs"], "batch": batch if batch < count else None}
    if options["steps"] is not None:
        passes = batch_indices(torch.arange(count), batch, merge_single=uses_batch_statistics(model))
        how = {"order": [passes[step % len(passes)] for step in range(options["steps"])]}
    how |= {name: options.get(name, 0.0) for name in ("momentum", "weight_decay")}
    lr = options["lr"] * options.get("lr_decay", 1.0) ** (up.round - 1)
    return FedAvgUpdate(model, [update[name] for name, _ in model.named_parameters()], lr=lr, **how)


def _own(invert: Inversion, client: int, members: Records) -> Tensor | None:
    if invert.owners is None:
        return None
    own, most = invert.owners[client].cpu().long(), len(members.pixels) - 1
    if int(own.min()) < 0 or int(own.max()) > most:
        advice = "give members= all clients' records, in the order that owners refer to"
        told = f"got {int(own.min())} to {int(own.max())}"
        raise ValueError(f"owners must be indices of members, 0 to {most}, {told}: {advice}")
    return own


def _compare_own(
    section: Section, images: Tensor, own: Tensor, members: Records, non_members: Records | None, sender: str
) -> None:
    """Compare recovered images with the client's records, and with non-members of the same classes."""
    truth = members.pixels[own]
    paired, fitted = _paired(images, truth)
    aligned = psnr(fitted, truth)
    order = aligned.argsort(descending=True)[:_SHOWN]
    levels = ", ".join(f"{v:.0f}" for v in aligned[order].tolist())
    caption = "Recovered images, the same aligned, and the client's records, the closest first. PSNR aligned:"
    section.add(image_grid([paired[order], fitted[order], truth[order]], f"{caption} {levels} dB."))
    cells = [("the client's records", *map(_mean_and_best, (psnr(paired, truth), aligned)))]
    if non_members is None:
        section.missing.append("whether the inverted images are more than similar to the records: give non_members=")
        section.add(Table(_HEADER, cells, left=1))
        return
    draws = [non_members.selected[index] for index in _draw_held_out(members, own, non_members)]
    chance = [[psnr(one, drawn).mean() for one in _paired(images, drawn)] for drawn in draws]
    plain, others = torch.tensor(chance).T
    cells.append(("the same number of held-out images", *map(_mean_and_best, (plain, others))))
    beaten, recovered = int((others >= aligned.mean()).sum()), int((aligned >= PSNR_LEVELS[0]).sum())
    section.add(
        Table(_HEADER, cells, left=1),
        f"Means over {len(own)} images, each paired with one record. Held-out images of the same classes were drawn "
        f"{_DRAWS} times, and were as close {beaten} times.",
    )
    means = f"{float(aligned.mean()):.1f} dB aligned, held-out images of its classes {float(others.mean()):.1f}"
    result = f"inverting the update of {sender} recovers"
    if beaten:
        words = f"{result} images no closer to its records than to others ({means})"
        section.negatives.append(("inversion", words))
    elif recovered:
        share = f"{recovered} of its {len(own)} records above {PSNR_LEVELS[0]} dB"
        section.leak("inversion", f"{result} {share} (mean {means})")
    else:
        section.leak("inversion", f"{result} images closer to its records than to others ({means})")


def _compare_nearest(section: Section, images: Tensor, members: Records, non_members: Records | None) -> None:
    section.missing.append("whether inverted images show the client's records: give invert=Inversion(owners=...)")
    groups = {"private record": members.selected}
    groups |= {} if non_members is None else {"held-out image": non_members.selected}
    cells, rows = [], [images]
    for name, records in groups.items():
        near = torch.stack([records[psnr(align(x.expand_as(records), records), records).argmax()] for x in images])
        rows.append(near)
        levels = map(_mean_and_best, (psnr(images, near), psnr(align(images, near), near)))
        cells.append((f"the nearest {name} of {len(records)}", *levels))
    caption = f"Recovered images, and below each the nearest {' and '.join(groups)}."
    section.add(image_grid([row[:_SHOWN] for row in rows], caption), Table(_HEADER, cells, left=1))
    section.add(
        "In a larger set the nearest image is closer by chance alone, so this does not show whose records these are."
    )


def _paired(images: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return images in the order of the true ones, as they are and aligned in brightness and contrast."""
    paired = images[match(images, truth)]
    return paired, align(paired, truth)


def _mean_and_best(decibels: Tensor) -> str:
    return f"{float(decibels.mean()):.1f} (best {float(decibels.max()):.1f})"


def _draw_held_out(members: Records, own: Tensor, non_members: Records) -> list[Tensor]:
    """Draw several random samples of non-members, each with as many records as a client has.

    If there are enough non-members of every class, each sample also has the client's class counts.
    """
    everyone = torch.arange(len(non_members.index))
    if len(everyone) < len(own):
        raise ValueError(f"non_members must be at least {len(own)}, the inverted records, got {len(everyone)}")
    groups = [(len(own), everyone)]
    inside, outside = members.data, non_members.data
    if inside is not None and outside is not None and inside.labels.ndim == outside.labels.ndim == 1:
        theirs, ours = outside.labels[non_members.index].cpu(), inside.labels[own].cpu()
        by_class = [(int(n), everyone[theirs == k]) for k, n in zip(*ours.unique(return_counts=True))]
        groups = by_class if all(len(group) >= n for n, group in by_class) else groups

    def drawn(draw: int, number: int, count: int, group: Tensor) -> Tensor:
        return group[torch.randperm(len(group), generator=derive(0, "strangers", draw, number))[:count]]

    return [torch.cat([drawn(k, i, *one) for i, one in enumerate(groups)]) for k in range(_DRAWS)]
