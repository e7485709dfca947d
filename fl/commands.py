"""The command `distillkit study`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

import fl.addons
from distillkit._utils.pages import Section, drawn
from distillkit.commands._results import Result, printed, refuse_given
from distillkit.commands._sources import Sources, numbers, source_options
from distillkit.commands._training import Networks, network_options
from distillkit.data import partition
from distillkit.study import Study, Task, curves, grid, read_records, summary_table
from fl.averaging import AddOn, FedAvg
from fl.methods import FedDM, Real
from fl.study import Federated

_OF_SETS = {"FedDM": FedDM, "Real": Real}


@click.command(
    epilog="Example: distillkit study digits --size 16 --width 8 --depth 2 --methods FedAvg,MOON --rounds 2 --out runs"
)
@click.argument("source")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the study, which can be continued."
)
@click.option(
    "--methods",
    default="FedAvg,FedProx,FedDM",
    show_default=True,
    help="FedAvg, any add-on by its name (SCAFFOLD, MOON, FedAvgM, ...), FedDM and Real.",
)
@click.option("--clients", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--alpha",
    type=click.FloatRange(0, min_open=True),
    default=0.1,
    show_default=True,
    help="Skew of the classes: Dirichlet(alpha).",
)
@click.option("--min-size", type=click.IntRange(1), default=10, show_default=True, help="Least images of a client.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Number of seeds.")
@click.option(
    "--lr", callback=numbers, default="0.1", show_default=True, help="Learning rates to search, separated by commas."
)
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help="Local epochs.")
@click.option("--steps", type=click.IntRange(1), default=100, show_default=True, help="Condensation steps of FedDM.")
@click.option(
    "--ipc", type=click.IntRange(1), default=10, show_default=True, help="Images per class of FedDM and Real."
)
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Runs at a time.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Stop after so long; the same call continues.")
@source_options
@network_options
@printed
def study(
    source: str, out: Path | None, methods: str, clients: int, alpha: float, min_size: int, rounds: int, seeds: int,
    lr: tuple[float, ...], epochs: int, steps: int, ipc: int, processes: int, seconds: float | None, sources: Sources,
    networks: Networks, progress: bool,
) -> Result:  # fmt: skip
    """Compare federated methods on the images of SOURCE, or show the study in the folder SOURCE."""
    if (Path(source) / "study.json").is_file():
        names = {str(one.name) for one in click.get_current_context().command.params}
        refuse_given("in a finished study", *(names - {"source", "as_json", "html", "quiet"}))
        return _shown(Path(source))
    refuse_given("in a study", "augment")
    if out is None:
        raise click.UsageError("--out is missing: the folder to which the study is written")
    split = sources.read(source, progress=progress)
    assign = partial(partition.dirichlet, clients=clients, alpha=alpha, min_size=min_size)
    options: dict[str, Any] = {"factory": networks.network, "factory_options": networks.options(), "rounds": rounds}
    task = Task(Path(source).stem, split, assign, **options)
    rates, own = list(lr), {"batch": 32, "epochs": epochs}
    sets = {"ipc": ipc, "steps": steps, "batch_real": 32, "server_batch": 32}
    candidates = {
        name: Federated(_OF_SETS[name], settings=sets, search=grid(server_lr=rates))
        if name in _OF_SETS
        else Federated(_averaging(name), settings=own, search=grid(lr=rates))
        for name in (one.strip() for one in methods.split(","))
    }
    made = Study(out, [task], candidates, seeds=[networks.seed + i for i in range(seeds)])
    made.run(processes=processes, device=networks.device, progress=progress, seconds=seconds)
    return _shown(out)


def _averaging(name: str) -> partial[FedAvg]:
    """Return a function that makes FedAvg, with an add-on unless `name` is "FedAvg"."""
    if name == "FedAvg":
        return partial(FedAvg)
    addon = getattr(fl.addons, name, None)
    if not (isinstance(addon, type) and issubclass(addon, AddOn)):
        raise click.UsageError(
            f"--methods takes FedAvg, {', '.join(_OF_SETS)} and {', '.join(fl.addons.__all__)}, not {name!r}"
        )
    try:
        return partial(FedAvg, addon())
    except TypeError as error:
        raise click.UsageError(f"--methods cannot make {name}: {error}; call Study in your own code") from error


def _shown(folder: Path) -> Result:
    try:
        records = read_records(folder)
    except FileNotFoundError:
        return Result("no finished run", f"{folder} has no finished run yet; the same call continues", {"runs": []})
    table = summary_table(records)
    rows = [dict(record.line) for record in records]
    page = Section("Results", [table, drawn(curves(records), "test accuracy over rounds, mean and standard deviation")])
    missing = f"\n\n{len(records.missing)} runs are missing; the same call continues" if records.missing else ""
    return Result(f"{len(rows)} runs in {folder}", f"{table}{missing}", {"runs": rows}, [page])
