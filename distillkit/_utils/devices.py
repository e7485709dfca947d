"""Differences between a CPU and an accelerator."""

from __future__ import annotations

import torch

CHECKED_STEPS = 10
"""A loss on an accelerator, and the range of pixels, is read after so many steps, because this takes time."""


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes while Python goes on, so that reading a value waits for it."""
    return device.type != "cpu" or bool(device.index)
