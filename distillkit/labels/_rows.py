"""Logits in half precision, and the rows of probabilities that they give."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["label_rows", "stored_logits"]

_LEAST = -60000.0  # half precision ends at -65504


def stored_logits(logits: Tensor, top_k: int | None) -> tuple[Tensor, Tensor | None]:
    """Return logits minus the largest of each row in half precision, and the classes that they belong to.

    Args:
        logits: float [N, K].
        top_k: number of largest logits to keep; None for all, whose classes need no index.
    """
    values = (logits - logits.amax(1, keepdim=True)).clamp_min(_LEAST)
    if top_k is None or top_k >= logits.shape[1]:
        return values.half(), None
    values, index = values.topk(top_k, dim=1)
    return values.half(), index


def label_rows(values: Tensor, index: Tensor | None, classes: int, temperature: float, dtype: torch.dtype) -> Tensor:
    """Return rows of probabilities, float [N, K], from what `stored_logits` kept.

    Args:
        values: logits in half precision, [N, k].
        index: their classes, int64 [N, k], or None if all classes are kept in order.
        classes: number of classes, K.
        temperature: temperature of the softmax.
        dtype: dtype of the rows.
    """
    rows = (values.to(dtype) / temperature).softmax(1)
    return rows if index is None else rows.new_zeros(len(rows), classes).scatter_(1, index, rows)
