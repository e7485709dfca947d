"""An object as JSON: what it is made of, by names and numbers."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distillkit._utils.files import write_tensors
from distillkit._utils.init_recorder import Recorded
from distillkit.fingerprint import set_fingerprint, tensor_fingerprint
from distillkit.recipes.names import is_named, path_of, source_of
from distillkit.sets import LabeledImages

__all__ = ["KIND", "NotRecorded", "named", "recipe", "tensors_fingerprint"]

KIND = "distillkit.tensors/1"
"""The format of a file of tensors in a store."""


class NotRecorded(TypeError):
    """Something in a value cannot be said in JSON; the message names where it stands and what to write instead."""


def recipe(
    value: Any, *, store: str | Path | None = None, shared: str | Path | None = None, name: str = "value"
) -> Any:
    """What `value` is, in JSON: numbers and words as they are, objects by their class and what built them.

    Call it to write down what a run was asked to do; `made` builds it again. Known are None, numbers, strings, lists,
    tuples, dictionaries, ranges, paths, PyTorch's dtypes, devices and sizes; functions and classes that have a name at
    the top level of a module, and `functools.partial` of them; dataclasses; objects that know what they were built with
    (`Recorded`: every method, add-on, filter, sampler and network of ours); tensors and sets of images, if there is a
    place to keep them.

    Args:
        value: what is to be said.
        store: a folder for tensors and sets, each in a file that bears its fingerprint. It is made when needed, and
            nothing is written unless all of `value` can be said.
        shared: another store that may have some of these files: they are linked in place of being written once more.
        name: what `value` is called in messages.

    Raises:
        NotRecorded: a lambda, a function within a function, an open file, a generator of random numbers, ...: what it
            is and where in `value` it stands. A `TypeError`.
    """
    saying = _Saying(store is not None)
    said = saying.say(value, name)
    if store is not None and saying.writing:
        folder = Path(store)
        folder.mkdir(parents=True, exist_ok=True)
        for file, write in saying.writing.items():
            if not (folder / file).exists() and not _linked(shared, folder, file):
                write(folder / file)
    return said


def _linked(shared: str | Path | None, folder: Path, file: str) -> bool:
    """Whether a file could be linked; files of a store are replaced and never changed, so that a link is a copy."""
    if shared is None:
        return False
    try:
        os.link(Path(shared) / file, folder / file)
    except OSError:  # it is not there, or the file system has no links
        return False
    return True


def named(value: Any) -> dict[str, Any]:
    """The functions and classes that the recipe of `value` names, by these names: what `made(said, names=...)` takes.

    Args:
        value: as for `recipe`.

    Raises:
        NotRecorded: see `recipe`.
    """
    saying = _Saying(keeps=True)
    saying.say(value, "value")
    return saying.named


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The fingerprint of named tensors, in their order."""
    return tensor_fingerprint([part for name, tensor in tensors.items() for part in (name, tensor)])


class _Saying:
    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.writing: dict[str, Callable[[Path], Any]] = {}
        self.named: dict[str, Any] = {}
        self.within: list[Any] = []

    def say(self, value: Any, at: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float or isinstance(value, np.number | np.bool_):
            number = value if kind is float else value.item()
            return {"float": repr(number)} if isinstance(number, float) and not math.isfinite(number) else number
        if any(value is outer for outer in self.within):
            raise NotRecorded(f"{at} contains itself, and JSON cannot say that")
        self.within.append(value)
        try:
            return self._object(value, at)
        finally:
            self.within.pop()

    def _object(self, value: Any, at: str) -> Any:
        kind = type(value)
        if kind is list:
            return [self.say(v, f"{at}[{i}]") for i, v in enumerate(value)]
        if kind in (torch.Size, tuple):
            items = [self.say(v, f"{at}[{i}]") for i, v in enumerate(value)]
            return {"tuple" if kind is tuple else "size": items}
        if kind in (dict, OrderedDict, MappingProxyType):
            if value and all(type(k) is str and isinstance(v, Tensor) for k, v in value.items()):
                return self._tensors(dict(value), at)
            return {"dict": [[self.say(k, f"a key of {at}"), self.say(v, f"{at}[{k!r}]")] for k, v in value.items()]}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        if isinstance(value, torch.dtype | torch.device):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, LabeledImages):
            return self._set(value, at)
        if kind in (Tensor, nn.Parameter):
            self._require_store(at, f"a tensor of shape {list(value.shape)}")
            return {"tensor": self._keep({"tensor": value})}
        if is_named(value):
            return {"name": self._path(value), **_source(value)}
        if kind is functools.partial:
            given = {"args": [self.say(v, f"{at}.args[{i}]") for i, v in enumerate(value.args)]} if value.args else {}
            named = {k: self.say(v, f"{at}.{k}") for k, v in value.keywords.items()}
            return {"partial": self.say(value.func, f"{at}.func"), **given, **({"with": named} if named else {})}
        return self._built(value, at)

    def _built(self, value: Any, at: str) -> Any:
        kind = type(value)
        if not is_named(kind):
            raise NotRecorded(f"{at} is {_what(value)}, which cannot be said in JSON: {_remedy(value)}")
        said: dict[str, Any] = {"object": self._path(kind), **_source(kind)}
        init = next((base for base in kind.__mro__ if "__init__" in vars(base)), object)
        if is_dataclass(kind) and "__dataclass_params__" in vars(init):
            options = {f.name: getattr(value, f.name) for f in fields(kind) if f.init}
            signature = inspect.signature(kind)
            if isinstance(value, Recorded):  # `__post_init__` may have turned what was given into something else
                given, named = value.built_with()
                options |= signature.bind_partial(*given, **named).arguments
            if set(signature.parameters) <= set(options):  # it has no `InitVar`
                return said | {"with": {k: self.say(v, f"{at}.{k}") for k, v in options.items()}}
        if not isinstance(value, Recorded):
            raise NotRecorded(f"{at} is {_what(value)}, which cannot be said in JSON: {_remedy(value)}")
        said |= self._arguments(value, kind, at)
        if isinstance(value, nn.Module):
            self._require_store(at, f"{_what(value)} and its weights")
            said["weights"] = self._keep(value.state_dict()) if value.state_dict() else None
            said["training"] = value.training
        return said

    def _arguments(self, value: Recorded, kind: type, at: str) -> dict[str, Any]:
        given, named = value.built_with()
        bound = inspect.signature(kind.__init__).bind(value, *given, **named)  # type: ignore[misc]
        stated = set(bound.arguments)
        bound.apply_defaults()
        by_position, by_name = list[Any](), dict[str, Any]()
        parameters = list(bound.signature.parameters.values())[1:]
        open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        for p in parameters:
            here = bound.arguments[p.name]
            if p.kind is p.VAR_POSITIONAL:
                by_position += [self.say(v, f"{at}.{p.name}[{i}]") for i, v in enumerate(here)]
            elif p.kind is p.VAR_KEYWORD:
                by_name |= {k: self.say(v, f"{at}.{k}") for k, v in here.items()}
            elif p.kind is p.POSITIONAL_ONLY or (open_ended and p.kind is p.POSITIONAL_OR_KEYWORD):
                by_position.append(self.say(here, f"{at}.{p.name}"))
            else:
                try:
                    by_name[p.name] = self.say(here, f"{at}.{p.name}")
                except NotRecorded:
                    if p.name in stated:  # what was left at its default need not be said
                        raise
        return {k: v for k, v in (("args", by_position), ("with", by_name)) if v}

    def _tensors(self, tensors: dict[str, Tensor], at: str) -> dict[str, Any]:
        self._require_store(at, f"{len(tensors)} tensors by name")
        return {"tensors": self._keep(tensors)}

    def _set(self, data: LabeledImages, at: str) -> dict[str, Any]:
        self._require_store(at, f"a set of {len(data)} images")
        found = set_fingerprint(data)
        self.writing[f"{found}.safetensors"] = data.save
        return {"set": found}

    def _keep(self, tensors: dict[str, Tensor]) -> str:
        found = tensors_fingerprint(tensors)
        facts = {"format": KIND, "order": json.dumps(list(tensors))}
        self.writing[f"{found}.safetensors"] = lambda path: write_tensors(path, tensors, facts)
        return found

    def _path(self, value: Any) -> str:
        path = path_of(value)
        self.named[path] = value
        return path

    def _require_store(self, at: str, what: str) -> None:
        if not self.keeps:
            raise NotRecorded(f"{at} is {what}, which JSON cannot hold: give store=, a folder for its file")


def _source(value: Any) -> dict[str, str]:
    source = source_of(value)
    return {} if source is None else {"source": source}


def _what(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    if name is None or not callable(value):
        return f"a {type(value).__qualname__}"
    if "<lambda>" in name:
        return "a lambda"
    return f"the function {name} within a function" if "<locals>" in name else f"{name}, a {type(value).__name__}"


def _remedy(value: Any) -> str:
    name = getattr(value, "__qualname__", "") if callable(value) else ""
    partial = "functools.partial(ConvNet, (3, 32, 32), width=32)"
    if "<lambda>" in name:
        return f"a lambda has no name; write {partial}, or a function at the top level of a module"
    if "<locals>" in name:
        return f"it has no name outside; write it at the top level of a module, or {partial} for its arguments"
    if isinstance(value, torch.Generator):
        return "give the seed in its place"
    if isinstance(value, np.ndarray):
        return "give torch.from_numpy(array)"
    if isinstance(value, nn.Module):
        return (
            f"derive {type(value).__qualname__} from distillkit.recipes.Recorded, or give what makes it, as {partial}"
        )
    if "<locals>" in type(value).__qualname__:
        return "write its class at the top level of a module"
    return "write its class as a frozen dataclass, or derive it from distillkit.recipes.Recorded"
