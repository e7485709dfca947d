"""Write the tables of `docs/which_method.md` from the records of the pages of results, and from nothing else.

    python docs/scripts/which_method.py

A table stands between `<!-- choice: NAME -->` and `<!-- end of choice -->`, NAME one of `TABLES`.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from distillkit.study import Table, read_records, summary_table

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS / "scripts"))

from attacks_page import number, read  # noqa: E402

PAGE = DOCS / "which_method.md"
CHOICE = re.compile(r"(<!-- choice: (\S+) -->\n).*?(<!-- end of choice -->)", re.DOTALL)
UNKNOWN = "not measured"


class Row(NamedTuple):
    """A line of a table: words, the way's name in the records, where attacks looked: (row, attack, said after it)."""

    words: tuple[str, ...]
    way: str
    found: tuple[tuple[str, str, str], ...] | str = UNKNOWN


class Choice(NamedTuple):
    """A table: the records and the task that it is of, its headings, its columns by their heading there, its lines."""

    records: str
    task: str
    words: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    """(heading in the summary of the records, heading here)"""
    rows: tuple[Row, ...]
    found: str = ""
    """The heading of what attacks found, or "" for none."""


SUMMARY = {
    "privacy": ["cpu_seconds_condense"],
    "methods": ["accuracy_own", "bytes_up", "bytes_down", "client_seconds"],
    "feddm_private": ["rounds", "bytes_up", "client_seconds"],
}
"""What is asked of each file of records beside accuracy and epsilon."""

MEMBERS = "members found %"
THEMSELVES = "all: they are the records"
COSTS = (("bytes up (MB)", "MB up"), ("bytes down (MB)", "MB down"), ("client seconds (s)", "client s"))


def card(name: str, page: str) -> str:
    """A link to a method's card."""
    return f"[{name}](methods/{page}.md)"


DM, PRIVATE = "components/distribution_matching.md", "components/privacy.md"
TABLES = {
    "sets": Choice(
        "privacy", "digits", ("to train on", "made by"),
        (("last %", "accuracy %"), ("cpu seconds condense (s)", "CPU s"), ("ε", "ε")),
        (
            Row(("all real images", "–"), "all real images", THEMSELVES),
            Row(("100 random real images", "[coresets](components/coresets.md)"), "random real images", THEMSELVES),
            Row(("100 learned images", f"[`distribution_matching`]({DM})"),
                "distribution matching from real images", (("dm", "nearest", ""),)),
            Row(("100 images with a guarantee", f"[`condense_private`]({PRIVATE})"), "class means, epsilon 8",
                (("class-means", "nearest", ""),)),
            Row(("with a stronger guarantee", f"[`condense_private`]({PRIVATE})"), "class means, epsilon 1"),
            Row(("100 images by DP-SGD on pixels", f"[`image_sgd`]({PRIVATE})"), "image SGD, epsilon 8"),
        ), MEMBERS),
    "federated": Choice(
        "methods", "digits", ("method", "a client sends"), (("last %", "accuracy %"), *COSTS),
        (
            Row((card("FedAvg", "fedavg"), "weights"), "FedAvg"),
            Row((card("FedProx", "fedprox"), "weights"), "FedProx"),
            Row((card("FedAvgM", "fedavgm"), "weights"), "FedAvgM"),
            Row((card("FedExP", "fedexp"), "weights"), "FedExP"),
            Row((card("SCAFFOLD", "scaffold"), "weights, control variates"), "SCAFFOLD"),
            Row((card("FedReg", "fedreg"), "weights"), "FedReg"),
            Row((card("FedCOG", "fedcog"), "weights"), "FedCOG"),
            Row((card("VHL", "vhl"), "weights"), "VHL"),
            Row((card("FedLGD", "fedlgd"), "weights, trained on condensed images"), "FedLGD",
                (("fedlgd", "LiRA offline", "by the model"),)),
            Row((card("FedGen", "fedgen"), "weights, class counts"), "FedGen"),
            Row((card("FedDF", "feddf"), "weights"), "FedDF"),
            Row((card("single image", "single_image"), "weights, logits for crops"), "Single image, rate 1"),
            Row((card("FedDM", "feddm"), "learned images"), "FedDM",
                (("feddm", "nearest", "by the images"), ("feddm", "LiRA offline", "by the model"))),
            Row((card("Real", "feddm"), "as many raw images as FedDM"), "Real", THEMSELVES),
        ), MEMBERS),
    "personal": Choice(
        "methods", "digits", ("method", "a client sends"), (("accuracy own (%)", "accuracy on own tests %"), *COSTS),
        (
            Row(("FedAvg, one model for all", "weights"), "FedAvg, chosen by own tests"),
            Row((card("fine-tuned FedAvg", "finetune"), "weights"), "Fine-tuned FedAvg"),
            Row((card("Ditto", "ditto"), "weights"), "Ditto"),
            Row((card("FedRep", "fedrep"), "weights without the head"), "FedRep"),
            Row((card("FedProto", "fedproto"), "class means of embeddings"), "FedProto"),
        )),
    "guarantees": Choice(
        "feddm_private", "digits-dirichlet", ("method", "protects", "against"),
        (("ε", "ε"), ("last %", "accuracy %"), ("rounds", "rounds"), *COSTS[:1], *COSTS[2:]),
        (
            Row((card("`PrivateFedDM`", "feddm_private"), "a record", "everybody"), "FedDM-DP, class means, epsilon 8"),
            Row((card("`SummedFedDM`", "feddm_private"), "a record", "everybody"), "FedDM-DP, sums, epsilon 8"),
            Row((card('`SummedFedDM(noise="shares")`', "feddm_private"), "a record", "readers of sums alone"),
                "FedDM-DP, sums, shared noise, epsilon 8"),
            Row((card("`DPSGD`", "dp_sgd"), "a record", "everybody"), "FedAvg with DP-SGD, epsilon 8"),
            Row((card("`ClientDP`", "client_dp"), "a client", "all except the server"),
                "FedAvg, whole clients protected, epsilon 8"),
            Row((card("FedDM", "feddm"), "nothing", "–"), "FedDM"),
        )),
}  # fmt: skip


@cache
def summary(records: str) -> dict[tuple[str, str], dict[str, str]]:
    """(task, way) -> heading -> what the table of these records prints there."""
    made = summary_table(read_records(DOCS / "results" / f"{records}.jsonl"), columns=SUMMARY[records])
    lines = [dict(zip(made.header, cells)) for cells in made.cells]
    return {(line["task"], line["method"]): line for line in lines}


def found(row: Row) -> str:
    """What attacks found, in per cent of the members."""
    if isinstance(row.found, str):
        return row.found
    lines = read(DOCS / "results" / "attacks.jsonl")
    parts = [(number(lines, place, attack, "tpr").removesuffix(" %"), how) for place, attack, how in row.found]
    return "; ".join(f"{value} {how}".strip() for value, how in parts)


def table(name: str) -> Table:
    """One of the tables.

    Raises:
        ValueError: there is no such table, or a way has no record.
    """
    if name not in TABLES:
        raise ValueError(f"a choice must be one of {', '.join(TABLES)}, got {name!r}")
    asked = TABLES[name]
    lines = summary(asked.records)
    if lacking := [row.way for row in asked.rows if (asked.task, row.way) not in lines]:
        raise ValueError(f"{asked.records}.jsonl has no run of {', '.join(lacking)} on {asked.task}")
    cells = []
    for row in asked.rows:
        own = lines[asked.task, row.way]
        numbers = (own[heading] for heading, _ in asked.columns)
        cells.append((*row.words, *numbers, *([found(row)] if asked.found else [])))
    header = (*asked.words, *(here for _, here in asked.columns), *([asked.found] if asked.found else []))
    return Table(header, tuple(cells), [{} for _ in cells], left=len(asked.words))


def filled(text: str) -> str:
    """The text of the page with its tables made anew from the records."""
    return CHOICE.sub(lambda place: f"{place[1]}\n{table(place[2])}\n\n{place[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
