"""Checks that neither a loss nor a network layer mixes the examples of a batch."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distillkit._utils.batches import uses_batch_statistics
from distillkit.augment import DSA, CropFlip
from distillkit.privacy.errors import BatchStatistics, NotSeparable

ONE_EACH = "; pass reduction='none', as in nn.CrossEntropyLoss(reduction='none')"
"""What to do about a loss that returns a single number."""

_LAYERS = (
    *(nn.Sequential, nn.Identity, nn.Flatten, nn.Conv2d, nn.Linear, nn.GroupNorm, nn.BatchNorm2d, nn.ReLU),
    *(nn.LeakyReLU, nn.Sigmoid, nn.SiLU, nn.Tanh, nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d),
)
"""Layers of PyTorch that treat every image separately, so their code may run on private images."""

_ORIGINS = {"torch", "distillkit", "typing_extensions", *sys.stdlib_module_names}
"""Packages from which the functions of PyTorch and of this package come."""

_FIRST: dict[Any, dict[str, Any]] = {}
"""What classes and modules held when they were first looked at."""

_BUILTIN = (type(None), bool, int, float, str, tuple, list, set, dict, OrderedDict)
"""Types of the attributes of an unchanged layer. Others, such as tensors beside the parameters, may run code."""


def refuse_batch_norm(network: object) -> None:
    """Refuse a network in which a layer normalizes with the statistics of the batch.

    Args:
        network: network to check; batch norm in eval mode uses stored statistics and is accepted.

    Raises:
        BatchStatistics: a batch-norm layer uses the statistics of the batch, so one record would change the embeddings
            of all records.
    """
    if uses_batch_statistics(network):
        raise BatchStatistics(
            f"{type(network).__name__} has batch norm that uses the batch's own statistics, so one record changes the "
            "embedding of all. Use norm='instance' or 'group', or a network in eval mode whose running statistics come "
            "from public data"
        )


def require_mean_objective(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
    """Check that a training objective is the mean of the objectives of single examples."""
    together = loss(logits, labels)
    if together.ndim:
        raise NotSeparable(f"the objective must be one number, the mean over examples, got {list(together.shape)}")
    alone = torch.stack([loss(z[None], y[None]) for z, y in zip(logits, labels)]).mean()
    if not bool((together - alone).abs() <= together.abs() * torch.finfo(logits.dtype).eps ** 0.5):
        raise NotSeparable(
            f"the objective of a batch is {float(together):.5g}, but the mean over its single examples is "
            f"{float(alone):.5g}, so an example has no contribution that could be clipped. Use the mean over examples, "
            "without weights that depend on the batch"
        )


def require_independent_losses(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> None:
    """Check that the loss of each example depends on its own row alone.

    Args:
        loss: function of (logits [n, K], labels) that returns n losses.
        logits, labels: logits and labels on which the loss is tested. They must be public, with at least two rows.

    Raises:
        NotSeparable: the number of losses is not n, or a loss depends on other rows.
    """
    with torch.no_grad():
        together = loss(logits, labels)
        if not isinstance(together, Tensor) or together.shape != labels.shape[:1]:
            got = f"shape {list(together.shape)}" if isinstance(together, Tensor) else type(together).__name__
            raise NotSeparable(f"the loss must give one value for each example [n], got {got}{ONE_EACH}")
        alone = torch.cat([loss(z[None], y[None]) for z, y in zip(logits, labels)])
    if not torch.allclose(together, alone, rtol=1e-4, atol=1e-6):
        raise NotSeparable(
            f"the losses of {len(labels)} examples in a batch differ from their losses one by one, so an example "
            "has no contribution that could be clipped. Compute the loss of every row independently, without weights, "
            "contrasts or means over the batch"
        )


def is_own_augmentation(augment: object) -> bool:
    """Return whether an augmentation is None, or an unchanged `DSA` or `CropFlip`. Subclasses do not count."""
    return augment is None or (type(augment) in (DSA, CropFlip) and _is_original(type(augment), torch, F, Tensor))


def is_own_network(network: object) -> bool:
    """Return whether a network consists only of unchanged layers of this package and of PyTorch.

    The result is False for a network with a hook, a replaced method or layer, batch statistics or tensor subclasses,
    and if other code replaced a function of PyTorch.
    """
    if not isinstance(network, nn.Module) or any(_global_hooks()) or not _is_original(torch, F, Tensor):
        return False
    tensors = [*network.parameters(), *network.buffers()]
    return all(_is_plain(m) for m in network.modules()) and all(type(t) in (Tensor, nn.Parameter) for t in tensors)


def _global_hooks() -> list[Any]:
    module = nn.modules.module
    return [getattr(module, name) for name in dir(module) if name.startswith("_global_") and name.endswith("_hooks")]


def _is_original(*places: Any) -> bool:
    """Return whether no function of these classes and modules was replaced by one of other packages."""
    for place in places:
        first = _FIRST.setdefault(place, dict(vars(place)))
        for name, value in vars(place).items():
            if isinstance(value, FunctionType):
                if value.__globals__["__name__"].partition(".")[0] not in _ORIGINS:
                    return False
            elif first.get(name) is not value and (callable(value) or hasattr(type(value), "__get__")):
                return False
    return True


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    named = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None)
    known = kind in _LAYERS or (named is kind and kind.__module__.startswith("distillkit.networks."))
    changed = any(type(value) not in _BUILTIN for value in vars(module).values())
    hooked = any(value for name, value in vars(module).items() if name.endswith("_hooks"))
    mixing = isinstance(module, nn.BatchNorm2d) and (module.training or module.running_mean is None)
    mixing |= isinstance(module, nn.Flatten) and module.start_dim != 1
    return known and not changed and not hooked and not mixing and _is_original(*kind.__mro__)


_is_original(torch, F, Tensor, *(base for kind in (*_LAYERS, DSA, CropFlip) for base in kind.__mro__))
