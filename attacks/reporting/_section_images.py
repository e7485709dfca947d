"""Sections of a report on the images that clients sent or that were published.

They show the records that are nearest to these images, the share of records that resemble one of the images, and
membership inference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.reporting._evidence import Evidence, Records
from attacks.reporting._page import Section, histogram
from attacks.reporting._rates import format_percent, judge, rate_table, share_of
from attacks.reporting.copies import closest_images, find_copies
from attacks.reporting.similarity import PSNR_LEVELS, random_baseline, record_scores
from attacks.statistics import OperatingPoint
from distillkit._utils.pages import image_grid
from distillkit._utils.tables import Table
from distillkit.rng import derive

_SHOWN, _EQUAL = 10, 60.0
_PAIRS = 1_000_000
"""Largest number of pairs of an image and a record that are searched for altered copies."""


def nearest_section(found: Evidence) -> Section:
    """Return the section that shows sent images and, below each, the most similar member and non-member."""
    images, members, others = torch.cat(found.observed.rounds), found.members, found.non_members
    chance = torch.randperm(len(images), generator=derive(0, "shown"))[:_SHOWN]
    count = f"{len(images)} images were sent in {len(found.observed.rounds)} round(s)."
    if members is None:
        section = Section("Sent images", [image_grid([images[chance]], "Sent images, chosen at random."), count])
        section.missing.append("which records the sent images show: give members=, the private training images")
        return section
    section = Section("Sent images and the nearest records")
    level, which = closest_images(members.selected, images)
    first: dict[int, int] = {}
    for image in level.argsort(descending=True, stable=True).tolist():
        first.setdefault(int(which[image]), image)
    below = " and the nearest held-out image" if others is not None else ""
    for chosen, words in ((chance, "at random"), (torch.tensor([*first.values()])[:_SHOWN], "the closest")):
        rows = [images[chosen], members.selected[which[chosen]]]
        if others is not None:
            rows.append(others.selected[closest_images(others.selected, images[chosen])[1]])
        decibels = ", ".join("equal" if v > _EQUAL else f"{v:.0f}" for v in level[chosen].tolist())
        caption = f"Sent images ({words}), and below each the nearest private record{below}."
        section.add(image_grid(rows, f"{caption} PSNR to the record: {decibels} dB."))
    section.add(count)
    if others is None:
        section.missing.append("whether similarity is a leak: give non_members=, such as the test set")
    return section


def recovery_section(found: Evidence, members: Records) -> Section:
    """Return the section on how many private records resemble an image that was sent or published.

    For comparison, the section also counts the non-members that resemble a sent image, and the private records that
    resemble an image of a baseline, which sends random private records.

    Args:
        found: the report's evidence.
        members: its training records.
    """
    images, groups = torch.cat(found.observed.rounds), {"private records": members.selected}
    if found.non_members is not None:
        groups["held-out images"] = found.non_members.selected
    levels = {name: _record_levels(images, records) for name, records in groups.items()}
    drawn = torch.cat(random_baseline(found.observed.rounds, members.pixels))
    rows = {**levels, "baseline: random real images": closest_images(drawn, members.selected)[0]}
    cells = [(name, str(len(v)), *(str(share_of(v >= d)) for d in PSNR_LEVELS)) for name, v in rows.items()]
    shares = [format_percent(float((v >= PSNR_LEVELS[1]).float().mean())) for v in levels.values()]
    others = "".join(f" (of held-out images {share})" for share in shares[1:])
    return Section(
        "How many records are recovered",
        [
            "For each record, the PSNR (in pixel space; higher is closer) of the nearest image sent in any round. "
            "Flips, shifts, changes of color and tiling are undone first. "
            "Held-out images show how close unrelated images come. The baseline sends as many random real images per "
            "round; a method whose images are safer than the data must stay far below it.",
            Table(("group", "number", *(f"at least {d} dB" for d in PSNR_LEVELS)), cells, left=1),
            histogram(levels, "Shares of records by the PSNR of the nearest sent image.", "PSNR in dB", PSNR_LEVELS),
        ],
        recovered=f"{shares[0]} of all records are recovered above {PSNR_LEVELS[1]} dB{others}",
    )


def _record_levels(images: Tensor, records: Tensor) -> Tensor:
    """Return the level of each record's nearest image; altered copies are sought among at most _PAIRS / N images."""
    chosen = torch.randperm(len(images), generator=derive(0, "altered"))[: max(1, _PAIRS // len(records))]
    return torch.maximum(closest_images(images, records)[0], find_copies(images[chosen], records).record_level)


def membership_section(found: Evidence, members: Records, others: Records, started_from: Tensor | None) -> Section:
    """Return the section on membership inference from the images that were sent in the run.

    The attack compares the records with the sent images, and needs no trained model.

    Args:
        found: the report's evidence.
        members: its training records.
        others: its records that were not used for training.
        started_from: indices of the members from which sent images were initialized, int [S]; None if unknown.
    """
    real = random_baseline(found.observed.rounds, members.pixels)
    own, baseline = (
        [record_scores(rounds, records.selected) for records in (members, others)]
        for rounds in (found.observed.rounds, real)
    )
    scores: dict[str, tuple[Tensor, Tensor]] = {}
    for name in own[0]:
        scores |= {name: (own[0][name], own[1][name]), f"{name}, baseline": (baseline[0][name], baseline[1][name])}
    table, points = rate_table("attack", scores, len(own[0]))
    points = {name: points[name] for name in own[0]}
    section = Section(
        "Membership inference from the images",
        [
            "An adversary with the images scores a candidate by its distance to the nearest image, or by how much "
            "closer that image is than the second nearest. No model or shadow model is needed. Thresholds for 1 % "
            "false positives come from one half of the held-out images; rates are counted on the other half. Guessing "
            "has equal true- and false-positive rates.",
            table,
        ],
    )
    sizes = f" ({len(members.index)} members and {len(others.index)} non-members)"
    judge(section, "images", points, "the sent images identify", sizes)
    _add_groups(section, members, own[0], points, started_from)
    return section


def _add_groups(
    section: Section, members: Records, scores: dict[str, Tensor], points: dict[str, OperatingPoint],
    started_from: Tensor | None,
) -> None:  # fmt: skip
    if started_from is None:
        section.missing.append("rates for records that images started from, and for the rest: give started_from=")
        return
    first, cells = torch.isin(members.index, started_from.cpu()), []
    for name, values in scores.items():
        called = values >= points[name].threshold
        shares = [str(share_of(c)) if len(c) else "none attacked" for c in (called[first], called[~first])]
        cells.append((name, *shares))
    section.add(
        f"By group, at the same thresholds: images started from {int(first.sum())} of {len(first)} members.",
        Table(("attack", "records that images started from", "the rest"), cells, left=1),
    )
