"""The commands `distillkit attack` and `distillkit report`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from attacks.reporting import Leaks, leaks
from attacks.reporting import report as report_run
from attacks.reporting.copies import closest_images
from distillkit import plot
from distillkit._utils.pages import Section, drawn, image_grid
from distillkit.commands._results import Result, printed, refuse_given
from distillkit.commands._sources import Sources, source_options
from distillkit.sets import LabeledImages, StoredImages

_SHOWN = 10


def _measured(
    small: LabeledImages, source: str, held_out: str | None, device: str, sources: Sources, progress: bool
) -> tuple[Any, Leaks]:
    """Return the training records, and what a set reveals of them."""
    train, others = sources.read(source, small, progress=progress)
    if held_out is not None:
        others = replace(sources, test_fraction=0.0).read(held_out, small, progress=progress).train
    if not len(others):
        raise click.UsageError(
            f"{source} has no held-out part: give --held-out with records that the set was not made from"
        )
    return train, leaks(small, train, others, device=device)


_HELD_OUT = click.option("--held-out", metavar="SOURCE", help="Records not used; default: the test part of --train.")
_DEVICE = click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or auto.")


@click.command(epilog="Example: distillkit attack digits-dm-1 --train digits")
@click.argument("set", metavar="SET")
@click.option("--train", "source", required=True, metavar="SOURCE", help="The records that SET was made from.")
@_HELD_OUT
@_DEVICE
@source_options
@printed
def attack(set: str, source: str, held_out: str | None, device: str, sources: Sources, progress: bool) -> Result:
    """Measure what the images of SET reveal of the records that it was made from."""
    _, found = _measured(sources.read_set(set), source, held_out, device, sources, progress)
    return Result(_verdict(set, found), str(found), found.record(), [Section("Attacks", [found.table()])])


@click.command(epilog="Example: distillkit report digits-dm-1 --train digits --html report.html")
@click.argument("path", metavar="SET_OR_RUN")
@click.option("--train", "source", metavar="SOURCE", help="The records that it was made from; needed for a set.")
@_HELD_OUT
@_DEVICE
@source_options
@printed
def report(
    path: str, source: str | None, held_out: str | None, device: str, sources: Sources, progress: bool
) -> Result:  # fmt: skip
    """Report what a SET, or the folder of a federated RUN, reveals of its records.

    A set's report shows its images beside the nearest training records. A run's report is also written to its folder.
    """
    if (Path(path) / "config.json").is_file():
        refuse_given("in the report of a run", "held_out", "device")
        return _of_run(Path(path), source, sources, progress)
    if source is None:
        raise click.UsageError("the report of a set needs --train, the records that it was made from")
    small = sources.read_set(path)
    train, found = _measured(small, source, held_out, device, sources, progress)
    origin = [f"{name}: {small.info[name]}" for name in ("method", "epsilon", "delta", "reason") if name in small.info]
    nearest = Section("The images beside the training records nearest to them")
    nearest.add(*_nearest(small, train))
    pages = [
        Section("Set", [str(small), origin, drawn(plot.grid(small), "the images, one class a row")]), nearest,
        Section("Attacks", [found.table(), "Smaller leaks remain possible; labels are not examined."]),
    ]  # fmt: skip
    return Result(_verdict(path, found), "\n".join([str(small), *origin, str(found)]), found.record(), pages)


def _verdict(name: str, found: Leaks) -> str:
    return f"{name}: {found.table().cells[0][1]}"


def _nearest(small: LabeledImages, train: LabeledImages | StoredImages) -> list[Any]:
    """Return a picture of the images that are nearest to a training record, above these records, and their PSNR."""
    pixels = small.pixels().float()
    best, index = torch.full((len(small),), -torch.inf), torch.zeros(len(small), dtype=torch.long)
    for rows in torch.arange(len(train)).split(1024):
        part = train.read(rows) if isinstance(train, StoredImages) else train[rows]
        level, near = closest_images(part.pixels().float(), pixels)
        index, best = torch.where(level > best, rows[near], index), torch.maximum(best, level.float())
    shown = best.argsort(descending=True)[:_SHOWN]
    records = train.read(index[shown]) if isinstance(train, StoredImages) else train[index[shown]]
    levels = ", ".join(f"{level:.0f}" for level in best[shown].tolist())
    return [image_grid([pixels[shown], records.pixels().float()], f"images above, records below; PSNR in dB: {levels}")]


def _of_run(folder: Path, source: str | None, sources: Sources, progress: bool) -> Result:
    given: dict[str, Any] = {}
    if source is None:
        refuse_given("in the report of a run without --train", *vars(sources))
    else:
        train, test = sources.read(source, progress=progress)
        given = {"members": train, "non_members": test}
    found = report_run(folder, progress=progress, **given)
    record = {"verdict": found.verdict, "leaks": found.leaks, "not_found": found.not_found, "missing": found.missing}
    lists = [Section(name, [list(texts)]) for name, texts in record.items() if isinstance(texts, tuple) and texts]
    return Result(found.verdict, str(found), {**record, "html": str(found.html)}, lists)
