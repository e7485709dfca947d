"""Tests of the papers' claims with enough seeds. The design of each test is registered before its first result.

    export DISTILLKIT_DATA=DATA
    python examples/claims.py fedcog --pilot --out PILOT    # five pairs of runs, to estimate the spread between seeds
    python examples/claims.py fedcog --register PILOT       # write the design to docs/results/designs; then commit it
    python examples/claims.py fedcog                        # run the registered seeds

A claim compares two candidates on one task. Both search equally many configurations, by the mean validation accuracy of
the late rounds over two seeds. The seeds of pilots, of tuning and of results are disjoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from _claims import CLAIMS
from _options import command_line, parse_arguments, run_study
from distillkit.study import (
    Records,
    Study,
    paired_differences,
    power_analysis,
    read_design,
    read_records,
    summary_table,
)

DESIGNS = Path(__file__).resolve().parents[1] / "docs" / "results" / "designs"
PILOT, TUNING, FIRST = range(200, 205), (100, 101), 300
"""Seeds of pilots and of tuning, and the first seed of the results."""


def main(words: list[str] | None = None) -> None:
    """Run the pilot or the registered runs of a claim, or register its design."""
    parser = command_line(__doc__, out="runs/claim", presets=("smoke", "cpu"))
    parser.add_argument("claim", choices=CLAIMS, help="claim to test")
    parser.add_argument("--pilot", action="store_true", help="run the pairs that estimate the spread between seeds")
    parser.add_argument("--register", type=Path, metavar="PILOT", help="write the design, from the folder of the pilot")
    o = parse_arguments(parser, words)
    claim, path = CLAIMS[o.claim](o), DESIGNS / f"{o.claim}.json"
    (base, candidate), late = claim.candidates, "accuracy_late"
    prepare = partial(
        Study, o.out, claim.task, claim.candidates, tune_seeds=TUNING, rule="late", late_rounds=claim.rounds
    )
    if o.register:
        pilot = read_records(o.register).late(claim.rounds)
        power = power_analysis(pilot, candidate, base, effect=claim.effect, column=late)
        study = prepare(seeds=range(FIRST, FIRST + power.seeds))
        sentence = " ".join((CLAIMS[o.claim].__doc__ or "").split())
        print(study.register(path, claim=sentence, method=candidate, base=base, power=power, earlier=[o.register]))
        return
    if not o.pilot and not path.is_file():
        parser.error(f"{o.claim} has no registered design ({path.name}); run --pilot and --register first")
    design = None if o.pilot else read_design(path)
    study = prepare(seeds=o.seeds or (PILOT if design is None else design.seeds), registered=path if design else None)

    def tables(records: Records) -> list[object]:
        shown: list[object] = [summary_table(records, columns=[late, "client_seconds"])]
        if design is not None:
            return [*shown, design.evaluate(records)]
        shown.append(paired_differences(records, base, column=late))
        enough = len(study.design.seeds) >= len(PILOT)
        return [*shown, *([power_analysis(records, candidate, base, effect=claim.effect, column=late)] * enough)]

    run_study(study, o, tables, claim=str(design) if design else None)


if __name__ == "__main__":
    main()
