"""Functions that move messages and sets of images to a device."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from distillkit.sets import LabeledImages
from fl.message import Message

T = TypeVar("T")


def placed(value: T, device: torch.device) -> T:
    """Move a message, set, tensor, or dictionary of tensors to a device, and return it.

    A value that is already on the device is returned without copying, so it remains the same object. A value of any
    other type is returned unchanged.
    """
    if isinstance(value, Message):
        moved = {key: placed(item, device) for key, item in value.items()}
        same = all(moved[key] is item for key, item in value.items())
        return value if same else Message.unchecked(moved)  # type: ignore[return-value]
    if isinstance(value, dict):
        group = {name: placed(item, device) for name, item in value.items()}
        return value if all(group[n] is item for n, item in value.items()) else group  # type: ignore[return-value]
    if isinstance(value, LabeledImages):
        parts = (value.images, value.labels, *value.columns.values())
        return value if all(placed(t, device) is t for t in parts) else value.to(device)  # type: ignore[return-value]
    if isinstance(value, Tensor) and not value.is_meta:
        return value.to(device)  # type: ignore[return-value]
    return value
