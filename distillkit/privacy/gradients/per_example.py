"""Per-example gradients of a batch, computed by a graph of operators that is traced once for one example."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.networks._base import require_network
from distillkit.privacy.capture._captured_function import CapturedFunction, capture
from distillkit.privacy.capture._tracing import Stateless
from distillkit.privacy.errors import BatchStatistics, NotSeparable, PrivacyError
from distillkit.privacy.gradients.private_gradient import PrivateGradient
from distillkit.privacy.validation._arguments import refuse_half_precision
from distillkit.privacy.validation._independence import ONE_EACH

Losses = Callable[..., Tensor]
"""`losses(images, labels, ...)` returns the loss of each of n examples, float [n]."""

_MEMORY_CPU, _MEMORY_ACCELERATOR, _CACHE = 1 << 28, 1 << 31, 7 << 19
"""Largest numbers of values in one pass, and in one tensor of a pass on a CPU, which should stay in the cache."""

_MOST_CPU = 64
"""Largest number of records in one pass on a CPU. More save little time per record."""


def require_per_example(network: nn.Module) -> None:
    """Refuse a network whose layers mix the examples of a batch, or that has no trainable parameters.

    This is a quick check of the layer types before private training. A full check follows when `per_example_gradients`
    captures the network.

    Args:
        network: the network to train. Norm layers with running statistics are accepted in eval mode.

    Raises:
        BatchStatistics: a layer uses or updates statistics of the batch; the message names the layers.
        PrivacyError: no parameter requires a gradient, or a parameter is in half precision, NaN or infinite.
        TypeError: `network` is not an `nn.Module`.
    """
    require_network(network)
    found = [name or type(m).__name__ for name, m in network.named_modules() if keeps_statistics(m)]
    if found:
        raise BatchStatistics(
            f"layers {', '.join(found)} of {type(network).__name__} keep or use statistics of the batch, which no "
            "per-example clip bounds. Use norm='instance' or 'group', or convert a copy: without_batch_norm(network). "
            "To fine-tune a network whose running statistics are public, such as pretrained ones, put these layers in "
            "eval mode before the call: network.eval()"
        )
    if not any(p.requires_grad for p in network.parameters()):
        raise PrivacyError(
            f"{type(network).__name__} has no parameter that requires a gradient, so there is nothing to train; set "
            "requires_grad on the parameters to train"
        )
    for name, parameter in network.named_parameters():
        refuse_half_precision(parameter, f"parameter {name}")
        if type(parameter) is nn.Parameter and not bool(torch.isfinite(parameter).all()):
            raise PrivacyError(
                f"parameter {name} holds NaN or Inf, so no gradient is finite; train from finite weights"
            )


def tracks_statistics(module: nn.Module) -> bool:
    """Return whether a layer (`module`) is batch norm of any kind, or instance norm with running statistics."""
    batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return batch or (isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats)


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a layer (`module`), in its present mode, uses or stores statistics of the batch."""
    return tracks_statistics(module) and (module.training or module.running_mean is None)


class ExampleGradients:
    """Callable that computes the gradient of every example's own loss. `per_example_gradients` creates it.

    Call it with the arguments of the loss function, which have n rows each. The gradients are taken at the network's
    current parameters and buffers, and each has n rows. If an example's loss or gradient cannot be computed, its rows
    are zero.

    Attributes:
        trained: trained parameters by name, in the order of the returned tensors.
        captured: function of (parameters and buffers, examples) that computes the gradients, as a traced graph of
            PyTorch operations. You can also call it with the parameters and buffers of another network of the same
            architecture.
    """

    def __init__(self, network: nn.Module, trained: Mapping[str, nn.Parameter], captured: CapturedFunction) -> None:
        self.trained, self.captured = dict(trained), captured
        self._state = [*network.parameters(), *network.buffers()]

    def __call__(self, *examples: Tensor, generator: torch.Generator | None = None) -> list[Tensor]:
        """Compute the gradients of n examples, one tensor [n, *parameter.shape] for each trained parameter.

        The tensors have the order of the attribute `trained`.

        Args:
            examples: the arguments of the losses, for instance images and labels, with n rows each.
            generator: secret generator for dropout and other random operators; required if the network has such
                operators.
        """
        return self.captured(self._state, *examples, generator=generator)

    def add_to(self, private: PrivateGradient, *examples: Tensor, generator: torch.Generator | None = None) -> None:
        """Clip the gradients of n examples and add them to the sum of a step.

        Args:
            private: accumulator of the step.
            examples, generator: arguments of a call of this object.
        """
        private.add(self(*examples, generator=generator))

    def chunk_size(self, expected: float, chunk: int | None = None) -> int:
        """Return the number of examples to pass to one call of this object, so that memory suffices.

        The number does not depend on private data.

        Args:
            expected: expected number of examples in a training step: the sample rate times the public number of
                records.
            chunk: upper bound; None for a default that depends on the device and the network.
        """
        device = next(iter(self.trained.values())).device
        return chunk_for(self.captured.activations, self.captured.largest, device, expected, chunk)


def chunk_for(values: int, largest: int, device: torch.device, expected: float, chunk: int | None) -> int:
    """Return the number of records whose gradients are computed together.

    Args:
        values: number of values that are computed for one record.
        largest: number of values in the largest tensor of one record.
        device: device of the computation.
        expected: expected number of records in a step.
        chunk: upper bound; None for a default.
    """
    likely = max(1, math.ceil(expected + 3 * math.sqrt(expected)))
    if chunk is None:
        whole, largest = max(1, values), max(1, largest)
        if device.type == "cpu":
            fitting = min(_MOST_CPU, max(8, _CACHE // largest), _MEMORY_CPU // whole)
        else:
            fitting = _MEMORY_ACCELERATOR // whole
        chunk = 1 << (max(1, fitting).bit_length() - 1)
    return min(check.positive_int(chunk, "chunk"), likely)


def per_example_gradients(
    network: nn.Module, losses: Losses, like: Sequence[Tensor], *, trained: Mapping[str, nn.Parameter] | None = None
) -> ExampleGradients:
    """Trace the gradient of one example's loss, and return a function that computes the gradients of many examples.

    A private optimizer needs the gradient of every example, but autograd only returns the sum of the gradients over a
    batch.

        def losses(images, labels):
            return F.cross_entropy(network(images), labels, reduction="none")
        gradients = per_example_gradients(network, losses, like=(images, labels))
        rows = gradients(images[:16], labels[:16])     # for each trained parameter [16, *shape]

    The network, the loss and the backward pass are traced once, on one example of fake tensors (shapes and dtypes
    without values). The result is a fixed graph of tensor operators. Private examples only ever pass through this
    graph, one by one or batched by `vmap`: no code of the network or the loss runs on them. Row i of the result is
    therefore a function of example i and the network's state alone. All other values that the code reads (attributes,
    closures, counters) are fixed when the code is traced. Parameters of *other* networks become constants.

    Dropout and other random operators draw independently for every example, from the generator that you pass to the
    returned function: `gradients(images, labels, generator=generator)`.

    Args:
        network: the network, in the mode in which it is trained; its parameters and buffers are read at every call.
        losses: function that evaluates `network` on tensors with n rows each (images, labels, ...) and returns n
            losses. It is only called with one row.
        like: sample arguments of `losses`, such as a batch of images and its labels. Only their shapes (without the
            number of rows), dtypes and device are used.
        trained: parameters to train, by their names in the network. Default: all parameters that require a gradient.

    Raises:
        BatchStatistics, NotCapturable, NotSeparable, PrivacyError: the network or the loss is refused. The message
            names the line of code and a remedy.
    """
    require_per_example(network)
    chosen = {n: p for n, p in network.named_parameters() if p.requires_grad} if trained is None else dict(trained)
    if not chosen:
        raise PrivacyError("trained names no parameter, so there are no gradients to compute; leave it out for all")
    function_name = f"the network {type(network).__name__} or its loss"
    call = Stateless(network, losses, function_name)
    names = call.names()

    def gradient(values: list[Tensor], *one: Tensor) -> list[Tensor]:
        state = {n: v.detach().requires_grad_(n in chosen) for n, v in zip(names, values)}
        with torch.enable_grad():
            rows = call.at(list(state.values()), *(e[None] for e in one))
        if not isinstance(rows, Tensor) or rows.shape != (1,):
            got = f"shape {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise NotSeparable(
                f"the loss must give one value for each example [n], got {got} for one example{ONE_EACH}"
            )
        leaves = [state[n] for n in chosen]
        grads = torch.autograd.grad(rows, leaves, allow_unused=True) if rows.requires_grad else [None] * len(leaves)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads)]

    captured = capture(gradient, call.state(), like, function_name=function_name, names=names, modules=[network])
    return ExampleGradients(network, chosen, captured)
