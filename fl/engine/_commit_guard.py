"""Check of the server's new state before a round is committed: it must be finite, and its models must work."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl._noise_images import empty_set, noise_set
from fl.engine._contract import checked_models
from fl.method import Method
from fl.participants import Server
from fl.schema import value_parts


def check_state(method: Method, server: Server) -> str | None:
    """Return the reason why a round's new state must not be committed, or None if it is usable.

    A state is unusable if it holds NaN or Inf, or if a global model's outputs on noise images are not finite.
    """
    for key, value in server.state.items():
        for name, part in value_parts(value):
            if isinstance(part, Tensor) and part.numel() and part.is_floating_point() and not _is_finite(part):
                return f"the new state's {key}[{name}] holds NaN or Inf"
    label = f"{type(method.inner).__name__}.predictors"
    noise = noise_set(server.task, empty_set(server), server.generator("commit guard"))
    for name, model in checked_models(method, server).items():
        outputs = model.network(noise.images)
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"the model {name!r} of {label} must return logits as a tensor, got {type(outputs).__name__}"
            )
        used = outputs[:, : model.outputs] if outputs.ndim == 2 else outputs
        classes = server.task.num_classes  # with `predict="all"`, the outputs of an add-on's classes are tested, too
        if used.ndim != 2 or len(used) != len(noise) or used.shape[1] < classes:
            raise ValueError(
                f"the model {name!r} of {label} must give [N, {classes}] logits or more for N images, got "
                f"{list(used.shape)} for {len(noise)}"
            )
        if not torch.isfinite(outputs).all():
            return f"the new model{f' {name!r}' if name else ''} gives NaN or Inf on noise images"
    return None


def _is_finite(values: Tensor) -> bool:
    return all(math.isfinite(float(v)) for v in values.detach().aminmax())  # one pass; NaN is in both
