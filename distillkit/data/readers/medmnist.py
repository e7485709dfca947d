"""The 2D sets of MedMNIST by name: which file, which classes."""

from __future__ import annotations

import re
from pathlib import Path

from distillkit.data.readers.folder import Size
from distillkit.data.readers.npz import load_npz
from distillkit.data.split import Split
from distillkit.normalization import Normalization

__all__ = ["CLASSES", "classes_in", "file_of", "read", "require_validation"]

_ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
CLASSES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ),
    "chestmnist": (
        "atelectasis",
        "cardiomegaly",
        "effusion",
        "infiltration",
        "mass",
        "nodule",
        "pneumonia",
        "pneumothorax",
        "consolidation",
        "edema",
        "emphysema",
        "fibrosis",
        "pleural",
        "hernia",
    ),
    "dermamnist": (
        "actinic keratoses and intraepithelial carcinoma",
        "basal cell carcinoma",
        "benign keratosis-like lesions",
        "dermatofibroma",
        "melanoma",
        "melanocytic nevi",
        "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": ("0", "1", "2", "3", "4"),
    "breastmnist": ("malignant", "normal, benign"),
    "bloodmnist": (
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocytes",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
    ),
    "tissuemnist": (
        "Collecting Duct, Connecting Tubule",
        "Distal Convoluted Tubule",
        "Glomerular endothelial cells",
        "Interstitial endothelial cells",
        "Leukocytes",
        "Podocytes",
        "Proximal Tubule Segments",
        "Thick Ascending Limb",
    ),
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
}
"""The classes of each set in label order, after `medmnist/info.py` of MedMNIST 2.1; those of chestmnist are not
exclusive. There, class 3 of bloodmnist has the kinds of its granulocytes in brackets."""

_SOURCE = "https://zenodo.org/records/10519652 (MedMNIST v2)"


def file_of(name: str) -> str | None:
    """The file of a set: `pathmnist.npz`, or `pathmnist_64.npz` of the larger pictures; None if MedMNIST has none such.

    Args:
        name: in small letters, without hyphens and underscores: "pathmnist" or "pathmnist64".
    """
    found = re.fullmatch(r"([a-z]+)(64|128|224)?", name)
    if not found or found[1] not in CLASSES:
        return None
    return f"{found[1]}{'_' + found[2] if found[2] else ''}.npz"


def read(file: Path, *, size: Size | None, channels: int | None, normalization: Normalization | None) -> Split:
    """Read one set's file, whose splits train, val and test are those of its authors.

    Args:
        file: as `file_of` calls it.
        size: see `load`.
        channels: see `load`.
        normalization: default measured on the training split.

    Raises:
        FileNotFoundError: no such file; says where it comes from.
        ValueError: it is damaged, lacks an array, or has labels that its classes do not.
    """
    classes = classes_in(file)
    split = load_npz(file, size=size, channels=channels, normalization=normalization, classes=classes)
    require_validation(file, split.validation)
    return split


def classes_in(file: Path) -> tuple[str, ...]:
    """The names of the classes of one set's file, if it is there.

    Args:
        file: as `file_of` calls it.

    Raises:
        FileNotFoundError: no such file; says where it comes from.
    """
    if not file.is_file():
        raise FileNotFoundError(
            f"{file.stem} is not in {file.parent}: missing {file.name}. Get it from {_SOURCE}, which is not done here "
            "(download= serves torchvision's datasets), or give the root of your copy with root= or DISTILLKIT_DATA."
        )
    return CLASSES[file.stem.partition("_")[0]]


def require_validation(file: Path, validation: object) -> None:
    """Refuse a file without a validation set, which all of MedMNIST's have.

    Args:
        file: it.
        validation: what was read of it.

    Raises:
        ValueError: there is none.
    """
    if validation is None:
        raise ValueError(f"{file} lacks val_images and val_labels, which MedMNIST's files have; get it from {_SOURCE}")
