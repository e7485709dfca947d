"""Reader of the 2D datasets of MedMNIST."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left", "lung-right",
    "pancreas", "spleen",
)  # fmt: skip
CLASSES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        "adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
        "cancer-associated stroma", "colorectal adenocarcinoma epithelium",
    ),
    "chestmnist": (
        "atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia", "pneumothorax",
        "consolidation", "edema", "emphysema", "fibrosis", "pleural", "hernia",
    ),
    "dermamnist": (
        "actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma", "benign keratosis-like lesions",
        "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": ("0", "1", "2", "3", "4"),
    "breastmnist": ("malignant", "normal, benign"),
    "bloodmnist": (
        "basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte", "monocyte", "neutrophil",
        "platelet",
    ),
    "tissuemnist": (
        "Collecting Duct, Connecting Tubule", "Distal Convoluted Tubule", "Glomerular endothelial cells",
        "Interstitial endothelial cells", "Leukocytes", "Podocytes", "Proximal Tubule Segments",
        "Thick Ascending Limb",
    ),
    "organamnist": _ORGANS,
    "organcmnist": _ORGANS,
    "organsmnist": _ORGANS,
}  # fmt: skip
"""The classes of each set in label order, from `medmnist/info.py` of MedMNIST 2.1, where class 3 of bloodmnist also
lists the kinds of granulocytes. The classes of chestmnist are not exclusive."""

_SOURCE = "https://zenodo.org/records/10519652 (MedMNIST v2)"


def read_medmnist(
    read: Callable[..., Any],
    root: Path,
    *,
    name: str,
    side: int | None = None,
    workers: int | None = None,
    **options: Any,
) -> Any:
    """Load or open a 2D dataset of MedMNIST, with the splits of MedMNIST's authors.

    Args:
        read: `load_npz` or `open_npz`.
        root: the folder that contains `pathmnist.npz` and the files of the other datasets.
        name: the dataset, for example "pathmnist".
        side: 64, 128 or 224 for the larger images (`pathmnist_64.npz`); None for images of 28 pixels.
        workers: ignored, because the file is read by one thread.
        options: further options of `read`.

    Raises:
        FileNotFoundError: the file does not exist. The message says where to get it.
        ValueError: the file is damaged, an array is missing, or a label is outside the classes.
    """
    file = root / f"{name}{'' if side is None else f'_{side}'}.npz"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file.stem} is not in {root}: missing {file.name}. Get it from {_SOURCE}; download= fetches only "
            "torchvision's datasets. Or give the root of your copy with root= or DISTILLKIT_DATA."
        )
    split = read(file, classes=CLASSES[name], **options)
    if split.validation is None:
        raise ValueError(f"{file} lacks val_images and val_labels, which MedMNIST's files have; get it from {_SOURCE}")
    return split
