"""Sets in the layouts of papers' releases load, and what the files do not say must be passed."""

from __future__ import annotations

import pickle
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from distillkit import LabeledImages, Normalization
from distillkit.data import load_set
from distillkit.normalization import IDENTITY
from distillkit.rng import derive
from tests.refused import refused

X = torch.randn(6, 3, 4, 4, generator=derive(0))
Y = torch.arange(6) % 3
ROWS = torch.rand(6, 3, generator=derive(1)).softmax(1)
CIFAR = Normalization([0.49, 0.48, 0.45], [0.25, 0.24, 0.26])
read = partial(load_set, normalization=CIFAR)


def dm(path: Path, count: int) -> Path:
    """Write a file as DC, DSA and DM do, with accuracies as NumPy numbers; a single set in PyTorch's old format."""
    data = [[X + i, Y] for i in range(count)]
    accuracies = {"ConvNet": [np.float64(0.5), np.float32(0.25), 0.75]}
    torch.save({"data": data, "accs_all_exps": accuracies}, path, _use_new_zipfile_serialization=count > 1)
    return path


def test_files_of_dc_dsa_and_dm(tmp_path: Path) -> None:
    path = dm(tmp_path / "res_DM_CIFAR10_ConvNet_2ipc.pt", 3)
    found = load_set(path, normalization=CIFAR, class_names=("a", "b", "c"))
    assert torch.equal(found.images, X + 2)
    assert torch.equal(found.labels, Y)
    assert (found.normalization, found.class_names) == (CIFAR, ("a", "b", "c"))
    assert found.info == {"source": path.name, "run": 2}
    for run in (0, 1, 2):
        one = read(path, run=run)
        assert torch.equal(one.images, X + run)
        assert one.info == {"source": path.name, "run": run}
    refused(lambda: read(path, run=3), ValueError, r"run must be in \[0, 3\), the number of sets in .*, got 3")
    old = dm(tmp_path / "one.PT", 1)
    old.write_bytes(old.read_bytes().replace(b"numpy._core", b"numpy.core"))  # as of NumPy 1
    assert read(old).info == {"source": "one.PT"}


def test_files_of_mtt_and_datm(tmp_path: Path) -> None:
    for name, tensor in (("image_imagenette.pt", X), ("label_imagenette.pt", Y)):
        torch.save(tensor, tmp_path / name)
    assert torch.equal(read(tmp_path / "image_imagenette.pt").labels, Y)
    torch.save(X.clone().requires_grad_(), tmp_path / "images_best.pt")
    refused(lambda: read(tmp_path), FileNotFoundError, r"images_best\.pt holds images only.*labels_best\.pt")
    torch.save(X, tmp_path / "syn.pt")  # of which no name of labels can be made
    refused(lambda: read(tmp_path / "syn.pt"), FileNotFoundError, "syn.pt holds images only")
    torch.save(Y, tmp_path / "labels_best.pt")
    for source in (tmp_path, tmp_path / "images_best.pt"):
        found = read(source)
        assert torch.equal(found.images, X)
        assert torch.equal(found.labels, Y)
        assert (found.images.requires_grad, found.info) == (False, {"source": source.name})
    torch.save((4 * ROWS - 2).requires_grad_(), tmp_path / "labels_best.pt")
    torch.save(torch.tensor(0.0125), tmp_path / "lr_best.pt")
    refused(lambda: read(tmp_path), ValueError, r"rows of .* are not probabilities.*logits=")
    found = read(tmp_path, logits=True)
    assert torch.allclose(found.labels, (4 * ROWS - 2).softmax(1))
    assert torch.equal(found.columns["logits"], 4 * ROWS - 2)
    assert not found.columns["logits"].requires_grad
    assert found.info == {"source": tmp_path.name, "lr_student": pytest.approx(0.0125)}


@pytest.mark.parametrize(
    "content",
    [
        [X, Y],
        (X, Y, torch.tensor(0.02)),
        (X, Y, 0.02),
        ([X * 0, Y], [X, Y]),
        {"x": X * 0, "y": Y * 0, "images": X, "labels": Y},
        {"image_syn": X, "label_syn": Y[:, None]},
        {"syn_images": X, "targets": Y},
        {"data": [X, Y]},
        {"data": {"x": X, "y": Y.float()}},
        {"images": torch.nn.Parameter(X), "labels": Y.int()},
    ],
)
def test_other_layouts(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "data_best.pt")
    found = read(tmp_path / "data_best.pt")
    assert torch.equal(found.images, X)
    assert torch.equal(found.labels, Y)
    assert found.labels.dtype == torch.int64
    assert found.info.get("lr_student") == (pytest.approx(0.02) if len(content) == 3 else None)


def test_bytes_are_pixels_and_rows_in_half_precision_are_renormalized(tmp_path: Path) -> None:
    torch.save([(X * 40 + 128).clamp(0, 255).byte(), ROWS.half()], tmp_path / "a.pth")
    found = read(tmp_path / "a.pth")
    assert torch.allclose(found.pixels(), (X * 40 + 128).clamp(0, 255).byte() / 255, atol=1e-6)
    assert torch.allclose(found.labels.sum(1), torch.ones(6), atol=1e-6)
    assert torch.allclose(found.labels, ROWS, atol=1e-3)
    assert (found.normalization, found.columns) == (CIFAR, {})
    torch.save([X[:1], ROWS[:1]], tmp_path / "a.pt")
    assert torch.allclose(read(tmp_path / "a.pt").labels, ROWS[:1])
    for factor, accepted in ((1.009, True), (1.011, False), (0.991, True), (0.989, False)):
        torch.save([X, torch.cat([ROWS[:5], ROWS[5:] * factor])], tmp_path / "a.pt")
        if accepted:
            assert torch.allclose(read(tmp_path / "a.pt").labels, ROWS)
        else:
            refused(lambda: read(tmp_path / "a.pt"), ValueError, "are not probabilities")
    torch.save([X, torch.tensor([[1.5, -0.5, 0]] * 5 + [[0.5, 0.5, 0.009]])], tmp_path / "a.pt")
    refused(lambda: read(tmp_path / "a.pt"), ValueError, "from -0.5 to 1.5 and sum to 1 to 1.01; pass logits=True")


class Runs:
    """Object whose unpickling would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"data": [[X, Y]], "generator": Runs(tmp_path / "trace")}, tmp_path / "a.pt")
    refused(lambda: read(tmp_path / "a.pt"), ValueError, r"a\.pt cannot be read as tensors alone.*weights_only=False")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Runs(tmp_path / "trace"), protocol=2))
    refused(lambda: read(tmp_path / "b.pt"), ValueError, r"b\.pt cannot be read as tensors")
    assert not (tmp_path / "trace").exists()


def test_what_a_file_does_not_say_must_be_given(tmp_path: Path) -> None:
    path = dm(tmp_path / "a.pt", 1)
    refused(lambda: load_set(path), TypeError, r"normalization must be given, because a\.pt does not contain it")
    refused(lambda: read(path, logits=True), ValueError, "logits=True needs label rows")
    refused(lambda: read(path, logits="no"), TypeError, "logits must be")  # type: ignore[arg-type]
    torch.save({"weights": X}, tmp_path / "b.pt")
    refused(lambda: read(tmp_path / "b.pt"), ValueError, r"b\.pt holds a dictionary of weights; expected tensors")
    odd: Any = ({"images": X}, {"labels": Y}, [[1, 2], [X, Y]], [], [1, 2], [X[0], Y], [X, Y, 0.1, 0.2], "text")
    for content in (*odd, {"data": 3}, {"images": X[0], "labels": Y}):
        torch.save(content, tmp_path / "c.pt")
        refused(lambda: read(tmp_path / "c.pt"), ValueError, r"c\.pt")
    torch.save([X, Y + 0.5], tmp_path / "c.pt")
    refused(lambda: read(tmp_path / "c.pt"), TypeError, "labels must be class indices")
    torch.save((X, Y, torch.tensor([0.1, 0.2])), tmp_path / "c.pt")
    assert "lr_student" not in read(tmp_path / "c.pt").info
    torch.save((X, Y, 0.0), tmp_path / "c.pt")
    assert read(tmp_path / "c.pt").info["lr_student"] == 0
    refused(lambda: read(tmp_path / "d.pt"), FileNotFoundError, "d.pt does not exist")
    refused(lambda: load_set("cifar10-dm-3"), FileNotFoundError, "no set .*'cifar10-dm-3'; shipped .*: digits-c.*, f")


def test_own_files_and_folders_of_pictures(tmp_path: Path) -> None:
    data = LabeledImages(X, ROWS, normalization=CIFAR)
    own = (data.save(tmp_path / "a.safetensors"), data.export(tmp_path / "a.npz"))
    assert all(torch.equal(load_set(path).images, X) for path in own)
    for name in ("00000", "00001"):
        (tmp_path / "rded" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4), (51, 102, 204)).save(tmp_path / "rded" / name / "class0_id0.jpg", quality=100)
    found = load_set(tmp_path / "rded")
    assert (len(found), found.class_names, found.normalization) == (2, ("00000", "00001"), IDENTITY)
    assert torch.allclose(found.images[0, :, 0, 0], torch.tensor([0.2, 0.4, 0.8]), atol=0.02)
    assert load_set(tmp_path / "rded", normalization=CIFAR).normalization == CIFAR
    given: dict[str, Any] = {"logits": True, "class_names": ("a", "b"), "normalization": CIFAR}
    for path, option in (
        *product((*own, "digits-dm-10"), given),
        (tmp_path / "rded", "logits"),
        (tmp_path / "rded", "class_names"),
    ):
        words = f"{option} must be left out for '{path}', which contains it"
        refused(partial(load_set, path, **{option: given[option]}), TypeError, words)
