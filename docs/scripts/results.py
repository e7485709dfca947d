"""Write the tables and curves of a results page from the records of its studies.

    python docs/scripts/results.py PAGE [FOLDER ...]

With FOLDERs of finished studies, their records are first written to `results/PAGE.jsonl`, from which the page is made.
A table stands between `<!-- table: KIND option=value ... -->` and `<!-- end of table -->`:

    summary columns=bytes_up,client_seconds        to_target accuracy=0.9         worst_clients
    paired base=FedAvg column=accuracy_last        at_equal by=client_seconds     tuning
    leaderboard task=digits       scores task=digits            leaks task=digits
    rates hits=refuted,found trials=attacks means=seconds_cpu                     (sums of counts, with intervals)
    design name=fedcog        (the registered design `designs/fedcog.json` as a list, and the verdict on its claim)

Each kind accepts `task="S|T"` and `ways="A|B"` (select and order), `seeds="0|1"` (select), `hide="task|best % *"`
(columns to omit), `late=5` (a column `accuracy_late`: the mean over the last five rounds) and `published=yes` (a column
from `results/PAGE_published.json`, {task: {way: text}}). A table with `from=PAGE`, on `papers.md` or in `methods/`,
uses PAGE's records and is rebuilt with PAGE. `<!-- curves: NAME option=value ... -->`, with `task`, `ways`, `seeds` and
`by=bytes`, draws `../pictures/NAME.png`. `<!-- rounds: NAME columns="client_drift.relative|a.b+c" minus=METHOD every=5
-->` draws a panel for each group of columns over the rounds, see `_rounds.py`. The commits of the records stand between
`<!-- commits -->` and `<!-- end of commits -->`. New records are compared with the previous ones, and changes are
printed. `FOLDER@NAME` is a study of one task with another study's settings, recorded under the task name NAME. In a
run's folder, accuracies by domain (`domains.json`) are recorded as `accuracy_domain.NAME`, and the shares that a judge
names (`judge.json`) as `judge.NAME`, and the leaks of a set (`leaks.json`) as `leaks.NAME`.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from distillkit.study import (
    Records,
    Table,
    compare_studies,
    curves,
    paired_differences,
    read_design,
    read_records,
    summary_table,
    tuning_table,
    write_records,
)
from fl.study import at_equal, to_target, worst_clients

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS / "scripts"))

from _leaderboard_tables import leaderboard, leak_table, score_table  # noqa: E402
from _marks import COMMITS, TABLE, with_commits, with_tables  # noqa: E402
from _rounds import columns_by_round  # noqa: E402

__all__ = ["TABLE", "filled"]

CURVES = re.compile(r"<!-- (curves|rounds): (.*?) -->")
Options = dict[str, Any]


def rates(records: Records, options: Options) -> Table:
    """Return the share of counted events per method with exact 95 % intervals, and means of other columns.

    A record holds counts of its own, out of its `trials` column, or of one if it has none.
    """
    hits, means = (options.pop(name, "").split(",") for name in ("hits", "means"))
    hits, means, per = [n for n in hits if n], [n for n in means if n], options.pop("trials", "")
    cells, rows = [], []
    for key in dict.fromkeys((r.task, r.method) for r in records):
        own = [r for r in records if (r.task, r.method) == key]
        trials = sum(int(r.last(per)) if per else 1 for r in own)
        row: dict[str, Any] = {"task": key[0], "method": key[1], "trials": trials}
        line = [*key, str(trials)]
        for name in hits:
            row[name] = sum(int(r.last(name)) for r in own)
            low, high = binomtest(row[name], trials).proportion_ci(method="exact")
            line.append(f"{100 * row[name] / trials:.1f} ({100 * low:.1f} to {100 * high:.1f})")
        for name in means:
            row[name] = sum(float(r.last(name)) for r in own) / len(own)
            line.append(f"{row[name]:.3g}")
        cells.append(tuple(line))
        rows.append(row)
    shown = [*(f"{name.replace('_', ' ')} %" for name in hits), *(f"{name.replace('_', ' ')}, mean" for name in means)]
    return Table(("task", "method", per or "trials", *shown), tuple(cells), rows)


KINDS: dict[str, Callable[[Records, Options], Table]] = {
    "summary": lambda records, o: summary_table(records, columns=[c for c in o.pop("columns", "").split(",") if c]),
    "paired": lambda records, o: paired_differences(
        records, o.pop("base", "FedAvg"), column=o.pop("column", "accuracy_last")
    ),
    "to_target": lambda records, o: to_target(records, accuracy=float(o.pop("accuracy"))),
    "at_equal": lambda records, o: at_equal(records, by=o.pop("by", "rounds")),
    "rates": rates,
    "worst_clients": lambda records, o: worst_clients(records),
    "leaderboard": leaderboard,
    "leaks": leak_table,
    "scores": score_table,
}


def chosen(records: Records, tasks: Sequence[str], ways: Sequence[str], seeds: Sequence[str] = ()) -> Records:
    """Select the records of some tasks, methods and seeds, in the given order; all if none is named."""
    known = [{key[part] for key in records.missing} for part in (0, 1)]
    unknown = set(tasks) - {r.task for r in records} - known[0] | set(ways) - {r.method for r in records} - known[1]
    if unknown:
        raise ValueError(f"no run of {', '.join(sorted(unknown))}")
    if unknown := set(seeds) - {str(r.seed) for r in records} - {str(key[2]) for key in records.missing}:
        raise ValueError(f"no run of seed {', '.join(sorted(unknown))}")

    def asked(task: str, way: str, seed: int) -> bool:
        return all(asked_for(*one) for one in ((task, tasks), (way, ways), (str(seed), seeds)))

    found = [r for r in records if asked(r.task, r.method, r.seed)]
    found.sort(key=lambda r: (tasks.index(r.task) if tasks else 0, ways.index(r.method) if ways else 0))
    return Records(found, [key for key in records.missing if asked(*key)])


def asked_for(name: str, names: Sequence[str]) -> bool:
    """Check whether a name is selected; an empty selection selects all."""
    return not names or name in names


def taken(said: str) -> Records:
    """Read a study's records, with accuracies by domain and judgements if present, under another task name if given."""
    folder, _, task = said.partition("@")
    found = read_records(folder)
    for index, record in enumerate(found):
        files = {"accuracy_domain": "domains.json", "judge": "judge.json", "leaks": "leaks.json"}
        paths = {column: Path(str(record.folder)) / name for column, name in files.items()}
        more = {c: json.loads(path.read_text(encoding="utf-8")) for c, path in paths.items() if path.exists()}
        found[index] = replace(record, line={**record.line, **more})
    if not task:
        return found
    return Records(replace(r, line={**r.line, "task": task}) for r in found)


def options_of(said: str) -> tuple[str, dict[str, Any]]:
    """Parse a marker into its name and options; `task`, `ways`, `seeds` and `hide` are lists."""
    name, *words = shlex.split(said)
    options: dict[str, Any] = dict(word.split("=", 1) for word in words)
    return name, options | {key: options[key].split("|") for key in ("task", "ways", "seeds", "hide") if key in options}


def registered(path: Path, name: str) -> str:
    """Return a registered design as a list, and the verdict on its claim from the page's records."""
    design = read_design(path.parent / "designs" / f"{name}.json")
    found = [r for r in read_records(path) if r.task == design.task]
    return f"{design}\n\n**Result:** {design.evaluate(found)}"


def table(said: str, path: Path) -> Table | str:
    """Return the table that a marker requests, from the page's records or those it names."""
    kind, options = options_of(said)
    path = path.with_name(f"{options.pop('from', path.stem)}.jsonl")
    if kind == "design":
        return registered(path, **options)
    tasks, ways = options.pop("task", []), options.pop("ways", [])
    seeds = [] if kind == "tuning" else options.pop("seeds", [])
    hide, published = options.pop("hide", []), options.pop("published", "no")
    late = options.pop("late", None)
    if kind == "tuning":
        made = tuning_table(path)
        kept = [asked_for(row["task"], tasks) and asked_for(row["method"], ways) for row in made.rows]
        made = replace(made, cells=tuple(compress(made.cells, kept)), rows=list(compress(made.rows, kept)))
    elif kind in KINDS:
        records = chosen(read_records(path), tasks, ways, seeds)
        made = KINDS[kind](records if late is None else records.late(int(late)), options)
    else:
        raise ValueError(f"a table must be one of tuning, {', '.join(KINDS)}, got {kind!r}")
    if options:
        raise ValueError(f"a table of kind {kind} has no option {', '.join(options)}")
    if published == "yes":
        numbers = json.loads(path.with_name(f"{path.stem}_published.json").read_text(encoding="utf-8"))
        made = made.with_column("published %", lambda row: numbers.get(row["task"], {}).get(row["method"], ""))
    return made.without(*hide)


def filled(text: str, path: Path) -> str:
    """Return a page with its tables and commits rebuilt from the records."""
    if COMMITS.search(text):
        text = with_commits(text, (r.line.get("commit") for r in read_records(path)))
    return with_tables(text, lambda said: table(said, path))


def draw(text: str, path: Path) -> None:
    """Draw the curves of a text that use the records at `path`. Curves with `from=PAGE` use PAGE's records."""
    for kind, said in CURVES.findall(text):
        name, options = options_of(said)
        if options.pop("from", path.stem) != path.stem:
            continue
        selected = (options.pop(key, []) for key in ("task", "ways", "seeds"))
        found = chosen(read_records(path), *selected)
        numbers = {key: int(options.pop(key)) for key in ("every", "last") if key in options}
        figure = columns_by_round(found, **options, **numbers) if kind == "rounds" else curves(found, **options)
        figure.savefig(path.parents[1] / "pictures" / f"{name}.png", dpi=150)


def _of_other_pages(text: str) -> str:
    """Return the markers of curves that use another page's records."""
    return "".join(found.group() for found in CURVES.finditer(text) if " from=" in found.group())


def cards() -> list[Path]:
    """Return the pages whose tables use another page's records."""
    return [*DOCS.glob("results/papers.md"), *sorted(DOCS.glob("methods/*.md"))]


def main() -> None:
    """Import the records of the named studies, then write the page."""
    page, *folders = sys.argv[1:]
    path = DOCS / "results" / f"{page}.jsonl"
    if folders:
        new = sum(map(taken, folders), Records([]))
        if path.exists():
            print(compare_studies(path, new))
        write_records(new, path)
    own = path.with_suffix(".md")
    if own.exists():  # the measured runs have no page of their own
        text = filled(own.read_text(encoding="utf-8"), path)
        own.write_text(text, encoding="utf-8")
        draw(text, path)
    for other in set(DOCS.glob("results/*.md")) - {own}:
        draw(_of_other_pages(other.read_text(encoding="utf-8")), path)
    for card in cards():
        text = card.read_text(encoding="utf-8")
        if f" from={page} " in text:
            card.write_text(filled(text, path), encoding="utf-8")


if __name__ == "__main__":
    main()
