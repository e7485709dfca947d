"""Write the tables of the page on scaling from its record and the methods' formulas.

    python docs/scripts/scaling.py

The record is that of `python -m tests.benchmarks scaling`. A table is between `<!-- table: NAME -->` and
`<!-- end of table -->`. The measuring machine is shared, which only adds CPU seconds. So the smallest of several seeds
counts, and the largest is shown beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS / "scripts"))

from _marks import TABLE, table, with_commits, with_tables  # noqa: E402
from scaling_costs import bytes_of, cost_of  # noqa: E402
from scaling_methods import costs, even, levels, number, ratios, runs, sizes, words, work  # noqa: E402

__all__ = ["PAGE", "RECORD", "TABLE", "filled"]

RECORD, PAGE = DOCS / "results" / "scaling.json", DOCS / "scaling.md"
Rows = list[dict[str, Any]]
HOUR, WIRE, MEMORY = 3600, 1e9 / 8, 16e9
"""Assumptions of the table of limits: seconds per round, bytes per second each way, bytes of memory."""


def only(rows: Rows, part: str, **fields: int) -> Rows:
    """Select rows by part, clients, weights and so on."""
    return [r for r in rows if r["part"] == part and all(r[name] == value for name, value in fields.items())]


def milliseconds(rows: Rows, name: str = "cpu_round") -> float:
    """Return the smallest CPU milliseconds per client over seeds."""
    return min(1e3 * r[name] / (r["drawn"] if name == "cpu_round" else 1) for r in rows)


def span(values: list[float], digits: int = 2) -> str:
    """Format the smallest and largest of some values."""
    return f"{min(values):.{digits}f} ({max(values):.{digits}f})"


def each_client(rows: Rows) -> str:
    """Return CPU milliseconds per client."""
    return span([1e3 * r["cpu_round"] / r["drawn"] for r in rows])


def grown(rows: Rows) -> float:
    """Return the growth of process memory in MiB; seeds agree to a few."""
    return max(r["memory_peak"] - r["memory_before"] for r in rows)


def drawn(rows: Rows) -> str:
    """Return the table of rounds with 10, 100 and 1,000 clients."""
    lines = []
    for clients, weights in sorted({(r["drawn"], r["weights"]) for r in only(rows, "drawn")}):
        own = only(rows, "drawn", drawn=clients, weights=weights)
        lines.append([
            f"{clients:,}", f"{weights:,}", each_client(own), span([1e3 * r["cpu_client"] for r in own]),
            f"{own[0]['bytes_up'] / 1e6:.2f}", f"{own[0]['bytes_down'] / 1e6:.2f}", f"{grown(own):.0f}",
        ])  # fmt: skip
    return table("clients | weights | CPU ms per client | of which on its side | MB up | MB down | memory MiB", lines)


def registered(rows: Rows) -> str:
    """Return the table of ten drawn clients among many registered ones."""
    lines = []
    for clients in sorted({r["clients"] for r in only(rows, "registered")}):
        line = [f"{clients:,}"]
        for part in ("registered", "listed"):
            own = only(rows, part, clients=clients)
            line += (
                [each_client(own), span([r["cpu_first"] for r in own], 3), f"{grown(own):.0f}"] if own else ["–"] * 3
            )
        lines.append(line)
    head = "registered | CPU ms per drawn client | first round, CPU s | memory MiB"
    return table(f"{head} | in a list: CPU ms | first round, CPU s | memory MiB", lines)


def apart(rows: Rows) -> str:
    """Return the table of client memories, parallel images and the adapter."""
    words = {
        "kept": "keep a memory as large as the network, in a run with a folder",
        "union": "send ten images of 3x32x32",
        "flower": "use the Flower adapter, without Flower itself",
    }
    lines = []
    for part, said in words.items():
        for clients, weights in sorted({(r["drawn"], r["weights"]) for r in only(rows, part)}):
            own = only(rows, part, drawn=clients, weights=weights)
            kept = f"{own[0]['bytes_kept']:,}" if part == "kept" else "–"
            lines.append([said, f"{clients:,}", f"{weights:,}", each_client(own), f"{grown(own):.0f}", kept])
    return table("clients that | clients | weights | CPU ms per client | memory MiB | bytes on disk", lines)


def started(rows: Rows) -> str:
    """Return the cost of an idle process."""
    own = only(rows, "start")
    lines = [[words, span([r[f"cpu_{name}"] for r in own]), f"{max(r[f'memory_{name}'] for r in own):.0f}"]
             for name, words in (("torch", "PyTorch"), ("node", "a node's modules, except Flower"))]  # fmt: skip
    return table("a process that imports | CPU s | memory MiB", lines)


def line(rows: Rows, part: str) -> tuple[float, float]:
    """Fit CPU milliseconds per client as a + b P to a hundred clients with 10^4 and 10^6 weights."""
    low, high = (milliseconds(only(rows, part, drawn=100, weights=w)) for w in (10_000, 1_000_000))
    slope = (high - low) / 990_000
    return low - slope * 10_000, slope


def fits(rows: Rows) -> str:
    """Return the formula of the extrapolation and its error on measured rows."""
    lines = []
    for part, way in (("drawn", "`simulate`"), ("flower", "over the adapter")):
        a, b = line(rows, part)
        for clients, weights in sorted({(r["drawn"], r["weights"]) for r in only(rows, part)}):
            own = only(rows, part, drawn=clients, weights=weights)
            said = f"{a:.2f} + {1e6 * b:.2f} P / 1,000,000"
            lines.append([way, said, f"{clients:,}", f"{weights:,}", f"{a + b * weights:.2f}", each_client(own)])
    return table("both sides together | CPU ms per client | clients | weights | formula | measured", lines)


def share(rows: Rows) -> str:
    """Return the share of a client's own work, from FedAvg in the study of all methods on digits."""
    (a, b), averaged = line(rows, "drawn"), [r for r in runs() if r.method == "FedAvg"]
    last = averaged[0].rows[-1]
    clients = last["accuracy_clients"]["clients"]
    weights = last["bytes_down"] // clients // 4
    training = 1e3 * min(r.line["client_seconds"] for r in averaged) / clients / last["round"]
    lines = [
        [f"a client's training, {weights:,} weights, one round of the study", f"{training:.1f}"],
        ["the engine's work for it", f"{a + b * weights:.2f}"],
        ["hours of one core for a million such clients, training and engine", number((training + a) * 1e6 / 3.6e6)],
    ]
    return table("one client and round | CPU ms", lines)


def held_twice(rows: Rows) -> float:
    """Return the measured server memory per byte of images that clients send."""
    few, many = (grown(only(rows, "union", drawn=n)) for n in (100, 1000))
    union = cost_of("FedDM")
    return (many - few) * 2**20 / 900 / bytes_of(union.each, {"c": 10, "i": 1, "x": 3072})


def remembered(rows: Rows) -> float:
    """Return the measured history memory per client and round."""
    (long,), short = only(rows, "long"), only(rows, "drawn", drawn=1000, weights=10_000)
    rounds = long["rounds"] - short[0]["rounds"]
    return (grown([long]) - grown(short)) * 2**20 / rounds / long["drawn"]


def million(rows: Rows) -> str:
    """Return the extrapolated round of FedAvg and FedDM's images for up to a million clients."""
    (a, b), (a_far, b_far), lines = line(rows, "drawn"), line(rows, "flower"), []
    history = mean(r["bytes_history"] / r["drawn"] for r in only(rows, "drawn", drawn=1000))
    averaging, union = cost_of("FedAvg"), cost_of("FedDM")
    for name, values in sizes():
        both = bytes_of(averaging.up, values) + bytes_of(averaging.down, values)
        images = held_twice(rows) * bytes_of(union.each, {**values, "i": 10})
        for clients in (1000, 10_000, 100_000, 1_000_000):
            lines.append([
                name, f"{clients:,}", number(clients * both / 1e9),
                *(number(clients * (at + slope * values["P"]) / 1e3) for at, slope in ((a, b), (a_far, b_far))),
                number(clients * history / 1e6), number(100 * clients * remembered(rows) / 1e9),
                number(clients * images / 1e9),
            ])  # fmt: skip
    head = "network | clients a round | GB both ways | engine, CPU s | over the adapter, CPU s"
    line_of = "a line of the history, MB | 100 of them in memory, GB"
    return table(f"{head} | {line_of} | FedDM's images on the server, GB", lines)


def limits(rows: Rows) -> str:
    """Return the number of clients per round at which a resource is exhausted."""
    (a, b), lines = line(rows, "flower"), []
    union = cost_of("FedDM")
    for name, values in sizes():
        wire = WIRE * HOUR / bytes_of(cost_of("FedAvg").up, values)
        core = HOUR / (a + b * values["P"]) * 1e3
        images = MEMORY / held_twice(rows) / bytes_of(union.each, {**values, "i": 10})
        learned = WIRE * HOUR / bytes_of(union.up, {**values, "i": 10})
        first = "the wire" if wire < core else "the core", "memory" if images < min(learned, core) else "another"
        lines.append([name, f"{values['P']:,}", number(wire), number(core), first[0], number(images), first[1]])
    head = "network | weights | FedAvg: the wire | one core | so first | FedDM: images in memory | so first"
    return table(head, lines)


def advice(rows: Rows) -> str:
    """Return the recommended setup for given resources."""
    few, many = (grown(only(rows, "registered", clients=n)) for n in (10, 1_000_000))
    ten, thousand = (grown(only(rows, "drawn", drawn=n, weights=1_000_000)) for n in (10, 1000))
    a, b = line(rows, "flower")
    node = only(rows, "start")
    lines = [
        ["one machine, some of many clients", "`simulate` with `participation=`, clients created on demand",
         f"memory for the drawn clients: {few:.0f} MiB among 10 registered clients, {many:.0f} MiB among a million"],
        ["one machine, all clients every round", "`simulate`",
         f"the clients' own training; a million weights take {ten:.0f} MiB with 10 clients, {thousand:.0f} MiB with "
         "1,000, except for methods that send images"],
        ["10 to 100 machines", "Flower, all clients in every round",
         f"a process for every message: {min(r['cpu_node'] for r in node):.1f} CPU s and "
         f"{max(r['memory_node'] for r in node):.0f} MiB on the node before any work"],
        ["thousands of machines", "Flower, some hundred clients drawn in a round (`participation=100`)",
         f"{a:.1f} CPU ms per client and {1e6 * b:.0f} ms per million weights on both sides, and Flower's own"],
        ["more clients in a round", "fewer drawn clients, or a tree of servers, which does not exist yet",
         "see [the first limit](#a-million-clients) and [several levels](#several-levels-of-servers)"],
    ]  # fmt: skip
    return words(table("you have | use | cost", lines))


TABLES: dict[str, Callable[[Rows], str]] = {
    "advice": advice, "drawn": drawn, "registered": registered, "apart": apart, "started": started, "fits": fits,
    "million": million, "share": share, "limits": limits,
}  # fmt: skip
BARE = {"costs": costs, "work": work, "levels": levels, "even": even, "ratios": ratios}
"""Tables that do not read the record."""


def filled(text: str) -> str:
    """Return the page with its tables and commits rebuilt."""
    rows: Rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    made = {name: partial(make, rows) for name, make in TABLES.items()} | BARE
    return with_tables(with_commits(text, (r["commit"] for r in rows)), lambda name: made[name]())


def main() -> None:
    """Rebuild the tables of the page."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
