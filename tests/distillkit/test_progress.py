"""Progress bars of long calls, how to disable them, and settings recorded in results."""

from __future__ import annotations

import io
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import distillkit
from distillkit import LabeledImages, data
from distillkit._utils import progress
from distillkit.augment import DSA
from distillkit.condense import (
    InnerTraining,
    distribution_matching,
    fit_to_gradient,
    gradient_matching,
    herding,
    k_center,
    random_subset,
    stitch,
)
from distillkit.evaluate import evaluate
from distillkit.generate import Patches, cnn_noise, invert, separability, stylegan_noise
from distillkit.labels import Relabel, stored_soft_labels
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.privacy import Passes, condense_private, image_sgd, train_private
from distillkit.rng import as_generator, derive
from distillkit.sets import as_set
from distillkit.sets._devices import on_device
from distillkit.training import Protocol, train
from tests.distillkit.labels.toys import stripes, trained_teacher
from tests.refused import refused

SET = LabeledImages(torch.rand(12, 1, 8, 8, generator=derive(0)), torch.arange(12) % 3)
SHORT = Protocol(epochs=1)
PUBLIC = SET.replace(num_classes=3)


def net() -> ConvNet:
    return ConvNet((1, 8, 8), 3, width=4, depth=1)


def networks() -> RandomNetworks:
    return RandomNetworks(net)


class Lazy(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return SET[index]


def gradients() -> list[torch.Tensor]:
    return [torch.ones_like(p) for p in build(net, 0).parameters()]


TINY: dict[str, Any] = {"epsilon": 8.0, "size": 12, "ipc": 1, "num_networks": 1, "steps": 1}
TINY |= {"passes": Passes(first_steps=1), "networks": networks()}

CALLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "DM": ("distribution matching", lambda **q: distribution_matching(SET, networks=networks(), ipc=1, steps=2, **q)),
    "DC": ("gradient matching", lambda **q: gradient_matching(SET, networks=networks(), ipc=1, iterations=2, **q)),
    "to a target": ("gradient matching", lambda **q: fit_to_gradient(build(net, 0), SET, gradients(), steps=2, **q)),
    "herding": ("herding", lambda **q: herding(SET, ipc=1, **q)),
    "k_center": ("k-center", lambda **q: k_center(SET, ipc=1, **q)),
    "a lazy dataset": ("reading images", lambda **q: random_subset(Lazy(), ipc=1, **q)),
    "train": ("training", lambda **q: train(build(net, 0), SET, SHORT, chunk=5, **q)),
    "evaluate": (
        "evaluate",
        lambda **q: evaluate(
            stripes(6), stripes(9, 1), dict.fromkeys("abc", net),
            num_networks=2, protocol=SHORT, real=stripes(12, 2), **q,
        ),
    ),
    "stitch": ("stitch", lambda **q: stitch(stripes(60), observer=trained_teacher(), ipc=1, classes=[0, 2], **q)),
    "labels": (
        "labels",
        lambda **q: stored_soft_labels(
            stripes(60), Protocol(epochs=3, schedule="constant", relabel=Relabel(trained_teacher())), epochs=[0, 2], **q
        ),
    ),
    "invert": ("invert", lambda **q: invert(build(net, 0), SET.labels[:2], shape=SET.shape, steps=2, batch=1, **q)),
    "stylegan_noise": ("stylegan_noise", lambda **q: stylegan_noise(2, 2, 8, 1, width=4, **q)),
    "cnn_noise": ("cnn_noise", lambda **q: cnn_noise(2, 2, 8, 1, width=4, **q)),
    "separability": ("separability", lambda **q: separability(SET, factory=net, epochs=1, **q)),
    "condense_private": ("fitting private images", lambda **q: condense_private(PUBLIC, **TINY, **q)),
    "image_sgd": (
        "private image steps",
        lambda **q: image_sgd(PUBLIC, size=12, sigma=1.0, ipc=1, steps=2, networks=networks(), **q),
    ),
    "train_private": (
        "private training",
        lambda **q: train_private(build(net, 0), PUBLIC, size=12, sigma=1.0, steps=2, rate=1.0, chunk=5, **q),
    ),
    "patches": ("cropping", lambda **q: Patches(torch.rand(3, 32, 32), size=8).batch([0, 1], **q)),
}  # fmt: skip

UNITS = {
    "evaluate": "epoch", "training": "epoch", "labels": "epoch", "separability": "epoch", "stitch": "class",
    "random": "class", "herding": "class", "k-center": "class", "reading images": "image", "stylegan_noise": "image",
    "cropping": "crop",
}  # fmt: skip
"""What a bar counts; steps by default."""


def terminal(monkeypatch: pytest.MonkeyPatch, interactive: bool = True) -> io.StringIO:
    """Make stderr a terminal for the rest of the test. (Pytest restores its own `sys.stderr` after fixtures.)"""
    shown = io.StringIO()
    shown.isatty = lambda: interactive  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr(progress, "DELAY", 0.0)
    return shown


@pytest.mark.parametrize("name", CALLS)
def test_long_work_shows_one_bar_unless_disabled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    what, call = CALLS[name]
    call(progress=False)
    assert screen.getvalue() == ""
    call()
    words = {line.split(":")[0].strip() for line in screen.getvalue().replace("\n", "\r").split("\r") if "%" in line}
    assert words == {what}
    refused(lambda: call(progress="no"), TypeError, "progress must be True or False, got 'no'")


UNDRAWN = {"to a target", "herding", "k_center", "train_private", "patches"}


@pytest.mark.parametrize("name", sorted(CALLS.keys() - UNDRAWN))
def test_a_generator_is_advanced_and_a_seed_recorded(name: str) -> None:
    """Two calls with one generator differ."""
    generator, call = as_generator(7), CALLS[name][1]
    made = call(progress=False, generator=generator)
    assert not torch.equal(generator.get_state(), as_generator(7).get_state())
    if isinstance(made, LabeledImages) and "private" not in CALLS[name][0]:
        info = call(progress=False, generator=7).info
        facts = (distillkit.__version__, torch.__version__, 7)
        assert (info["distillkit"], info["torch"], info["generator"]) == facts


def test_bar_of_continued_work_begins_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with progress.bar(10, "work", done=4):
        pass
    assert "| 4/10 " in screen.getvalue()


def test_notebook_shows_a_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of its kernel are no terminals."""
    shown = terminal(monkeypatch, interactive=False)
    CALLS["herding"][1]()
    assert shown.getvalue() == ""
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    CALLS["herding"][1]()
    assert "herding" in shown.getvalue()


def test_log_states_what_is_done_at_intervals_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step a second, from step 100 to 1600: lines after 10, 20, 40, ... seconds, and at most ten minutes apart."""
    log, seconds = io.StringIO(), [0.0]
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setattr("distillkit._utils.progress.time.monotonic", lambda: seconds[0])
    with progress.bar(0, "reading", unit="image") as outer, progress.bar(3, "inner") as inner:
        seconds[0] = 9.9
        outer.update(4)
        seconds[0] = 90.0
        inner.update()
        outer.update(3)
    assert log.getvalue() == "reading: 7 images, 0:01:30 passed\n"
    with progress.bar(3, "quiet", progress=False) as quiet:
        seconds[0] = 1000.0
        quiet.update()
    assert "quiet" not in log.getvalue()
    with progress.bar(1600, "work", done=100) as shown:
        shown.set_postfix_str("loss 2.5")
        for _ in range(1500):
            seconds[0] += 1
            shown.update()
    lines = log.getvalue().splitlines()[1:]
    assert lines[0] == "work: 110 of 1600 steps (7%), 0:00:10 passed, about 0:24:50 left, loss 2.5"
    assert [int(line.split()[1]) - 100 for line in lines] == [10, 20, 40, 80, 160, 320, 640, 1240]


Bars = list[tuple[str, str, int, int, int]]


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Bars:
    """Record what every shown bar counts, its unit, where it began and ended, and its total."""
    seen: Bars = []

    class Counting:
        def __init__(self, total: int, what: str, *, unit: str = "step", progress: bool = True, done: int = 0) -> None:
            self.what, self.unit, self.total, self.shown = what, unit, total, progress
            self.start = self.done = done

        def __enter__(self) -> Counting:
            return self

        def update(self, n: int = 1) -> None:
            self.done += n

        def set_postfix_str(self, s: str, refresh: bool = True) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            if self.shown:
                seen.append((self.what, self.unit, self.start, self.done, self.total))

    real = progress.bar
    for name, module in list(sys.modules.items()):
        if name.startswith("distillkit.") and getattr(module, "bar", None) is real:
            monkeypatch.setattr(module, "bar", Counting)
    return seen


def two_folders(pets: Path, **options: Any) -> None:
    """Read the pictures as training and as test pictures."""
    for part in ("train", "test"):
        shutil.copytree(pets, pets.parent / str(options) / part)
    data.load_folder(pets.parent / str(options), **options)


CHECKED, READ = ("checking pictures", "picture", 0, 12, 12), ("reading pictures", "picture", 0, 12, 12)
STORED = [CHECKED, ("caching pets (192 bytes)", "picture", 0, 12, 12)]
READERS: dict[str, tuple[Bars, Callable[..., Any]]] = {
    "load_folder": ([CHECKED, READ], data.load_folder),
    "test folder": ([(what, unit, 0, 24, 24) for what, unit, *_ in (CHECKED, READ)], two_folders),
    "load_domains": ([CHECKED, READ], lambda f, **q: data.load_domains({"a": f}, **q)),
    "load_table": ([CHECKED, READ], lambda f, **q: data.load_table(table(f), folder=f, **q)),
    "open_folder": (STORED, lambda f, **q: data.open_folder(f, cache=f.parent / str(q), **q)),
    "open_table": (STORED, lambda f, **q: data.open_table(table(f), folder=f, cache=f.parent / str(q), **q)),
    "open_npz": (
        [("caching breastmnist.npz (720 bytes)", "picture", 0, 45, 45)],
        lambda f, **q: data.open_dataset("breastmnist", root=f.parent, cache=f.parent / str(q), **q),
    ),
    "store_dataset": (
        [("storing a", "image", 0, 12, 12)],
        lambda f, **q: data.store_dataset(PIXELS, f.parent / str(q) / "a.npy", **q),
    ),
    "as_set": ([("reading real", "image", 0, 12, 12)], lambda f, **q: as_set(Lazy(), name="real", **q)),
    "on a device": (
        [("reading real", "image", 0, 12, 12)],
        lambda f, **q: on_device("x", "real")(lambda x, real, progress=1, device=None: 0)(
            SET, Lazy(), device="cpu", **q
        ),
    ),
    "from_dataset": (
        [("reading dataset", "image", 0, 12, 12)], lambda f, **q: LabeledImages.from_dataset(PIXELS, **q)
    ),
}  # fmt: skip
PIXELS = [(torch.full((1, 4, 4), k, dtype=torch.uint8), k % 2) for k in range(12)]


def table(pets: Path) -> dict[str, list[str]]:
    names = [str(file.relative_to(pets)) for file in sorted(pets.rglob("*.png"))]
    return {"file": names, "label": [name[:3] for name in names]}


@pytest.mark.parametrize("name", READERS)
def test_readers_count_their_images_unless_disabled(name: str, tmp_path: Path, bars: Bars) -> None:
    for k in range(12):
        (tmp_path / "pets" / ("cat", "dog")[k % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), k).save(tmp_path / "pets" / ("cat", "dog")[k % 2] / f"{k}.png")
    parts = {"train": 40, "test": 3, "val": 2}
    arrays = {f"{p}_images": np.random.default_rng(n).integers(0, 256, (n, 4, 4), np.uint8) for p, n in parts.items()}
    np.savez(tmp_path / "breastmnist.npz", **arrays, **{f"{p}_labels": np.arange(n) % 2 for p, n in parts.items()})
    wanted, call = READERS[name]
    for options, shown in (({"progress": False}, []), ({}, wanted)):
        (tmp_path / str(options)).mkdir()
        call(tmp_path / "pets", **options)
        assert bars == shown


def test_bar_counts_all_work_and_continues_after_an_interruption(bars: Bars) -> None:
    for _, call in CALLS.values():
        call()
    states: list[dict[str, torch.Tensor]] = []
    distribution_matching(SET, networks=networks(), ipc=1, steps=2, callback=lambda p: states.append(p.state()))
    distribution_matching(SET, networks=networks(), ipc=1, steps=5, resume=states[-1])
    assert ("distribution matching", "step", 2, 5, 5) in bars
    twice: dict[str, Any] = {"networks": networks(), "ipc": 1, "inner": InnerTraining((2, 3))}
    gradient_matching(SET, iterations=2, callback=lambda p: states.append(p.state()), **twice)
    gradient_matching(SET, iterations=5, resume=states[-1], **twice)
    assert ("gradient matching", "step", 4, 10, 10) in bars
    fit = lambda **how: fit_to_gradient(build(net, 0), SET, gradients(), **how)  # noqa: E731
    fit(steps=1, callback=lambda p: states.append(p.state()))
    fit(steps=3, resume=states[-1])
    assert ("gradient matching", "step", 1, 3, 3) in bars
    assert {what for what, *_ in bars} >= {what for what, _ in CALLS.values()}
    assert [one for one in bars if one[3] != one[4] or one[1] != UNITS.get(one[0], "step")] == []


def test_other_threads_show_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    thread = threading.Thread(target=CALLS["herding"][1])
    thread.start()
    thread.join()
    assert screen.getvalue() == ""


def test_bar_is_closed_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distribution_matching(SET, networks=networks(), ipc=1, steps=2, callback=stop)
    screen.truncate(0)
    CALLS["herding"][1]()
    assert "herding" in screen.getvalue()


def test_resumed_set_records_the_seed_of_the_first_call() -> None:
    states: list[dict[str, torch.Tensor]] = []
    how: dict[str, Any] = {"networks": networks(), "ipc": 1, "steps": 2, "augment": DSA()}
    whole = distribution_matching(SET, generator=derive(7), callback=lambda p: states.append(p.state()), **how)
    rest = distribution_matching(SET, generator=derive(8), resume=states[0], **how)
    assert rest.info == whole.info
    assert whole.info["augment"] == repr(DSA())
    assert whole.info["seed"] == int(torch.randint(2**62, (), generator=derive(7)))
    assert "generator" not in whole.info


def test_notebook_without_widgets_gets_a_bar_and_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm chooses its bar, and warns, at first import: here in an emulated kernel without ipywidgets."""

    kernel = ModuleType("IPython")
    kernel.get_ipython = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", ModuleType("ipykernel.zmqshell"))
    for name in ("ipywidgets", "IPython.html.widgets"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("tqdm.auto", "tqdm.autonotebook", "tqdm.notebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(progress, "_watched", lambda: True)
    with warnings.catch_warnings(record=True) as told:  # tqdm would catch an error
        warnings.simplefilter("always")
        with progress.bar(2, "work") as shown:
            shown.update()
    assert sys.modules["tqdm.notebook"].IProgress is None
    assert [str(one.message) for one in told] == []
