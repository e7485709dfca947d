"""Privacy report of a small run that this script makes, or of a run of one of your studies.

    python examples/privacy_report.py                    # ten clients with digits, FedDM; report in the run's folder
    python examples/privacy_report.py --init noise       # images initialized with noise
    python examples/privacy_report.py --method FedAvg    # sixty clients send weights; an update is inverted
    python examples/privacy_report.py --method private   # FedDM whose clients send noised class means
    python examples/privacy_report.py --run runs/quickstart-look/dirichlet-0.01-feddm-0    # one run of `make demo`

The report is one HTML file. Without shadow models it takes seconds; each shadow model takes as long as the run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attacks import Report, report
from attacks.membership import Pipeline, Scorer, model_scorer
from attacks.reporting import DamagedRun, IncompatibleImages, Inversion, NoRun
from attacks.transcript import DamagedTranscript
from distillkit.data import Split, load, partition
from distillkit.networks import build
from distillkit.privacy import gaussian_sigma, plan_noise
from distillkit.study import Study, Task
from distillkit.training import Protocol, train
from fl import CheckpointError, FedAvg, FedDM
from fl.methods import PrivateFedDM
from fl.study import Federated, NotRepeatable, repeat
from fl.study import load as load_run
from shared.options import command_line, number, parse_arguments, refuse_unused

DELTA = 1e-5
FEW: dict[str, Any] = {"clients": 10, "alpha": 0.01}
MANY: dict[str, Any] = {"clients": 60, "alpha": 0.1, "min_size": 2}
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"rounds": 1, "steps": 1, "shadows": 0},
    "cpu": {"seeds": [0], "rounds": 3, "steps": 10, "shadows": 8},
}
SERVER: dict[str, Any] = {"server_lr": 0.03, "server_batch": 32, "server_epochs": 5}
RAW = Protocol(epochs=60, lr=0.03, batch=32)


def private(factory: Any, rounds: int, epsilon: float, steps: int, num_networks: int = 5) -> PrivateFedDM:
    """Return FedDM whose clients send noised class means, with `epsilon` for each record over the whole run."""
    sizes = gaussian_sigma(epsilon, DELTA) / 0.05**0.5  # a twentieth of the budget for the class sizes
    sigma = plan_noise(epsilon, DELTA, count=num_networks * rounds, spent=[(sizes, 1.0, 1)]).sigma
    options = {"num_networks": num_networks, "steps": steps, **SERVER}
    return PrivateFedDM(factory=factory, sigma=sigma, sigma_sizes=sizes, **options)


def make_run(options: Any, seed: int) -> Path:
    """Make the run of one seed, as a study of one candidate. A run of a study can be repeated from its folder."""
    assign = partial(partition.dirichlet, **(MANY if options.method == "FedAvg" else FEW))
    network = {"width": 32, "depth": 2}
    digits = partial(load, "digits", size=16)
    task = Task("digits", digits, assign, factory_options=network, rounds=options.rounds)
    sizes = {"ipc": 10, "batch_real": 32, "steps": options.steps, "init": options.init, "rho": 20.0, **SERVER}
    candidates: dict[str, tuple[Any, dict[str, Any]]] = {
        "FedDM": (FedDM, sizes), "FedAvg": (FedAvg, {"batch": 32, "lr": 0.1}),
        "private": (private, {"epsilon": 8.0, "steps": 10 * options.steps, "rounds": options.rounds}),
    }  # fmt: skip
    make, settings = candidates[options.method]
    candidate = Federated(make, settings=settings, delta=DELTA, transcript=True)
    study = Study(options.out, task, {options.method: candidate}, seeds=[seed])
    if options.estimate:
        print(f"{study.estimate(device=options.device)}\nEach of {options.shadows} shadows takes as long.")
        raise SystemExit
    [record] = study.run(device=options.device, workers=options.workers, trial=False, progress=False)
    return Path(str(record.folder))


def repeat_run(folder: Path, split: Split, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """Repeat the whole run for one shadow model, with only the records at `indices`."""
    shadow = repeat(folder, keep=indices, seed=seed, data=split, progress=False)
    return {"model": model_scorer(shadow.models[""])}


def raw(folder: Path, split: Split, indices: Tensor, seed: int) -> dict[str, Scorer]:
    """Train the run's network on the raw records at `indices`, as a baseline."""
    network = build(partial(load_run(folder).task.network(split), split.train.num_classes), seed)
    train(network, split.train[indices], RAW, generator=seed, progress=False)
    return {"model": model_scorer(network)}


def write_report(folder: Path, options: Any) -> Report:
    """Write the report of a run, with all results that its folder provides."""
    if not (folder / "config.json").is_file():
        return report(folder)  # raises an error that says what a run is
    run = load_run(folder)
    split = run.task.load()

    def pipeline(fit: Any) -> Pipeline:
        population = split.test.images, split.test.labels
        return Pipeline(partial(fit, folder, split), split.train.images, split.train.labels, population, str(run.hash))

    given: dict[str, Any] = {"workers": options.workers}
    if options.shadows:
        given |= {"pipeline": pipeline(repeat_run), "baselines": {"model on raw data": pipeline(raw)}}
    return report(
        folder, members=split.train, non_members=split.test, network=run.models[""],
        invert=Inversion(owners=run.assign(split).owners), shadows=options.shadows or 8, **given,
    )  # fmt: skip


def main(words: Sequence[str] | None = None) -> list[Report]:
    """Run the example."""
    doc, at_once = (__doc__ or "").splitlines()[0], "shadows at a time"
    parser = command_line(doc, out="runs/privacy_report", presets=PRESETS, workers=at_once, data=False, study=False)
    add = parser.add_argument
    add("--run", type=Path, default=None, help="run of a study with transcript=True; default: make one")
    add("--method", choices=("FedDM", "FedAvg", "private"), default="FedDM", help="method of the run made here")
    add("--init", choices=("real", "noise"), default="real", help="initialization of FedDM's images")
    add("--shadows", type=number(0), default=None, help="repetitions on halves of the records; default: the preset's")
    options = parse_arguments(parser, words)
    unused = ("--method", "--init", "--seeds", "--out", "--device", "--estimate")
    refuse_unused(parser, words, "with --run", *unused, unless=not options.run)
    refuse_unused(parser, words, f"with --method {options.method}", "--init", unless=options.method == "FedDM")
    if options.shadows % 2 or 0 < options.shadows < 8:
        parser.error(f"--shadows must be 0, or even and at least 8, got {options.shadows}")
    torch.set_num_threads(1)
    found = []
    for seed in options.seeds:
        try:
            found.append(write_report(options.run or make_run(options, seed), options))
        except (CheckpointError, DamagedRun, DamagedTranscript, NoRun, NotRepeatable, IncompatibleImages) as error:
            sys.exit(str(error))
        lines = [found[-1].verdict, *(f"- {line}" for line in [*found[-1].leaks, *found[-1].not_found])]
        print("\n".join([*lines, *(f"not determined: {missing}" for missing in found[-1].missing)]))
        print(f"{found[-1].html}\n{found[-1].markdown}")
        if options.run:
            break
    return found


if __name__ == "__main__":
    main()
