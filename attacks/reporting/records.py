"""Sections on images that were sent: beside their nearest records, the share of records recovered, membership."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.reporting.closeness import LEVELS, closest, random_rounds, record_scores
from attacks.reporting.folder import RunFolder
from attacks.reporting.judged import finds, judged, percent
from attacks.reporting.page import Section, Table, histogram, sheet_of
from attacks.reporting.verdict import Outcome
from attacks.statistics import Point, Rate, clopper_pearson
from distillkit.rng import derive
from distillkit.sets import LabeledImages

__all__ = ["Records", "Sent", "beside", "recovered", "told_apart"]

_SHOWN, _EQUAL = 10, 60.0


@dataclass(frozen=True, eq=False)
class Records:
    """Records that the caller gave, members or others.

    Attributes:
        pixels: of all, float [N, C, H, W] in [0, 1].
        index: int64 [n], the ones that are looked at.
        data: the set they came as; None if they were bare pixels.
    """

    pixels: Tensor
    index: Tensor
    data: LabeledImages | None

    @property
    def seen(self) -> Tensor:
        """Pixels of the ones that are looked at."""
        return self.pixels[self.index]


@dataclass(frozen=True, eq=False)
class Sent:
    """The images of a run that an adversary has, and what else its messages say.

    Attributes:
        rounds: pixels of each round's sets [M, C, H, W]; a published set alone is one round.
        sets: what each client sent, (client, set) pairs.
        updates: what each client's update did to the last layer's bias, with its number of records if that was sent.
        replies: in how many trainings each client replied; keys and the like, which other exchanges send, aside.
    """

    rounds: list[Tensor]
    sets: list[tuple[int, LabeledImages]]
    updates: list[tuple[int, Tensor, int | None]]
    replies: dict[int, int]

    @staticmethod
    def of(run: RunFolder) -> Sent:
        """Read them off the transcript, and off the published set.

        Args:
            run: the folder.
        """
        rounds: dict[int, list[Tensor]] = {}
        sets, updates, replies = [], [], dict[int, int]()
        for message in run.messages():
            if message.direction == "down":
                continue
            if message.exchange == "local":
                replies[message.client] = replies.get(message.client, 0) + 1
            for made in message.sets.values():
                if len(made):
                    rounds.setdefault(message.round, []).append(made.pixels().float())
                    sets.append((message.client, made))
            samples = next((v for k, v in message.values.items() if k.endswith(".samples")), None)
            size = int(samples) if isinstance(samples, float | int) and samples == int(samples) > 0 else None
            for key, value in message.values.items():
                if key.endswith(".update") and isinstance(value, dict):
                    biases = [t for n, t in value.items() if n.endswith("bias") and t.ndim == 1]
                    updates += [(message.client, biases[-1], size)] if biases else []
        if run.published is not None:
            rounds.setdefault(0, []).append(run.published.pixels().float())
        return Sent([torch.cat(rounds[r]) for r in sorted(rounds)], sets, updates, replies)


def beside(sent: Sent, inside: Records | None, outside: Records | None) -> Section:
    """Some of the images, each over the record and the held-out image that is nearest to it.

    Args:
        sent: what was sent.
        inside, outside: members, and others; without members the images alone.
    """
    images = torch.cat(sent.rounds)
    chance = torch.randperm(len(images), generator=derive(0, "shown"))[:_SHOWN]
    count = f"{len(images)} images were sent in all, in {len(sent.rounds)} round(s)."
    if inside is None:
        return Section("Images that were sent", [sheet_of([images[chance]], "Sent images, at random."), count])
    level, which = closest(inside.seen, images)
    section = Section("Images that were sent, beside records")
    first: dict[int, int] = {}
    for image in level.argsort(descending=True, stable=True).tolist():
        first.setdefault(int(which[image]), image)
    order = torch.tensor(list(first.values()))
    below = ", the nearest held-out image" if outside is not None else ""
    for chosen, words in ((chance, "at random"), (order[:_SHOWN], "the closest")):
        rows = [images[chosen], inside.seen[which[chosen]]]
        if outside is not None:
            rows.append(outside.seen[closest(outside.seen, images[chosen])[1]])
        decibels = ", ".join("equal" if v > _EQUAL else f"{v:.0f}" for v in level[chosen].tolist())
        section.parts.append(
            sheet_of(
                rows, f"Sent images ({words}), below each the nearest private record{below}. PSNR to it: {decibels} dB."
            )
        )
    section.parts.append(count)
    return section


def recovered(sent: Sent, inside: Records, outside: Records | None, outcome: Outcome) -> Section:
    """Which share of records has an image close to it, beside held-out ones and random real images.

    Args:
        sent: what was sent.
        inside, outside: members, and others.
        outcome: gets the shares.
    """
    images, groups = torch.cat(sent.rounds), {"private records": inside.seen}
    if outside is not None:
        groups["held-out images"] = outside.seen
    levels = {name: closest(images, records)[0] for name, records in groups.items()}
    baseline = closest(torch.cat(random_rounds(sent.rounds, inside.pixels)), inside.seen)[0]
    rows = {**levels, "baseline: random real images": baseline}
    table = Table(
        ["of these", "number", *(f"at least {d} dB" for d in LEVELS)],
        [[name, str(len(v)), *(str(_share(v >= d)) for d in LEVELS)] for name, v in rows.items()],
    )
    shares = {name: float((v >= LEVELS[1]).float().mean()) for name, v in levels.items()}
    outcome.recovered = f"{percent(shares['private records'])} of all records are recovered above {LEVELS[1]} dB"
    if outside is not None:
        outcome.recovered += f" (of held-out images {percent(shares['held-out images'])})"
    return Section(
        "How many records are recovered",
        [
            "For each record, how close the nearest image comes that was sent in any round (PSNR of pixels, higher is "
            "closer). Held-out images say how close strangers come. The baseline sends as many random real images a "
            "round: what a method must stay far below if its images are to be better than the data.",
            table,
            histogram(
                levels, "Shares of records by the PSNR of the nearest image that was sent.", "PSNR in dB", LEVELS
            ),
        ],
    )


def told_apart(sent: Sent, inside: Records, outside: Records, started: Tensor | None, outcome: Outcome) -> Section:
    """Membership from the images alone: rates with intervals, by group, and beside the baseline.

    Args:
        sent: what was sent.
        inside, outside: members, and others.
        started: numbers of members that images were started from; None where it is not known.
        outcome: gets the finding.
    """
    scores = [record_scores(sent.rounds, records.seen) for records in (inside, outside)]
    real = random_rounds(sent.rounds, inside.pixels)
    baseline = [record_scores(real, records.seen) for records in (inside, outside)]
    rows, points = [], {}
    for name in scores[0]:
        points[name], row = _row(name, scores[0][name], scores[1][name], len(scores[0]))
        rows += [row, _row(f"{name}, baseline", baseline[0][name], baseline[1][name], len(scores[0]))[1]]
    best = max(points.values(), key=lambda p: p.tpr.low - p.fpr.high)
    where = f"{len(inside.index)} members and {len(outside.index)} others"
    if finds(best):
        outcome.find(
            "images",
            f"its images tell {percent(best.tpr.value)} of the records from strangers, with {best.fpr.hits} false "
            f"positives among {best.fpr.trials} ({where})",
        )
    else:
        upper = max(p.tpr.high for p in points.values())
        outcome.clear(
            "images",
            f"by the sent images at most {percent(upper)} of the records are recognised, not surely more than "
            f"strangers ({where})",
        )
    section = Section(
        "Who was in it: the images",
        [
            "Whoever has the images and a candidate scores it by its distance to the nearest, or by how much nearer "
            "that is than the second nearest. No model, no shadows; thresholds for 1 % false positives from a half of "
            "the held-out images, counted on the other half. Guessing has as many true as false positives.",
            Table(["attack", "AUC", "true positives", "false positives"], rows),
        ],
    )
    section.parts += _groups(inside, scores[0], points, started, outcome)
    return section


def _row(name: str, inside: Tensor, outside: Tensor, tried: int) -> tuple[Point, list[str]]:
    area, point = judged(inside, outside, tried)
    return point, [name, f"{area:.3f}", str(point.tpr), str(point.fpr)]


def _groups(
    inside: Records, scores: Mapping[str, Tensor], points: Mapping[str, Point], started: Tensor | None, outcome: Outcome
) -> list[str | Table]:
    if started is None:
        outcome.missing.append("shares by group, of records that an image started from and the rest: give started=")
        return []
    if not isinstance(started, Tensor) or started.is_floating_point() or started.dtype == torch.bool:
        raise TypeError(
            f"started must be an int tensor [S] of members' numbers, got {getattr(started, 'dtype', started)}"
        )
    if started.ndim != 1 or not len(started) or int(started.min()) < 0 or int(started.max()) >= len(inside.pixels):
        raise ValueError(f"started must be numbers of members, 0 to {len(inside.pixels) - 1}, [S], at least one")
    first = torch.isin(inside.index, started.cpu())
    rows = []
    for name, values in scores.items():
        called = values >= points[name].threshold
        both = (called[first], called[~first])
        rows.append([name, *(str(_share(c)) if len(c) else "none looked at" for c in both)])
    return [
        f"By group, at the same thresholds: an image started from {int(first.sum())} of {len(first)} members.",
        Table(["attack", "records an image started from", "the rest"], rows),
    ]


def _share(hits: Tensor) -> Rate:
    count, total = int(hits.sum()), len(hits)
    return Rate(count, total, *clopper_pearson(count, total), 0.95)
