"""Checks of what a method's functions return, and of values that they may only read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Self, cast

from torch import Tensor, nn

from distillkit._utils.content import content
from distillkit.sets import LabeledImages
from fl.message import Entry, Message
from fl.method import Method, Predictor
from fl.participants import Client, Interrupted, Server
from fl.schema import EntrySpec, Schema

Given = Mapping[str, Message]


class ChangedInput(ValueError):
    """Error: a function of a method changed a value that it may only read. It ends the run."""


class Unchanged:
    """Context manager that raises an error if a function of a method has changed what it was given.

    Changes are found by the identity of a message's values and, on a client up to round 1, by checksums of tensors.
    Checksums would cost much of a round of a tiny network. So later, and on the server, the version that PyTorch counts
    for a tensor is compared: a write through `.data`, or to a tensor of inference mode, is then not found.

    Args:
        method: the method.
        function: name of its function that is called in the block.
        given: the messages that the function may only read, by the name that the error shows.
        participant: the server or the client, whose sets and state or number the function may only read.

    Raises:
        ChangedInput: a value was changed, also if the block itself raised an error that does not end the run.
    """

    def __init__(self, method: Method, function: str, given: Given, participant: Server | Client) -> None:
        self._name, self._given, self._held = f"{type(method.inner).__name__}.{function}", given, participant
        self._mark = content if isinstance(participant, Client) and participant.round <= 1 else _version

    def __enter__(self) -> Self:
        self._before = self._now()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and (issubclass(kind, Interrupted) or not issubclass(kind, Exception)):
            return
        after = self._now()
        for name in [*self._before, *after]:
            one, other = self._before.get(name), after.get(name)
            if one is None or other is None or one[0] is not other[0] or one[1] != other[1]:
                raise ChangedInput(
                    f"{self._name} changed {name}, which it may only read: others use it, too. Change a copy, as "
                    "tensor.clone(), or build a new Message"
                )

    def _now(self) -> dict[str, tuple[object, int]]:
        """Return the values and their marks; the participant's are read again, as its attributes can be replaced."""
        if isinstance(self._held, Client):
            held = {f"client.{name}": getattr(self._held, name) for name in ("id", "round", "seed", "data", "test")}
            return dict(_marks({**self._given, **held}, self._mark))
        held = {f"server.{name}": getattr(self._held, name) for name in ("round", "seed", "clients", "state")}
        held |= {f"server.data[{k!r}]": v for k, v in self._held.data.items()}
        return dict(_marks({**self._given, **held}, self._mark))


def _marks(given: Mapping[str, Any], mark: Callable[[Tensor], int]) -> Iterator[tuple[str, tuple[object, int]]]:
    """Yield the name of each value, and the value with the mark of a tensor, which shows whether it was changed."""

    def marked(value: object) -> tuple[object, int]:
        return value, mark(value) if isinstance(value, Tensor) else 0

    for name, held in given.items():
        for key, value in held.items() if isinstance(held, Message) else [("", held)]:
            label = f"{name}[{key}]" if key else name
            yield label, marked(value)
            if isinstance(value, LabeledImages):
                parts: dict[str, Any] = {"images": value.images, "labels": value.labels, **value.columns}
                yield from ((f"{label}.{part}", marked(t)) for part, t in parts.items())
            elif isinstance(value, dict):
                yield from ((f"{label}[{part}]", marked(t)) for part, t in value.items())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# What a method's functions return.


def _wrong(method: Method, function: str, wanted: str, got: object) -> str:
    plain = isinstance(got, str | int | float) or (isinstance(got, list) and all(isinstance(x, int) for x in got))
    shown = f"{got!r:.80}" if plain else type(got).__name__
    return f"{type(method.inner).__name__}.{function} must return {wanted}, got {shown}"


def checked_message(method: Method, function: str, value: object) -> Message:
    """Return the result of a function of the method if it is a `Message`."""
    if not isinstance(value, Message):
        raise TypeError(_wrong(method, function, "a Message (empty if there is nothing to say)", value))
    return value


def checked_schema(method: Method, function: str, value: object) -> Schema:
    """Return the result of a function of the method if it is a schema: a mapping of entry keys to `EntrySpec`."""
    wanted = "a mapping of entry keys to EntrySpec, as {self.update.key: EntrySpec(example)}"
    if not isinstance(value, Mapping):
        raise TypeError(_wrong(method, function, wanted, value))
    for key, spec in value.items():
        if not isinstance(key, str) or not isinstance(spec, EntrySpec):
            raise TypeError(_wrong(method, function, wanted, {}) + f" of {key!r}: {type(spec).__name__}")
    return dict(value)


def checked_draw(method: Method, server: Server) -> list[int]:
    """Return the clients that `Method.draw` draws: indices of clients in ascending order, each at most once."""
    drawn: Any = method.draw(server)
    wanted = f"a list of clients' indices from 0 to {server.clients - 1} in ascending order, each at most once"
    if isinstance(drawn, str) or not isinstance(drawn, Sequence):
        raise TypeError(_wrong(method, "draw", wanted, drawn))
    if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in drawn):
        raise TypeError(_wrong(method, "draw", wanted, list(drawn)))
    clients = [int(one) for one in drawn]
    if clients != sorted(set(clients)) or (clients and not 0 <= clients[0] <= clients[-1] < server.clients):
        raise ValueError(_wrong(method, "draw", wanted, clients))
    return clients


def checked_models(method: Method, server: Server) -> Mapping[str, Predictor]:
    """Return the result of `Method.predictors` if it is a mapping of names to `Predictor` objects."""
    models: Any = method.predictors(server)
    wanted = "a mapping of names to Predictor objects, as {'': Predictor(network)}"
    if not isinstance(models, Mapping):
        raise TypeError(_wrong(method, "predictors", wanted, models))
    for name, model in models.items():
        if not isinstance(name, str) or not isinstance(model, Predictor) or not isinstance(model.network, nn.Module):
            held = model.network if isinstance(model, Predictor) else model
            raise TypeError(_wrong(method, "predictors", wanted, {}) + f" of {name!r}: {type(held).__name__}")
    return models


def checked_rejections(method: Method, value: object, present: Sequence[int]) -> Mapping[int, str]:
    """Return the result of `Method.receive_exchange` if it maps clients of the round to reasons."""
    wanted = "a mapping of clients' indices to reasons ({} if all replies are usable)"
    if not isinstance(value, Mapping):
        raise TypeError(_wrong(method, "receive_exchange", wanted, value))
    for client, reason in value.items():
        if client not in present or not isinstance(reason, str):
            raise ValueError(_wrong(method, "receive_exchange", wanted, {}) + f" of {client!r}: {reason!r}")
    return value


def declared(method: Method) -> dict[str, Entry[Any]]:
    """Return the entries that the method declares, by key."""
    entries: Any = method.entries()
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise TypeError(_wrong(method, "entries", "a list of Entry objects", entries))
    for entry in entries:
        if not isinstance(entry, Entry) or not entry.key:
            raise TypeError(_wrong(method, "entries", "a list of Entry objects, declared as class attributes", entry))
    return {entry.key: entry for entry in entries}


def require_exchanges(method: Method) -> None:
    """Refuse a method whose `exchanges` or whose schemas of replies do not fit its functions.

    `exchanges` must hold "local", and names of other functions, each once. A class that overrides `answer` or
    `evaluate` must override the function that returns the reply's schema, too.
    """
    kind, verbs = type(method.inner), cast(Any, method.exchanges)
    for verb, schema in (("answer", "expect_answer"), ("evaluate", "expect_evaluation")):
        if getattr(kind, verb) is not getattr(Method, verb) and getattr(kind, schema) is getattr(Method, schema):
            raise ValueError(
                f"{kind.__name__}.{verb} returns a reply, but the schema of this reply is missing: write {schema}"
            )
    name = f"{kind.__name__}.exchanges"
    if not isinstance(verbs, tuple | list) or not all(isinstance(verb, str) for verb in verbs):
        raise TypeError(f"{name} must be names of functions, as ('local',), got {verbs!r:.80}")
    if "local" not in verbs or len(set(verbs)) < len(verbs):
        raise ValueError(f"{name} must hold 'local', and each name once, got {tuple(verbs)}")
    for verb in verbs:
        if verb in ("answer", "evaluate") or not any(callable(getattr(part, verb, None)) for part in method.parts):
            raise ValueError(f"{name} names {verb!r}, but there is no function {verb}(client, message) for an exchange")
