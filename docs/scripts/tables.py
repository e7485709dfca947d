"""Fill the tables, numbers and pictures of the pages from the committed records in `docs/results`.

    python docs/scripts/tables.py                     fill every page, and the README
    python docs/scripts/tables.py NAME [FOLDER ...]   write the records of finished studies to `results/NAME.jsonl`,
                                                      print what changed, fill every page, and draw the pictures of NAME

    <!-- table: KIND option=value ... -->             up to <!-- end of table -->
    <!-- found: ROW ATTACK KEY -->                    a number of `attacks.jsonl`, up to <!-- end of found -->
    <!-- commits -->                                  those of the page's records, up to <!-- end of commits -->
    <!-- curves: PICTURE option=value ... -->         draws `pictures/PICTURE.png`
    <!-- rounds: PICTURE columns="client_drift.relative|a.b+c" minus=METHOD every=5 -->   likewise, see `_rounds.py`

Every table and picture is made from the records of its page's name, or those that `from=NAME` gives. Its KIND is one of
`STUDY`, with the options `task="S|T"` and `ways="A|B"` (select and order), `seeds="0|1"`, `late=5` (a column
`accuracy_late`: the mean of the last five rounds), `base=METHOD column=COLUMN` (differences from a method), `best=yes`
(columns of best rounds) and `published=yes` (a column from `results/NAME_published.json`, {task: {way: text}}), or one
of `OTHERS`. A column that says nothing or only the one task is left out, and so is a note that stands above already.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar

from scipy.stats import binomtest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "docs" / "scripts")]

from _methods_table import methods_table  # noqa: E402
from _rounds import columns_by_round  # noqa: E402

from claims.registration import read_design  # noqa: E402
from distillkit import study  # noqa: E402
from distillkit._utils.tables import NONE, Table  # noqa: E402
from distillkit.scores import label_robust_score  # noqa: E402
from distillkit.study import Records  # noqa: E402
from fl.study import at_equal, to_target  # noqa: E402
from membership.pipelines import ROWS  # noqa: E402
from membership.tables import percent  # noqa: E402
from membership.tables import table as membership  # noqa: E402

DOCS = ROOT / "docs"
TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
FOUND = re.compile(r"(<!-- found: (\S+) (\S+) (\S+) -->).*?(<!-- end of found -->)", re.DOTALL)
COMMITS = re.compile(r"(<!-- commits -->).*?(<!-- end of commits -->)", re.DOTALL)
CURVES = re.compile(r"<!-- (curves|rounds): (.*?) -->")
Lines = Sequence[dict[str, Any]]
records_of = functools.cache(study.read_records)


# Records of any kind: `rows by=FIELD,... columns="heading={field} of {other:.1f}|..." each=LIST,... FIELD="A|B"`.


class Values(list[Any]):
    """Values of one field in the rows of a group. A format that is not in `SHOWN` is of the first value."""

    SHOWN: ClassVar[dict[str, Callable[[list[Any], str], str]]] = {
        "median": lambda v, n: f"{statistics.median(v):.{n}f}",
        "mean": lambda v, n: f"{statistics.mean(v):.{n}f}",
        "spread": lambda v, n: f"{statistics.median(v):.{n}f} ({min(v):.{n}f} to {max(v):.{n}f})",
        "percent": lambda v, n: f"{100 * statistics.mean(v):.{n}f} %",
        "count": lambda v, n: f"{sum(v)} of {len(v)}",
    }

    def __getitem__(self, key: Any) -> Any:
        return Values(v.get(key) for v in self) if isinstance(key, str) else super().__getitem__(key)

    def __format__(self, spec: str) -> str:
        known = [v for v in self if v not in (None, [], {})]
        how, _, digits = spec.partition(".")
        if not known:
            return NONE
        if how in self.SHOWN:
            return self.SHOWN[how](known, digits)
        return ", ".join(map(str, known[0])) if isinstance(known[0], list | dict) else format(known[0], spec)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a .jsonl file, or the rows of each part of a .json file, which is their `whole`."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    held = json.loads(text)
    return [{"part": name, "whole": own, **row} for name, own in held.items() for row in own.get("rows", [{}])]


def rows(path: Path, options: dict[str, Any]) -> Table:
    """Return a table of chosen rows, grouped by fields; with `each`, of every entry of lists, with its `number`."""
    by, columns = options.pop("by").split(","), options.pop("columns").split("|")
    each, left = options.pop("each", ""), int(options.pop("left", 1))
    found = [row for row in read(path) if all(str(row.get(k)) in v.split("|") for k, v in options.items())]
    if not found:
        raise ValueError(f"no row of {path.name} has {options}")
    options.clear()
    if each:
        lists = [zip(*(row[name] for name in each.split(","))) for row in found]
        found = [
            {**row, "number": i, **dict(zip(each.split(","), entries))}
            for row, own in zip(found, lists) for i, entries in enumerate(own, 1)
        ]  # fmt: skip
    groups: dict[tuple[str, ...], Lines] = {}
    for row in found:
        groups.setdefault(tuple(str(row.get(name)) for name in by), []).append(row)  # type: ignore[attr-defined]
    fields = {name for row in found for name in row}
    values = [{name: Values(row.get(name) for row in own) for name in fields} for own in groups.values()]
    header, texts = zip(*(column.split("=", 1) for column in columns))
    return Table(header, [[text.format_map(own) for text in texts] for own in values], left=left)


# Records of studies.


def rates(records: Records, options: dict[str, Any]) -> Table:
    """Return the share of counted events per method with exact 95 % intervals, and means of other columns.

    A record holds counts of its own, out of its `trials` column, or of one if it has none. With `wide=yes`, there is a
    column for each task, without intervals; with `wide=method`, one for each method.
    """
    hits, means = ([n for n in options.pop(name, "").split(",") if n] for name in ("hits", "means"))
    per, wide, cells = options.pop("trials", ""), options.pop("wide", ""), []
    if wide:
        across, down = (1, 0) if wide == "method" else (0, 1)
        found: dict[str, dict[str, str]] = {}
        for key in dict.fromkeys((r.task, r.method) for r in records):
            own = [r for r in records if (r.task, r.method) == key]
            shares = (100 * sum(r.last(n) for r in own) / sum(r.last(per) for r in own) for n in hits)
            found.setdefault(key[down], {})[key[across]] = " / ".join(f"{share:.3g}" for share in shares)
        names = list(dict.fromkeys(name for line in found.values() for name in line))
        shown = (("method", "task")[across], *names)
        return Table(shown, [[key, *(line.get(n, NONE) for n in names)] for key, line in found.items()], left=1)
    for task, method in dict.fromkeys((r.task, r.method) for r in records):
        own = [r for r in records if (r.task, r.method) == (task, method)]
        trials = sum(int(r.last(per)) if per else 1 for r in own)
        line = [task, method, str(trials)]
        for name in hits:
            count = sum(int(r.last(name)) for r in own)
            low, high = binomtest(count, trials).proportion_ci(method="exact")
            line.append(f"{100 * count / trials:.1f} ({100 * low:.1f} to {100 * high:.1f})")
        cells.append([*line, *(f"{statistics.mean(float(r.last(name)) for r in own):.3g}" for name in means)])
    shown = [*(f"{name.replace('_', ' ')} %" for name in hits), *(f"{name.replace('_', ' ')}, mean" for name in means)]
    return Table(("task", "method", per or "trials", *shown), cells)


def sets(columns: dict[str, str]) -> Callable[[Records, dict[str, Any]], Table]:
    """Return the maker of a table of condensed sets, by images per class and method; LRS is the label-robust score."""

    def numbers(own: Records, name: str) -> list[float]:
        found = [v["hits"] / v["trials"] if isinstance(v, dict) else v for v in (r.last(name) for r in own)]
        return [v for v in found if v is not None]

    def cell(name: str, own: Records, random: Records) -> str:
        means = [statistics.mean(numbers(of, n)) for of, n in ((own, "accuracy_last"), (random, "accuracy_last"))]
        if name == "score":
            real = statistics.mean(numbers(own, "labels.teacher"))
            score = label_robust_score(real_hard=real, data_hard=means[0], data_own=means[0], random_own=means[1])
            return f"{score:.3f}"
        known = numbers(own, name)
        if name == "epsilon" or not known:
            return f"{known[0]:g}" if known else NONE
        return study.mean_std(known[:1] if len({*known}) == 1 else known, 1.0 if "seconds" in name else 100.0)

    def table(records: Records, options: dict[str, Any]) -> Table:
        found = dict[tuple[int, str], Records]()
        for record in records:
            method, _, ipc = record.method.rpartition("-")
            found.setdefault((int(ipc), method), Records([])).append(record)
        cells = []
        for (ipc, method), own in sorted(found.items(), key=lambda item: item[0][0]):  # methods keep their order
            random = found[ipc, "random-tiles" if method == "dm-tiles" else "random"]
            cells.append([str(ipc), method, *(cell(name, own, random) for name in columns.values())])
        return Table(("ipc", "method", *columns), cells)

    return table


def summary(records: Records, options: dict[str, Any]) -> Table:
    """Return a table of accuracies and other columns, with differences from the method `base` and their intervals."""
    base, column = options.pop("base", ""), options.pop("column", "accuracy_last")
    made = study.summary_table(records, columns=[c for c in options.pop("columns", "").split(",") if c])
    if not base:
        return made
    other = study.paired_differences(records, base, column=column)
    for place in (3, 4):
        cells = {line[:2]: line[place] for line in other.cells}
        made = made.with_column(other.header[place], lambda row, c=cells: c.get((row["task"], row["method"]), ""))
    return replace(made, notes=(*made.notes, *other.notes))


def trimmed(made: Table, best: bool) -> Table:
    """Leave out deviations that round to 0, and columns that a page does not need; equally many seeds are a note."""
    cells = [[re.sub(r" ± 0\.?0*$", "", cell) for cell in line] for line in made.cells]
    values = {name: {line[i] for line in cells} for i, name in enumerate(made.header)}
    unwanted = [name for name in values if values[name] <= {"", NONE} or ("*" in name and not best)]
    unwanted += [name for name in ("task", "seeds", "seeds of both") if len(values.get(name, ())) == 1]
    unwanted += [name for name in ("caution", "configurations", "worst %") if name in values]
    made, notes = replace(made, cells=cells).without(*dict.fromkeys(unwanted)), []
    for note in made.notes:
        if note.startswith("±") and len(seeds := values.get("seeds", set())) == 1:
            note = "One seed." if seeds == {"1"} else note.replace("over seeds", f"over {min(seeds)} seeds")
            note = note.replace("(n - 1).", "(n - 1), unless it rounds to 0.")
        notes.append(note)
    return replace(made, notes=tuple(notes))


STUDY: dict[str, Callable[[Records, dict[str, Any]], Table]] = {
    "summary": summary,
    "paired": lambda records, o: study.paired_differences(
        records, o.pop("base", "FedAvg"), column=o.pop("column", "accuracy_last")
    ),
    "to_target": lambda records, o: to_target(records, accuracy=float(o.pop("accuracy"))),
    "at_equal": lambda records, o: at_equal(records, by=o.pop("by", "rounds")),
    "rates": rates,
    "leaderboard": sets({
        "hard %": "accuracy_last", "one row %": "labels.row", "per view %": "labels.view",
        "ResNet-8 %": "transfer.resnet8", "ViT %": "transfer.vit", "condense CPU s": "cpu_seconds_condense",
        "ε": "epsilon", "LRS": "score",
    }),
    "leaks": sets({
        "copies %": "leaks.copies", "within 25 dB %": "leaks.within_25_db",
        "within 25 dB of held-out %": "leaks.within_25_db_of_held_out",
        "`nearest` names: used records %": "leaks.nearest.tpr", "held-out records %": "leaks.nearest.fpr",
    }),
}  # fmt: skip


def chosen(records: Records, tasks: Sequence[str], ways: Sequence[str], seeds: Sequence[str] = ()) -> Records:
    """Select the records of some tasks, methods and seeds, in the given order; all if none is named."""
    keys = [*((r.task, r.method, r.seed) for r in records), *records.missing]
    asked: tuple[Sequence[str], ...] = (tasks, ways, seeds)
    for part, names in enumerate(asked):
        if unknown := {*names} - {str(key[part]) for key in keys}:
            raise ValueError(f"no run of {('task', 'method', 'seed')[part]} {', '.join(sorted(unknown))}")

    def kept(*key: object) -> bool:
        return all(not names or str(one) in names for one, names in zip(key, asked))

    found = [r for r in records if kept(r.task, r.method, r.seed)]
    found.sort(key=lambda r: (tasks.index(r.task) if tasks else 0, ways.index(r.method) if ways else 0))
    return Records(found, [key for key in records.missing if kept(*key)])


def of_study(kind: str, path: Path, options: dict[str, Any]) -> Table:
    """Return a table of a study's records."""
    tasks, ways, late = options.pop("task", []), options.pop("ways", []), options.pop("late", None)
    published, best = options.pop("published", "no"), options.pop("best", "no")
    if kind == "tuning":
        made = study.tuning_table(path)
        kept = [
            (not tasks or r["task"] in tasks) and (not ways or r["method"] in ways) and not cells[2].startswith("as ")
            for r, cells in zip(made.rows, made.cells)
        ]
        made = replace(made, cells=tuple(compress(made.cells, kept)), rows=list(compress(made.rows, kept)))
    else:
        records = chosen(records_of(path), tasks, ways, options.pop("seeds", []))
        made = STUDY[kind](records if late is None else records.late(int(late)), options)
    if published == "yes":
        numbers = json.loads(path.with_name(f"{path.stem}_published.json").read_text(encoding="utf-8"))
        made = made.with_column("published %", lambda row: numbers.get(row["task"], {}).get(row["method"], ""))
    return trimmed(made, best == "yes")


def design(path: Path, options: dict[str, Any]) -> str:
    """Return a registered design (`name`) as a list, and the verdict on its claim."""
    found = read_design(path.parent / "designs" / f"{options.pop('name')}.json")
    records = [r for r in records_of(path) if r.task == found.task]
    said = re.sub(r"\n- Verdict, [^\n]*", "", str(found))  # of every design alike; the page says it once
    return f"{said}\n\n**Result:** {found.evaluate(records)}"


def measured(path: Path, options: dict[str, Any]) -> str:
    """Return the table that a program of `tests.benchmarks` prints of its record, and the rows that it lacks."""
    if path.suffix == ".json":
        held = json.loads(path.read_text(encoding="utf-8"))
        return importlib.import_module(f"tests.benchmarks.bench_{path.stem.removesuffix('_costs')}").table(held)
    show, wanted = (importlib.import_module(f"tests.benchmarks.{name}") for name in ("show", "table"))
    lines = show.read(path)
    if any(line["tiny"] for line in lines):
        raise ValueError(f"{path.name} was made with --tiny, which measures nothing: make it again without")
    missing = [name for name in wanted.NAMES if name not in {show.name(line) for line in lines}]
    return show.tables(lines) + (f"\n\nNot measured: {', '.join(missing)}." if missing else "")


OTHERS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "rows": rows, "design": design, "measured": measured, "methods": lambda path, o: methods_table(),
    "membership": lambda path, o: membership(o.pop("name"), read(path)) or "Not run yet.",
}  # fmt: skip


# Pages.


def options_of(said: str) -> tuple[str, dict[str, Any]]:
    """Parse a mark into its name and options; `task`, `ways` and `seeds` are lists."""
    name, *words = shlex.split(said)
    options: dict[str, Any] = dict(word.split("=", 1) for word in words)
    return name, options | {key: options[key].split("|") for key in ("task", "ways", "seeds") if key in options}


def path_of(results: Path, name: str) -> Path:
    """Return the path of the records of this name."""
    return next((p for p in [results / f"{name}.json"] if p.exists()), results / f"{name}.jsonl")


def table(said: str, page: str, results: Path) -> object:
    """Return the table that a mark on a page requests.

    Raises:
        ValueError: there is no such kind, option, column or record.
    """
    kind, options = options_of(said)
    path = path_of(results, options.pop("from", page))
    if kind not in ("tuning", *STUDY, *OTHERS):
        raise ValueError(f"a table must be one of tuning, {', '.join([*STUDY, *OTHERS])}, got {kind!r}")
    made = OTHERS[kind](path, options) if kind in OTHERS else of_study(kind, path, options)
    if options:
        raise ValueError(f"a table of kind {kind} has no option {', '.join(options)}")
    return made


NUMBERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tpr": lambda line: percent(line["tpr"]),
    "started": lambda line: percent(line["started"]["tpr"]),
    "rest": lambda line: percent(line["started"]["rest"]),
    "share": lambda line: f"{100 * line['started']['share']:.0f}",
    "accuracy": lambda line: f"{100 * line['accuracy']:.1f}",
    "training": lambda line: f"{100 * line['above']['25']['training'][0]:.1f}",
    "held-out": lambda line: f"{100 * line['above']['25']['held-out'][0]:.1f}",
}
"""What a single number of the attacks may be, in per cent."""


def number(lines: Lines, row: str, attack: str, key: str) -> str:
    """Return one number of the attacks' records; blanks in the attack's name are underscores."""
    own = [line for line in lines if (line["row"], line["attack"]) == (row, attack.replace("_", " "))]
    if len(own) != 1:
        raise ValueError(f"there must be one record of {row}, {attack}, found {len(own)}")
    return f"{NUMBERS[key](own[0])} %"


def filled(text: str, page: str, results: Path) -> str:
    """Return a page's text with its tables, numbers and commits made from the records in a folder."""
    if COMMITS.search(text):
        path = path_of(results, page)
        own = [r.line for r in records_of(path)] if is_study(path) else read(path)
        commits = ", ".join(dict.fromkeys(str(line.get("commit")) for line in own))
        text = COMMITS.sub(lambda found: f"{found[1]}{commits}{found[2]}", text)
    if FOUND.search(text):
        lines = read(results / "attacks.jsonl")
        text = FOUND.sub(lambda found: f"{found[1]}{number(lines, found[2], found[3], found[4])}{found[5]}", text)
    said: set[str] = set()

    def anew(found: re.Match[str]) -> str:
        first, *notes = str(table(found[2], page, results)).split("\n\n")
        new = [note for note in notes if note not in said or found[2].startswith("design")]
        said.update(notes)
        return "\n\n".join([f"{found[1]}\n{first}", *new, found[3]])

    return TABLE.sub(anew, text)


def is_study(path: Path) -> bool:
    """Check whether a file holds records of a study, whose first line names the format."""
    return path.suffix == ".jsonl" and "format" in json.loads(path.read_text(encoding="utf-8").partition("\n")[0])


def draw(text: str, page: str, name: str, docs: Path) -> None:
    """Draw the curves of a page that show the records `name`."""
    for kind, said in CURVES.findall(text):
        picture, options = options_of(said)
        if options.pop("from", page) != name:
            continue
        selected = (options.pop(key, []) for key in ("task", "ways", "seeds"))
        found = chosen(records_of(docs / "results" / f"{name}.jsonl"), *selected)
        numbers = {key: int(options.pop(key)) for key in ("every", "last") if key in options}
        figure = columns_by_round(found, **options, **numbers) if kind == "rounds" else study.curves(found, **options)
        figure.savefig(docs / "pictures" / f"{picture}.png", dpi=150)


def pages(docs: Path) -> list[Path]:
    """Return the README and all pages."""
    return [docs.parent / "README.md", *sorted(docs.rglob("*.md"))]


# Import of records.


def taken(said: str) -> Records:
    """Read a study's records, under another task name if `FOLDER@NAME` gives one.

    Accuracies by domain (`domains.json`), shares that a judge names (`judge.json`) and leaks of a set (`leaks.json`) in
    a run's folder become columns.
    """
    folder, _, task = said.partition("@")
    found = study.read_records(folder)
    for index, record in enumerate(found):
        files = {"accuracy_domain": "domains.json", "judge": "judge.json", "leaks": "leaks.json"}
        paths = {column: Path(str(record.folder)) / name for column, name in files.items()}
        more = {c: json.loads(path.read_text(encoding="utf-8")) for c, path in paths.items() if path.exists()}
        found[index] = replace(record, line={**record.line, **more, **({"task": task} if task else {})})
    return Records(found) if task else found


def merged(old: Lines, new: Lines) -> list[dict[str, Any]]:
    """Merge records of attacks: newer rows replace older ones, in the order of the table."""
    fresh, order = {line["row"] for line in new}, [*ROWS, "transcript"]
    both = [*(line for line in old if line["row"] not in fresh), *new]
    return sorted(both, key=lambda line: order.index(line["row"]))


def keep(name: str, folders: Iterable[str], docs: Path) -> None:
    """Write the records of folders to `results/NAME.jsonl`, and print what has changed."""
    path = docs / "results" / f"{name}.jsonl"
    if name == "attacks":
        lines = read(path)
        for folder in folders:
            lines = merged(lines, read(Path(folder) / "records.jsonl"))
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    else:
        new = sum(map(taken, folders), Records([]))
        if path.exists():
            print(study.summary_table(path), study.summary_table(new), sep="\n\n")
        study.write_records(new, path)


def main(arguments: Sequence[str], docs: Path = DOCS) -> None:
    """Import the records that are named, then fill all pages."""
    name, *folders = arguments or [""]
    if folders:
        keep(name, folders, docs)
    for path in pages(docs):
        text = path.read_text(encoding="utf-8")
        new = filled(text, path.stem, docs / "results")
        if new != text:
            path.write_text(new, encoding="utf-8")
        if name:
            draw(new, path.stem, name, docs)


if __name__ == "__main__":
    main(sys.argv[1:])
