"""Check of the server's new state before a round is committed: clients must be able to train with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fl._noise_images import empty_set, noise_set
from fl.engine._contract import checked_models, declared
from fl.message import Message
from fl.method import Method, Predictor
from fl.participants import Client, Server
from fl.schema import BadReply, check_reply, value_parts

__all__ = ["check_state", "largest_value"]

_JUMP = 3.0
"""Growth factor of a tensor's largest value in one round above which a client's training is tried on noise images."""
_EXPLOSION = 10.0
"""Growth factor of a weight tensor's largest value in one round above which the weights count as exploded."""


def check_state(method: Method, server: Server, before: Message) -> tuple[str | None, list[str]]:
    """Check the server's state after a round, before it is committed.

    Weights count as exploded if their largest absolute value grew more than tenfold in the round, to more than 10. Only
    tensors with the name of a parameter of a global model are compared. Other tensors, such as images, sums, running
    statistics of batch norm, and step counts of optimizers, may grow that much in normal operation.

    Args:
        method: the run's method.
        server: server with the new state; it is not changed.
        before: state before the round.

    Returns:
        A pair: the reason why the new state must not be committed, or None if it is usable; and the names of the
        weight tensors that have exploded.
    """
    peaks, old = _peaks(server.state), _peaks(before)
    grown = {name: peak / max(1.0, old.get(name, 0.0)) for name, peak in peaks.items()}
    models = checked_models(method, server)
    weights = tuple(f"[{name}]" for model in models.values() for name, _ in model.network.named_parameters())
    exploded = [name for name, growth in grown.items() if growth > _EXPLOSION and name.endswith(weights)]
    why = _unusable(method, server, before, models, peaks, max(grown.values(), default=0.0))
    return why, exploded


def _unusable(
    method: Method,
    server: Server,
    before: Message,
    models: Mapping[str, Predictor],
    peaks: Mapping[str, float],
    growth: float,
) -> str | None:
    """Return the reason why a round's new state must not be committed, or None if it is usable.

    A state is unusable if it holds NaN or Inf, or if a global model's outputs on noise images are not finite. If
    `growth` is above 3, one client is also trained on noise images, once with the new state and once with the state
    before the round. The new state is unusable if the server's checks refuse the reply of the first training, but not
    that of the second. Private methods skip this training, because it would charge the privacy ledger.

    Args:
        method: the run's method.
        server: server with the new state; it is not changed.
        before: state before the round.
        models: global models with the new state, by name.
        peaks: largest absolute value of each float tensor of the new state, by the tensor's name.
        growth: largest factor by which a value in `peaks` grew in the round. Earlier values below 1 count as 1.
    """
    for name, peak in peaks.items():
        if not peak < float("inf"):
            return f"the new state's {name} holds NaN or Inf"
    label = f"{type(method.inner).__name__}.predictors"
    noise = noise_set(server.task, empty_set(server), server.generator("commit guard"))
    for name, model in models.items():
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
    if method.private or growth <= _JUMP:
        return None
    why = _trial(method, server)
    if why is None:
        return None
    if _trial(method, replace(server, state=before)) is not None:
        return None
    return f"a client with noise images fails with the new state: {why}"


def largest_value(message: Message) -> float:
    """Return the largest absolute value of all float tensors of a message; 0 if it has none."""
    return max(_peaks(message).values(), default=0.0)


def _peaks(state: Message) -> dict[str, float]:
    """Return the largest absolute value of each float tensor of a state, by the tensor's name.

    The value of a tensor that contains NaN is infinity.
    """
    found = {}
    for key, value in state.items():
        for name, part in value_parts(value):
            if isinstance(part, Tensor) and part.is_floating_point() and part.numel():
                low, high = (float(v) for v in part.detach().aminmax())  # one pass; if there is NaN, both are NaN
                found[f"{key}[{name}]"] = float("inf") if math.isnan(low) else max(-low, high)
    return found


def _trial(method: Method, server: Server) -> str | None:
    """Train one client on noise images with the server's state, and check its reply as in a round.

    Returns:
        The reason why the reply fails the check; None if it passes, or if there is no reply because the training
        raised an error.
    """
    method, number = method.inner, (server.drawn or [0])[0]
    data = noise_set(server.task, empty_set(server), server.generator("commit guard trial"))
    client = Client(number, data, None, server.task, server.round, server.seed, device=server.device)
    try:
        reply = method.local(client, method.send(server, number))
        check_reply(reply, declared(method), method.expect(server, number))
    except BadReply as error:
        return str(error)
    except Exception:  # the method may need more than noise images, so this failure does not show an unusable state
        return None
    return None
