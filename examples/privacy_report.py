"""What a finished run gives away, on one page: of a small run made here, or of your own.

    python examples/privacy_report.py                       # ten clients with digits, FedDM; report beside the run
    python examples/privacy_report.py --init noise          # images that start from noise
    python examples/privacy_report.py --run FOLDER          # a run of digits of yours, kept with transcript=True
    python examples/privacy_report.py --shadows 8           # and the strong attacks, the run repeated on halves

The report opens alone in any browser. Without shadows it takes seconds; each shadow takes as long as the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from attacks import Report, report
from attacks.membership import Pipeline, model_scorer
from attacks.membership.pipeline import Scorer
from attacks.reporting import DamagedRun, NoRun, OtherSpace
from attacks.transcript import DamagedTranscript
from distillkit import LabeledImages
from distillkit.data import clients, load, partition
from distillkit.networks import ConvNet
from fl import FedDM, simulate

CLIENTS, ALPHA = 10, 0.01


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


def main(words: Sequence[str] | None = None) -> Report:
    """Make the run unless one is given, and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=None, help="folder of a run of these digits; default: make one")
    parser.add_argument("--out", type=Path, default=Path("runs/privacy_report"), help="folder of the run made here")
    parser.add_argument("--init", choices=("real", "noise"), default="real", help="what the images start from")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of each client a round")
    parser.add_argument("--shadows", type=int, default=0, help="repetitions on halves of the records; 0 for none")
    parser.add_argument("--workers", type=int, default=1, help="shadows at a time")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    train, test = load("digits", size=16)
    folder = options.run or options.out
    if options.run is None:
        simulate(
            feddm(options.init, options.steps), held(train), rounds=options.rounds, seed=0, test=test, out=folder,
            transcript=True, resume=True,
        )  # fmt: skip
    pipeline, network = None, None if options.run else convnet(10)
    if options.shadows and options.run:
        parser.error("--shadows repeats the run made here; for your own give attacks.report a pipeline of yours")
    if options.shadows:
        again = partial(fit, train, options.init, options.steps, options.rounds)
        population = (test.images, test.labels)
        pipeline = Pipeline(again, train.images, train.labels, population, tag=f"{options.init} {options.steps}")
    try:
        found = report(
            folder, pipeline, members=train, outsiders=test, network=network, shadows=options.shadows or 8,
            workers=options.workers,
        )  # fmt: skip
    except (NoRun, DamagedRun, DamagedTranscript, OtherSpace) as error:
        sys.exit(str(error))
    print(found.verdict)
    for missing in found.missing:
        print(f"not told: {missing}")
    print(f"{found.html}\n{found.markdown}")
    return found


if __name__ == "__main__":
    main()
