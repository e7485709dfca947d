"""`distillkit label`."""

from __future__ import annotations

from pathlib import Path

import click

from distillkit._utils.pages import Section
from distillkit.commands._results import Result, printed
from distillkit.commands._sources import Sources, set_path, source_options, write_set
from distillkit.commands._training import Networks, network_options
from distillkit.labels import soft_labels
from distillkit.training import accuracy


@click.command(
    epilog="Example: distillkit label digits-dm-1 --train digits --width 16 --depth 2 --epochs 5 --out soft.npz"
)
@click.argument("set", metavar="SET")
@click.option("--train", "source", required=True, metavar="SOURCE", help="Images on which the teacher is trained.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    callback=set_path,
    help="The labeled set: a .safetensors or .npz file, or a folder of PNGs.",
)
@click.option("--epochs", type=click.IntRange(1), default=20, show_default=True, help="Epochs of the teacher.")
@click.option("--temperature", type=float, default=1.0, show_default=True)
@source_options
@network_options
@printed
def label(
    set: str, source: str, out: Path, epochs: int, temperature: float, sources: Sources, networks: Networks,
    progress: bool,
) -> Result:  # fmt: skip
    """Give every image of SET the probabilities of a teacher that is trained on SOURCE."""
    small = sources.read_set(set)
    train, test = sources.read(source, small, progress=progress)
    teacher = networks.trained(train, epochs, progress=progress)
    soft = soft_labels(small, teacher, temperature=temperature, pool=train)
    write_set(soft, out)
    tested = accuracy(teacher, test) if len(test) else None
    said = "" if tested is None else f"the teacher is right on {100 * tested:.1f} % of the held-out images\n"
    record = {"out": str(out), "images": len(soft), "teacher_accuracy": tested, "info": dict(soft.info)}
    return Result(str(soft), f"{soft}\n{said}wrote {out}", record, [Section("Set", [str(soft), said])])
