"""`distillkit evaluate`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from distillkit import plot
from distillkit._utils.pages import Section, drawn
from distillkit._utils.tables import Table
from distillkit.commands._results import Result, printed, refuse_given
from distillkit.commands._sources import Sources, source_options
from distillkit.commands._training import Networks, network_options
from distillkit.evaluate import evaluate as evaluate_set
from distillkit.protocols import PROTOCOLS
from distillkit.study import mean_std
from distillkit.training import Protocol

_PROTOCOLS = tuple(name for name, protocol in PROTOCOLS.items() if protocol.relabel is None)


@click.command(
    epilog="Example: distillkit evaluate digits-dm-1 --test digits --width 16 --depth 2 --epochs 5 --networks 1"
)
@click.argument("set", metavar="SET")
@click.option("--test", "source", required=True, metavar="SOURCE", help="Test images; of a folder its test part.")
@click.option("--real", is_flag=True, help="Compare with random images of the training part of SOURCE.")
@click.option("--networks", "count", type=click.IntRange(1), default=3, show_default=True, help="Networks to train.")
@click.option("--epochs", type=click.IntRange(1), help="Epochs; default: 300, or those of --protocol.")
@click.option("--protocol", type=click.Choice(_PROTOCOLS), help="A paper's protocol, if it needs no teacher.")
@source_options
@network_options
@printed
def evaluate(
    set: str, source: str, real: bool, count: int, epochs: int | None, protocol: str | None, sources: Sources,
    networks: Networks, progress: bool,
) -> Result:  # fmt: skip
    """Train networks from scratch on SET, and test them on SOURCE."""
    if protocol is not None:
        refuse_given("with --protocol, which has its own augmentation", "augment")
    small = sources.read_set(set)
    split = sources.read(source, small, progress=progress)
    test = split.test if len(split.test) else split.train
    if real and test is split.train:
        raise click.UsageError(f"--real needs a SOURCE with a training and a test part, but {source} has one part")
    own = PROTOCOLS[protocol] if protocol else Protocol(epochs=300, augment=networks.augmentation())
    found = evaluate_set(
        small, test, networks.factory(small), real=split.train if real else None, num_networks=count,
        protocol=replace(own, epochs=epochs) if epochs else own, generator=networks.seed, device=networks.device,
        progress=progress,
    )  # fmt: skip
    cells = [[row.data, row.architecture, mean_std(row.accuracies, 100)] for row in found.rows]
    parts: list[Any] = [Table(["data", "network", "accuracy (%)"], cells), drawn(plot.grid(small), "the images")]
    said = f"{100 * found.rows[0].mean:.1f} % of {len(test)} test images"
    return Result(
        f"Networks trained on the set are right on {said}", str(found), found.record(), [Section("Accuracy", parts)]
    )
