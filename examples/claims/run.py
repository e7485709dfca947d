"""Tests of the papers' claims with enough seeds. The design of each test is registered before its first result.

    python examples/claims/run.py fedcog --data DATA --pilot --out PILOT   # five pairs of runs
    python examples/claims/run.py fedcog --register PILOT                  # write the design; then commit it
    python examples/claims/run.py fedcog --data DATA                       # the registered runs, and the verdict

A claim compares two candidates on one task. Both try equally many configurations, which are compared by the mean
validation accuracy over the late rounds and two seeds. If the best learning rate is the smallest or largest one, both
candidates get further rates. The pilot runs use fixed settings. They show how much results vary between seeds, and
`--register` computes from them how many seeds the test needs. `docs/results/designs` contains the registered designs.
`real_images.py` and `condensed_images.py` contain the claims, with the differences that the papers report.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of all examples

from claims.claim import described
from claims.condensed_images import CLAIMS as CONDENSED
from claims.extension import extended
from claims.real_images import CLAIMS as ON_IMAGES
from claims.registration import Design, read_design, used_seeds
from distillkit.study import Records, Study, paired_differences, power_analysis, read_records, summary_table
from shared.files import write_file
from shared.options import command_line, parse_arguments, refuse_unused
from shared.study import UNFINISHED, run_study

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
CLAIMS = ON_IMAGES | CONDENSED
DESIGNS = RESULTS / "designs"
PRESETS: dict[str, dict[str, Any]] = {"smoke": {"seeds": None}, "cpu": {"seeds": None}}
PILOT, TUNING = range(200, 205), (100, 101)
FIRST = 300
"""First seed of the registered runs."""


def main(words: list[str] | None = None) -> None:
    """Run the pilot of a claim, register its design, or run the registered design."""
    parser = command_line(__doc__, out="runs/claim", presets=PRESETS)
    parser.add_argument("claim", choices=CLAIMS, help="claim to test")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--pilot", action="store_true", help="run the pairs that show how results vary by seed")
    kind.add_argument("--inside", action="store_true", help="run pairs of the pilot again, with more measurements")
    kind.add_argument("--register", type=Path, metavar="PILOT", help="write the design, from this folder of the pilot")
    o = parse_arguments(parser, words)
    pilot = o.pilot or o.inside
    refuse_unused(parser, words, "without --pilot, because a design fixes the seeds", "--seeds", unless=pilot)
    if o.data is not None:
        os.environ["DISTILLKIT_DATA"] = str(o.data.expanduser().resolve())  # no design contains the path of the data
    claim, path = CLAIMS[o.claim](o), DESIGNS / f"{o.claim}.json"
    base, candidate = claim.candidates
    seeds: Sequence[int]
    if o.inside and claim.measured is None:
        parser.error(f"{o.claim} has no measurements of its own: --inside has no effect")
    claim = claim.inside() if o.inside else claim
    fixed = {name: replace(one, search=[claim.pilot.get(name, {})]) for name, one in claim.candidates.items()}
    if pilot:
        claim = replace(claim, tasks=claim.tasks[:1], candidates=fixed)
    searched = [one.search for one in claim.candidates.values() if one.like is None]
    rates = all(len({settings.get("lr") for settings in search} - {None}) > 1 for search in searched)
    if o.register:
        found = read_records(o.register).late(claim.rounds)
        power = power_analysis(found, candidate, base, effect=claim.effect, column="accuracy_late")
        seeds = range(FIRST, FIRST + max(claim.least, power.seeds))
    elif not pilot and not path.is_file():
        parser.error(f"{o.claim} has no registered design ({path.name}); run its pilot first, with --pilot")
    else:
        seeds = (o.seeds or PILOT) if pilot else read_design(path).seeds
    study = Study(
        o.out, claim.tasks, claim.candidates, seeds=seeds, tune_seeds=TUNING, rule="late", late_rounds=claim.rounds
    )
    limits = {"lr": 1} if rates and not pilot else {}
    description = described(study, claim.tasks[0].name, (candidate, base), limits)
    if o.register:
        if path.exists():
            parser.error(f"{path} exists, and a registered design never changes")
        earlier = used_seeds([o.register, *RESULTS.glob(f"{o.claim}.jsonl")])
        design = Design(claim.text, candidate, base, power, earlier, description)
        write_file(path, json.dumps(design.content(), indent=1) + "\n")
        print(design)
        return
    registered = None if pilot else read_design(path)
    if registered is not None and not (o.estimate or o.repeat):
        registered.require(description, path)
        longer = extended(study, limits, processes=o.workers, device=o.device, seconds=o.seconds)
        if longer is None:
            sys.exit(UNFINISHED)
        study = longer

    def tables(records: Records) -> list[object]:
        shown: list[object] = [summary_table(records, columns=["accuracy_late", "client_seconds"])]
        if registered is not None:
            verdict = registered.evaluate(records)
            shown.append(verdict)
            if verdict.startswith("Unfinished"):
                return shown
        elif len(seeds) >= len(PILOT):
            shown.append(power_analysis(records, candidate, base, effect=claim.effect, column="accuracy_late"))
        return [*shown, paired_differences(records, base, column="accuracy_late")]

    run_study(study, o, tables, claim=None if registered is None else str(registered))


if __name__ == "__main__":
    main()
