"""Messages between server and clients. A message maps declared entries to values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast, get_args, overload

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit.sets import LabeledImages

Tensors = dict[str, Tensor]
"""Tensors by name, such as the parameters of a model."""
Value = Tensor | Tensors | LabeledImages | float | int | str
Rule = Literal["mean", "sum", "max", "first", "union"]
V = TypeVar("V")

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
"""Dtypes that a message may hold. Order, sums and the file format are defined for these dtypes."""


class Entry(Generic[V]):
    """Declaration of one named value that a message, a server's state or a client's memory may hold.

    In the class body of your method or add-on, declare one entry for each value that it sends or keeps, with the
    value's type in brackets: `model = Entry[Tensors]("first")`. Then `message[self.model]` reads and writes the value.
    The key is `"Class.attribute"`, or `"key.attribute"` in a class that sets a `key`, as all built-in components do.
    The rule determines how the values in a round's replies are aggregated into one value:

    * `mean`: sum(w v) / sum(w) over the clients' values v with weights w. `by` is another entry of the same reply,
      which holds w: a number, or a vector with one weight for each row of v. Without `by`, w = 1.
    * `sum`, `max`: elementwise sum or maximum. For integers, use these rules or `first`, because integers have no
      `mean`.
    * `first`: the value of the client with the lowest index.
    * `union`: rows of all clients, concatenated in client order. In an image set, the column "client" holds the index
      of the client that sent each image.

    Args:
        rule: aggregation rule.
        by: entry of the same reply that holds the weights w. Permitted only with the rule `mean`.
        cached: whether to send the value only to clients that do not hold it yet, and its digest to all others. Use it
            for values that the server sends unchanged in many rounds.

    Attributes:
        key: the entry's name in messages, files and histories.
        owner: the declaring class, with its module.

    Raises:
        ValueError: the rule is unknown, or is not `mean` although `by` is given.
        TypeError: an option has the wrong type.
    """

    def __init__(self, rule: Rule = "mean", *, by: Entry[Any] | None = None, cached: bool = False) -> None:
        if rule not in get_args(Rule):
            raise ValueError(f"rule must be one of {', '.join(get_args(Rule))}, got {rule!r}")
        if rule != "mean" and by is not None:
            raise ValueError(f"by belongs to rule='mean', got rule={rule!r}; leave it out")
        if by is not None and not isinstance(by, Entry):
            raise TypeError(f"by must be another Entry, got {type(by).__name__}")
        self.rule, self.by, self.cached = rule, by, check.boolean(cached, "cached")
        self.key = self.owner = ""

    def __set_name__(self, owner: type, name: str) -> None:
        if not self.key:
            stated = vars(owner).get("key")
            self.key = f"{stated if isinstance(stated, str) else owner.__name__}.{name}"
            self.owner = f"{owner.__module__}.{owner.__qualname__}"
            self.__module__, self.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"

    def __repr__(self) -> str:
        return f"Entry({self.key!r}, {self.rule})"


def declared_entries(owner: object) -> list[Entry[Any]]:
    """Return the message entries that an object's class and its base classes declare as class attributes.

    Messages of the object may hold no other entries.

    Args:
        owner: a method, an add-on or a filter.
    """
    found: dict[str, Entry[Any]] = {}
    for base in reversed(type(owner).__mro__):
        for value in vars(base).values():
            if isinstance(value, Entry):
                found[value.key] = value
    return list(found.values())


class Message:
    """Flat map from entries to values: tensors, groups of tensors (dicts), image sets, numbers and strings.

    An entry is an `Entry` object that a method, add-on or filter declares as class attribute. In a method that declares
    the entry `model`, `Message({self.model: weights})` builds a message from its values. You can also build an empty
    message and set values one by one: `message[self.model] = weights`. `message[self.model]` reads the value of an
    entry. `self.model in message` is true if the message holds a value of this entry. A server's state and a client's
    memory are messages, too. Values are shared, not copied: treat a message as read-only once it is sent.

    Args:
        values: initial values, by entry.

    Raises:
        TypeError, ValueError: a message cannot hold a value (see `check_value`). Setting a value later raises the same
            errors.
    """

    __slots__ = ("__weakref__", "_values")

    def __init__(self, values: Mapping[Entry[Any], Value] | None = None) -> None:
        self._values: dict[str, Value] = {}
        if values is not None and not isinstance(values, Mapping):
            raise TypeError(f"values must map entries to values, got {type(values).__name__}")
        for entry, value in (values or {}).items():
            self[entry] = value

    @staticmethod
    def unchecked(values: Mapping[str, Value]) -> Message:
        """Build a message from a mapping of keys to values without checks.

        Use it only for values that were checked before.

        Args:
            values: mapping, entry key -> value.
        """
        message = Message()
        message._values = dict(values)
        return message

    def __getitem__(self, entry: Entry[V]) -> V:
        if not isinstance(entry, Entry):
            raise TypeError(f"the values of a message are accessed by an Entry, got {entry!r}")
        if entry.key not in self._values:
            raise KeyError(f"the message holds no {entry.key!r}; it holds {', '.join(self._values) or 'nothing'}")
        return cast(V, self._values[entry.key])

    def __setitem__(self, entry: Entry[Any], value: Any) -> None:
        if not isinstance(entry, Entry):
            raise TypeError(f"the values of a message are accessed by an Entry, got {entry!r}")
        if not entry.key:
            raise ValueError(
                "an Entry must be declared as a class attribute before it is used, in the class body, as "
                "`model = Entry[Tensors]()`: its key comes from there"
            )
        self._values[entry.key] = check_value(entry.key, value)

    def __delitem__(self, entry: Entry[Any]) -> None:
        self[entry]
        del self._values[entry.key]

    def __contains__(self, entry: object) -> bool:
        if not isinstance(entry, Entry):
            raise TypeError(f"the values of a message are accessed by an Entry, got {entry!r}")
        return entry.key in self._values

    @overload
    def get(self, entry: Entry[V]) -> V | None: ...
    @overload
    def get(self, entry: Entry[V], default: V) -> V: ...
    def get(self, entry: Entry[V], default: V | None = None) -> V | None:
        """Return the value of `entry`, or `default` if the message does not hold it."""
        return cast("V | None", self._values[entry.key]) if entry in self else default

    def __iter__(self) -> NoReturn:
        raise TypeError("a Message is not iterable; `items()` yields pairs of an entry's key and its value")

    def items(self) -> Iterator[tuple[str, Value]]:
        """Yield pairs of an entry's key and its value, in insertion order."""
        yield from self._values.items()

    def copy(self) -> Message:
        """Return a shallow copy.

        Entries that are set in the copy do not affect this message, but the two messages share the values.
        """
        return Message.unchecked(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Message({', '.join(f'{k}: {n} bytes' for k, n in payload_bytes(self).items())})"


def check_value(key: str, value: Any) -> Value:
    """Check that `value` has a type, dtype and size that a message can hold, and return it.

    NaN and infinite numbers pass this check, because the state of a diverging method may contain them. `check_reply`
    refuses them in replies.

    Args:
        key: the entry's key, for the error message.
        value: the value to check.

    Returns:
        The value itself.

    Raises:
        TypeError: `value` is of a type that messages cannot hold, or is a tensor whose dtype or layout cannot be sent.
        ValueError: `value` is an integer beyond 64 bits, or a string that is not Unicode text.
    """
    if isinstance(value, bool) or not isinstance(value, Tensor | dict | LabeledImages | float | int | str):
        raise TypeError(
            f"{key} must be a tensor, a dict of tensors, a LabeledImages, a number or a string, "
            f"got {type(value).__name__}"
        )
    if isinstance(value, dict):
        wrong = [n for n, t in value.items() if not isinstance(n, str) or not isinstance(t, Tensor)]
        if wrong:
            raise TypeError(f"{key} must map names to tensors, but {wrong[0]!r} does not")
    for name, tensor in _tensors(key, value):
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            where = f"{key}[{name}]" if name else key
            raise TypeError(
                f"{where} must be a dense tensor of a plain real dtype, got {tensor.dtype} ({tensor.layout}, "
                f"{tensor.device}); convert it first"
            )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{key} must fit in 64 bits, got an integer of {value.bit_length()} bits")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{key} must be Unicode text: {error}") from error
    return value


def _tensors(key: str, value: Value) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a value with its name in the dict or image set; "" for a tensor."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, LabeledImages):
        try:
            parts = value.parts()[0]
        except AttributeError as error:
            raise TypeError(f"{key} is not a complete set: {error}") from error
        wrong = [n for n, t in parts.items() if not isinstance(t, Tensor)]
        if wrong:
            raise TypeError(f"{key} is not a complete set: its {wrong[0]} must be a tensor")
        yield from parts.items()


def payload_bytes(message: Message) -> dict[str, int]:
    """Return the payload size of each entry in bytes, by key; a run's history records these sizes.

    For an image set, the size of the pixels is under the entry's key, the size of the labels under "key:labels", and
    the size of each column under "key:" and the column's name. A number counts as 8 bytes, and a string as its length
    in UTF-8. Names, shapes and the file format's overhead are not counted.

    Args:
        message: message that is sent or stored.
    """
    found: dict[str, int] = {}
    for key, value in message.items():
        if isinstance(value, Tensor):
            found[key] = value.nbytes
        elif isinstance(value, dict):
            found[key] = sum(t.nbytes for t in value.values())
        elif isinstance(value, LabeledImages):
            found[key] = value.images.nbytes
            found[f"{key}:labels"] = value.labels.nbytes
            for name, column in value.columns.items():
                found[f"{key}:{name}"] = column.nbytes
        elif isinstance(value, str):
            found[key] = len(value.encode())
        else:
            found[key] = 8
    return found
