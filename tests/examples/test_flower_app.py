"""The example Flower app over an in-memory grid, on digits and on folders of images; and its README."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fl import simulate
from fl.engine.store import Store
from fl.study import outcome_hash
from fl.study.saved_run import hash_of
from tests.fl.flower import fake_flower
from tests.refused import refused

APP = Path(__file__).parents[2] / "examples" / "flower_app"
CONFIG: dict[str, Any] = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"][
    "config"
]
SMALL = {"rounds": 2, "steps": 2, "server-epochs": 1, "ipc": 1, "per-class": 2, "width": 4, "depth": 1}
SMALL |= {"connect-timeout": 20.0}


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that imports the app's modules by name."""
    monkeypatch.syspath_prepend(str(APP))
    with fake_flower.installed():
        yield lambda name: importlib.import_module(f"flower_app.{name}")
        for name in [name for name in sys.modules if name.startswith("flower_app")]:
            del sys.modules[name]


def play(apps: Any, config: dict[str, Any], nodes: list[dict[str, Any]], folder: Path) -> Any:
    """Run the app with these nodes, and return the run in process with the same data."""
    contexts, held = {}, []
    for k, more in enumerate(nodes):
        contexts[100 + k] = made = fake_flower.context(100 + k, k, len(nodes))
        made.node_config.update({"folder": str(folder / f"node{k}"), **more})
        made.run_config.update(config)
        held.append(apps("images").load_client(k, made.node_config, config))
    server = fake_flower.context(0, None, 0)
    server.run_config.update(config)
    apps("server_app").app(fake_flower.Grid(apps("client_app").app, contexts), server)
    return simulate(
        apps("methods").method_of(config), held, rounds=config["rounds"], test=apps("images").test_set(config),
        progress=False,
    )  # fmt: skip


@pytest.mark.parametrize("method", ["feddm", "vhl"])
def test_digits_equal_threads_bitwise(method: str, apps: Any, tmp_path: Path, capsys: Any) -> None:
    config = {**CONFIG, **SMALL, "method": method, "out": str(tmp_path / "run")}
    beside = play(apps, config, [{}, {}], tmp_path)
    assert capsys.readouterr().out.strip() == repr(beside)
    store = Store(tmp_path / "run")
    assert hash_of(store.rows(), store.state()) == outcome_hash(beside)


POLICY = """
epsilon = {epsilon}
delta = 1e-5
smallest_sigma = 1.0
largest_rate = 1.0
largest_clip = 1.0
methods = ["PrivateFedDM"]
evaluation = false
app = "any"
"""


def test_private_run_spends_its_epsilon_within_the_policy(apps: Any, tmp_path: Path) -> None:
    config = {**CONFIG, **SMALL, "method": "private", "out": str(tmp_path / "run"), "epsilon": 4.0}
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=4.1), encoding="utf-8")
    nodes = [{"policy": str(tmp_path / "policy.toml")}] * 2
    beside = play(apps, config, nodes, tmp_path)
    (row,) = Store(tmp_path / "run").rows()[-1:]
    assert row["failed"] == {}
    assert row["epsilon"] == beside.rows[-1]["epsilon"] == pytest.approx(4.0)
    refused(lambda: play(apps, {**config, "out": str(tmp_path / "second")}, nodes, tmp_path), RuntimeError, "budget")


def pictures(folder: Path, classes: dict[str, int]) -> str:
    """Write a folder with ten small images per class, each class with its own colour."""
    generator = torch.Generator().manual_seed(0)
    for name, colour in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(10):
            pixels = torch.randint(0, 120, (12, 12, 3), generator=generator, dtype=torch.uint8)
            pixels[:, :, colour] += 100
            Image.fromarray(pixels.numpy()).save(folder / name / f"{i}.png")
    return str(folder)


def test_nodes_with_own_folders_may_lack_classes(apps: Any, tmp_path: Path) -> None:
    config = {**CONFIG, **SMALL, "classes": "red, green, blue", "size": 8, "channels": 3, "test": ""}
    config["out"] = str(tmp_path / "run")
    nodes = [
        {"images": pictures(tmp_path / "a", {"blue": 2, "red": 0})},
        {"images": pictures(tmp_path / "b", {"green": 1, "red": 0})},
    ]
    beside = play(apps, config, nodes, tmp_path)
    assert beside.rows[-1]["failed"] == {}
    labels = [sorted(set(apps("images").load_client(k, n, config).train.labels.tolist())) for k, n in enumerate(nodes)]
    assert labels == [[0, 2], [0, 1]]
    with pytest.raises(ValueError, match=r"not in classes; add or move them: \w+/green"):
        apps("images").load_client(1, nodes[1], {**config, "classes": "red,blue"})


def test_an_unknown_method_is_refused(apps: Any) -> None:
    refused(lambda: apps("methods").method_of({**CONFIG, "method": "fedavg"}), ValueError, "feddm")


def test_readme_uses_known_options_and_reads_the_status() -> None:
    said = (APP / "README.md").read_text(encoding="utf-8")
    for given in re.findall(r"-c '([^']*)'", said):
        assert set(tomllib.loads("\n".join(re.split(r" (?=\w)", given)))) <= set(CONFIG), given
    for switch in (
        "FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1",
    ):  # fmt: skip
        assert switch in said
    assert said.count("--format json") == 3
