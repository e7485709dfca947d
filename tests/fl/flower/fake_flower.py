"""Fake of Flower: the names of `flwr` 1.41 that the adapter uses, and an in-memory grid.

If Flower is installed, its own records, messages and apps are used and only the grid is fake, so the same tests check
the fake against the original.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import random
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

REAL = importlib.util.find_spec("flwr") is not None


class Array:
    def __init__(self, dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> None:
        assert isinstance(shape, tuple)
        assert isinstance(data, bytes)
        self.dtype, self.shape, self.stype, self.data = dtype, shape, stype, data


class _Typed(dict[str, Any]):
    kinds: tuple[type, ...] = ()

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, value in (given or {}).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or not isinstance(value, self.kinds):
            raise TypeError(f"{type(self).__name__} cannot hold {name!r}: {type(value).__name__}")
        super().__setitem__(name, value)


class ArrayRecord(_Typed):
    kinds = (Array,)


class ConfigRecord(_Typed):
    kinds = (int, float, str, bytes, bool, list)


class RecordDict(_Typed):
    kinds = (ArrayRecord, ConfigRecord)


@dataclass
class Error:
    code: int
    reason: str | None = None


@dataclass
class Metadata:
    dst_node_id: int = 0
    message_type: str = ""
    group_id: str = ""
    ttl: float = 0.0
    reply_to_message_id: str = ""
    message_id: str = ""
    created_at: float = field(default_factory=time.time)


class Message:
    def __init__(
        self,
        content: Any = None,
        dst_node_id: int | None = None,
        message_type: str | None = None,
        *,
        ttl: float | None = None,
        group_id: str | None = None,
        reply_to: Message | None = None,
    ) -> None:
        if reply_to is None:
            if not isinstance(content, RecordDict) or not isinstance(dst_node_id, int) or message_type is None:
                raise TypeError("Invalid arguments for Message")
            self.metadata = Metadata(dst_node_id, message_type, group_id or "", ttl or 43200.0)
        else:
            there = reply_to.metadata
            self.metadata = Metadata(
                message_type=there.message_type, group_id=there.group_id, reply_to_message_id=there.message_id
            )
        self._content = content

    def has_error(self) -> bool:
        return isinstance(self._content, Error)

    @property
    def content(self) -> Any:
        if self.has_error():
            raise ValueError("Message content is None")
        return self._content

    @content.setter
    def content(self, value: Any) -> None:
        self._content = value

    @property
    def error(self) -> Any:
        return self._content


@dataclass
class Context:
    run_id: int
    node_id: int
    node_config: dict[str, Any]
    state: Any
    run_config: dict[str, Any]


class ClientApp:
    def __init__(self) -> None:
        self._functions: dict[str, Callable[[Message, Context], Message]] = {}

    def _register(self, name: str) -> Callable[[Any], Any]:
        def keep(function: Any) -> Any:
            self._functions[name] = function
            return function

        return keep

    def train(self, action: str = "default") -> Callable[[Any], Any]:
        return self._register(f"train.{action}")

    def query(self, action: str = "default") -> Callable[[Any], Any]:
        return self._register(f"query.{action}")

    def evaluate(self, action: str = "default") -> Callable[[Any], Any]:
        return self._register(f"evaluate.{action}")

    def __call__(self, message: Message, context: Context) -> Message:
        category, _, action = message.metadata.message_type.partition(".")
        return self._functions[f"{category}.{action or 'default'}"](message, context)


class ServerApp:
    def main(self) -> Callable[[Any], Any]:
        def keep(function: Any) -> Any:
            self._main = function
            return function

        return keep

    def __call__(self, grid: Any, context: Context) -> None:
        self._main(grid, context)


@contextmanager
def installed() -> Iterator[None]:
    """Make `import flwr.app` and the like find the fake if Flower is not installed."""
    if REAL:
        identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
        identity.run_id = identity.node_id = identity.task_id = 1
        yield
        return
    here = {"app": types.ModuleType("flwr.app"), "clientapp": types.ModuleType("flwr.clientapp")}
    here["serverapp"] = types.ModuleType("flwr.serverapp")
    for kind in (Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict):
        setattr(here["app"], kind.__name__, kind)
    here["clientapp"].ClientApp, here["serverapp"].ServerApp = ClientApp, ServerApp  # type: ignore[attr-defined]
    names = {"flwr": types.ModuleType("flwr"), **{f"flwr.{name}": module for name, module in here.items()}}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def app_module() -> Any:
    """Return `flwr.app`, the original or the fake."""
    return importlib.import_module("flwr.app")


def context(node: int, partition: int | None, partitions: int) -> Any:
    config = {} if partition is None else {"partition-id": partition, "num-partitions": partitions}
    app = app_module()
    return app.Context(run_id=1, node_id=node, node_config=config, state=app.RecordDict(), run_config={})


def _copied(message: Any) -> Any:
    """Return a deep copy of the message, as after a network transfer."""
    if REAL:
        content = message.__dict__["_content"]
        message.__dict__["_content"] = copy.deepcopy(content)
        return message
    message._content = copy.deepcopy(message._content)
    return message


Fault = Callable[[int, str, str], str | None]
"""(node, message type, group) -> None, "lost", "late", "twice", "garbage", "error" (of the app), "gone" (the node), or
"dead": never delivered."""


class Grid:
    """In-memory nodes, which handle one pushed message per pull in shuffled order, with injected faults.

    Args:
        app: the client app of every node, or one by node.
        nodes: context of each node, by its number.
        fault: returns the fault of a message.
        seed: determines the order of replies.
    """

    def __init__(self, app: Any, nodes: dict[int, Any], fault: Fault = lambda *_: None, seed: int = 0) -> None:
        self.app, self.nodes, self.fault = app, nodes, fault
        self.log: list[tuple[int, str, str]] = []
        self._ids, self._random = itertools.count(), random.Random(seed)
        self._jobs: deque[tuple[str, Any]] = deque()
        self._answers: dict[str, list[Any]] = {}
        self._late: list[tuple[int, str, Any]] = []

    def get_node_ids(self) -> Iterable[int]:
        return self._random.sample(sorted(self.nodes), len(self.nodes))

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        given = []
        for message in messages:
            name = f"m{next(self._ids)}"
            message.metadata.__dict__["_message_id" if REAL else "message_id"] = name
            self._jobs.append((name, _copied(message)))
            given.append(name)
        return given

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        wanted = list(message_ids)
        self._late = [(left - 1, name, answer) for left, name, answer in self._late]
        for left, name, answer in self._late:
            if left <= 0:
                self._answers.setdefault(name, []).append(answer)
        self._late = [entry for entry in self._late if entry[0] > 0]
        if self._jobs:
            self._jobs.rotate(self._random.randrange(len(self._jobs)))
            self._do(*self._jobs.popleft())
        ready = [name for name in self._answers if name in wanted]
        self._random.shuffle(ready)
        return [answer for name in ready for answer in self._answers.pop(name)]

    def _do(self, name: str, message: Any) -> None:
        node, kind, group = message.metadata.dst_node_id, message.metadata.message_type, message.metadata.group_id
        self.log.append((node, kind, group))
        fate = self.fault(node, kind, group)
        app = app_module()
        if fate in ("error", "gone"):
            error = app.Error(2, "the app crashed") if fate == "error" else app.Error(5, "the node is unavailable")
            self._answers[name] = [app.Message(error, reply_to=message)]
            return
        if fate == "dead" or node not in self.nodes:
            return
        function = self.app[node] if isinstance(self.app, dict) else self.app
        try:
            answer = _copied(function(message, self.nodes[node]))
        except Exception as error:  # as Flower does
            self._answers[name] = [app.Message(app.Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)]
            return
        if fate == "garbage":
            for key in [key for key in answer.content["strings"] if key.endswith("result")]:
                answer.content["strings"][key] = "{"
        if fate == "late":
            self._late.append((3, name, answer))
        elif fate != "lost":
            self._answers[name] = [answer] * (2 if fate == "twice" else 1)
