"""Every federated method on the same ten clients: handwritten digits under Dirichlet(0.1), one table.

Run `python examples/methods/run.py --help`. Each client keeps a fifth of its digits for its own tests. A seventh of the
training images stays with the server, for the methods that need images there. Every candidate searches four
configurations on held-out images; `candidates.py` lists them. The search evaluates the global model. For personal
methods and their baseline, a second FedAvg, it evaluates the clients on their own test images.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of all examples

from distillkit.data import load, partition
from distillkit.study import Records, Study, Table, Task, paired_differences, summary_table
from fl.addons import SCAFFOLD
from fl.methods import FedProto
from fl.study import Federated
from methods.candidates import OWN, PERSONAL, VHL, averaging, candidates, ensemble
from shared.options import command_line, parse_arguments
from shared.study import run_study

PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {"rounds": 2, "late": 2, "divisor": 20},
    "cpu": {"rounds": 10, "late": 9, "divisor": 1},
}
COLUMNS = ("accuracy_own", "bytes_up", "bytes_down", "client_seconds")


def task(rounds: int) -> Task:
    """Return the task: the digits of ten clients, with a ConvNet of two blocks and 14,826 parameters."""
    data, assign = partial(load, "digits", size=16), partial(partition.dirichlet, clients=10, alpha=0.1)
    network = {"width": 32, "depth": 2}
    return Task("digits", data, assign, factory_options=network, rounds=rounds, own_tests=0.2, server_share=1 / 7)


def controls() -> dict[str, Federated]:
    """Return control candidates, each of which differs in one setting from the candidate that it copies."""

    def like(name: str, candidate: Federated, **settings: Any) -> Federated:
        return replace(candidate, like=name, search=({},), settings=settings)

    scaffold, proto = SCAFFOLD(), Federated(FedProto)
    return {
        "FedAvg, 30 rounds": like("FedAvg", averaging(), rounds=30),
        "SCAFFOLD, 30 rounds": like("SCAFFOLD", averaging(scaffold, weights="uniform"), rounds=30),
        "VHL, 30 rounds": like("VHL", averaging(VHL), rounds=30),
        "FedAvg, uniform weights": like("FedAvg", averaging(weights="uniform")),
        "SCAFFOLD, weighted by samples": like("SCAFFOLD", averaging(scaffold)),
        "FedDF, 20 steps": like("FedDF", averaging(partial(ensemble, steps=20))),
        "FedDF, 200 steps": like("FedDF", averaging(partial(ensemble, steps=200))),
        "FedProto, weight 0.1": like("FedProto", proto, lam=0.1),
        "FedProto, by its classifier": like("FedProto", proto, predict="classifier"),
        "FedProto without the distance": like("FedProto", proto, lam=0.0, predict="classifier"),
    }


def tables(records: Records) -> list[Table]:
    """Return the results of each candidate, and the paired differences from FedAvg with equally many rounds."""
    found: list[Table] = [summary_table(records, columns=COLUMNS)]
    for base, column in {"FedAvg": "accuracy_last", "FedAvg, 30 rounds": "accuracy_last", OWN: "accuracy_own"}.items():
        alike = [r for r in records if kind(r.method) == kind(base)]
        if {base} < {record.method for record in alike}:
            found.append(paired_differences(alike, base, column=column))
    return found


def kind(name: str) -> tuple[bool, bool]:
    """Return the group of a candidate by its models and rounds. Only candidates of the same group are compared."""
    return name.startswith(PERSONAL), name.endswith("30 rounds")


def main() -> None:
    """Run the example."""
    parser = command_line((__doc__ or "").splitlines()[0], out="runs/methods", presets=PRESETS, data=False)
    parser.add_argument("--methods", nargs="+", default=None, metavar="NAME", help="only these methods and FedAvg")
    parser.add_argument("--controls", action="store_true", help="also run the control candidates")
    arguments = parse_arguments(parser)
    usual, further = candidates(arguments.late, arguments.divisor), controls()
    found = {**usual, **further}
    if unknown := sorted(set(arguments.methods or ()) - set(found)):
        parser.error(f"--methods must be among {'; '.join(found)}; got {'; '.join(unknown)}")
    wanted = {"FedAvg", OWN, *(arguments.methods or usual), *(further if arguments.controls else ())}
    wanted |= {str(found[name].like) for name in wanted if found[name].like}
    compared = {name: candidate for name, candidate in found.items() if name in wanted}
    if arguments.preset == "smoke":
        compared = {name: replace(candidate, search=candidate.search[:1]) for name, candidate in compared.items()}
    study = Study(arguments.out, task(arguments.rounds), compared, seeds=arguments.seeds)
    run_study(study, arguments, tables, by=())


if __name__ == "__main__":
    main()
