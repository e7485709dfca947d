"""The section on one client's update: what an inversion makes of it, beside the records and beside held-out images."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from attacks.inversion import Victim, invert_message
from attacks.matching import align, match
from attacks.metrics import psnr
from attacks.reporting.closeness import LEVELS
from attacks.reporting.folder import RunFolder
from attacks.reporting.page import Section, Table, sheet_of
from attacks.reporting.records import Records
from attacks.reporting.replays import Inversion, fedavg, not_plain, pair, sizes
from attacks.reporting.verdict import Outcome
from distillkit.normalization import IDENTITY, Normalization
from distillkit.rng import derive

__all__ = ["inverted"]

_DRAWS, _SHOWN = 99, 8


def inverted(
    run: RunFolder, invert: Inversion, network: nn.Module | None, inside: Records, outside: Records | None,
    outcome: Outcome,
) -> Section:  # fmt: skip
    """What comes back of one client's message.

    Args:
        run: the folder.
        invert: which message, and how.
        network: of the run's architecture; its weights are those that the message says.
        inside, outside: members, and others.
        outcome: gets the finding.
    """
    section = Section("Inversion of an update")

    def left_out(why: str, remedy: str) -> Section:
        section.parts.append(f"Not tried: {why}.")
        outcome.missing.append(f"what the update of a single client shows: {why}; {remedy}")
        return section

    if not run.transcript:
        return left_out("the run kept no transcript", run.kept_by)
    if invert.victim is None and (why := not_plain(run)):
        return left_out(why, "give invert=Inversion(victim=...), what replays its messages")
    if invert.victim is None and network is None:
        return left_out("a replay wants the network", "give network=, as the run trained it")
    rounds = sorted({message.round for message in run.messages() if message.exchange == "local"})
    if invert.round is not None and invert.round not in rounds:
        raise ValueError(f"round must be one in which a client answered, {rounds}, got {invert.round}")
    found = sizes(run, invert)
    if not found:
        return left_out("the messages do not say how many records they are of", "give invert=Inversion(owners=...)")
    client = min(found, key=lambda c: (found[c], c)) if invert.client is None else invert.client
    if client not in found:
        raise ValueError(f"client must be one that holds records and answered, {sorted(found)}, got {client}")
    count = found[client]
    who = f"client {client}" if invert.client is not None else f"client {client} (the fewest records)"
    if count > invert.largest:
        return left_out(
            f"the message of {who} is of {count} records at once, and of more than {invert.largest} this attack brings "
            "hardly anything back, which says nothing of stronger ones",
            f"give invert=Inversion(largest={count}) to try",
        )
    own = _own(invert, client, inside)
    down, up = pair(run, client, invert.round)
    victim: Victim
    if invert.victim is not None:
        victim = invert.victim(down, up)
    else:
        assert network is not None
        victim = fedavg(run, network, down, up, count)
    normalization = Normalization(mean=run.space[0], std=run.space[1]) if run.space is not None else IDENTITY
    shape, labels = tuple(inside.pixels.shape[1:]), None
    if invert.known_labels and own is not None:
        if inside.data is None:
            raise ValueError("members must be LabeledImages where known_labels is set: they have the labels")
        labels = inside.data.labels[own]
    elif not victim.ordered and outside is not None:
        labels = victim.read_labels(count, normalization.encode(outside.seen[:64]))

    def search(steps: int, restarts: int) -> tuple[Tensor, float]:
        began = time.process_time()
        found = invert_message(
            victim, shape, count, labels=labels, steps=steps, restarts=restarts, normalization=normalization,
            total_variation=invert.total_variation,
        )  # fmt: skip
        return found.images.cpu().float(), time.process_time() - began

    search(1, 1)  # pays for what is set up once
    estimate = search(5, 1)[1] / 6 * invert.steps * invert.restarts
    if estimate > invert.seconds:
        return left_out(
            f"the search would take about {estimate:.0f} s, more than the {invert.seconds:g} s allowed",
            f"give invert=Inversion(seconds={2 * estimate:.0f})",
        )
    images, seconds = search(invert.steps, invert.restarts)
    told = "labels known" if invert.known_labels else "labels read off the message"
    section.parts.append(
        f"The message of {who} in round {up.round}, of {count} records, inverted as the server can: images are sought "
        f"that would have caused it ({invert.steps} steps, {invert.restarts} start(s), {seconds:.0f} s; {told}). One "
        "message stands for all; one attack that fails is no protection. Aligned: after the "
        "change of brightness and contrast that fits best, which norm layers hide."
    )
    if own is None:
        return _unowned(section, images, inside, outside, outcome)
    return _owned(section, images, own, inside, outside, f"{who} in round {up.round}", outcome)


def _owned(
    section: Section, images: Tensor, own: Tensor, inside: Records, outside: Records | None, who: str, outcome: Outcome
) -> Section:
    """Against the client's own records, and against held-out images of the same classes in their place."""
    truth = inside.pixels[own]
    found, plain, aligned = _scored(images, truth)
    order = aligned.argsort(descending=True)[:_SHOWN]
    section.parts.append(
        sheet_of(
            [found[order], align(found, truth)[order], truth[order]],
            f"What came back, the same aligned, and the client's records, the closest first. PSNR aligned: "
            f"{', '.join(f'{v:.0f}' for v in aligned[order].tolist())} dB.",
        )
    )
    rows = [["the client's records", *(f"{float(v.mean()):.1f} (best {float(v.max()):.1f})" for v in (plain, aligned))]]
    header = ["images held against", "PSNR in dB", "aligned"]
    if outside is None:
        outcome.missing.append("whether the inverted images are more than likeness: give outsiders=")
        section.parts.append(Table(header, rows))
        return section
    draws = [_scored(images, outside.seen[index])[1:] for index in _strangers(inside, own, outside)]
    rates = [torch.stack([draw[k].mean() for draw in draws]) for k in (0, 1)]
    rows.append(["as many held-out images", *(f"{float(r.mean()):.1f} (best {float(r.max()):.1f})" for r in rates)])
    beaten = int((rates[1] >= aligned.mean()).sum())
    section.parts += [
        Table(header, rows),
        f"Means over {len(own)} images, each paired with one; held-out ones of the same classes were drawn "
        f"{_DRAWS} times, and came as close {beaten} times.",
    ]
    found_again = int((aligned >= LEVELS[0]).sum())
    means = f"{float(aligned.mean()):.1f} dB aligned, held-out images of its classes {float(rates[1].mean()):.1f}"
    if beaten:
        outcome.clear(
            "inversion", f"inverting the update of {who} comes no closer to its records than to others ({means})"
        )
    elif found_again:
        outcome.find(
            "inversion",
            f"inverting the update of {who} brings {found_again} of its {len(own)} records back above {LEVELS[0]} dB "
            f"(mean {means})",
        )
    else:
        outcome.find("inversion", f"inverting the update of {who} comes closer to its records than to others ({means})")
    return section


def _unowned(section: Section, images: Tensor, inside: Records, outside: Records | None, outcome: Outcome) -> Section:
    outcome.missing.append("whether inverted images are of the client's records: give invert=Inversion(owners=...)")
    rows, drawn = [], [images]
    for name, records in (("private record", inside), ("held-out image", outside)):
        if records is not None:
            near = torch.stack([_nearest(one, records.seen) for one in images])
            drawn.append(near)
            plain, aligned = psnr(images, near), psnr(align(images, near), near)
            means = [f"{float(v.mean()):.1f} (best {float(v.max()):.1f})" for v in (plain, aligned)]
            rows.append([f"the nearest {name} of {len(records.seen)}", *means])
    words = "What came back, below each the nearest private record" + (", held-out image." if outside else ".")
    section.parts += [
        sheet_of([one[:_SHOWN] for one in drawn], words),
        Table(["images held against", "PSNR in dB", "aligned"], rows),
        "Among more images the nearest is nearer by chance alone: whose records these are cannot be told from this.",
    ]
    return section


def _scored(images: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The images in the order of the truth that they are paired with, and their PSNR to it, plain and aligned."""
    found = images[match(images, truth)]
    return found, psnr(found, truth), psnr(align(found, truth), truth)


def _nearest(image: Tensor, candidates: Tensor) -> Tensor:
    return candidates[psnr(align(image.expand_as(candidates), candidates), candidates).argmax()]


def _strangers(inside: Records, own: Tensor, outside: Records) -> list[Tensor]:
    """Held-out images in the places of a client's records, of the same classes where enough are known to be."""
    everyone = torch.arange(len(outside.index))
    groups = [(len(own), everyone)]
    if inside.data is not None and outside.data is not None and inside.data.labels.ndim == 1:
        theirs, ours = outside.data.labels[outside.index].cpu(), inside.data.labels[own].cpu()
        wanted = ours.unique(return_counts=True)
        groups = [(int(n), everyone[theirs == k]) for k, n in zip(*wanted)]
        if any(len(group) < n for n, group in groups):
            groups = [(len(own), everyone)]
    if any(len(group) < n for n, group in groups):
        raise ValueError(f"outsiders must be at least {len(own)}, the records inverted, got {len(everyone)}")
    return [
        torch.cat([group[torch.randperm(len(group), generator=derive(0, "strangers", k, i))[:n]]
                   for i, (n, group) in enumerate(groups)])
        for k in range(_DRAWS)
    ]  # fmt: skip


def _own(invert: Inversion, client: int, inside: Records) -> Tensor | None:
    if invert.owners is None:
        return None
    own = invert.owners[client].cpu()
    if int(own.min()) < 0 or int(own.max()) >= len(inside.pixels):
        raise ValueError(
            f"owners must be numbers of members, 0 to {len(inside.pixels) - 1}, got {int(own.min())} to "
            f"{int(own.max())}: give members= all clients' records, in the order that owners count"
        )
    return own
