"""Write the tables of the page on inversion from its records.

    python docs/scripts/inversion_page.py

The records are those of `inversion.py`. A table stands between `<!-- table: PART -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS / "scripts"))

from _marks import TABLE, read, table, with_commits, with_tables  # noqa: E402

__all__ = ["PAGE", "RECORDS", "TABLE", "TABLES", "filled", "read", "write_page"]

RECORDS, PAGE = DOCS / "results" / "inversion.jsonl", DOCS / "results" / "inversion.md"
Record = dict[str, Any]


def cases(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group the records by case, in order of first appearance."""
    return {case: [r for r in records if r["case"] == case] for case in dict.fromkeys(r["case"] for r in records)}


def column(rows: Sequence[Record], name: str) -> list[float]:
    """Return one number of each record."""
    return [float(r[name]) for r in rows]


def spread(values: Sequence[float]) -> str:
    """Format median and range."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def images(records: Sequence[Record]) -> str:
    """Return the table of single images by attack."""
    lines = []
    for case, rows in cases(records).items():
        first = rows[0]
        names = {"total_variation": "total variation", "lr": "lr"}
        said = "".join(f", {word} {first[name]}" for name, word in names.items() if name in first)
        guess = [median(column(rows, name)) for name in ("guess", "guess_aligned")]
        lines.append([
            f'{case}; "{first["method"]}", {first["steps"]} steps{said}',
            f"{sum(r['label'] for r in rows)} of {len(rows)}",
            spread(column(rows, "psnr")),
            spread(column(rows, "aligned")),
            f"{guess[0]:.1f}, {guess[1]:.1f}",
            f"{median(column(rows, 'seconds')):.1f}",
        ])  # fmt: skip
    return table("images, network, attack | labels | PSNR dB | aligned dB | a guess, plain and aligned | CPU s", lines)


def formulas(records: Sequence[Record]) -> str:
    """Return the table of closed-form recoveries."""
    (r,) = records
    error = f"{r['error']:.1e}" if r["error"] else "0"
    return table(
        "images | labels inferred | largest error of a linear layer's input",
        [[str(r["images"]), f"{r['labels']} of {r['images']}", error]],
    )


def defences(records: Sequence[Record]) -> str:
    """Return the table of recoveries under defences."""
    lines = [
        [case, f"{sum(r['label'] for r in rows)} of {len(rows)}", spread(column(rows, "aligned"))]
        for case, rows in cases(records).items()
    ]
    return table("the message | labels | aligned dB", lines)


def classes(records: Sequence[Record]) -> str:
    """Return the table of class inferences."""
    lines = []
    for r in records:
        of = {"held_certain": "held", "lacking_certain": "lacking", "counts_certain": "held"}
        wrong = "–" if r["misplaced"] is None else f"{100 * r['misplaced']:.1f} %"
        lines.append([r["case"], *(f"{r[a]} of {r[b]}" for a, b in of.items()), str(r["false"]), wrong])
    head = (
        "the message | classes held, certain | lacking, certain | counts, certain | false | estimate, misplaced records"
    )
    return table(head, lines)


def clients(records: Sequence[Record]) -> str:
    """Return the table of recoveries from client messages."""
    lines = []
    for case, rows in cases(records).items():
        sent = "–" if rows[0]["sent_nearest"] is None else f"{mean(column(rows, 'sent_nearest')):.1f}"
        aligned, near, other = (f"{mean(column(rows, name)):.1f}" for name in ("aligned", "nearest", "held_out"))
        lines.append([case, aligned, sent, near, other])
    head = (
        "the gradient of | found, to the image behind it | that image, to the nearest record | "
        "found, to the nearest record | a held-out record, to the nearest"
    )
    return table(head, lines)


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "images": images, "formulas": formulas, "defences": defences, "classes": classes, "clients": clients,
}  # fmt: skip


def filled(text: str, records: Sequence[Record]) -> str:
    """Return the page with its tables and commits rebuilt."""
    made = {part: [r for r in records if r["part"] == part] for part in TABLES}
    return with_tables(with_commits(text, (r["commit"] for r in records)), lambda part: TABLES[part](made[part]))


def write_page() -> None:
    """Rebuild the tables of the page."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), read(RECORDS)), encoding="utf-8")


if __name__ == "__main__":
    write_page()
