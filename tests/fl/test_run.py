"""Display of runs: one line, a notebook's table and curve, flat rows for pandas, loggers by `on_round`."""

from __future__ import annotations

import base64
import csv
import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call
from xml.etree import ElementTree

import pytest
from PIL import Image

from distillkit import plot
from distillkit.condense import distribution_matching
from distillkit.networks import RandomNetworks
from fl import ClientData, ClientDP, FedAvg, Filtered, Run, history, simulate
from fl.addons import FedProx
from fl.averaging.addon import AddOn
from fl.participants import Interrupted
from tests.fl.federations import Tiny, federation, images

DOCS = Path(__file__).parents[2] / "docs" / "federation.md"


def play(method: Any = None, **options: Any) -> Run:
    held = [ClientData(c, images(8, seed=50 + k)) for k, c in enumerate(federation())]
    method = method or FedAvg(FedProx(0.1), factory=Tiny, lr=0.1)
    return simulate(method, held, **{"rounds": 7, "test": images(30, 77), "progress": False, **options})


def parsed(html: str) -> ElementTree.Element:
    """Parse HTML, all of whose tags but that of a picture must be closed."""
    return ElementTree.fromstring(re.sub("(<img[^>]*)>", r"\1/>", html))


def test_repr_of_a_run_is_one_line() -> None:
    run = play()
    last, best = (f"{100 * a:.1f} %" for a in (run.accuracy_last, run.accuracy_best) if a is not None)
    assert repr(run) == f"Run(7 rounds of FedAvg(FedProx), 5 clients, accuracy {last} (best {best}))"
    private = Filtered(FedAvg(factory=Tiny, weights="uniform"), ClientDP(2.0, 0.5, 1.0))
    run = play(private, rounds=2)
    assert repr(run).endswith(f"epsilon {run.rows[-1]['epsilon']:.3g})")
    assert "no guarantee" in repr(play(private, rounds=1, secret=1))
    failed = Run([{**row, "failed": {"0": "x"}, "epsilon": 0.0} for row in run.rows], run.server, {}, run.method)
    assert "2 replies left out, epsilon 0)" in repr(failed)


def test_run_that_falls_is_plotted_and_its_last_and_best_accuracy_differ() -> None:
    run = play(rounds=3)
    rows = [{**row, "accuracy": accuracy} for row, accuracy in zip(run.rows, (0.0, 0.9, 0.4), strict=True)]
    falling = Run(rows, run.server, {}, run.method)
    assert (falling.accuracy_last, falling.accuracy_best) == (0.4, 0.9)
    wanted = {"rounds": 3, "accuracy_last": 0.4, "accuracy_best": 0.9, "epsilon": 3, "failed": 3}
    wanted |= {name: sum(row[name] for row in rows) for name in ("bytes_up", "bytes_down", "client_seconds", "seconds")}
    assert history.summary([{**row, "failed": {"0": "x"}, "epsilon": row["round"]} for row in rows]) == wanted
    assert repr(falling).endswith("accuracy 40.0 % (best 90.0 %))")
    assert "accuracy, 0.0 to 90.0 %, rounds 1 to 3" in falling._repr_html_()
    (drawn,) = plot.curves(falling).axes[0].lines
    assert [y / 100 for _, y in drawn.get_xydata()] == pytest.approx([0.0, 0.9, 0.4])
    assert len(plot.curves({"a": run, "b": [run, run]}).axes[0].lines) == 2


def test_repr_without_evaluation_or_rounds_omits_unknown_values() -> None:
    run = play(rounds=2, test=None, evaluate="none")
    assert repr(run) == "Run(2 rounds of FedAvg(FedProx), 5 clients)"
    assert "<img" not in run._repr_html_()
    empty = Run([], run.server, {}, run.method)
    assert repr(empty) == "Run(0 rounds of FedAvg(FedProx), 5 clients)"
    assert not list(parsed(empty._repr_html_()).iter("table"))


def test_long_server_loop_stops_with_the_run() -> None:
    server = play(rounds=1).server
    server.stop.clear()
    server.check_running()
    server.stop.set()
    with pytest.raises(Interrupted):
        server.check_running()


def test_notebook_shows_curve_and_last_rows() -> None:
    run = play()
    html = run._repr_html_()
    assert len(list(parsed(html).iter("tr"))) == 6
    accuracies = [100 * row["accuracy"] for row in run.rows]
    (label, picture) = re.findall(r'<img alt="([^"]*)" width="360" src="data:image/png;base64,([^"]*)">', html)[0]
    assert label == f"accuracy, {min(accuracies):.1f} to {max(accuracies):.1f} %, rounds 1 to 7"
    assert Image.open(io.BytesIO(base64.b64decode(picture))).width > 360
    assert f"{run.rows[-1]['accuracy']:.1%}" in " ".join(parsed(html).itertext())
    base = {"bytes_up": 2e6, "bytes_down": 34e5, "failed": {"1": "x", "2": "y"}, "seconds": 1.26, "epsilon": None}
    shown = [{**base, "round": 1, "accuracy": 0.0, "loss": 1.2345, "drawn": None}]
    shown.append({**base, "round": 2, "accuracy": None, "loss": None, "drawn": [0, 4, 7]})
    text = " ".join(parsed(replace(run, rows=shown)._repr_html_()).itertext())
    assert (
        text.split("Run(")[1].split()
        == (
            f"2 rounds of {run.method}, 5 clients, 4 replies left out) "
            "round accuracy loss MB up MB down clients failed seconds 1 0.0% 1.234 2.00 3.40 2 1.3 2 2.00 3.40 3 2 1.3"
        ).split()
    )
    single = parsed(play(rounds=1)._repr_html_())
    assert [len(list(single.iter(tag))) for tag in ("img", "table")] == [0, 1]


def test_names_are_escaped_in_html() -> None:
    run = replace(play(rounds=1), method="A<b>&c")
    assert "A&lt;b&gt;&amp;c" in run._repr_html_()


def test_table_has_one_value_a_cell_and_every_column_in_every_row() -> None:
    run = play(rounds=3)
    rows = run.table()
    assert rows == history.table(run.rows)
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert not [v for row in rows for v in row.values() if isinstance(v, dict | list | tuple)]
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in run.rows]
    assert rows[1]["up.FedAvg.update"] == run.rows[1]["up"]["FedAvg.update"]
    assert rows[1]["accuracy_clients.mean"] == run.rows[1]["accuracy_clients"]["mean"]
    assert (rows[0]["drawn"], rows[0]["failed"]) == (5, 0)
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    assert len(file.getvalue().splitlines()) == 4


def test_rows_of_a_table_may_lack_columns_of_others() -> None:
    found = history.table([{"round": 1, "failed": {"3": "why"}}, {"round": 2, "new": {"a": {"b": 2}}}])
    assert found == [{"round": 1, "failed": 1, "new.a.b": None}, {"round": 2, "failed": None, "new.a.b": 2}]
    assert history.table([]) == []
    told = {"round": 1, "empty": [2], "failed": {"5": "b", "3": "a"}, "failed_after": {"deal": {"4": "d", "2": "c"}}}
    assert history.table([told]) == [{"round": 1, "empty": 1, "failed": 2, "failed_after.deal": 2}]
    hidden = history.masked(told)
    assert hidden["failed"] == {"#1": "a", "#2": "b"}
    assert hidden["failed_after"] == {"deal": {"#1": "c", "#2": "d"}}


def test_bytes_of_tests_are_those_of_all_tested_clients() -> None:
    parts = [ClientData(data, images(6, seed=k)) for k, data in enumerate(federation())]
    for evaluate, tested in (("all", 5), ("drawn", 2), ([4], 1), ("none", 0)):
        [row] = simulate(FedAvg(factory=Tiny), parts, rounds=1, participation=2, evaluate=evaluate, progress=False).rows
        assert row.get("bytes_up_evaluation", 0) == tested * 8 * (3 + 3 * 3)
        assert ("bytes_down_evaluation" in row) == ("accuracy_clients" in row) == (tested > 0)
        if tested:
            assert row["bytes_down_evaluation"] == tested * row["down"]["FedAvg.model"] / 2
            assert row["accuracy_clients"]["clients"] == tested
            assert set(row["accuracy_clients"]) == {"mean", "std", "worst10", "clients"}
    [row] = simulate(FedAvg(factory=Tiny), parts, rounds=1, evaluate="none", progress=False).rows
    assert not {"bytes_up_evaluation", "accuracy_clients"} & set(row)


def test_notes_of_an_add_on_replace_no_column() -> None:
    class Noting(AddOn):
        def receive(self, server: Any, replies: Any, old: Any) -> None:
            server.notes |= {"failed": 7, "mine": mine}

    mine: Any = 8
    [row] = simulate(FedAvg(Noting(), factory=Tiny), federation(), rounds=1, progress=False).rows
    assert (row["failed"], row["note_failed"], row["mine"]) == ({}, 7, 8)
    mine = {8}
    with pytest.raises(TypeError, match=r"server.notes\['mine'\] must be a JSON value, got set"):
        simulate(FedAvg(Noting(), factory=Tiny), federation(), rounds=1, progress=False)


@pytest.mark.parametrize("private", [False, True])
def test_progress_bar_counts_rounds_and_clients(private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl.engine._runner.bar", bar := MagicMock())
    shown = bar.return_value.__enter__.return_value
    method: Any = FedAvg(factory=Tiny, weights="uniform")
    method = Filtered(method, ClientDP(2.0, 1.0, 1.0)) if private else method
    run = play(method, rounds=1, out=tmp_path, progress=True)
    clients = [] if private else [f"client {k} of 5" for k in range(1, 6)]
    texts = [*clients, f"accuracy {100 * run.rows[0]['accuracy']:.1f} %"]
    assert shown.mock_calls == [*map(call.set_postfix_str, texts), call.update()]
    play(method, rounds=3, out=tmp_path, resume=True)
    assert [(*c.args, c.kwargs) for c in bar.call_args_list] == [
        (total, "simulate", {"unit": "round", "progress": done == 0, "done": done}) for total, done in ((1, 0), (3, 1))
    ]
    assert shown.update.call_count == 3


def page_code(logger: str, use: str) -> dict[str, Any]:
    """Run the page's lines for a logger, and then those that pass `use`; return their names."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.S)
    (made,) = (block for block in blocks if logger in block)
    (used,) = (block for block in blocks if "log(" in block and use in block)
    known = {"simulate": simulate, "distribution_matching": distribution_matching, "method": FedAvg(factory=Tiny)}
    place: dict[str, Any] = {**known, "clients": federation(), "test": images(60, 77)}
    place["networks"] = RandomNetworks(lambda: Tiny(3))
    exec(made + used, place)
    return place


@pytest.mark.parametrize("module", ["torch.utils.tensorboard", "wandb", "mlflow"])
def test_page_code_for_a_logger_gets_rounds_and_steps(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, int]] = []
    log = Mock(side_effect=lambda numbers, step: seen.extend((name, value, step) for name, value in numbers.items()))
    writer = SimpleNamespace(add_scalar=lambda *one: seen.append(one))
    wandb = SimpleNamespace(log=log)
    logger = SimpleNamespace(log_metrics=log, init=lambda project: wandb, SummaryWriter=lambda folder: writer)
    monkeypatch.setitem(sys.modules, module, logger)  # type: ignore[arg-type]
    rows = page_code(module, "on_round=")["run"].rows
    assert [(v, step) for name, v, step in seen if name == "accuracy"] == [
        (row["accuracy"], row["round"]) for row in rows
    ]
    assert ("up.FedAvg.update", rows[0]["up"]["FedAvg.update"], 1) in seen
    assert all(isinstance(value, int | float) for _, value, _ in seen)
    seen.clear()
    page_code(module, "callback=")
    assert [(name, step) for name, _, step in seen] == [("loss", 1), ("loss", 2), ("loss", 3)]


def test_row_of_a_secret_draw_names_no_client() -> None:
    reasons, numbered, named = {"7": "b", "3": "a"}, {"#1": "a", "#2": "b"}, ("failed", "failed_evaluation", "dominant")
    row = {"round": 1, "drawn": [7, 8], "empty": [8], "bytes_by_client": {"7": [1, 2]}, "noted": {"steps": 7.0}}
    row |= dict.fromkeys(named, reasons) | {"failed_after": {"late": reasons}}
    hidden = {"round": 1, "drawn": None, "empty": [None], "bytes_by_client": None, "noted": None}
    assert history.masked(row) == hidden | dict.fromkeys(named, numbered) | {"failed_after": {"late": numbered}}
    assert history.masked({"empty": []}) == {"drawn": None, "bytes_by_client": None, "empty": []}
    counts = {"drawn": 2, "empty": 1, "bytes_by_client": 1, "noted.steps": 7.0, "failed_after.late": 2}
    assert history.table([row]) == [{"round": 1, **counts, **dict.fromkeys(named, 2)}]
    one = {"7": "reason"}
    row |= dict.fromkeys(named, one) | {"failed_after": {"late": one}}
    hidden = history.masked(row)
    assert not {"7", "8"} & set(re.findall(r"[0-9]+", str(hidden)))
    assert str(hidden).count("reason") == 4
    assert history.table([row])[0]["dominant"] == history.table([row])[0]["failed"] == 1
