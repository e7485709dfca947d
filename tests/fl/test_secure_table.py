"""Support of secure sums by method: the table of the page matches the declared entries.

`python -m tests.fl.test_secure_table` prints the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fl.addons
import fl.methods
from distillkit.privacy import PrivacyError
from fl import Classification, FedAvg, FedDM, Method, Real, Server
from fl.aggregation import Schema
from fl.methods import FedLGD, FedProto, FedRep, PrivateFedDM, SingleImage, SummedFedDM
from fl.secure._encoding import ReplyLayout
from fl.secure.sums import require_sums
from tests.fl.test_addon_combinations import OPTIONS, PICTURE, SHARED, Net, digits, normed

PAGE = Path(__file__).parents[2] / "docs" / "components" / "secure_sums.md"
DM: dict[str, Any] = {"factory": Net, "ipc": 1}
NOISED: dict[str, Any] = {**DM, "sigma": 1.0, "sigma_sizes": 1.0, "public_statistics": True}
METHODS: dict[str, Callable[[], Method]] = {
    "FedAvg": lambda: FedAvg(factory=Net),
    "FedAvg, batch norm": lambda: FedAvg(factory=normed),
    'FedAvg, batch norm, buffers="drop"': lambda: FedAvg(factory=normed, buffers="drop"),
    "FedAvg, several architectures": lambda: FedAvg(factory={"a": Net, "b": Net}, assign=lambda k: "ab"[k % 2]),
    "FedDM": lambda: FedDM(**DM),
    "FedLGD": lambda: FedLGD(factory=Net, ipc=1),
    "FedProto": lambda: FedProto(factory=Net),
    "FedRep": lambda: FedRep(factory=Net),
    "PrivateFedDM": lambda: PrivateFedDM(**NOISED),
    "Real": lambda: Real(**DM),
    "SingleImage": lambda: SingleImage(factory=Net, image=PICTURE, shared=SHARED),
    "SummedFedDM": lambda: SummedFedDM(**NOISED, num_networks=2),
}
WITHOUT = ("ClippedCrossEntropy",)
"""Names that are not methods."""


def everything() -> Iterator[tuple[str, Callable[[], Method]]]:
    """Yield every public method and add-on, with a function that builds a small one."""
    yield from METHODS.items()
    for name, options in sorted(OPTIONS.items()):
        yield name, partial(_with, name, options)


def _with(name: str, options: dict[str, Any]) -> Method:
    weights = {"weights": "uniform"} if name in ("DPSGD", "RobustMean") else {}
    return FedAvg(getattr(fl.addons, name)(**options), factory=Net, **weights)  # type: ignore[arg-type]


def verdict(make: Callable[[], Method]) -> tuple[list[str], str]:
    """Return the summed entries, or the reason for a refusal."""
    method = make()
    try:
        require_sums(method)
        schema = replies(method)
        entries = {e.key: e for e in method.entries()}
        ReplyLayout.from_schema(schema, entries, dict.fromkeys(schema, 1.0), 40, 4)
    except PrivacyError as error:
        return [], str(error)
    return sorted(schema), ""


def replies(method: Method) -> Schema:
    data = digits()
    server = Server(Classification(3), data.shape, data.normalization, 4, 0, data={"proxy": data, "validation": data})
    method.start(server)
    server.round, server.drawn = 1, list(range(4))
    return method.expect(server, 0)


def table() -> list[str]:
    rows = ["| method, or add-on to `FedAvg` | replies are summed | or why not |", "|---|---|---|"]
    for name, make in everything():
        summed, why = verdict(make)
        said = re.sub(r"^(\S+\.\S+)", r"`\1`", why)
        title, *more = name.split(", ")
        rows.append(f"| `{title}`{''.join(', ' + m for m in more)} | {', '.join(f'`{s}`' for s in summed)} | {said} |")
    return rows


def test_table_of_the_page_matches_the_declarations() -> None:
    known = {name.split(", ")[0] for name, _ in everything()}
    assert known == {"FedAvg", "FedDM", *fl.addons.__all__, *fl.methods.__all__} - set(WITHOUT)
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| method, or add-on to `FedAvg` | replies are summed | or why not |")
    assert lines[start : start + len(table())] == table()


if __name__ == "__main__":
    print("\n".join(table()))


def test_costs_on_the_page_match_the_record() -> None:
    record = json.loads((PAGE.parents[1] / "results" / "secure_sums.json").read_text(encoding="utf-8"))
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    start = shown.index(record["columns"])
    assert shown[start + 1 : start + 1 + len(record["rows"])] == record["rows"]
