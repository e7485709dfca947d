"""What a finished run gives away, on one page: of a small run made here, or of your own.

    python examples/privacy_report.py                    # ten clients with digits, FedDM; report beside the run
    python examples/privacy_report.py --init noise       # images that start from noise
    python examples/privacy_report.py --run FOLDER       # a run of digits of yours, kept with transcript=True
    python examples/privacy_report.py --shadows 0        # without the strong attacks, which repeat the run on halves

The report opens alone in any browser. Without shadows it takes seconds; each shadow takes as long as the run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from _options import command_line, number, parsed
from attacks import Report, report
from attacks.membership import Pipeline, estimate, model_scorer
from attacks.membership.pipeline import Scorer
from attacks.reporting import DamagedRun, NoRun, OtherSpace
from attacks.transcript import DamagedTranscript
from distillkit import LabeledImages
from distillkit.data import clients, load, partition
from distillkit.networks import ConvNet
from fl import FedDM, simulate

CLIENTS, ALPHA = 10, 0.01
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"rounds": 1, "steps": 1, "shadows": 0},
    "cpu": {"rounds": 3, "steps": 10, "shadows": 8},
}


def convnet(outputs: int) -> ConvNet:
    """A ConvNet of two blocks for digits of 16 x 16."""
    return ConvNet((1, 16, 16), outputs, width=32, depth=2)


def held(train: LabeledImages) -> list[LabeledImages]:
    """Ten clients with different digits."""
    return list(clients(train, partition.dirichlet(train.labels, CLIENTS, ALPHA, generator=0)))


def feddm(init: Literal["real", "noise"], steps: int) -> FedDM:
    """FedDM, as in the quickstart but for fewer epochs of the server."""
    return FedDM(
        factory=convnet, ipc=10, batch_real=32, steps=steps, init=init, rho=20.0, server_lr=0.03, server_batch=32,
        server_epochs=5,
    )  # fmt: skip


def fit(
    train: LabeledImages, init: Literal["real", "noise"], steps: int, rounds: int, indices: Tensor, seed: int
) -> dict[str, Scorer]:
    """One shadow: the whole run again, every client with those of its records that are among `indices`."""
    owner = partition.dirichlet(train.labels, CLIENTS, ALPHA, generator=0)
    kept = [train[part[torch.isin(part, indices)]] for part in owner]
    run = simulate(feddm(init, steps), kept, rounds=rounds, seed=seed, progress=False)
    return {"model": model_scorer(run.models[""])}


def reported(options: Any, seed: int, train: LabeledImages, test: LabeledImages) -> Report:
    """The run of one seed, unless one is given, and its report."""
    folder = options.run or options.out / str(seed)
    if options.run is None:
        simulate(
            feddm(options.init, options.steps), held(train), rounds=options.rounds, seed=seed, test=test, out=folder,
            device=options.device, transcript=True, resume=True,
        )  # fmt: skip
    pipeline = None if options.run or not options.shadows else shadowed(options, train, test)
    return report(
        folder, pipeline, members=train, outsiders=test, network=None if options.run else convnet(10),
        shadows=options.shadows or 8, workers=options.workers,
    )  # fmt: skip


def shadowed(options: Any, train: LabeledImages, test: LabeledImages) -> Pipeline:
    """The whole run, to be repeated on halves of its records."""
    again = partial(fit, train, options.init, options.steps, options.rounds)
    tag = f"{options.init} {options.steps} {options.rounds}"
    return Pipeline(again, train.images, train.labels, (test.images, test.labels), tag=tag)


def main(words: Sequence[str] | None = None) -> list[Report]:
    """Make what the options ask for."""
    parser = command_line(
        (__doc__ or "").splitlines()[0], out="runs/privacy_report", presets=tuple(PRESETS), workers="shadows at a time"
    )
    add = parser.add_argument
    add("--run", type=Path, default=None, help="folder of a run of these digits; default: make one")
    add("--init", choices=("real", "noise"), default="real", help="what the images start from")
    add("--rounds", type=number(1), default=None, help="of the run made here; default: the preset's")
    add("--steps", type=number(0), default=None, help="of each client a round; default: the preset's")
    add("--shadows", type=number(0), default=None, help="repetitions on halves of the records; default: the preset's")
    options = parsed(parser, words)
    if options.run and options.shadows:
        parser.error("--shadows repeats the run made here; for your own give attacks.report a pipeline of yours")
    for name, value in PRESETS[options.preset].items():
        setattr(options, name, value if getattr(options, name) is None else getattr(options, name))
    torch.set_num_threads(1)
    train, test = load("digits", size=16)
    if options.estimate:
        print(estimate(shadowed(options, train, test), max(2, options.shadows), workers=options.workers))
        raise SystemExit
    found = []
    for seed in options.seeds or [0]:
        try:
            found.append(reported(options, seed, train, test))
        except (NoRun, DamagedRun, DamagedTranscript, OtherSpace) as error:
            sys.exit(str(error))
        print("\n".join([found[-1].verdict, *(f"not told: {missing}" for missing in found[-1].missing)]))
        print(f"{found[-1].html}\n{found[-1].markdown}")
    return found


if __name__ == "__main__":
    main()
