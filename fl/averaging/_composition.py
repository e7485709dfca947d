"""Composition of add-ons: checks of permitted combinations, and the order in which add-ons act."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any

from torch import Tensor

from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from fl._components import require_distinct, require_plain_options
from fl.averaging.addon import SLOTS, AddOn, overrides
from fl.averaging.settings import Settings, floating_buffers
from fl.message import Tensors

__all__ = [
    "active_addons", "check_update", "require_answer_schema", "require_composable", "require_full_models",
    "require_one_architecture", "require_unscaled", "require_whole_models",
]  # fmt: skip


def active_addons(addons: Sequence[object]) -> tuple[AddOn, ...]:
    """Return the active add-ons of a method, sorted by their keys, which is the order in which they act.

    Args:
        addons: add-ons as the user passed them to `FedAvg`.

    Raises:
        TypeError: an argument is not an add-on, for example a class (`FedProx` instead of `FedProx()`); or an option
            has the name of a hook or another attribute of `AddOn`.
        TypeError, ValueError: an attribute has a value that `AddOn` does not allow.
    """
    for addon in addons:
        if isinstance(addon, type) and issubclass(addon, AddOn):
            raise TypeError(
                f"an add-on must be an object, got the class {addon.__name__}: FedAvg({addon.__name__}(...), ...)"
            )
        if not isinstance(addon, AddOn):
            hint = "; what makes the network is an option: FedAvg(..., factory=...)" if callable(addon) else ""
            raise TypeError(f"FedAvg takes add-ons (`fl.addons`) before its options, got {type(addon).__name__}{hint}")
        require_plain_options(addon, AddOn)
        _require_attributes(addon)
        _warn_of_constant_damping(addon)
        _warn_of_misspelt_hooks(addon)
    found = [a for a in addons if isinstance(a, AddOn) and not a.disabled]
    return tuple(sorted(found, key=lambda a: a.key))


def require_composable(addons: Sequence[AddOn]) -> None:
    """Refuse add-ons that cannot be combined, while a method is being built.

    Args:
        addons: the active add-ons, sorted by their keys.

    Raises:
        ValueError: an add-on is given twice, or two add-ons fill the same slot.
    """
    require_distinct(addons, "an add-on may stand in a method once")
    for slot in SLOTS:
        both = [a.name for a in addons if overrides(a, slot)]
        if len(both) > 1:
            raise ValueError(f"{' and '.join(both)} cannot be combined: both fill the slot {slot!r}; leave one out")


def require_answer_schema(addons: Sequence[AddOn]) -> None:
    """Refuse an add-on that has `answer` but no `expect_answer`, while a method is being built.

    Args:
        addons: the active add-ons.

    Raises:
        ValueError: an add-on lacks `expect_answer`; the message names the add-on.
    """
    for addon in addons:
        if overrides(addon, "answer") and not overrides(addon, "expect_answer"):
            raise ValueError(
                f"{addon.name}.answer returns a reply, but the schema of this reply is missing: write expect_answer"
            )


def require_full_models(asking: AddOn, settings: Settings, addons: Sequence[AddOn]) -> None:
    """Refuse a method whose replies do not hold whole models, for an add-on that runs clients' models on the server.

    Call it in the `check` of an add-on whose `read_reply` uses `server.trained(reply)`.

    Args:
        asking: add-on that needs whole models.
        settings: the method's options and its networks.
        addons: the active add-ons.

    Raises:
        ValueError: part of a model stays with its client (`personal`, `buffers`), or an add-on rescales updates.
    """
    networks, some = settings.networks, 2  # classes: buffers do not depend on how many
    require_whole_models(asking, settings, "it runs the clients' models on the server")
    require_unscaled(asking, addons)
    if settings.buffers != "mean" and any(floating_buffers(networks.template(n, some)) for n in networks.names):
        raise ValueError(
            f"{asking.name} runs the clients' models on the server, but their batch statistics stay with the clients: "
            "give buffers='mean', or a network without them (norm='instance')"
        )


def require_whole_models(asking: AddOn, settings: Settings, reason: str) -> None:
    """Refuse a method with personal parameters, for an add-on that needs all parameters on the server.

    Args:
        asking: add-on that needs whole models.
        settings: the method's options.
        reason: reason for the refusal, for the message.

    Raises:
        ValueError: some parameters are personal.
    """
    if settings.personal:
        raise ValueError(
            f"{asking.name} needs whole models, so nothing can be personal: {reason}; leave personal out, got "
            f"personal={settings.personal}"
        )


def require_unscaled(asking: AddOn, addons: Sequence[AddOn]) -> None:
    """Refuse add-ons that rescale the clients' updates, for an add-on that reads the updates.

    Args:
        asking: add-on that reads the updates.
        addons: the active add-ons.

    Raises:
        ValueError: an add-on rescales updates; the message names it.
    """
    for addon in (a for a in addons if overrides(a, "scale_update")):
        raise ValueError(
            f"{asking.name} needs the clients' models, but {addon.name} rescales what they send: leave one of the two "
            "out"
        )


def require_one_architecture(addon: AddOn, settings: Settings, reason: str) -> None:
    """Refuse a method with several architectures, for an add-on that needs a single one.

    Args:
        addon: add-on that needs a single architecture.
        settings: the method's options and its networks.
        reason: reason for the refusal, for the message.

    Raises:
        ValueError: the method has several architectures.
    """
    names = settings.networks.names
    if len(names) > 1:
        raise ValueError(f"{addon.name} needs one architecture, got {list(names)}: {reason}")


def check_update(addon: AddOn, slot: str, got: object, mean: Tensors) -> Tensors:
    """Return an add-on's update if it has the same names and shapes as the mean update; otherwise raise an error.

    Args:
        addon: add-on that returned the update.
        slot: name of the slot, for the message.
        got: value that the add-on returned.
        mean: mean update that was passed to the add-on.

    Raises:
        TypeError, ValueError: the return value is missing, its names differ from those of the mean update, or the shape
            of a tensor differs.
    """
    expectation = f"{addon.name}.{slot} must return a tensor for every name of `mean`"
    if not isinstance(got, dict):
        raise TypeError(f"{expectation}, got {type(got).__name__}")
    missing, unknown = sorted(set(mean) - set(got)), sorted(map(str, set(got) - set(mean)))
    if missing or unknown:
        wrong = {"lacks": missing[:3], "has unknown": unknown[:3]}
        raise ValueError(
            f"{expectation}; it {' and '.join(f'{what} {names}' for what, names in wrong.items() if names)}"
        )
    for name, tensor in got.items():
        if not isinstance(tensor, Tensor) or tensor.shape != mean[name].shape:
            came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{expectation}, of its shape: {name!r} must be {list(mean[name].shape)}, got {came}")
    return got


def _require_attributes(addon: AddOn) -> None:
    """Raise TypeError or ValueError if an attribute of an add-on is not valid."""
    name = addon.name
    check.one_of(addon.data_access, f"{name}.data_access", ("none", "example", "batch"))
    check.positive_int(addon.extra_outputs, f"{name}.extra_outputs", least=0)
    check.positive_int(addon.first_round, f"{name}.first_round")
    check.real_number(addon.damping, f"{name}.damping", least=0.0)
    check.boolean(addon.needs_previous, f"{name}.needs_previous")
    check.boolean(addon.single_label, f"{name}.single_label")
    for layer in check.sequence(addon.layers, f"{name}.layers", "names of modules of the network"):
        if not isinstance(layer, str):
            raise TypeError(f"{name}.layers must be names of modules of the network, got {layer!r}")


def _warn_of_constant_damping(addon: AddOn) -> None:
    """Warn about `damping = alpha` in a class body, which uses the default of option alpha instead of its value."""
    options: tuple[Field[Any], ...] = fields(addon) if is_dataclass(addon) else ()
    for option in options:
        if addon.damping and type(addon).damping is option.default:
            warn(
                f"{addon.name}.damping is the default of {option.name}, whatever value {option.name} is given: write a "
                f"property, `def damping(self): return self.{option.name}`"
            )


def _warn_of_misspelt_hooks(addon: AddOn) -> None:
    """Warn about methods that are never called and whose names resemble the name of a hook."""
    hooks = [n for n, value in vars(AddOn).items() if callable(value) and not n.startswith("_")]
    own = {n for kind in type(addon).__mro__[: type(addon).__mro__.index(AddOn)] for n in vars(kind)}
    for name in sorted(n for n in own - set(dir(AddOn)) if not n.startswith("_")):
        if not callable(getattr(type(addon), name)):
            continue
        if meant := difflib.get_close_matches(name, hooks, n=1, cutoff=0.85):
            warn(f"{addon.name}.{name} is not a hook, so it is never called: did you mean {meant[0]}?")
