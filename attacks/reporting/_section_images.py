"""Sections of a report on the images that clients sent or that were published.

They show the records that are nearest to these images, the share of records that resemble one of the images, and
membership inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.reporting._findings import Findings, evaluate_scores, format_percent, is_significant
from attacks.reporting._rendering import Section, Table, histogram, image_grid
from attacks.reporting._section_messages import ObservedData
from attacks.reporting.copies import closest_images, find_copies
from attacks.reporting.similarity import PSNR_LEVELS, random_baseline, record_scores
from attacks.statistics import OperatingPoint, Rate
from distillkit.rng import derive
from distillkit.sets import LabeledImages

__all__ = ["Records", "membership_section", "nearest_section", "recovery_section"]

_SHOWN, _EQUAL = 10, 60.0
_PAIRS = 1_000_000
"""Largest number of pairs of an image and a record that are searched for altered copies."""


@dataclass(frozen=True, eq=False)
class Records:
    """Records that the user passed to `report`: either members (training records) or non-members.

    Attributes:
        pixels: pixels of all records, float [N, C, H, W] in [0, 1].
        index: indices of the records that are attacked, int64 [n]. Their number n is at most the argument `max_records`
            of `report`.
        data: the set that the user passed; None if the user passed only pixels.
    """

    pixels: Tensor
    index: Tensor
    data: LabeledImages | None

    @property
    def selected(self) -> Tensor:
        """Pixels of the records that are attacked, float [n, C, H, W]."""
        return self.pixels[self.index]


def nearest_section(observed: ObservedData, members: Records | None, non_members: Records | None) -> Section:
    """Return the section that shows sent images and, below each, the most similar member and non-member.

    Args:
        observed: images that the run sent or published.
        members: private training records; if None, only the sent images are shown.
        non_members: records that were not used for training; if None, they are not shown.
    """
    images = torch.cat(observed.rounds)
    chance = torch.randperm(len(images), generator=derive(0, "shown"))[:_SHOWN]
    count = f"{len(images)} images were sent in {len(observed.rounds)} round(s)."
    if members is None:
        return Section("Sent images", [image_grid([images[chance]], "Sent images, chosen at random."), count])
    level, which = closest_images(members.selected, images)
    section = Section("Sent images and the nearest records")
    first: dict[int, int] = {}
    for image in level.argsort(descending=True, stable=True).tolist():
        first.setdefault(int(which[image]), image)
    order = torch.tensor(list(first.values()))
    below = " and the nearest held-out image" if non_members is not None else ""
    for chosen, words in ((chance, "at random"), (order[:_SHOWN], "the closest")):
        rows = [images[chosen], members.selected[which[chosen]]]
        if non_members is not None:
            rows.append(non_members.selected[closest_images(non_members.selected, images[chosen])[1]])
        decibels = ", ".join("equal" if v > _EQUAL else f"{v:.0f}" for v in level[chosen].tolist())
        section.parts.append(
            image_grid(
                rows,
                f"Sent images ({words}), and below each the nearest private record{below}. PSNR to the record: "
                f"{decibels} dB.",
            )
        )
    section.parts.append(count)
    return section


def recovery_section(
    observed: ObservedData, members: Records, non_members: Records | None, findings: Findings
) -> Section:
    """Return the section on how many private records resemble an image that was sent or published.

    For comparison, the section also counts the non-members that resemble a sent image, and the private records that
    resemble an image of a baseline, which sends random private records.

    Args:
        observed: the images that clients sent or that were published.
        members: private training records.
        non_members: records that were not used for training; None if the user passed none.
        findings: findings of the report, to which the share of recovered records is added.
    """
    images, groups = torch.cat(observed.rounds), {"private records": members.selected}
    if non_members is not None:
        groups["held-out images"] = non_members.selected
    levels = {name: _record_levels(images, records) for name, records in groups.items()}
    baseline = closest_images(torch.cat(random_baseline(observed.rounds, members.pixels)), members.selected)[0]
    rows = {**levels, "baseline: random real images": baseline}
    table = Table(
        ["group", "number", *(f"at least {d} dB" for d in PSNR_LEVELS)],
        [[name, str(len(v)), *(str(_share(v >= d)) for d in PSNR_LEVELS)] for name, v in rows.items()],
    )
    shares = {name: format_percent(float((v >= PSNR_LEVELS[1]).float().mean())) for name, v in levels.items()}
    findings.recovered = f"{shares['private records']} of all records are recovered above {PSNR_LEVELS[1]} dB"
    if non_members is not None:
        findings.recovered += f" (of held-out images {shares['held-out images']})"
    return Section(
        "How many records are recovered",
        [
            "For each record, the PSNR (in pixel space; higher is closer) of the nearest image sent in any round. "
            "Flips, shifts, changes of color and tiling are undone first. "
            "Held-out images show how close unrelated images come. The baseline sends as many random real images per "
            "round; a method whose images are safer than the data must stay far below it.",
            table,
            histogram(levels, "Shares of records by the PSNR of the nearest sent image.", "PSNR in dB", PSNR_LEVELS),
        ],
    )


def _record_levels(images: Tensor, records: Tensor) -> Tensor:
    """Return the level of each record's nearest image; altered copies are sought among at most _PAIRS / N images."""
    chosen = torch.randperm(len(images), generator=derive(0, "altered"))[: max(1, _PAIRS // len(records))]
    return torch.maximum(closest_images(images, records)[0], find_copies(images[chosen], records).record_level)


def membership_section(
    observed: ObservedData, members: Records, non_members: Records, started_from: Tensor | None, findings: Findings
) -> Section:
    """Return the section on membership inference from the images that were sent in the run.

    The attack compares the records with the sent images, and needs no trained model.

    Args:
        observed: the sent images.
        members: training records.
        non_members: records that were not used for training.
        started_from: indices of the members from which sent images were initialized, int [S]; None if unknown.
        findings: findings of the report, to which the result is added.
    """
    scores = [record_scores(observed.rounds, records.selected) for records in (members, non_members)]
    real = random_baseline(observed.rounds, members.pixels)
    baseline = [record_scores(real, records.selected) for records in (members, non_members)]
    rows, points = [], {}
    for name in scores[0]:
        points[name], row = _row(name, scores[0][name], scores[1][name], len(scores[0]))
        rows += [row, _row(f"{name}, baseline", baseline[0][name], baseline[1][name], len(scores[0]))[1]]
    best = max(points.values(), key=lambda p: p.tpr.low - p.fpr.high)
    sizes = f"{len(members.index)} members and {len(non_members.index)} non-members"
    if is_significant(best):
        findings.add_leak(
            "images",
            f"its images identify {format_percent(best.tpr.value)} of the records as members, with {best.fpr.hits} "
            f"false positives among {best.fpr.trials} ({sizes})",
        )
    else:
        upper = max(p.tpr.high for p in points.values())
        findings.add_negative(
            "images",
            f"the sent images identify at most {format_percent(upper)} of the records as members, not significantly "
            f"more than of non-members ({sizes})",
        )
    section = Section(
        "Membership inference from the images",
        [
            "An adversary with the images scores a candidate by its distance to the nearest image, or by how much "
            "closer that image is than the second nearest. No model or shadow model is needed. Thresholds for 1 % "
            "false positives come from one half of the held-out images; rates are counted on the other half. Guessing "
            "has equal true- and false-positive rates.",
            Table(["attack", "AUC", "true positives", "false positives"], rows),
        ],
    )
    section.parts += _groups(members, scores[0], points, started_from, findings)
    return section


def _row(name: str, members: Tensor, non_members: Tensor, tried: int) -> tuple[OperatingPoint, list[str]]:
    area, point = evaluate_scores(members, non_members, tried)
    return point, [name, f"{area:.3f}", str(point.tpr), str(point.fpr)]


def _groups(
    members: Records,
    scores: Mapping[str, Tensor],
    points: Mapping[str, OperatingPoint],
    started_from: Tensor | None,
    findings: Findings,
) -> list[str | Table]:
    if started_from is None:
        findings.missing.append("rates for records that images started from, and for the rest: give started_from=")
        return []
    if not isinstance(started_from, Tensor) or started_from.is_floating_point() or started_from.dtype == torch.bool:
        got = getattr(started_from, "dtype", started_from)
        raise TypeError(f"started_from must be an int tensor [S] of indices of members, got {got}")
    valid = (started_from >= 0) & (started_from < len(members.pixels))
    if started_from.ndim != 1 or not len(started_from) or not bool(valid.all()):
        raise ValueError(f"started_from must hold at least one index of a member, 0 to {len(members.pixels) - 1}, [S]")
    first = torch.isin(members.index, started_from.cpu())
    rows = []
    for name, values in scores.items():
        called = values >= points[name].threshold
        both = (called[first], called[~first])
        rows.append([name, *(str(_share(c)) if len(c) else "none attacked" for c in both)])
    return [
        f"By group, at the same thresholds: images started from {int(first.sum())} of {len(first)} members.",
        Table(["attack", "records that images started from", "the rest"], rows),
    ]


def _share(hits: Tensor) -> Rate:
    return Rate.of(int(hits.sum()), len(hits))
