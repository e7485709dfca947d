"""Tables of the scaling page that need no measurement: bytes by method, and client seconds from the study."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from _marks import table
from scaling_costs import COSTS, bytes_of, cost_of, shown

import fl.addons
import fl.methods
from distillkit.networks import ConvNet, LeNet, ResNet
from distillkit.study import Records, read_records
from fl import AddOn

__all__ = ["costs", "even", "levels", "number", "ratios", "runs", "sizes", "words", "work"]

NETWORKS: dict[str, tuple[Any, tuple[int, int, int], dict[str, Any]]] = {
    "LeNet": (LeNet, (1, 28, 28), {}),
    "ConvNet": (ConvNet, (3, 32, 32), {}),
    "ResNet-18": (ResNet, (3, 32, 32), {"norm": "group"}),
}
WAYS = {
    "NaiveVHL": "Naive VHL", "FineTune": "Fine-tuned FedAvg", "SingleImage": "Single image, rate 1",
    "Condensed": "FedAvg on condensed data",
}  # fmt: skip
"""What the records of all methods on digits call a way, where that is not the public name."""

ROUNDS = 100
"""Over which what is sent once is spread in the table of ratios."""


def runs() -> Records:
    """Return the runs of the study of all methods on digits."""
    return read_records(Path(__file__).parents[1] / "results" / "methods.jsonl")


def number(value: float) -> str:
    """Format a number with three significant digits and thousands separators."""
    if value >= 100:
        return f"{round(value, 3 - len(str(int(value)))):,.0f}"
    return f"{value:.3g}"


def words(made: str) -> str:
    """Return a table whose columns are text, aligned left."""
    return made.replace("---:", "---")


def costs() -> str:
    """Return the table of what each method sends and stores."""
    lines = [
        [", ".join(f"`{n}`" for n in c.names), *(shown(f) for f in (c.up, c.down, c.once, c.client, c.server, c.each))]
        for c in COSTS
    ]
    kept = "a client keeps | the server keeps | of each client"
    return words(table(f"method, or add-on to `FedAvg` | up | down | once more, down | {kept}", lines))


def levels() -> str:
    """Return the table of how the replies of each method combine over several levels of servers."""
    public = {name: getattr(m, name) for m in (fl.addons, fl.methods) for name in m.__all__}
    single = {n for n, thing in public.items() if inspect.isclass(thing) and issubclass(thing, AddOn)
              and thing.read_reply is not AddOn.read_reply}  # fmt: skip
    summed = [n for c in COSTS if c.each == "0" for n in c.names if n not in single]
    united = [n for c in COSTS if c.each != "0" for n in c.names if n not in single]
    said = {
        "sums and means: a middle server sends one sum": summed,
        "concatenated rows: a middle server forwards all of them": united,
        "each reply is read first: a middle server would have to do that": sorted(single),
    }
    lines = [[k, ", ".join(f"`{n}`" for n in v)] for k, v in said.items()]
    return words(table("how replies combine | methods", lines))


def work() -> str:
    """Return client seconds in the study as multiples of FedAvg's."""
    seconds: dict[str, list[float]] = {}
    for record in runs():
        seconds.setdefault(record.method, []).append(float(record.line["client_seconds"]))
    names = {WAYS.get(n, n): n for c in COSTS for n in c.names if n not in ("SharedImage", "SharedPool")}
    ratios = {names[way]: mean(s) / mean(seconds["FedAvg"]) for way, s in seconds.items() if way in names}
    bands = {"less": (0, 0.8), "about as much": (0.8, 1.25), "up to 3 times": (1.25, 3), "more": (3, 1e9)}
    lines = []
    for said, (low, high) in bands.items():
        found = sorted((r, n) for n, r in ratios.items() if low <= r < high)
        lines.append([said, ", ".join(f"`{n}` {number(r)}" for r, n in found)])
    return words(table("compared with FedAvg | client seconds, FedAvg = 1", lines))


def sizes() -> Iterator[tuple[str, dict[str, float]]]:
    """Return each network with the values of its letters for ten classes."""
    for name, (made, shape, options) in NETWORKS.items():
        network = made(shape, 10, **options)
        weights = list(network.parameters())
        head = sum(p.numel() for n, p in network.named_parameters() if n.startswith("classifier"))
        values = {"P": sum(p.numel() for p in weights), "T": len(weights), "H": head, "K": 10, "c": 10, "N": 1}
        channels, height, width = shape
        last = [p for n, p in network.named_parameters() if n == "classifier.weight"]
        yield name, {**values, "x": channels * height * width, "e": last[0].shape[1]}


def defaults() -> list[tuple[str, str, dict[str, float]]]:
    """Return the methods to compare with FedAvg, by name in `COSTS`, with the values of their letters."""
    lgd = inspect.signature(fl.methods.FedLGD).parameters
    summed = inspect.signature(fl.methods.SummedFedDM.__mro__[1]).parameters["num_networks"].default
    shared = inspect.signature(fl.addons.SharedImage).parameters
    vhl = inspect.signature(fl.addons.VHL).parameters
    patches = {"s": shared["keep"].default, "q": 3 * 1024 * 1024}
    own = [(f"`FedDM`, ipc {i}", "FedDM", {"i": i}) for i in (1, 10, 50)]
    return [
        ("`SCAFFOLD`", "SCAFFOLD", {}),
        ("`VHL`", "VHL", {"V": vhl["classes"].default * vhl["per_class"].default, "outputs": vhl["classes"].default}),
        (f"`FedLGD`, {lgd['anchors'].default} anchors per class", "FedLGD", {"a": lgd["anchors"].default, "i": 1}),
        *((f"`SharedImage`, weights in {100 * r:.0f} % of rounds", "SharedImage", {**patches, "r": r})
          for r in (1.0, shared["rate"].default)),
        *own,
        (f"`SummedFedDM`, {summed} networks", "SummedFedDM", {"d": summed, "i": 10}),
        ("`FedRep`", "FedRep", {}),
        ("`FedProto`", "FedProto", {}),
    ]  # fmt: skip


def ratios() -> str:
    """Return the bytes of a client relative to FedAvg."""
    plain, lines = COSTS[0], []
    networks = list(sizes())
    for said, name, own in defaults():
        cost = cost_of(name)
        cells = []
        for _, values in networks:
            given = {**values, **own}
            given["P"] += own.get("outputs", 0) * (values["e"] + 1)
            up, down, once = (bytes_of(f, given) for f in (cost.up, cost.down, cost.once))
            up_plain, down_plain = bytes_of(plain.up, values), bytes_of(plain.down, values)
            cells += [number(up / up_plain), number((up + down + once / ROUNDS) / (up_plain + down_plain))]
        lines.append([said, *cells])
    head = " | ".join(f"{name}: up | both ways" for name, _ in networks)
    return table(f"{head.join(('method | ', ''))}", lines)


def even() -> str:
    """Return the table of break-even points from which FedDM sends less than FedAvg."""
    lines = []
    for name, values in sizes():
        image = bytes_of("4*x + 8", values)
        up = bytes_of(COSTS[0].up, values)
        shares = [number(values["c"] * i * image / up) for i in (1, 10, 50)]
        lines.append([name, f"{values['P']:,}", f"{up / 1e6:.2f}", f"{image:,.0f}", number(up / image / 10), *shares])
    head = "network | P | FedAvg, MB up | bytes per image | images per class of equal bytes"
    return table(f"{head} | FedDM / FedAvg at ipc 1 | ipc 10 | ipc 50", lines)
