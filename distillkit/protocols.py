"""Training protocols of papers on dataset distillation: how they train the networks that evaluate a distilled set."""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches

from distillkit.augment import DSA, ResizedCrop, ShufflePatches
from distillkit.labels import CutMix, Relabel
from distillkit.training import CLASSIC, Protocol, require_protocol

__all__ = ["PROTOCOLS", "describe_protocol"]

_DSA = replace(CLASSIC, augment=DSA())
_PER_VIEW = Protocol(
    epochs=300, lr=0.001, weight_decay=0.01, batch=1024, optimizer="adamw", schedule="cosine", augment=ResizedCrop(),
    relabel=Relabel(None, temperature=20.0, mix=CutMix()),
)  # fmt: skip


class _Protocols(dict[str, Protocol]):
    """Protocols by name. An unknown name is refused with the known names."""

    def __missing__(self, name: object) -> Protocol:
        near = get_close_matches(str(name).lower().replace("_", "-"), self, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"PROTOCOLS has no {name!r}{hint} Its names are {', '.join(self)}")


PROTOCOLS: dict[str, Protocol] = _Protocols({
    # VICO-UoE/DatasetCondensation@53f63a6 utils.py:337-355 (E + 1 epochs, drop and new optimizer), main.py:22-29
    "classic": CLASSIC,
    "dc": replace(CLASSIC, epochs=300),
    # the same, main_DM.py:21-28
    "dm": _DSA,
    # the same, main.py:112-121
    "dsa": _DSA,
    # GeorgeCazenavette/mtt-distillation@50dccea utils.py:357-379, distill.py:210 (lr is learned with the set)
    "mtt": _DSA,
    # NUS-HPC-AI-Lab/DATM@97ae510 utils/utils_gsam.py:447-468, configs/CIFAR-10/ConvIN (batch_train), labels are rows
    "datm": replace(_DSA, batch=128),
    # snu-mllab/Efficient-Dataset-Condensation@ceac95a train.py:104-110, 199-211, argument.py:120-121, 262-307, 439-452
    "idc": Protocol(
        epochs=1000, lr=0.01, batch=64, lr_drop=0.2, schedule="steps", mix=CutMix(probability=0.5),
        augment=DSA("color_crop_flip_scale_rotate"),
    ),
    # VILA-Lab/SRe2L@8d00cba SRe2L/validate/train_FKD.py:109-163, 216-251, train_FKD.sh
    "sre2l": _PER_VIEW,
    # LINs-lab/RDED@3f6453d validation/main.py:87-125, 195-231, argument.py:233-284 (factor 1, 10 images a class)
    "rded": replace(_PER_VIEW, batch=50, schedule="half-cosine", augment=ResizedCrop(min_scale=1.0)),
    # the same with factor 2, as in the scripts for ImageNet and its subsets
    "rded-factor-2": replace(
        _PER_VIEW, batch=50, schedule="half-cosine", augment=ShufflePatches(2, augment=ResizedCrop(min_scale=0.5))
    ),
    # NUS-HPC-AI-Lab/DD-Ranking@b8b0966 configs/Demo_LRS_Soft_Label.yaml; train_and_eval.py:121-127 (half cosine)
    "ddranking": replace(
        _PER_VIEW, schedule="half-cosine", relabel=Relabel(None, temperature=1.0, mix=CutMix())
    ),
})  # fmt: skip
"""Training protocols of the papers by name, each with the source of its numbers.

Every protocol tests the last iterate, also where a paper reports the best of several tests.
"""

_MOST = 3
"""Number of changed options up to which a protocol is described by the name of a paper's."""


def describe_protocol(protocol: Protocol) -> str:
    """Describe a protocol by its difference from a published one, such as "dm/dsa/mtt, epochs=50".

    The text consists of the name of the most similar protocol in `PROTOCOLS`, and the options in which `protocol`
    differs from it. If more than three options differ, the text instead lists all options of `protocol`.

    Args:
        protocol: any protocol. Its teacher, a network that labels the training images (see `Relabel`), does not count
            as a difference.
    """
    require_protocol(protocol)
    plain = protocol
    if isinstance(plain.relabel, Relabel):
        plain = replace(plain, relabel=plain.relabel.without_teacher())
    found = {
        name: [f.name for f in fields(Protocol) if getattr(plain, f.name) != getattr(known, f.name)]
        for name, known in PROTOCOLS.items()
    }
    name = min(found, key=lambda name: len(found[name]))
    if len(found[name]) > _MOST:
        return f"own, {plain!r}"
    same = "/".join(other for other, known in PROTOCOLS.items() if known == PROTOCOLS[name])
    return ", ".join([same, *(f"{option}={getattr(plain, option)!r}" for option in found[name])])
