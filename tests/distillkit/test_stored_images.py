"""Components give the same bits for a set in a file as for the same set in memory, and read no more than they need."""

from __future__ import annotations

import dataclasses
import io
import itertools
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from attacks.membership import Pipeline, gradient_norm, label_only, nearest, plant_canaries
from attacks.reporting import leaks
from attacks.reporting._evidence import _selected
from distillkit import LabeledImages, Normalization, _evaluation_checks, chunking, plot
from distillkit.augment import DSA
from distillkit.condense import (
    InnerTraining,
    class_statistics,
    distribution_matching,
    gradient_matching,
    herding,
    initial_images,
    k_center,
    random_subset,
    stitch,
)
from distillkit.evaluate import evaluate
from distillkit.generate import separability
from distillkit.labels import CutMix, Mixup, Relabel, soft_labels, stored_soft_labels
from distillkit.networks import ConvNet, FixedNetwork, RandomNetworks, build
from distillkit.privacy import (
    Account,
    EmbeddingNetworks,
    Ledger,
    Passes,
    PrivacyError,
    condense_private,
    image_sgd,
    train_private,
)
from distillkit.privacy.errors import NotCapturable, PrivateInitialization
from distillkit.rng import as_generator, derive
from distillkit.robustness import Corruption
from distillkit.scores import scores
from distillkit.sets import StoredImages, Tiles, _stored
from distillkit.sets.as_set import open_set
from distillkit.training import Protocol, accuracy, train
from tests.refused import refused
from tests.stored import require_same_set, write_pixels

SHAPE, CLASSES = (3, 10, 8), 5
COUNTS = (7, 0, 40, 3, 21)
SPACE = Normalization([0.4, 0.5, 0.6], [0.2, 0.3, 0.25])


def factory(norm: str = "instance") -> nn.Module:
    return ConvNet(SHAPE, CLASSES, width=4, depth=1, norm=norm)


def whole_set() -> LabeledImages:
    pixels, labels = pixels_and_labels()
    return LabeledImages.from_pixels(pixels, labels, num_classes=CLASSES, normalization=SPACE)


def pixels_and_labels() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    labels = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(COUNTS))
    labels = labels[torch.randperm(len(labels), generator=draws)]
    pixels = torch.randint(0, 256, (len(labels), *SHAPE), generator=draws)
    return (pixels * (labels + 1).view(-1, 1, 1, 1) // CLASSES).to(torch.uint8), labels


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredImages:
    pixels, labels = pixels_and_labels()
    columns = {"user": torch.arange(len(labels))}
    path = tmp_path_factory.mktemp("stored") / "a.npy"
    return write_pixels(path, pixels, labels, num_classes=CLASSES, normalization=SPACE, columns=columns)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the rows of each read, and keep small sets from being read as a whole."""
    found: list[list[int]] = []
    read = _stored.PixelFile.read

    def counted(file: _stored.PixelFile, rows: Tensor) -> Tensor:
        found.append(rows.tolist())
        return read(file, rows)

    monkeypatch.setattr(_stored.PixelFile, "read", counted)
    monkeypatch.setattr(_stored, "_CACHED", 0)
    monkeypatch.setattr(_evaluation_checks, "_VALUES", 20 * 240)
    for name, value in (("membership.nearest._CHUNK", 16), ("reporting.published_set._VALUES", 16 * 240)):
        monkeypatch.setattr(sys.modules[f"attacks.{name.rpartition('.')[0]}"], name.rpartition(".")[2], value)
    monkeypatch.setattr(sys.modules["distillkit.plot.images"], "_PART", 16)
    monkeypatch.setattr(sys.modules["distillkit.privacy.condensation.condense_private"], "_READ", 20)
    monkeypatch.setattr(sys.modules["distillkit.privacy.validation._arguments"], "_PART", 16)
    monkeypatch.setattr(chunking, "_PIXELS_CPU", 16 * 80)
    return found


def parts(result: Any) -> list[Any]:
    """Return what must be equal."""
    if isinstance(result, nn.Module):
        return [*result.state_dict().values()]
    return [*result] if isinstance(result, tuple) else [result]


def require_equal(one: Any, two: Any) -> None:
    if isinstance(one, LabeledImages):
        return require_same_set(one, two)
    for a, b in zip(parts(one), parts(two), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def dm(data: Any, **options: Any) -> LabeledImages:
    options = {"networks": RandomNetworks(factory), "steps": 3, "batch_real": 5, "ipc": 2, "lr": 0.1} | options
    return distribution_matching(data, progress=False, **options)


def dc(data: Any, **options: Any) -> LabeledImages:
    inner = InnerTraining(loops=(2, 1), batch=4)
    options = {"networks": RandomNetworks(factory), "iterations": 2, "batch_real": 5, "ipc": 2} | options
    return gradient_matching(data, inner=inner, progress=False, **options)


def product(real: Tensor, synthetic: Tensor) -> Tensor:
    return (real.mean(0) - synthetic.mean(0)).abs().sum()


def observer() -> nn.Module:
    """Return a network that knows how bright each class is."""
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))
    mean = SPACE.encode(torch.full((CLASSES, 3, 1, 1), 0.1) * torch.arange(1, 6).view(-1, 1, 1, 1)).flatten(1)
    with torch.no_grad():
        network[2].weight.copy_(50 * mean)
        network[2].bias.copy_(-25 * mean.square().sum(1))
    return network


FIXED = FixedNetwork(build(factory, 3))
CALLS: dict[str, Callable[[Any], Any]] = {
    "dm": dm,
    "dm, all images": partial(dm, batch_real=None),
    "dm, augmented, no rate": partial(dm, augment=DSA(), lr=None),
    "dm, fixed": partial(dm, networks=FIXED, chunk=6, match="embedding+logits"),
    "dm, batch statistics": partial(dm, networks=RandomNetworks(partial(factory, "batch"))),
    "dm, own loss": partial(dm, match=product, classes=[0, 4]),
    "dm, tiles": partial(dm, parametrize=Tiles(2)),
    "dc": dc,
    "dc, augmented": partial(dc, augment=DSA(), init="real", classes=[2, 3]),
    "dc, batch statistics": partial(dc, networks=RandomNetworks(partial(factory, "batch")), lr=None),
    "stitch": lambda data: stitch(data, observer=observer(), ipc=3, pool=9),
    "random": lambda data: random_subset(data, ipc=4),
    "random, tiles": lambda data: random_subset(data, ipc=1, parametrize=Tiles(2), classes=[0, 3]),
    "herding": lambda data: herding(data, ipc=5),
    "herding, network": lambda data: herding(data, ipc=2, network=build(factory, 1), chunk=4),
    "k-center": lambda data: k_center(data, ipc=5),
    "k-center, network": lambda data: k_center(data, ipc=2, network=build(factory, 1), chunk=4),
    "class statistics": class_statistics,
    "class statistics, whole set": partial(class_statistics, whole_set=True),
    **{f"init {init}": partial(initial_images, ipc=3, init=init) for init in ("real", "noise", "statistics")},
    "init tiles": partial(initial_images, ipc=2, parametrize=Tiles(2), classes=[2, 4]),
}


def fit(data: Any, norm: str = "instance", soft: bool = False, **options: Any) -> nn.Module:
    if soft:
        data = data.replace(labels=torch.nn.functional.one_hot(data.labels, CLASSES) * 0.5 + 0.1)
    protocol = Protocol(**{"epochs": 2, "batch": 16, **options})
    return train(build(partial(factory, norm), 7), data, protocol, generator=3, progress=False)


def relabelled(data: Any, **options: Any) -> nn.Module:
    protocol = Protocol(epochs=2, batch=16, augment=DSA(), relabel=Relabel(observer(), mix=CutMix()), **options)
    return fit(data, batch=16, augment=DSA(), relabel=stored_soft_labels(data, protocol, epochs=[0, 2], pool=data))


def evaluated(data: Any, against: tuple[Any, ...] = (), **options: Any) -> Any:
    small = random_subset(whole_set(), ipc=2, classes=[0, 2, 3, 4], generator=9)
    options = {"num_networks": 1, "protocol": Protocol(epochs=1), "progress": False, "against": against} | options
    found = evaluate(small, data, factory, real=data, **options)
    return [part for row in found.rows for part in (row.accuracies, row.against)]


def labelled(data: Any) -> LabeledImages:
    return soft_labels(random_subset(data, ipc=1), observer(), pool=data)


def scored(data: Any) -> Any:
    protocol = Protocol(epochs=1, batch=16, augment=DSA())
    small = random_subset(data, ipc=1)
    return scores(small, data, factory, real=data, num_networks=1, protocol=protocol, progress=False).record()["rows"]


def drawn(figure: Any) -> Any:
    """Return the pixels of a figure."""
    figure.canvas.draw()
    return torch.from_numpy(np.asarray(figure.canvas.buffer_rgba()).copy())


def near(data: Any) -> Any:
    return nearest(whole_set().images[::9], data if isinstance(data, StoredImages) else data.images)


class Own(nn.Module):
    """Network of a user, which holds something besides its weights."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.body, self.held = nn.Sequential(nn.Flatten(), nn.Linear(240, 6), nn.Tanh(), nn.Linear(6, CLASSES)), held

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.body(images)
        return found if self.held is None else found + 0 * self.held[:1].sum()


PASSES = Passes(first_num_networks=2, first_steps=2)


def private(data: Any, **options: Any) -> LabeledImages:
    account = Account(Ledger(delta=1e-5), secret=3)
    options = {"networks": RandomNetworks(factory), "num_networks": 2, "steps": 3, "passes": PASSES} | options
    return condense_private(data, epsilon=5.0, size=71, ipc=1, ledger=account, progress=False, **options)


def public_start() -> LabeledImages:
    images = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(4))
    return LabeledImages(images, range(5), num_classes=CLASSES, normalization=SPACE)


CALLS |= {
    "private": private,
    "private, own network": partial(private, networks=RandomNetworks(Own)),
    "private, public start": lambda data: private(data, init=public_start()),
    "grid": lambda data: drawn(plot.grid(data, per_class=3)),
    "real and synthetic": lambda data: drawn(plot.real_and_synthetic(data, whole_set(), per_class=2)),
    "selection": lambda data: drawn(plot.selection(data, torch.arange(0, 70, 3), rows=2, columns=4)),
    "histogram": lambda data: drawn(plot.pixel_histogram({"a": data})),
    "nearest": near,
    "leaks": lambda data: str(leaks(random_subset(data[:40], ipc=2), data[:40], data[40:])),
    "train": fit,
    "train, soft labels, augmented": partial(fit, soft=True, augment=DSA()),
    "train, batch norm, single last image": partial(fit, norm="batch", batch=10),
    "train, mixed": partial(fit, mix=Mixup()),
    "train, relabelled": partial(fit, relabel=Relabel(observer(), mix=CutMix())),
    "train, stored labels": relabelled,
    "evaluate": evaluated,
    "evaluate, attacked": partial(evaluated, against=(Corruption("gaussian_noise", 2),)),
    "accuracy": lambda data: accuracy(observer(), data, chunk=8),
    "soft labels": labelled,
    "scores": scored,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_stored_set_gives_the_bits_of_the_set_in_memory(
    stored: StoredImages, reads: list[list[int]], name: str
) -> None:
    expected = CALLS[name](stored.read())
    reads.clear()
    require_equal(CALLS[name](stored), expected)
    assert max(map(len, reads)) <= max(COUNTS)  # never more than a class


def test_private_condensation_refuses_code_that_holds_stored_records(
    stored: StoredImages, reads: list[list[int]]
) -> None:
    record = stored.read([50]).images
    assert len(private(stored, networks=RandomNetworks(partial(Own, torch.ones(1, *SHAPE))))) == 5
    for held in (record, stored.labels, stored):
        refused(lambda h=held: private(stored, networks=RandomNetworks(partial(Own, h))), NotCapturable, "record")
    start = public_start()
    for image in (record, (record - 0.3) * 0.5):
        images = torch.cat([start.images[:4], image])
        refused(lambda x=images: private(stored, init=start.replace(images=x)), PrivateInitialization, "private set")
    refused(lambda: private(stored.replace(info={"derived": "k-center"})), PrivacyError, "made from other records")
    assert max(map(len, reads)) < 71
    reads.clear()
    private(stored, networks=EmbeddingNetworks(RandomNetworks(factory), chunk=7))
    assert {*map(len, reads)} - {0} == {14, 71 % 14}  # two whole chunks, the most within 20 images, and the rest


IN_MEMORY: dict[str, Callable[[StoredImages], Any]] = {
    "image_sgd": partial(image_sgd, size=71, epsilon=1.0, clip=1.0),
    "train_private": lambda data: train_private(factory("none"), data, size=71, epsilon=1.0),
    "separability": separability,
    "pipeline": lambda data: Pipeline(lambda indices, seed: {}, data, data.labels),  # type: ignore[arg-type]
    "population": lambda data: Pipeline(lambda indices, seed: {}, *whole_set(), population=(data, data.labels)),
    "gradient norm": lambda data: gradient_norm(factory(), data, data.labels),  # type: ignore[arg-type]
    "label only": lambda data: label_only(factory(), data, data.labels),  # type: ignore[arg-type]
    "canaries": lambda data: plant_canaries(data, 2),  # type: ignore[arg-type]
    "report": lambda data: _selected(data, "members", None, 9),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_what_needs_the_set_in_memory_says_how_to_read_it(name: str, stored: StoredImages) -> None:
    words = r"the images of .* are in a file: read a part with `data.read\(indices\)`, or all 70 with `data.read\(\)`"
    refused(lambda: IN_MEMORY[name](stored[1:]), TypeError, words)


@pytest.mark.filterwarnings("ignore:.*their images are repeated")
def test_only_the_drawn_images_are_read(stored: StoredImages, reads: list[list[int]]) -> None:
    made = random_subset(stored, ipc=2)
    assert sorted(row for rows in reads for row in rows) == sorted(stored._rows[made.columns["user"]].tolist())
    reads.clear()
    dm(stored, init="noise", steps=4)
    assert sorted(map(len, filter(None, reads))) == 4 * [3] + 12 * [5]  # each batch once, although it is read ahead
    reads.clear()
    k_center(stored, ipc=2, network=build(factory, 1), chunk=4)
    assert max(map(len, reads[:-1])) == 4
    assert len(reads[-1]) == 8
    reads.clear()
    dm(stored, networks=FIXED, init="noise", chunk=4, steps=3)
    assert sum(map(len, reads)) == len(stored)  # whole classes, once
    assert max(map(len, reads)) == 4
    reads.clear()
    class_statistics(stored[stored.labels == 2])
    assert sum(map(len, reads)) == 40


def test_a_thread_reads_all_batches_but_the_first(stored: StoredImages, monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[bool] = []
    read = _stored.PixelFile.read

    def noted(file: _stored.PixelFile, rows: Tensor) -> Tensor:
        here.extend([threading.current_thread() is threading.main_thread()] * bool(len(rows)))
        return read(file, rows)

    monkeypatch.setattr(_stored.PixelFile, "read", noted)
    accuracy(build(factory, 1), stored[:40], chunk=8)
    assert (len(here), sum(here)) == (5, 1)


def test_batches_keep_their_recorded_draws(stored: StoredImages, reads: list[list[int]]) -> None:
    """Results are recorded with these draws: of the seed, the step and the class, in this order."""
    dm(stored, init="noise", steps=2, batch_real=5, generator=4)
    seed, wanted = int(torch.randint(2**62, (), generator=as_generator(4))), []
    for step, c in itertools.product(range(2), range(CLASSES)):
        own = (stored.labels == c).nonzero().flatten()
        order = torch.randperm(len(own), generator=derive(seed, step, c, "real"))[:5] if len(own) > 5 else slice(None)
        wanted.append(stored._rows[own[order]].tolist())
    assert sorted(filter(None, reads)) == sorted(filter(None, wanted))


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))], ids=str)
def test_batches_in_any_order_are_read_once(
    order: tuple[int, ...], stored: StoredImages, reads: list[list[int]]
) -> None:
    """Threads that share the classes ask for their batches in any order."""
    with stored._reader(lambda i: torch.tensor([i, i + 4]), 4) as read:
        found = [read(i) for i in order]
    assert sorted(reads) == sorted(stored._rows[torch.tensor([[i, i + 4] for i in order])].tolist())
    assert all(torch.equal(one, stored.read([i, i + 4]).images) for one, i in zip(found, order, strict=True))


@pytest.mark.parametrize(
    "given", [{"labels": [0]}, {"num_classes": 9, "normalization": SPACE}, {"normalization": SPACE}], ids=str
)
def test_what_a_stored_set_has_must_be_left_out(given: dict[str, Any], stored: StoredImages) -> None:
    words = f"{next(iter(given))} must be left out when real is a StoredImages"
    refused(lambda: open_set(stored, **given, name="real"), TypeError, words)


def test_small_sets_are_read_once(
    stored: StoredImages, reads: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (stored.bytes, stored[1:].bytes) == (4 * 71 * 3 * 10 * 8, 4 * 70 * 3 * 10 * 8)
    monkeypatch.setattr(_stored, "_CACHED", stored.bytes)
    dm(stored)
    assert [len(rows) for rows in reads if rows] == [len(stored)]
    reads.clear()
    monkeypatch.setattr(_stored, "_CACHED", stored.bytes - 1)
    dm(stored)
    assert max(map(len, reads)) <= 8


def test_subsets_and_loaders_of_stored_sets_stay_in_the_file(stored: StoredImages, reads: list[list[int]]) -> None:
    rows = [3, 9, 20, 33, 41]
    expected = random_subset(stored.read(rows), ipc=1)
    for data in (Subset(stored, rows), DataLoader(Subset(stored, rows), batch_size=2, shuffle=True)):
        require_equal(random_subset(data, ipc=1), expected)


def test_a_resumed_call_continues_with_the_same_bits(stored: StoredImages, reads: list[list[int]]) -> None:
    for call in (partial(dm, augment=DSA()), partial(dc, iterations=3)):
        states: list[Any] = []
        whole = call(stored, callback=lambda progress, states=states: states.append(progress.state()))
        require_equal(call(stored, resume=states[0]).images, whole.images)
    refused(lambda: dc(stored[:70], iterations=3, resume=states[0]), ValueError, "other arguments: classes=.*data=")


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(st.lists(st.integers(0, 70), max_size=5), min_size=1, max_size=12), data=st.data())
def test_a_reader_returns_its_rows_in_any_order(
    stored: StoredImages, rows: list[list[int]], data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distillkit.sets._labeled.is_accelerator", lambda device: True)
    monkeypatch.setattr("distillkit.sets._labeled._AHEAD", 3)
    wanted = [torch.tensor(own, dtype=torch.int64) for own in rows]
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20))
    for some in (stored, stored.read()):
        with some._reader(wanted.__getitem__, len(wanted)) as read:
            for i in order:
                assert torch.equal(read(i), some._take(wanted[i]))


def test_files_are_read_in_pieces_of_any_size(stored: StoredImages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may return fewer bytes than were asked for, and pictures are converted a part at a time."""
    wanted = stored.read()

    class Slow(io.FileIO):
        def readinto(self, part: Any) -> int:
            return super().readinto(part[:100])

    monkeypatch.setattr(_stored, "open", lambda path, *_, **__: Slow(path), raising=False)
    for size in (1, 500, 10**6):
        monkeypatch.setattr(_stored, "_READ", size)
        require_equal(stored.read(), wanted)
    file = dataclasses.replace(stored._file, start=stored._file.start + 1)
    short = StoredImages(file, stored._rows, stored.labels, num_classes=CLASSES)
    refused(short.read, ValueError, f"^{stored.path} is shorter than it was; open its source again$")


def test_stored_set_says_what_it_is_and_new_labels_end_its_guarantee(stored: StoredImages) -> None:
    told = stored.replace(info={"dataset": "x", "split": "train", "client": 0, "epsilon": 1.0})
    assert repr(told).startswith("StoredImages(71 images 3x10x8; 5 classes; mean (0.4, 0.5, 0.6) std")
    assert f"; dataset=x; split=train; client=0; in {stored.path}" in repr(told)
    assert torch.equal(told[9:].digests, told.digests[9:])
    assert (stored.replace(info={"a": (1,)}).info, stored[[1, 1]].info) == ({"a": [1]}, {"derived": "repeated images"})
    refused(lambda: stored.replace(classes_given="no"), TypeError, "classes_given must be")
    refused(lambda: stored.replace(class_names=["a"]), ValueError, "class_names must be 5 names")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a part is not checked for labels that start at 1
        stored.replace(labels=torch.ones(71).long(), num_classes=2, classes_given=False).read([0])
    rows = told.replace(labels=torch.rand(71, 5))
    assert "; rows of 5; " in repr(rows)
    assert (told.info["epsilon"], told[:9].info["epsilon"], rows.info["epsilon"]) == (1.0, 1.0, None)


def test_an_error_while_reading_ahead_is_raised(stored: StoredImages, tmp_path: Path) -> None:
    pixels, labels = pixels_and_labels()
    data = write_pixels(tmp_path / "a.npy", pixels, labels, num_classes=CLASSES)
    rows = torch.arange(4)
    with data._reader(lambda i: rows[i : i + 1], 4) as read:
        read(0)
        data.path.unlink()
        refused(lambda: [read(i) for i in range(1, 4)], FileNotFoundError, f"^{data.path} does not exist")
    data.path.mkdir()
    refused(data.read, IsADirectoryError, "Is a directory")  # which was not deleted
