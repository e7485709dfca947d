"""The command line: its commands are the library's calls, its help shows commands that run, its errors are one line."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points, version
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

import attacks.commands
import distillkit
import fl.commands
from attacks import Report, leaks
from distillkit import LabeledImages, Normalization
from distillkit._utils.pages import image_grid
from distillkit.augment import DSA
from distillkit.commands import _as_options, _sources, _training, main
from distillkit.commands import condense as condense_command
from distillkit.commands import doctor as doctor_command
from distillkit.commands import evaluate as evaluate_command
from distillkit.commands import label as label_command
from distillkit.commands import sets as sets_command
from distillkit.condense import distribution_matching
from distillkit.data import load, load_folder, load_npz, load_set, set_cards
from distillkit.labels import soft_labels
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.protocols import PROTOCOLS
from distillkit.rng import derive
from distillkit.sets import Tiles

COMMANDS = ("attack", "condense", "doctor", "evaluate", "label", "report", "sets", "study")
PARTS = {"train": slice(1040), "test": slice(1040, 1044)}
NETWORK = partial(ConvNet, (3, 8, 8), 3, width=8, depth=2)
_LONGER = ("attack", "condense", "label", "report", "study")
"""Commands whose examples take seconds; other tests run these commands on smaller images."""
SMALL = ("--width", "8", "--depth", "2", "--quiet", "--device", "cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: object, code: int = 0) -> Result:
    found = CliRunner().invoke(main, [str(word) for word in words])
    assert found.exit_code == code, (found.output, found.exception)
    return found


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 3 x 20 pictures of 12 x 12 pixels: a colour per class, and noise."""
    top = tmp_path_factory.mktemp("data") / "photos"
    for c, name in enumerate(("cat", "dog", "owl")):
        (top / name).mkdir(parents=True)
        for i in range(20):
            pixels = torch.randint(0, 120, (12, 12, 3), generator=derive(c, i)).numpy().astype(np.uint8)
            pixels[..., c] += 100
            Image.fromarray(pixels).save(top / name / f"{i}.png")
    return top


@pytest.fixture(scope="module")
def small(photos: Path) -> LabeledImages:
    """Return the photos' set as the library makes it."""
    train = load_folder(photos, size=8).train
    networks = RandomNetworks(lambda: ConvNet(train.shape, 3, width=8, depth=2))
    return distribution_matching(train, networks=networks, ipc=2, steps=4, batch_real=64, lr=None, progress=False)


def condensed(photos: Path, *more: object, out: str = "small.safetensors") -> Result:
    return run("condense", photos, "--size", 8, "--ipc", 2, "--steps", 4, "--out", out, *SMALL, *more)


def test_every_package_registers_its_commands() -> None:
    assert tuple(sorted(entry.name for entry in entry_points(group="distillkit.commands"))) == COMMANDS
    listed = run("--help").output
    assert all(re.search(rf"^  {name} +\w", listed, re.M) for name in COMMANDS)
    assert re.fullmatch(r"distillkit, version [\d.]+\n", run("--version").output)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _LONGER)) for name in COMMANDS]
)
def test_help_shows_an_example_that_runs(name: str, folder: Path) -> None:
    said = " ".join(run(name, "--help").output.split())
    _, first, *words = shlex.split(said.partition("Example: ")[2])
    assert first == name
    run(name, *words)
    if "--out" in words:
        assert (folder / words[words.index("--out") + 1]).exists()


def test_condense_is_the_library_call(photos: Path, folder: Path, small: LabeledImages) -> None:
    result = condensed(photos, "--json")
    found, record = LabeledImages.load("small.safetensors"), json.loads(result.stdout)
    assert torch.equal(found.images, small.images)
    assert (found.class_names, found.normalization) == (("cat", "dog", "owl"), small.normalization)
    wanted = {"out": "small.safetensors", "picture": "small.png", "images": 6, "info": dict(found.info)}
    assert record == {**wanted, "seconds": ANY}
    assert (record["images"], record["info"]["ipc"]) == (6, 2)
    with Image.open("small.png") as picture:
        assert picture.width > 100


def test_condense_ends_in_time_and_continues_to_the_same_set(photos: Path, folder: Path, small: LabeledImages) -> None:
    state = folder / "small.state.safetensors"
    said, stopped = condensed(photos, "--seconds", 1e-9, "--html", "page.html").output, "stopped after 1 of 4 steps"
    assert all(f"{stopped}; --resume continues" in text for text in (said, Path("page.html").read_text("utf-8")))
    first = LabeledImages.load("small.safetensors")
    assert (first.info["steps"], state.exists()) == (1, True)
    assert not torch.equal(first.images, small.images)
    condensed(photos, "--resume")
    assert torch.equal(LabeledImages.load("small.safetensors").images, small.images)
    assert not state.exists()


def test_state_is_saved_each_minute_and_used_on_request(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = condense_command.save_state
    monkeypatch.setattr(condense_command, "save_state", lambda path, s: saved.append(int(s["step"])) or save(path, s))
    assert "stopped" not in condensed(photos, "--seconds", 1e-9, "--steps", 1).output  # the last step is done
    assert saved == []
    condensed(photos, "--seconds", 1e-9, "--lr", 1)
    assert saved == [1]
    monkeypatch.setattr(condense_command, "_SAVE_INTERVAL", -1.0)
    condensed(photos, "--steps", 2, "--lr", 2)  # a new call, with other arguments
    assert saved == [1, 1, 2]
    monkeypatch.setattr(condense_command, "_SAVE_INTERVAL", 60.0)
    for more, steps, end in (((), [2, 4], ""), (("--seconds", 100), [2], "stopped after 2 of 5")):
        ticks = count(0, 40)  # seconds at the start, before the first step, and after each step
        monkeypatch.setattr(condense_command, "time", SimpleNamespace(monotonic=partial(next, ticks)))
        saved.clear()
        assert end in condensed(photos, "--steps", 5, "--lr", 3, *more).output
        assert saved == steps


def test_options_reach_the_library(photos: Path, small: LabeledImages, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def note(name: str) -> Any:
        return lambda *args, **given: seen.update({name: (args, given)}) or small

    for name in ("distribution_matching", "gradient_matching", "stitch", "condense_private"):
        monkeypatch.setattr(condense_command, name, note(name))
    monkeypatch.setattr(_training, "train", note("train"))
    words = ("condense", photos, "--size", 8, "--ipc", 2, "--seed", 3, "--out", "a.safetensors", *SMALL)
    own = ("--lr", 0.7, "--init", "noise", "--batch-real", 9, "--tiles", 4, "--augment", "dsa", "--steps", 5)
    wanted = {"lr": 0.7, "init": "noise", "batch_real": 9, "ipc": 2, "generator": 3, "device": "cpu", "augment": DSA()}
    plain = {"lr": None, "init": "real", "batch_real": 64, "ipc": 10, "generator": 0, "device": "auto", "augment": None}
    both = (("dm", "distribution_matching", "steps", 200), ("dc", "gradient_matching", "iterations", 100))
    for method, name, steps, most in both:
        run("condense", photos, "--size", 8, "--method", method, "--out", "a.safetensors")
        given = seen[name][1]
        assert {**plain, steps: most, "parametrize": None, "progress": True}.items() <= given.items()
        assert given["networks"].factory().body[0].weight.shape[0] == 64
        run(*words, *own, "--method", method)
        given = seen[name][1]
        assert {**wanted, steps: 5, "parametrize": Tiles(4), "progress": False}.items() <= given.items()
        networks = build(given["networks"].factory, 1)
        assert torch.equal(next(networks.parameters()), next(build(NETWORK, 1).parameters()))
    run(*words, "--method", "private", "--epsilon", 5, "--classes", "cat,dog,owl", "--channels", 3)
    assert {"epsilon": 5.0, "steps": 300, "ipc": 2, "device": "cpu"}.items() <= seen["condense_private"][1].items()
    run(*words, "--method", "stitch", "--epochs", 7, "--augment", "dsa")
    (network, _, protocol), given = seen["train"]
    assert (protocol.epochs, given["device"], seen["stitch"][1]["observer"]) == (7, "cpu", network)
    assert (protocol.batch, protocol.augment, given["progress"]) == (64, DSA(), False)
    assert torch.equal(next(network.parameters()), next(build(NETWORK, derive(3, "network")).parameters()))
    assert torch.equal(given["generator"].get_state(), derive(3, "train").get_state())
    run("condense", photos, "--size", 16, "--method", "stitch", "--network", "lenet", "--out", "a.safetensors")
    assert seen["train"][0][2].epochs == 10


def test_options_reach_the_evaluation_and_the_labels(
    photos: Path, small: LabeledImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.save("small.safetensors")
    seen: list[Any] = []

    def note(*args: Any, **given: Any) -> Any:
        seen.append((args, given))
        raise ValueError("enough")

    monkeypatch.setattr(evaluate_command, "evaluate_set", note)
    words = ("evaluate", "small.safetensors", "--test", photos)
    run(*words, code=1)
    run(*words, "--augment", "dsa", "--epochs", 4, "--seed", 5, "--real", *SMALL, code=1)
    for more in ((), ("--epochs", 2)):
        run(*words, "--protocol", "dm", *more, code=1)
    ((_, test, _), plain), (_, own), *papers = seen
    assert [given["protocol"] for _, given in papers] == [PROTOCOLS["dm"], replace(PROTOCOLS["dm"], epochs=2)]
    told = [(g["protocol"].epochs, g["protocol"].augment, g["num_networks"], g["generator"]) for g in (plain, own)]
    assert told == [(300, None, 3, 0), (4, DSA(), 3, 5)]
    assert [(g["device"], g["progress"]) for g in (plain, own)] == [("auto", True), ("cpu", False)]
    assert (len(test), plain["real"], len(own["real"])) == (12, None, 48)
    monkeypatch.setattr(label_command, "soft_labels", lambda *a, **g: seen.append(g) or soft_labels(*a, **g))
    monkeypatch.setattr(label_command, "accuracy", lambda n, data: seen.append(len(data)) or 0.625)
    words = ("label", "small.safetensors", "--train", photos, "--epochs", 15, "--temperature", 5, "--out", "soft.npz")
    told = [run(*words, *SMALL, *more).output for more in (("--html", "page.html"), ("--test-fraction", 0))]
    told.append(Path("page.html").read_text("utf-8").replace("&nbsp;", " "))
    assert ["the teacher is right on 62.5 % of the held-out images" in text for text in told] == [True, False, True]
    assert (len(seen[4]["pool"]), seen[4]["temperature"], seen[5]) == (48, 5.0, 12)
    command: Any = main.get_command(click.Context(main), "label")
    defaults = {one.name: one.default for one in command.params}
    assert (defaults["epochs"], defaults["temperature"]) == (20, 1.0)


OPTIONS = {
    "steps": 1, "epochs": 1, "batch-real": 1, "lr": 1, "init": "noise", "tiles": 2, "seconds": 1, "resume": None,
    "epsilon": 1, "classes": "a,b", "network": "convnet", "width": 8, "depth": 1, "augment": "dsa",
}  # fmt: skip
NETWORKS = {"network", "width", "depth"}
USED: dict[str, set[str]] = {
    **dict.fromkeys(("dm", "dc"), {*OPTIONS} - {"epochs", "epsilon", "classes"}),
    "private": {"steps", "epsilon", "classes", *NETWORKS}, "stitch": {"epochs", "augment", *NETWORKS},
    "random": set(), "herding": set(), "k-center": set(),
}  # fmt: skip


@pytest.mark.parametrize("method", USED)
def test_options_that_a_method_does_not_use_are_refused(method: str) -> None:
    for option, value in OPTIONS.items():
        words = ("condense", "nothing", "--out", "a.npz", "--method", method, f"--{option}")
        found = CliRunner().invoke(main, [*words, *([] if value is None else [str(value)])])
        assert found.exit_code != 0
        said = f"--{option} would change nothing for --method {method}" in " ".join(found.output.split())
        assert said is (option not in USED[method]), option


TABLE = {"image": "a", "label": "b", "folder": "c"}
PICTURES = {**TABLE, "background": 0.5, "test-fraction": 0.5}


@pytest.mark.parametrize(("source", "unused"), [
    ("photos", TABLE), ("many.npz", PICTURES), ("digits", {**PICTURES, "cache": "d"}),
    ("digits-dm-1", {**PICTURES, "cache": "d", "size": 8, "channels": 1}),
])  # fmt: skip
def test_options_that_a_source_does_not_use_are_refused(source: str, unused: dict[str, Any]) -> None:
    Path("photos").mkdir()
    np.savez("many.npz", train_images=np.zeros(1))
    for option, value in unused.items():
        words = ("condense", source, "--out", "a.npz", "--method", "random", f"--{option}", value)
        assert f"--{option} would change nothing for {source}" in " ".join(run(*words, code=2).output.split())


@pytest.mark.parametrize("method", ["dc", "stitch", "random", "herding", "k-center"])
def test_every_method_condenses_a_folder(method: str, photos: Path) -> None:
    steps = ("--steps", 1) if method == "dc" else ("--epochs", 2) if method == "stitch" else ()
    words = ("condense", photos, "--size", 8, "--ipc", 2, "--method", method, *steps, "--out", "small.safetensors")
    run(*words, *(SMALL if steps else ("--quiet", "--device", "cpu")))
    found = LabeledImages.load("small.safetensors")
    assert found.counts().tolist() == [2, 2, 2]
    assert found.info["method"] == {"dc": "gradient matching", "k-center": "k-center"}.get(method, found.info["method"])


def test_private_set_states_its_epsilon(photos: Path) -> None:
    words = ("condense", photos, "--size", 8, "--ipc", 1, "--method", "private", "--steps", 2, "--out", "p.safetensors")
    run(*words, "--epsilon", 8, "--classes", "cat, dog,owl", "--channels", 3, *SMALL)
    found = LabeledImages.load("p.safetensors")
    assert found.info["epsilon"] <= 8
    assert found.normalization == Normalization((0.5,) * 3, (0.5,) * 3)
    assert found.class_names == ("cat", "dog", "owl")
    for left_out in ("--epsilon", "--classes", "--channels"):
        given = {"--epsilon": 8, "--classes": "cat,dog,owl", "--channels": 3}
        rest = [word for name, value in given.items() if name != left_out for word in (name, value)]
        assert "needs --epsilon, --classes and --channels" in run(*words, *rest, *SMALL, code=2).output


def test_attack_and_report_are_the_measurement_of_the_library(photos: Path, folder: Path) -> None:
    """The set's file has its size and normalization, so that the folder is enough; its split is that of `condense`."""
    run("condense", photos, "--size", 8, "--ipc", 2, "--method", "random", "--out", "copies.safetensors", "--quiet")
    made = LabeledImages.load("copies.safetensors")
    copies = made.replace(info={**made.info, "epsilon": None, "reason": "real images were joined"})
    copies.save("copies.safetensors")
    with pytest.warns(UserWarning, match="12 records"):
        expected = leaks(copies, *load_folder(photos, size=8))
    result = run("attack", "copies.safetensors", "--train", photos, "--json", "--quiet")
    assert json.loads(result.stdout) == json.loads(json.dumps(expected.record()))
    assert "Warning: held_out holds 12 records" in result.stderr
    result = run("report", "copies.safetensors", "--train", photos, "--html", "report.html", "--quiet")
    assert "it leaks; it publishes " in result.output
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 2
    seen = [f"{name}: {copies.info[name]}" for name in ("method", "epsilon", "reason")]
    seen += ["method: random", "epsilon: None", "reason: real images were joined"]
    seen += ["PSNR in dB: inf", "held-out records that seem to have one</td>", "copies.safetensors: it leaks"]
    assert all(text in page for text in [str(copies), *seen])


def test_report_shows_images_above_their_records_the_nearest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randint(256, (1044, 4, 4), generator=derive(0), dtype=torch.uint8)
    arrays = {"images": pixels.numpy(), "labels": np.arange(1044) % 2}
    parts = {f"{part}_{n}": a[rows] for part, rows in PARTS.items() for n, a in arrays.items()}
    np.savez("many.npz", **parts)
    records = load_npz("many.npz").train
    chosen = records[94 * torch.arange(12)]  # records beyond the first 1,024, too
    signs = torch.randn(12, 1, 4, 4, generator=derive(1)).sign()
    noise = signs * torch.linspace(0.05, 0, 12).view(-1, 1, 1, 1)
    chosen.replace(images=chosen.images + noise).save("near.safetensors")
    seen: list[Any] = []
    monkeypatch.setattr(attacks.commands, "image_grid", lambda *args: seen.append(args) or image_grid(*args))
    for cache in ((), ("--cache", "cache")):
        run("report", "near.safetensors", "--train", "many.npz", "--quiet", *cache)
        (above, below), caption = seen.pop()
        torch.testing.assert_close(below, chosen.pixels().flip(0)[:10])
        levels = [float(level) for level in caption.split("PSNR in dB: ")[1].split(", ")]
        assert levels == sorted(levels, reverse=True)
        exact = -10 * (above - below).square().flatten(1).mean(1).log10()
        assert levels == [float(f"{level:.0f}") for level in exact.tolist()]


def test_oblong_sets_and_further_classes_are_measured(photos: Path) -> None:
    """The records get the set's size and the labels of its classes, of which the folder may lack some."""
    names = ("ant", "cat", "dog", "owl")
    with pytest.warns(UserWarning, match="1 of 4 classes.*ant"):
        train = load_folder(photos, size=(8, 6), classes=names).train
    train[:9].save("oblong.safetensors")
    found = json.loads(run("attack", "oblong.safetensors", "--train", photos, "--json", "--quiet").stdout)
    assert found["copies"] == 1
    rows = run("evaluate", "oblong.safetensors", "--test", photos, "--epochs", 1, "--networks", 1, "--json", *SMALL)
    assert json.loads(rows.stdout)["images"] == 9


def test_held_out_records_are_those_given(photos: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    condensed(photos)
    shutil.copytree(photos, "others")
    for picture in Path("others").rglob("*.png"):
        with Image.open(picture) as one:
            Image.fromarray(255 - np.asarray(one)).save(picture)
    shown: list[bool] = []
    monkeypatch.setattr(_sources, "load_folder", lambda *a, **b: shown.append(b["progress"]) or load_folder(*a, **b))
    words = ("attack", "small.safetensors", "--train", photos, "--json")
    found = [json.loads(run(*words, *more).stdout) for more in ((), ("--held-out", "others", "--quiet"))]
    assert shown == [True, False, False]
    assert [one["nearest"]["fpr"]["trials"] for one in found] == [6, 30]  # half of the test part, or of all others


def test_report_of_a_run_is_that_of_the_library(photos: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    made = Report("it leaks", Path("run/report.html"), Path("run/report.md"), ("first", "leak"), (), ("gaps",))
    monkeypatch.setattr(attacks.commands, "report_run", lambda *given, **more: seen.append((given, more)) or made)
    Path("run").mkdir()
    Path("run/config.json").touch()
    record = {"verdict": "it leaks", "leaks": ["first", "leak"], "not_found": [], "missing": ["gaps"]}
    assert json.loads(run("report", "run", "--json").stdout) == record | {"html": str(made.html)}
    assert str(made) in run("report", "run", "--train", photos, "--size", 8, "--html", "page.html", "--quiet").stdout
    page = Path("page.html").read_text(encoding="utf-8")
    assert [name in page for name in ("leaks</h2>", "missing</h2>", "not_found</h2>")] == [True, True, False]
    assert all(text in page for text in ("first</", "leak</", "gaps", "it leaks<"))
    (bare, more) = seen
    assert bare == ((Path("run"),), {"progress": True})
    parts = (more[1].pop("members"), more[1].pop("non_members"))
    assert more == ((Path("run"),), {"progress": False})
    assert all(torch.equal(one.images, own.images) for one, own in zip(parts, load_folder(photos, size=8), strict=True))
    for name in ("--device", "--held-out", "--root", "--size", "--test-fraction"):
        said = f"{name} would change nothing in the report of a run{' without --train' * (name > '--r')}; leave"
        assert said in run("report", "run", name, "0" if "fraction" in name else "8", code=2).output


def test_device_reaches_the_measurement_and_a_page_shows_it(small: LabeledImages, monkeypatch: Any) -> None:
    small.replace(info={"method": "dm", "epsilon": 8.0, "delta": 1e-5, "reason": "r"}).save("small.safetensors")
    seen: list[Any] = []
    monkeypatch.setattr(attacks.commands, "leaks", lambda *sets, device: seen.append(device) or leaks(*sets))
    records = LabeledImages(torch.rand(60, 3, 8, 8, generator=derive(0)), torch.arange(60) % 3, num_classes=3)
    records[:30].export("train.npz")
    records[30:].export("others.npz")
    sets = ("small.safetensors", "--train", "train.npz", "--held-out", "others.npz")
    said = run("attack", *sets, "--device", "cpu", "--html", "page.html").stdout
    assert said.split()[0] == "verdict"
    page = Path("page.html").read_text(encoding="utf-8")
    assert all(text in page for text in ("held-out records that seem to have one</td>", "small.safetensors: "))
    lines = run("report", *sets).stdout.splitlines()
    assert lines[1:5] == ["method: dm", "epsilon: 8.0", "delta: 1e-05", "reason: r"]
    assert lines[5:] == said.splitlines()
    assert seen == ["cpu", "auto"]


def test_evaluate_tests_on_the_part_that_was_held_out(
    photos: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condensed(photos)
    monkeypatch.setattr(sys, "argv", ["/bin/distillkit", "evaluate", "some"])
    words = ("evaluate", "small.safetensors", "--test", photos, "--epochs", 2, "--networks", 2, "--real", *SMALL)
    record = json.loads(run(*words, "--json", "--html", "page.html").stdout)
    assert [row["data"] for row in record["rows"]] == ["set", "random real"]
    assert [len(row["accuracies"]) for row in record["rows"]] == [2, 2]
    assert all((12 * rate) % 1 < 1e-6 or (12 * rate) % 1 > 1 - 1e-6 for rate in record["rows"][0]["accuracies"])
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.count("<img") == 1
    first, second = (100 * np.array(row["accuracies"]) for row in record["rows"])
    assert f"are right on {first.mean():.1f}&nbsp;% of 12 test images" in page
    shown = [f"{rates.mean():.1f} ± {rates.std(ddof=1):.1f}" for rates in (first, second)]
    assert re.findall("<td[^>]*>(.*?)</td>", page) == ["set", "ConvNet", shown[0], "random real", "ConvNet", shown[1]]
    assert "<title>distillkit evaluate</title>" in page
    assert re.search(r"<footer>distillkit [\d.]+: distillkit evaluate some</footer>", page)


def test_label_writes_the_teachers_rows(photos: Path) -> None:
    condensed(photos)
    words = ("label", "small.safetensors", "--train", photos, "--epochs", 15, "--out", "soft.npz", "--json", *SMALL)
    record, soft = json.loads(run(*words).stdout), load_set("soft.npz")
    assert record == {"out": "soft.npz", "images": 6, "teacher_accuracy": ANY, "info": dict(soft.info)}
    assert 0.3 < record["teacher_accuracy"] <= 1
    assert soft.labels.shape == (6, 3)
    assert torch.allclose(soft.labels.sum(1), torch.ones(6))


def test_sets_lists_and_exports(folder: Path) -> None:
    listed = run("sets").output
    assert re.search(r"\| digits-dm-10 +\| distribution matching .*\| +98\.1 \| +98\.1 \| +0 \| +– \|", listed)
    assert run("sets", "digits-dm-1", "--out", "one.npz").output.endswith("\nwrote one.npz\n")
    assert torch.equal(load_set("one.npz").images, load_set("digits-dm-1").images)
    assert set(json.loads(run("sets", "--json").stdout)) >= {"digits-dm-10"}


def test_sets_lists_the_better_soft_labels_and_reads_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {name: {**card, "leak": {"copies": 0.25}} for name, card in set_cards().items()}
    for cards in (set_cards(), changed):
        monkeypatch.setattr(sets_command, "set_cards", lambda cards=cards: cards)
        listed = run("sets").output
        for name, card in cards.items():
            line = next(line for line in listed.splitlines() if f"| {name} " in line)
            cells = [cell.strip() for cell in line.split("|")]
            hard, row, view = (card["accuracy"][kind] for kind in ("hard", "row", "view"))
            epsilon = "–" if card["epsilon"] is None else f"{card['epsilon']:.3g}"
            assert cells[2:5] == [card["method"], f"{100 * hard:.1f}", f"{100 * max(row, view):.1f}"]
            assert cells[5:7] == [f"{100 * card['leak']['copies']:.0f}", epsilon]
    said, small = run("sets", "digits-dm-1").output, load_set("digits-dm-1")
    assert said.splitlines() == [str(small), *(f"{k}: {v}" for k, v in small.info.items() if k != "card")]
    assert isinstance(small.info["card"], dict)
    roots: list[Any] = []
    monkeypatch.setattr(_sources, "load_set", lambda name, root, **_: roots.append((name, root)) or small)
    monkeypatch.setattr(_sources, "load", lambda name, root, **_: roots.append((name, root)) or load(name))
    for name in ("digits-dm-1", "hf://owner/name"):
        run("sets", name, "--root", "here")
    run("condense", "Digits", "--root", "there", "--method", "random", "--out", "a.safetensors", "--quiet")
    assert roots == [("digits-dm-1", Path("here")), ("hf://owner/name", Path("here")), ("digits", Path("there"))]


def test_only_files_without_a_normalization_need_one(photos: Path) -> None:
    Path("mtt").mkdir()
    for path in ("a.pt", "b.pth", "mtt/images_best.pt"):
        Path(path).touch()
        source = path.removesuffix("/images_best.pt")
        assert "give --normalization MEAN STD" in " ".join(run("sets", source, code=2).output.split())
    for name in ("one.npz", "TWO.NPZ"):
        run("sets", "digits-dm-1", "--out", "one.npz")
        Path("one.npz").rename(name)
        run("sets", name)
    space = ("--normalization", "0.5,0.4,0.3", "0.2,0.2,0.1")
    run("sets", photos, *space, "--out", "photos.safetensors")
    assert LabeledImages.load("photos.safetensors").normalization == Normalization((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))


def test_options_reach_the_study(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Seen:
        def __init__(self, out: Path, tasks: Any, candidates: Any, *, seeds: Any) -> None:
            seen.update(out=out, task=tasks[0], candidates=candidates, seeds=seeds)

        def run(self, **given: Any) -> None:
            seen.update(given)
            raise ValueError("enough")

    monkeypatch.setattr(fl.commands, "Study", Seen)
    own = "--clients 4 --alpha 0.7 --min-size 3 --rounds 3 --seeds 2 --seed 5 --lr 0.1,0.2 --epochs 6 --steps 8 --ipc 9"
    more = ("--methods", "FedAvg, FedDM", "--processes", 2, "--seconds", 11, "--size", 8, "--out", "runs", *SMALL)
    run("study", photos, *shlex.split(own), *more, code=1)
    task, candidates = seen["task"], seen["candidates"]
    assert (task.name, task.rounds, task.factory_options) == ("photos", 3, {"width": 8, "depth": 2})
    assert task.partition.keywords == {"clients": 4, "alpha": 0.7, "min_size": 3}
    given = ([5, 6], 2, 11, Path("runs"), "cpu", False)
    assert tuple(seen[name] for name in ("seeds", "processes", "seconds", "out", "device", "progress")) == given
    assert list(candidates) == ["FedAvg", "FedDM"]
    assert candidates["FedAvg"].settings == {"epochs": 6, "batch": 32}
    assert candidates["FedDM"].settings == {"steps": 8, "ipc": 9, "batch_real": 32, "server_batch": 32}
    assert [set(found.search[0]) for found in candidates.values()] == [{"lr"}, {"server_lr"}]
    rates = [[next(iter(one.values())) for one in found.search] for found in candidates.values()]
    assert rates == [[0.1, 0.2]] * 2


def test_study_runs_once_and_is_shown_again(folder: Path) -> None:
    words = shlex.split("study digits --size 8 --methods 'FedAvg, FedAvgM' --rounds 1 --seeds 2 --clients 3")
    first = json.loads(run(*words, "--lr", "0.1,0.3", "--out", "runs", "--json", *SMALL).stdout)["runs"]
    assert {(line["method"], line["seed"]) for line in first} == {(m, s) for m in ("FedAvg", "FedAvgM") for s in (0, 1)}
    again = run("study", "runs", "--html", "page.html", "--quiet")
    assert "| FedAvgM " in again.output
    assert "--rounds would change nothing in a finished study" in run("study", "runs", "--rounds", 2, code=2).output
    Path("none").mkdir()
    shutil.copy("runs/study.json", "none")
    assert json.loads(run("study", "none", "--json").stdout) == {"runs": []}
    assert run("study", "none").stdout == "none has no finished run yet; the same call continues\n"
    assert (folder / "page.html").read_text(encoding="utf-8").count("<img") == 1
    shutil.rmtree(next(Path("runs").glob("digits-*-1")))
    assert "1 runs are missing; the same call continues" in run("study", "runs").output


def test_doctor_says_what_an_extra_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads(run("doctor", "--json").stdout)
    assert record["device of auto"] == str(torch.get_default_device()) or torch.accelerator.is_available()
    facts = (distillkit.__version__, platform.python_version(), platform.platform(), str(os.cpu_count()))
    assert [record[name] for name in ("distillkit", "Python", "system", "cores", "torch")] == [*facts, version("torch")]
    assert record["missing"]["opendp"] == []
    assert re.search(r"\| opendp +\| nothing +\|", run("doctor").output)
    assert set(record["missing"]) == {"flower", "opendp", "data", "pandas", "secure"}
    monkeypatch.setattr(doctor_command, "_version", lambda name: None)
    monkeypatch.setenv("DISTILLKIT_CACHE", "here")
    monkeypatch.setenv("OMP_NUM_THREADS", "here")
    found = run("doctor").output
    assert re.search(r"\| opendp +\| opendp +\|", found)
    assert re.search(r"\| flower +\| flwr", found)
    assert re.search(r"\| torch +\| – +\|", found)
    assert re.search(r"\| DISTILLKIT_CACHE +\| here +\|", found)
    assert re.search(r"\| OMP_NUM_THREADS +\| here +\|", found)


def test_options_of_sources_reach_the_readers(photos: Path, folder: Path) -> None:
    """A table elsewhere, a cache, gray and a background: each gives the set of the library's reader."""
    rows = [f"{path.relative_to(photos)},{path.parent.name},x" for path in sorted(photos.rglob("*.png"))]
    Path("TABLE.CSV").write_text("\n".join(["at,kind,other", *rows]), encoding="utf-8")
    both = {"images": np.random.default_rng(0).integers(256, size=(20, 12, 12, 3), dtype=np.uint8)}
    both["labels"] = np.arange(20) % 2
    arrays = {f"train_{name}": values[:14] for name, values in both.items()}
    arrays |= {f"test_{name}": values[14:] for name, values in both.items()}
    np.savez("arrays.npz", **arrays)
    columns = ("--folder", photos, "--image", "at", "--label", "kind")
    ways: dict[str, tuple[object, ...]] = {
        "folder": (photos,), "table": ("TABLE.CSV", *columns), "cached": (photos, "--cache", "cache"),
        "cached table": ("TABLE.CSV", *columns, "--cache", "other"), "arrays": ("arrays.npz",),
        "cached arrays": ("arrays.npz", "--cache", "other"),
        "gray": (photos, "--channels", 1), "half": (photos, "--test-fraction", 0.5),
        "space": (photos, "--normalization", "0.5,0.4,0.3", "0.2,0.2,0.1"),
    }  # fmt: skip
    found = {}
    for name, words in ways.items():
        run("condense", *words, "--method", "random", "--ipc", 3, "--out", f"{name}.safetensors", "--quiet")
        found[name] = LabeledImages.load(f"{name}.safetensors")
    assert list(Path("cache").glob("*.npy"))
    for name in ("folder", "table", "arrays"):
        stored = found["cached" if name == "folder" else f"cached {name}"]
        assert torch.allclose(stored.images, found[name].images, atol=1e-6)
    assert len(list(Path("other").glob("*.npy"))) == 2
    assert sorted(found["table"].class_names) == ["cat", "dog", "owl"]
    assert found["gray"].shape == (1, 12, 12)
    assert found["space"].normalization == Normalization((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    whole = load_folder(photos, test_fraction=0.5).train
    assert {tuple(one.flatten().tolist()) for one in found["half"].images} <= {
        tuple(one.flatten().tolist()) for one in whole.images
    }
    for path in Path("clear/a/0.png"), Path("clear/a/1.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(path)
    given = ("--method", "random", "--ipc", 1, "--test-fraction", 0, "--quiet", "--normalization", "0", "1")
    run("condense", "clear", "--background", 0.25, *given, "--out", "clear.safetensors")
    assert torch.allclose(LabeledImages.load("clear.safetensors").images, torch.tensor(0.25), atol=1 / 255)
    assert "transparent" in run("condense", "clear", *given, "--out", "c.safetensors", code=1).output


ODD: dict[str, tuple[str, int, str]] = {
    "source that is not there": ("condense photo --out a.npz", 1, "no folder, file, set or dataset 'photo'"),
    "source that is a picture": ("condense one.png --out a.npz", 1, "one.png must be a folder, a table or a set"),
    "damaged arrays": ("condense junk.npz --out a.npz", 1, "junk.npz"),
    "normalization of words": (
        "sets digits-dm-1 --normalization a b", 2, "must be numbers separated by commas, got 'a'",
    ),
    "picture for a set": ("condense digits --out a.png", 2, "must end in .safetensors or .npz, or be a folder"),
    "size beside a set": (
        "attack digits-dm-1 --train digits --size 8", 2, "--size would change nothing because the set",
    ),
    "normalization of a set": ("sets digits-dm-1 --normalization 0 1", 2, "--normalization would change nothing for"),
    "augmentation beside a protocol": (
        "evaluate digits-dm-1 --test digits --protocol dm --augment dsa", 2, "--augment would change nothing with",
    ),
    "augmentation of a study": (
        "study digits --augment dsa --out runs", 2, "--augment would change nothing in a study",
    ),
    "network without width": ("condense digits --network lenet --width 3 --out a.npz", 1, "has no option width"),
    "protocol with a teacher": ("evaluate digits-dm-1 --test digits --protocol rded", 2, "'rded' is not one of"),
    "unknown device of DM": ("condense digits --device gpu7 --steps 1 --out a.safetensors", 1, "device must be"),
    "unknown device": ("condense digits --device gpu7 --method random --out a.safetensors", 1, "device must be"),
    "set of another form": ("attack digits-dm-1 --train cifar10", 1, "cifar10"),
    "held-out part missing": ("attack digits-dm-1 --train digits-dm-10", 2, "digits-dm-10 has no held-out part"),
    "real without training part": ("evaluate digits-dm-1 --test digits-dm-10 --real", 2, "has one part"),
    "report without records": ("report digits-dm-1", 2, "needs --train"),
    "out without set": ("sets --out a.npz", 2, "--out needs a SET"),
    "study without folder": ("study digits", 2, "--out is missing"),
    "unknown add-on": ("study digits --methods FedAverage --out runs", 2, "not 'FedAverage'"),
    "module for an add-on": ("study digits --methods feddf --out runs", 2, "not 'feddf'"),
    "add-on with arguments": ("study digits --methods SharedImage --out runs", 2, "cannot make SharedImage"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_errors_are_one_line(name: str, folder: Path) -> None:
    words, code, said = ODD[name]
    for damaged in ("one.png", "junk.npz", "junk.pt"):
        Path(damaged).write_bytes(b"PK")
    found = run(*shlex.split(words), code=code)
    assert isinstance(found.exception, SystemExit)
    assert said in " ".join(found.output.split())
    assert "Traceback" not in found.output
    assert code == 2 or not re.search(r"Error: \w+(Error|Exception): ", found.output)
    assert len(list(folder.iterdir())) == 3


def test_advice_names_options() -> None:
    Path("faces/images").mkdir(parents=True)
    for number, (mode, size) in enumerate((("RGB", 8), ("L", 8), ("RGB", 9))):
        Image.new(mode, (size, size)).save(f"faces/images/{number}.png")
    Path("faces/t.csv").write_text("image,mood,who\n0,a,x\n1,b,y\n2,a,x\n", encoding="utf-8")
    words = ("condense", "faces/t.csv", "--out", "a.safetensors", "--method", "random")
    faces = ("--label", "mood", "--folder", "faces/images")
    none = "--test-fraction 0.2 holds out no picture: the largest class has 2; give a larger one, a test folder, or "
    asked = [((), 'name it: image="..." or --label "..."'), (faces[:2], "pass --folder 'faces/images', which has")]
    asked += [(faces, "give --channels 1 or --channels 3: 1.png"), (faces, "give --size, for example --size 32: 2.png")]
    asked += [((*faces, "--size", "8", "--channels", "1"), f"{none}--test-fraction 0 for no test set")]
    for given, said in asked:
        assert said.replace("image=", "--image ") in " ".join(run(*words, *given, code=1).output.split())
    assert "load_table('faces/t.csv', folder='faces/images'" in run("condense", "faces", *words[2:], code=1).output
    advice = _as_options("give networks=5 or count=5 or source='a'", main.get_command(click.Context(main), "evaluate"))
    assert advice == "give --networks 5 or count=5 or source='a'"  # options, whatever the function calls their values


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTILLKIT_TRACEBACK", "1")
    found = CliRunner().invoke(main, ["sets", "none"])
    assert isinstance(found.exception, FileNotFoundError)


def test_kind_of_an_unexpected_error_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sources, "load_set", lambda *_, **__: {}["gone"])
    assert run("sets", "digits-dm-1", code=1).output == "Error: KeyError: 'gone'\n"


def test_records_get_the_normalization_of_the_set(photos: Path) -> None:
    """A saved set has its own."""
    train, test = load_folder(photos, size=8)
    small = train[:9].renormalize(Normalization((0.5,) * 3, (0.25,) * 3))
    for name, data in (("small", small), ("train", train), ("test", test)):
        data.save(f"{name}.safetensors")
    words = ("attack", "small.safetensors", "--train", "train.safetensors", "--held-out", "test.safetensors", "--json")
    with pytest.warns(UserWarning, match="12 records"):
        expected = leaks(small, *(data.renormalize(small.normalization) for data in (train, test)))
    assert json.loads(run(*words).stdout) == json.loads(json.dumps(expected.record()))
