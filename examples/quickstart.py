"""Ten clients with different handwritten digits train one model from weights, distilled images or raw images.

Run `make demo`, or `python examples/quickstart.py --help`. The default is a first look: one seed of the harder split.
`--preset cpu` makes the table of both splits and three seeds, after a search of eight configurations per candidate on
held-out images. The digits come with scikit-learn and are split over ten clients by Dirichlet(0.1) and Dirichlet(0.01).
FedAvg and FedProx send weights, and FedDM sends small synthetic sets. Real sends equally many random raw images to the
same server, as the control for the distilled sets.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from distillkit import plot
from distillkit.data import load, partition
from distillkit.study import Candidate, Records, Study, Task, grid, summary_table
from fl import FedAvg, FedDM, Real
from fl.addons import FedProx
from fl.engine.store import Store
from fl.study import Federated, at_equal
from shared.options import command_line, parse_arguments
from shared.study import run_study

COSTS = ("bytes_up", "bytes_down", "client_seconds", "seconds")
SKEWED, SKEWED_MORE = 0.1, 0.01
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"alphas": (SKEWED, SKEWED_MORE), "rounds": 2, "steps": 2, "server_epochs": 2},
    "look": {"alphas": (SKEWED_MORE,), "seeds": [0], "rounds": 10, "steps": 10, "server_epochs": 20},
    "cpu": {"alphas": (SKEWED, SKEWED_MORE), "rounds": 10, "steps": 10, "server_epochs": 20},
    "paper": {"alphas": (SKEWED, SKEWED_MORE), "rounds": 20, "steps": 1000, "server_epochs": 500},
}
SEARCH = {
    "FedAvg": grid(epochs=[1, 5], lr=[0.03, 0.1, 0.3, 1.0]),
    "FedProx": grid(epochs=[1, 5], lr=[0.1, 0.3], mu=[0.01, 0.1]),
    "FedDM": grid(server_lr=[0.003, 0.01, 0.03, 0.1], rho=[5.0, 20.0]),
}
CHOSEN = {
    "FedAvg": {"epochs": 1, "lr": 0.3},
    "FedProx": {"epochs": 5, "lr": 0.3, "mu": 0.01},
    "FedDM": {"server_lr": 0.01, "rho": 5.0},
}
"""Settings of the preset `look`, which has no search: the best ones on Dirichlet(0.01) (docs/results/quickstart.md)."""

CLOSING = """\
What this shows: with strongly skewed clients and few rounds, a server that trains on images of every client learns
faster than one that averages weights, and with fewer bytes. What it does not show: that distillation is the reason.
At 10 images per class, random raw images (Real) do about as well, but they are the private data themselves. FedDM
guarantees no privacy except in its differentially private variant. With enough rounds, FedAvg catches up."""


def task(alpha: float, rounds: int) -> Task:
    """Return the digits of ten clients, with a ConvNet of 14,826 parameters. A smaller `alpha` gives more skew."""
    assign = partial(partition.dirichlet, clients=10, alpha=alpha)
    network = {"width": 32, "depth": 2}
    return Task(f"dirichlet-{alpha}", partial(load, "digits", size=16), assign, factory_options=network, rounds=rounds)


def candidates(name: str) -> dict[str, Candidate]:
    """Return the four candidates with the search of the preset `name`. Real uses FedDM's settings."""
    preset, least = PRESETS[name], 1 if name == "smoke" else None
    search = {one: [CHOSEN[one]] if name == "look" else tried[:least] for one, tried in SEARCH.items()}
    sizes = {"ipc": 10, "batch_real": 32, "steps": preset["steps"], "server_batch": 32}
    sizes["server_epochs"] = preset["server_epochs"]
    seen: dict[str, Any] = {"transcript": name == "look"}  # for examples/privacy_report.py
    return {
        "FedAvg": Federated(FedAvg, settings={"batch": 32}, search=search["FedAvg"], **seen),
        "FedProx": Federated(
            lambda factory, mu, **others: FedAvg(FedProx(mu), factory=factory, **others),
            settings={"batch": 32}, search=search["FedProx"], **seen,
        ),
        "FedDM": Federated(FedDM, settings=sizes, search=search["FedDM"], **seen),
        "Real": Federated(Real, settings=sizes, like="FedDM", **seen),
    }  # fmt: skip


def pictures(study: Study, records: Records) -> None:
    """Draw the clients' digits, and the synthetic digits of FedDM's last round."""
    for name, one in study.design.tasks.items():
        split = one.load()
        owners = one.assign(split, study.design.seeds[0]).owners
        plot.partition(split.train.labels, owners).savefig(study.out / f"partition_{name}.png", dpi=150)
    last = [record.folder for record in records if record.method == "FedDM"][-1]
    synthetic = Store(Path(str(last))).state()[FedDM.images]
    plot.real_and_synthetic(split.train, synthetic, per_class=8).savefig(study.out / "synthetic_digits.png", dpi=150)


def main() -> None:
    """Run the example."""
    parser = command_line((__doc__ or "").splitlines()[0], out="runs/quickstart", presets=PRESETS, data=False)
    parser.set_defaults(preset="look")
    parser.add_argument("--equal-seconds", action="store_true", help="also give FedAvg FedDM's client seconds")
    arguments = parse_arguments(parser)
    compared = candidates(arguments.preset)
    more = 6 * arguments.rounds
    long = f"FedAvg, {more} rounds"
    if arguments.equal_seconds:
        compared[long] = Federated(FedAvg, settings={"batch": 32, "rounds": more}, like="FedAvg")
    tasks = [task(alpha, arguments.rounds) for alpha in arguments.alphas]
    study = Study(arguments.out, tasks, compared, seeds=arguments.seeds, tune_seeds=(100, 101))

    def tables(records: Records) -> list[object]:
        equal = [record for record in records if record.method in ("FedDM", long)]
        extra = [at_equal(equal, by="client_seconds")] if arguments.equal_seconds else []
        return [summary_table(records, columns=COSTS), *extra, CLOSING]

    pictures(study, run_study(study, arguments, tables, by=("round", "bytes_up", "client_seconds")))


if __name__ == "__main__":
    main()
