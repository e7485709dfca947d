"""Check, before a round is committed, that clients can work with the new server state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fl._noise_images import empty_set, noise_set
from fl.message import Message
from fl.method import Method, Predictor
from fl.participants import Client, Server
from fl.schema import BadReply, check_reply, value_parts

__all__ = ["check_state", "largest_value"]

_JUMP = 3.0
"""Growth of an entry's largest value in one round above which a client's work is tried on noise."""
_EXPLOSION = 10.0
"""Growth of the largest value of weights in one round above which the weights have exploded."""


def check_state(method: Method, server: Server, before: Message) -> tuple[str | None, list[str]]:
    """Return the reason why a round's new state must not be committed, or None; and the entries that have exploded.

    Weights have exploded if their largest value grew more than tenfold in the round, to more than 10. Only tensors with
    the name of a parameter of a global model are compared: images, sums, running statistics of batch norm, and step
    counts of optimizers may grow as their method intends.

    Args:
        method: method whose state is tested.
        server: server with the new state; it is not changed.
        before: state before the round.
    """
    peaks, old = _peaks(server.state), _peaks(before)
    grown = {name: peak / max(1.0, old.get(name, 0.0)) for name, peak in peaks.items()}
    models = method.predictors(server)
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
    """Return the reason why a round's new state must not be committed, or None.

    A state is unusable if it holds NaN or Inf, or if a global model's outputs on noise are not finite. If a value has
    more than tripled in the round, a client's training is also tried on noise images, with the new state and with the
    state before the round. The new state is unusable if the server would refuse the reply under the new state, but
    accept the reply under the earlier state. Private methods skip this trial, because training charges a ledger.

    Args:
        method: method whose state is tested.
        server: server with the new state; it is not changed.
        before: state before the round.
        models: global models with the new state.
        peaks: largest absolute value of each float tensor of the new state.
        growth: largest growth of these values in the round.
    """
    for name, peak in peaks.items():
        if not peak < float("inf"):
            return f"the new state's {name} holds NaN or Inf"
    noise = noise_set(server.task, empty_set(server), server.generator("commit guard"))
    for name, model in models.items():
        if not torch.isfinite(model.network(noise.images)).all():
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
    """Return the largest absolute value of each float tensor of a state by name; NaN counts as infinity."""
    found = {}
    for key, value in state.items():
        for name, part in value_parts(value):
            if isinstance(part, Tensor) and part.is_floating_point() and part.numel():
                low, high = (float(v) for v in part.detach().aminmax())  # one pass; NaN is in both
                found[f"{key}[{name}]"] = float("inf") if math.isnan(low) else max(-low, high)
    return found


def _trial(method: Method, server: Server) -> str | None:
    """Return the reason why the server would refuse the reply of a client with noise images, or None."""
    method, number = method.inner, (server.drawn or [0])[0]
    data = noise_set(server.task, empty_set(server), server.generator("commit guard trial"))
    client = Client(number, data, None, server.task, server.round, server.seed, device=server.device)
    try:
        reply = method.local(client, method.send(server, number))
        check_reply(reply, {e.key: e for e in method.entries()}, method.expect(server, number))
    except BadReply as error:
        return str(error)
    except Exception:  # the method may need more than noise images: this failure tells nothing
        return None
    return None
