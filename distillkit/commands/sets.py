"""`distillkit sets`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from distillkit import plot
from distillkit._utils.pages import Section, drawn
from distillkit._utils.tables import NONE, Table
from distillkit._utils.user_warnings import without_warnings
from distillkit.commands._results import Result, printed
from distillkit.commands._sources import NORMALIZATION, ROOT, read_set, set_path, write_set
from distillkit.data import set_cards
from distillkit.normalization import Normalization
from distillkit.sets import LabeledImages


@click.command(epilog="Example: distillkit sets digits-dm-10 --out digits.npz")
@click.argument("set", metavar="[SET]", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    callback=set_path,
    help="Write SET to a .safetensors or .npz file, or a folder of PNGs.",
)
@click.option("--card", is_flag=True, help="With a folder: a dataset for the hub of Hugging Face, with its card.")
@ROOT
@NORMALIZATION
@printed
def sets(
    set: str | None, out: Path | None, card: bool, root: Path | None, normalization: Normalization | None,
    progress: bool,
) -> Result:  # fmt: skip
    """List the sets that come with distillkit, or describe or write one SET of any origin."""
    if card and (out is None or out.suffix):
        raise click.UsageError("--card needs --out FOLDER")
    if set is None:
        if out is not None:
            raise click.UsageError("--out needs a SET")
        cards = set_cards()
        cells = [
            [
                name, one["method"], f"{100 * one['accuracy']['hard']:.1f}",
                f"{100 * max(one['accuracy']['row'], one['accuracy']['view']):.1f}",
                f"{100 * one['leak']['copies']:.0f}", NONE if one["epsilon"] is None else f"{one['epsilon']:.3g}",
            ]
            for name, one in cards.items()
        ]  # fmt: skip
        table = Table(
            ["set", "method", "accuracy (%)", "with soft labels (%)", "copies of records (%)", "epsilon"], cells, left=2
        )
        return Result(f"{len(cards)} sets", str(table), cards, [Section("Sets", [table])])
    found = read_set(set, root, normalization)
    wrote = ""
    if out is not None:
        (_publish if card else write_set)(found, out)
        wrote = f"\nwrote {out}"
    told = [f"{name}: {value}" for name, value in found.info.items() if not isinstance(value, dict)]
    page = Section(set, [str(found), told, drawn(plot.grid(found), "the images, one class a row")])
    return Result(str(found), "\n".join([str(found), *told]) + wrote, dict(found.info), [page])


def _publish(data: LabeledImages, folder: Path) -> None:
    """Write pictures for viewers, `set.safetensors` for `load_set`, and a card with the metadata of the hub."""
    with without_warnings():  # of what pictures lose: the file keeps it
        data.export(folder)
    data.save(folder / "set.safetensors")
    facts = {"images": str(data), **{k: v for k, v in data.info.items() if k != "card"}, **data.info.get("card", {})}
    license = str(facts.get("licence", "unknown")).partition(": ")[0]
    meta = {
        "license": license.lower().replace(" ", "-"),
        "pretty_name": folder.name,
        "task_categories": ["image-classification"],
        "tags": ["dataset-distillation", "distillkit"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "*/*.png"}]}],
    }
    rows = [f"- {name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in facts.items()]
    text = ["---", *(f"{name}: {json.dumps(value)}" for name, value in meta.items()), "---", f"# {folder.name}", ""]
    text += ["Pictures have 8 bits; `distillkit.data.load_set` reads `set.safetensors`, without loss.", "", *rows]
    (folder / "README.md").write_text("\n".join(text) + "\n", encoding="utf-8")
