"""Options of private calls, grouped as the calls take them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distillkit.networks.samplers import RandomNetworks
from distillkit.privacy import Account, EmbeddingNetworks, Ledger, Passes, PublicEmbedder, condense_private
from distillkit.privacy._journal import chained
from distillkit.sets import LabeledImages

_ACCOUNT = ("client", "round", "secret")
_EMBEDDING = ("match", "augment", "chunk")
_PASSES = ("count", "histogram_share", "first_share", "first_num_networks", "first_steps", "train")


def grouped(**options: Any) -> dict[str, Any]:
    """Group the fields of `Account`, `EmbeddingNetworks` and `Passes` among flat options."""

    def taken(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    if account := taken(_ACCOUNT):
        ledger = options.get("ledger") or Ledger(delta=options.get("delta", 1e-5))
        options["ledger"] = Account(ledger, **account)
    if "networks" in options and (embedding := taken(_EMBEDDING)):
        options["networks"] = EmbeddingNetworks(options["networks"], **embedding)
    if passes := taken(_PASSES):
        options["passes"] = Passes(**passes)
    return options


def condensed(data: LabeledImages, factory: Callable[[], nn.Module], **options: Any) -> LabeledImages:
    """Condense a set privately, in few steps; `options` are flat."""
    small = {"epsilon": 8.0, "num_networks": 3, "ipc": 2, "steps": 6, "lr": 2.0, "networks": RandomNetworks(factory)}
    small |= {"first_num_networks": 2, "first_steps": 2}
    return condense_private(data, **grouped(**small | options))


def embedded_sizes(method: str, patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of a method of embedders will append its number of images."""
    sizes: list[int] = []
    real = getattr(PublicEmbedder, method)
    patch.setattr(PublicEmbedder, method, lambda self, images: sizes.append(len(images)) or real(self, images))
    return sizes


def write_chain(path: Path, *lines: dict[str, Any]) -> None:
    """Write a ledger's files with lines that `Ledger` itself may never write, in a valid hash chain."""
    texts = chained(lines)
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    head = {"lines": 0, "hash": "", "next": [text.decode() for text in texts]}
    path.with_name(f"{path.name}.head").write_text(json.dumps(head), encoding="utf-8")
