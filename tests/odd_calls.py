"""Unusual calls: valid calls with one invalid argument, and their outcomes. Shared by the tests of all packages.

An odd call is *refused* if our code raised an error that names the argument, and *unnamed* if the message does not name
it; *warned* if it warned; *accepted* if it returned a result that could be used; *raw* if the error came from torch,
another library or Python itself, or if a client's such error left the round without replies. Nothing may be raw.
Accepted and unnamed calls must be listed with a reason.
"""

from __future__ import annotations

import fnmatch
import inspect
import linecache
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distillkit import LabeledImages, Normalization

__all__ = ["Call", "Outcome", "corruptions", "odd_calls", "outcome_of_call", "raised_by_us", "unlisted"]

_ROOT = Path(__file__).parents[1]
OURS = tuple(str(_ROOT / package) for package in ("distillkit", "fl", "attacks"))


@dataclass(frozen=True)
class Call:
    """A public function or class, valid arguments, and a use of its result.

    Attributes:
        function: the function to call with keyword arguments.
        arguments: returns valid arguments, created anew for every call.
        use: uses the result; raises, or returns a description of what is wrong with it.
        skip: arguments that are not corrupted.
    """

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    use: Callable[[Any], str | None] = lambda result: None
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """Outcome of one odd call: "refused", "unnamed", "warned", "accepted" or "raw", and the message."""

    name: str
    argument: str
    corruption: str
    kind: str
    words: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.name}({self.argument}: {self.corruption}) {self.kind}: {self.words}"


def raised_by_us(error: BaseException) -> bool:
    """Return whether the deepest frame is a `raise` statement in our packages."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0)
    return frame.filename.startswith(OURS) and line.strip().startswith("raise")


def _refusal(error: BaseException) -> bool:
    """Return whether an error is a refusal with a message: ours, or Python's for an unknown keyword, which it names."""
    unknown = isinstance(error, TypeError) and "got an unexpected keyword argument" in str(error)
    return bool(str(error)) and (raised_by_us(error) or unknown)


# Invalid values.


def _like(**changes: Any) -> Callable[[LabeledImages], LabeledImages]:
    return lambda data: data.replace(**{k: v(data) for k, v in changes.items()})


def _with_nan(data: LabeledImages) -> LabeledImages:
    odd = data.replace(images=data.images.clone())
    odd.images[0] = math.nan
    return odd


def _with_more_classes(data: LabeledImages) -> LabeledImages:
    labels = data.labels if data.labels.ndim == 1 else torch.nn.functional.pad(data.labels, (0, 2))
    return data.replace(labels=labels, num_classes=data.num_classes + 2)


def _with_other_labels(data: LabeledImages) -> LabeledImages:
    return data.replace(
        labels=torch.eye(data.num_classes)[data.labels] if data.labels.ndim == 1 else data.labels.argmax(1)
    )


_SETS: dict[str, Callable[[LabeledImages], Any]] = {
    "None": lambda data: None,
    "number": lambda data: 3,
    "bare images": lambda data: data.images,
    "class": lambda data: LabeledImages,
    "empty": lambda data: data[:0],
    "one row": lambda data: data[:1],
    "shape": _like(images=lambda data: torch.zeros(len(data), data.shape[0], data.shape[1] + 1, data.shape[2] + 2)),
    "channels": _like(images=lambda data: data.images.repeat(1, 2, 1, 1)),
    "space": _like(normalization=lambda data: Normalization((0.4,), (0.3,))),
    "class count": _with_more_classes,
    "other labels": _with_other_labels,
    "dtype": lambda data: data.to(dtype=torch.float64),
    "NaN": _with_nan,
}

_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "number": lambda x: 3,
    "string": lambda x: "x",
    "empty": lambda x: x[:0],
    "one row": lambda x: x[:1],
    "one dimension more": lambda x: x[None],
    "one dimension less": lambda x: x[0],
    "complex": lambda x: x.to(torch.complex64),
    "bool": lambda x: x > 0,
    "NaN": lambda x: torch.full_like(x, math.nan) if x.is_floating_point() else x.float() * math.nan,
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "negated": lambda x: -x - 1 if x.dtype != torch.bool else ~x,
    "huge": lambda x: x * 0 + 100 if not x.is_floating_point() else x * 0 + 1e6,
}

_INTEGERS: dict[str, Any] = {
    **{"None": None, "negative": -1, "zero": 0, "fraction": 2.5, "NaN": math.nan, "string": "3", "bool": True},
    **{"class": int, "list": [1], "array": np.array([1, 2]), "beyond int64": 10**20},
}
_NUMBERS: dict[str, Any] = {
    **{"None": None, "negative": -1.0, "infinite": math.inf, "NaN": math.nan, "string": "0.1", "bool": True},
    **{"class": float, "list": [0.1], "tensor": torch.zeros(3), "complex": 1j, "Fraction": Fraction(1, 2)},
}
_WORDS: dict[str, Any] = {"unknown": "nonsense", "number": 3, "None": None, "class": str, "list": ["a"], "empty": ""}
_SWITCHES: dict[str, Any] = {"string": "no", "number": 2, "None": None, "list": []}
_FUNCTIONS: dict[str, Any] = {
    **{"None": None, "number": 3, "True": True, "string": "f", "class": nn.Linear, "a network": nn.Linear(2, 2)},
    **{"no arguments": lambda: None, "three arguments": lambda a, b, c: a},
}
_LISTS: dict[str, Any] = {
    **{"None": None, "number": 3, "string": "x", "wrong items": [object()], "empty": [], "class": list}
}
_MAPPINGS: dict[str, Any] = {
    **{"None": None, "number": 3, "string": "x", "list": [1], "class": dict},
    **{"wrong names": {1: 2}, "unknown": {"nonsense": 3}},
}


def corruptions(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the invalid values for a value of this kind, with their names."""
    if isinstance(value, LabeledImages):
        yield from ((name, change(value)) for name, change in _SETS.items())
    elif isinstance(value, Tensor):
        yield from ((name, change(value)) for name, change in _TENSORS.items())
    elif isinstance(value, list | tuple) and value and isinstance(value[0], LabeledImages):
        yield from _LISTS.items()
        yield from ((f"one of them: {name}", [*value[:-1], odd]) for name, odd in corruptions(value[-1]))
    elif isinstance(value, bool):
        yield from _SWITCHES.items()
    elif isinstance(value, int):
        yield from _INTEGERS.items()
    elif isinstance(value, float):
        yield from _NUMBERS.items()
    elif isinstance(value, str):
        yield from _WORDS.items()
    elif isinstance(value, Mapping):
        yield from _MAPPINGS.items()
        for key, one in value.items():
            if isinstance(one, LabeledImages):
                yield from ((f"one of them: {name}", {**value, key: odd}) for name, odd in corruptions(one))
    elif isinstance(value, list | tuple):
        yield from _LISTS.items()
    elif inspect.isroutine(value) or inspect.isclass(value):
        yield from _FUNCTIONS.items()
    else:
        yield from {"None": None, "number": 3, "string": "x", "class": type(value), "list": [value]}.items()


# Calls and outcomes.


def outcome_of_call(name: str, call: Call, argument: str | None, corruption: str, value: Any) -> Outcome:
    """Make one call, use its result, and return the outcome. `argument` None makes the valid call."""
    arguments = call.arguments()
    if argument is not None:
        arguments[argument] = value
    shown = argument or ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrong = call.use(call.function(**arguments))
        except Exception as error:
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            ours = _refusal(error) and type(error).__name__ != "NoUsableReply"
            named = shown in " ".join(str(error).split())
            return Outcome(name, shown, corruption, ("refused" if named else "unnamed") if ours else "raw", words)
    if wrong is not None:
        return Outcome(name, shown, corruption, "raw", wrong)
    said = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return Outcome(name, shown, corruption, "warned" if said else "accepted", said[0][:160] if said else "")


def odd_calls(name: str, call: Call) -> Iterator[Outcome]:
    """Yield the outcome of every corruption of every argument of a call, including defaults."""
    given = call.arguments()
    optional: dict[str, bool] = {}
    parameters = inspect.signature(call.function).parameters
    for key, parameter in parameters.items():
        optional[key] = "None" in str(parameter.annotation)
        if parameter.default is not parameter.empty and parameter.default is not None:
            given.setdefault(key, parameter.default)
    for argument, value in given.items():
        if argument in call.skip or type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
            continue
        for corruption, odd in corruptions(value):
            if odd is None and optional.get(argument, False):
                continue  # None is valid there
            yield outcome_of_call(name, call, argument, corruption, odd)


Listed = Mapping[tuple[str, str, str], str]
"""Reasons by (name, argument, corruption), each a pattern."""


def unlisted(outcomes: list[Outcome], accepted: Listed, otherwise: Listed) -> list[str]:
    """Return the odd calls with raw errors, and those that were accepted or unnamed without being listed.

    Args:
        outcomes: outcomes of all corruptions of a call.
        accepted: reasons for accepting calls.
        otherwise: what refusals name instead of the argument.
    """
    lists = {"raw": {}, "accepted": accepted, "unnamed": otherwise}
    return [str(o) for o in outcomes if o.kind in lists and not _rules(o, lists[o.kind])]


def table_tests(
    calls: Mapping[str, Call], accepted: Listed, otherwise: Listed, valid: Callable[[str], tuple[str, ...]]
) -> Callable[..., None]:
    """Return the test of a table: every odd call is refused, warned of or listed.

    Args:
        calls: the calls by name.
        accepted, otherwise: arguments of `unlisted`.
        valid: function that returns the kinds of outcome that an unchanged call may have, for its name.
    """

    @pytest.mark.parametrize("name", calls)
    def check_calls(name: str) -> None:
        plain = outcome_of_call(name, calls[name], None, "", None)
        assert plain.kind in valid(name), plain
        assert not (found := unlisted(list(odd_calls(name, calls[name])), accepted, otherwise)), "\n".join(found)

    return check_calls


def _rules(o: Outcome, listed: Listed) -> list[tuple[str, str, str]]:
    place = (o.name, o.argument, o.corruption)
    return [rule for rule in listed if all(fnmatch.fnmatchcase(v, p) for v, p in zip(place, rule))]
