"""Convolution whose double backward pass computes only the image gradient, for gradient matching.

PyTorch's double backward of a convolution also computes the second derivative with respect to the weights, which is not
needed when images are optimized. This derivative is expensive, because it is a convolution with a kernel as large as
the feature maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = int | tuple[int, int]


@dataclass(frozen=True)
class _Setting:
    """Stride, padding, dilation and groups of a convolution, and which gradients the first backward pass computes."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    wanted: tuple[bool, bool]

    def forward(self, maps: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(maps, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def backward(self, output: Tensor, maps: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> list[Tensor | None]:
        """Return the gradients with respect to the convolution's input and its weight."""
        found = torch.ops.aten.convolution_backward.default(
            output, maps, weight, None, self.stride, self.padding, self.dilation, False, [0, 0], self.groups,
            [*wanted, False],
        )  # fmt: skip
        return list(found[:2])

    def input_gradient(self, output: Tensor, maps: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to the convolution's input `maps`.

        `output` is the gradient of the loss with respect to the convolution's output. On a CPU, if `maps` has
        at most 4 channels, the result is computed by a matrix product, which is faster than PyTorch's function.
        """
        if self.groups > 1 or maps.shape[1] > 4 or maps.device.type != "cpu":
            return cast(Tensor, self.backward(output, maps, weight, (True, False))[0])
        columns = weight.flatten(1).T.expand(len(output), -1, -1).bmm(output.flatten(2))
        return F.fold(columns, maps.shape[2:], weight.shape[2:], self.dilation, self.padding, self.stride)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Tensor, weight: Tensor, bias: Tensor | None, setting: _Setting) -> Tensor:
        ctx.save_for_backward(maps, weight)
        ctx.setting, ctx.biased = setting, bias is not None
        return setting.forward(maps, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        output, (maps, weight) = outputs[0], ctx.saved_tensors
        if not torch.is_grad_enabled():  # second backward pass: only the gradient of the images is needed
            return ctx.setting.input_gradient(output, maps, weight), None, None, None
        found = _Gradients.apply(output, maps, weight, ctx.setting)
        return *found, output.sum((0, 2, 3)) if ctx.biased else None, None


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, maps: Tensor, weight: Tensor, setting: _Setting) -> Any:
        ctx.save_for_backward(output, maps, weight)
        ctx.set_materialize_grads(False)
        ctx.setting = setting
        return tuple(setting.backward(output, maps, weight, setting.wanted))

    @staticmethod
    def backward(ctx: Any, of_maps: Tensor | None, of_weight: Tensor | None) -> Any:
        (output, maps, weight), setting = ctx.saved_tensors, ctx.setting
        of_output = None if of_maps is None else setting.forward(of_maps, weight)
        if of_weight is None:
            return of_output, None, None, None
        more = setting.forward(maps, of_weight)
        of_output = more if of_output is None else of_output.add_(more)
        return of_output, setting.input_gradient(output, maps, of_weight), None, None


def convolve(
    images: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """Compute `F.conv2d`, with a double backward pass that skips the second derivative with respect to the weight.

    Use it if your loss is a function of the parameter gradients, and you need the gradient of this loss with respect to
    `images`. The function calls PyTorch's own convolution in three cases: under autocast, if `padding` is a string, and
    if the weight or the bias is not a leaf tensor. A weight or bias that is not a leaf may depend on the images, and
    the second derivative with respect to it is then needed.
    """
    plain = input.ndim == 4 and not isinstance(padding, str) and not torch.is_autocast_enabled(input.device.type)
    computed = not weight.is_leaf or (bias is not None and not bias.is_leaf)
    if not plain or computed or not (input.requires_grad or weight.requires_grad):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    wanted = (input.requires_grad and input is not images, weight.requires_grad)
    setting = _Setting(_pair(stride), _pair(cast(Sizes, padding)), _pair(dilation), groups, wanted)
    return cast(Tensor, _Convolution.apply(input, weight, bias, setting))


def _pair(size: Sizes) -> tuple[int, int]:
    rows, columns = (size, size) if isinstance(size, int) else size
    return rows, columns
