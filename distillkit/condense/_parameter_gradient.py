"""Gradient of the cross-entropy with respect to parameters, and its distance from a target gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from distillkit._utils import check
from distillkit._utils.batches import uses_batch_statistics
from distillkit.chunking import chunk_size
from distillkit.condense._double_backward import convolve
from distillkit.losses.matching import gradient_distance
from distillkit.networks._base import Network

Metric = Literal["row_cosine", "mse", "cos"]


class _TwiceDifferentiable(TorchFunctionMode):
    """Context manager in which attention and convolutions can be differentiated twice with respect to images.

    It affects the current thread only. Attention is computed by its formula, because PyTorch's fused kernels have no
    second derivative. Convolutions use `convolve`, which skips the second derivative with respect to the weights.
    """

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self._images = images

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            kwargs["need_weights"] = True  # selects PyTorch's unfused code; calls inside it are not intercepted
        if func is F.conv2d:
            return convolve(self._images, *args, **kwargs)
        return (_attention if func is F.scaled_dot_product_attention else func)(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def parameter_gradient(
    network: Network,
    parameters: Sequence[Tensor],
    images: Tensor,
    labels: Tensor,
    *,
    chunk: int | None = None,
) -> list[Tensor]:
    """Return the gradient of the mean cross-entropy with respect to a network's parameters.

    Args:
        network: network that maps images to logits. If it uses batch statistics, all images are processed together.
        parameters: parameters for which the gradient is computed. A parameter that does not affect the loss has a zero
            gradient.
        images: images, float [N, C, H, W].
        labels: class indices int [N], or soft labels float [N, K].
        chunk: number of images per pass; the default depends on device and image size. The gradient is the mean of the
            chunks' gradients, weighted by chunk size, so `chunk` changes it only by rounding.

    Returns:
        One detached tensor for each parameter.
    """
    size = len(images) if uses_batch_statistics(network) else chunk_size(images, chunk)
    total: list[Tensor] = []
    for part, own in zip(images.split(size), labels.split(size), strict=True):
        loss = F.cross_entropy(network(part), own) * (len(part) / len(images))
        check.differentiable(loss, "networks", "their parameters")
        gradient = torch.autograd.grad(loss, parameters, materialize_grads=True)
        total = [a + b for a, b in zip(total, gradient, strict=True)] if total else list(gradient)
    return total


def distance_to_target(
    network: Network,
    parameters: Sequence[Tensor],
    images: Tensor,
    labels: Tensor,
    targets: Sequence[Tensor],
    *,
    metric: Metric = "row_cosine",
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the distance of a parameter gradient from a target, and the distance's gradient with respect to images.

    The parameter gradient is the gradient of the mean cross-entropy of `images` with respect to `parameters`. The
    function uses a double backward pass, because forward-mode differentiation gives wrong results for some
    normalization layers. If the images do not fit into one chunk, it processes them twice. The first pass computes the
    parameter gradient g, and the derivative v of the distance with respect to g. The second pass computes, chunk by
    chunk, the derivative of <g, v> with respect to the images. By the chain rule, this equals the gradient without
    chunks, but needs less memory.

    Args:
        network, parameters, images, labels, chunk: as in `parameter_gradient`.
        targets: target gradient, one tensor per parameter.
        metric: name of the distance; see `losses.matching.gradient_distance`.

    Returns:
        The distance, a scalar, and the gradient of the distance with respect to the images, [N, C, H, W].
    """
    size = len(images) if uses_batch_statistics(network) else chunk_size(images, chunk)
    if len(images) <= size:
        leaf = images.detach().requires_grad_()
        with _TwiceDifferentiable(leaf):
            loss = F.cross_entropy(network(leaf), labels)
        check.differentiable(loss, "network", "its parameters")
        gradient = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        distance = gradient_distance(gradient, targets, metric=metric)
        return distance.detach(), torch.autograd.grad(distance, leaf, materialize_grads=True)[0]

    whole = [g.requires_grad_() for g in parameter_gradient(network, parameters, images, labels, chunk=size)]
    distance = gradient_distance(whole, targets, metric=metric)
    direction = torch.autograd.grad(distance, whole, materialize_grads=True)
    gradients = []
    for part, own in zip(images.detach().split(size), labels.split(size), strict=True):
        leaf = part.requires_grad_()
        with _TwiceDifferentiable(leaf):
            loss = F.cross_entropy(network(leaf), own) * (len(part) / len(images))
        gradient = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        along = torch.stack([(g * v).sum() for g, v in zip(gradient, direction, strict=True)]).sum()
        gradients.append(torch.autograd.grad(along, leaf, materialize_grads=True)[0])
    return distance.detach(), torch.cat(gradients)
