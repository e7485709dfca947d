"""`distillkit sets`."""

from __future__ import annotations

from pathlib import Path

import click

from distillkit import plot
from distillkit._utils.pages import Section, drawn
from distillkit._utils.tables import NONE, Table
from distillkit.commands._results import Result, printed
from distillkit.commands._sources import read_set
from distillkit.data import set_cards

__all__ = ["sets"]


@click.command(epilog="Example: distillkit sets digits-dm-10 --out digits.npz")
@click.argument("set", metavar="[SET]", required=False)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write SET to a file (.safetensors, .npz) or a folder of PNGs."
)
@click.option("--root", type=click.Path(path_type=Path), help="Data root of named datasets.")
@printed
def sets(set: str | None, out: Path | None, root: Path | None, progress: bool) -> Result:
    """List the sets that come with distillkit, or describe or write one SET of any origin."""
    if set is None:
        if out is not None:
            raise click.UsageError("--out needs a SET")
        cards = set_cards()
        cells = [
            [
                name, card["method"], f"{100 * card['accuracy']['hard']:.1f}",
                f"{100 * max(card['accuracy']['row'], card['accuracy']['view']):.1f}",
                f"{100 * card['leak']['copies']:.0f}", NONE if card["epsilon"] is None else f"{card['epsilon']:.3g}",
            ]
            for name, card in cards.items()
        ]  # fmt: skip
        table = Table(
            ["set", "method", "accuracy (%)", "with soft labels (%)", "copies of records (%)", "epsilon"], cells, left=2
        )
        return Result(f"{len(cards)} sets", str(table), cards, [Section("Sets", [table])])
    found = read_set(set, root)
    wrote = ""
    if out is not None:
        found.save(out) if out.suffix == ".safetensors" else found.export(out)
        wrote = f"\nwrote {out}"
    told = [f"{name}: {value}" for name, value in found.info.items() if not isinstance(value, dict)]
    page = Section(set, [str(found), told, drawn(plot.grid(found), "the images, one class a row")])
    return Result(str(found), "\n".join([str(found), *told]) + wrote, dict(found.info), [page])
