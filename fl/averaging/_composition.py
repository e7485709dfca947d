"""Checks of the add-ons of a method: whether they can be combined, and whether their attributes and hooks are valid."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.user_warnings import warn
from distillkit.sets import LabeledImages
from fl._components import require_distinct, require_plain_options
from fl.averaging.addon import SLOTS, AddOn, overrides, slot_owner
from fl.averaging.settings import Settings, floating_buffers
from fl.averaging.step import Step
from fl.batches import Batch
from fl.message import Tensors

T = TypeVar("T")


def composed(addons: Sequence[object]) -> tuple[AddOn, ...]:
    """Check the add-ons of a method, and return the active ones, sorted by key.

    An add-on is active unless its options disable it. Add-ons act in the order of their keys.

    Args:
        addons: add-ons as the user passed them to `FedAvg`.

    Raises:
        TypeError: an argument is not an add-on, for example because it is a class (`FedProx` instead of `FedProx()`);
            or an option of an add-on has the name of a hook or another attribute of `AddOn`.
        TypeError, ValueError: an attribute of an add-on, such as `data_access`, has a value that `AddOn` does not
            permit.
        ValueError: two active add-ons have the same class or key, or override the same slot; or an add-on overrides
            `answer` but not `expect_answer`.
    """
    active: list[AddOn] = []
    for addon in addons:
        if isinstance(addon, type) and issubclass(addon, AddOn):
            raise TypeError(
                f"an add-on must be an object, got the class {addon.__name__}: FedAvg({addon.__name__}(...), ...)"
            )
        if not isinstance(addon, AddOn):
            hint = "; pass the function that makes the network as FedAvg(factory=...)" if callable(addon) else ""
            raise TypeError(f"FedAvg takes add-ons (`fl.addons`) before its options, got {type(addon).__name__}{hint}")
        require_plain_options(addon, AddOn)
        _require_attributes(addon)
        _warn_of_constant_damping(addon)
        _check_hooks(addon)
        if not addon.disabled:
            active.append(addon)
    active.sort(key=lambda one: one.key)
    require_distinct(active, "a method can have each add-on only once")
    for slot in SLOTS:
        both = [one.name for one in active if overrides(one, slot)]
        if len(both) > 1:
            raise ValueError(f"{' and '.join(both)} cannot be combined: both fill the slot {slot!r}; leave one out")
    for one in active:
        if overrides(one, "answer") and not overrides(one, "expect_answer"):
            raise ValueError(
                f"{one.name}.answer returns a reply, but the schema of this reply is missing: write expect_answer"
            )
    return tuple(active)


def require_full_models(asking: AddOn, settings: Settings, addons: Sequence[AddOn]) -> None:
    """Refuse a method if the server cannot rebuild the clients' whole models from their replies.

    Call it in the `check` of an add-on whose `read_reply` uses `server.trained(reply)`.

    Args:
        asking: add-on that needs whole models.
        settings: the method's options and its networks.
        addons: the active add-ons.

    Raises:
        ValueError: parameters or batch statistics stay with the clients, or an add-on rescales the updates.
    """
    networks, some = settings.networks, 2  # any number of classes, because buffers do not depend on it
    require_whole_models(asking, settings, "it runs the clients' models on the server")
    require_unscaled(asking, addons)
    if settings.buffers != "mean" and any(floating_buffers(networks.template(n, some)) for n in networks.names):
        raise ValueError(
            f"{asking.name} runs the clients' models on the server, but their batch statistics stay with the clients: "
            "give buffers='mean', or a network without them (norm='instance')"
        )


def require_whole_models(asking: AddOn, settings: Settings, reason: str) -> None:
    """Refuse a method in which parameters stay with the clients; the message shows the `reason`."""
    if settings.personal:
        raise ValueError(
            f"{asking.name} needs whole models, because {reason}: leave personal out, got personal={settings.personal}"
        )


def require_unscaled(asking: AddOn, addons: Sequence[AddOn]) -> None:
    """Refuse add-ons that rescale the clients' updates, because `asking` needs the original ones."""
    for addon in (a for a in addons if overrides(a, "scale_update")):
        raise ValueError(
            f"{asking.name} needs the clients' models, but {addon.name} rescales what they send: leave one of the two "
            "out"
        )


def require_one_architecture(addon: AddOn, settings: Settings, reason: str) -> None:
    """Refuse a method with several architectures; the message shows the `reason`."""
    names = settings.networks.names
    if len(names) > 1:
        raise ValueError(f"{addon.name} needs one architecture, got {list(names)}: {reason}")


def from_slot(addons: Sequence[AddOn], slot: str, *arguments: object, default: Tensors, name: str) -> Tensors:
    """Return the tensors that the add-on which fills a slot returns, or the default if no add-on fills it.

    Args:
        addons: the active add-ons.
        slot: name of the slot, a function of `AddOn`.
        arguments: arguments of this function.
        default: tensors with the expected names, shapes and devices.
        name: name of these tensors in error messages, such as that of the function's argument.

    Raises:
        TypeError, ValueError: the result is not a dict, has other names, or a tensor has another shape.
    """
    owner = slot_owner(addons, slot)
    return default if owner is None else check_update(owner, slot, getattr(owner, slot)(*arguments), default, name)


def check_update(
    addon: AddOn, hook: str, got: object, like: Mapping[str, Tensor], name: str, some: bool = False
) -> Tensors:
    """Check that tensors which a hook returned or changed have the names and shapes of others, and return them."""
    wanted = "tensors for names" if some else "a tensor for every name"
    expectation = f"{addon.name}.{hook} must return {wanted} of `{name}`"
    if not isinstance(got, dict):
        raise TypeError(f"{expectation}, got {type(got).__name__}")
    missing, unknown = sorted(set(like) - set(got)), sorted(map(str, set(got) - set(like)))
    if unknown or (missing and not some):
        wrong = {"lacks": [] if some else missing[:3], "has unknown": unknown[:3]}
        raise ValueError(
            f"{expectation}; it {' and '.join(f'{what} {names}' for what, names in wrong.items() if names)}"
        )
    for key, tensor in got.items():
        if not isinstance(tensor, Tensor) or tensor.shape != like[key].shape:
            came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{expectation}, of its shape: {key!r} must be {list(like[key].shape)}, got {came}")
        if tensor.layout is not torch.strided or tensor.device != like[key].device:
            raise ValueError(
                f"{expectation}, dense and on its device: {key!r} must be on {like[key].device}, got {tensor.layout} "
                f"on {tensor.device}"
            )
    return got


def check_result(addon: AddOn, hook: str, got: T, kind: Any, wanted: str) -> T:
    """Check the type of what a hook of an add-on returned, and return it."""
    if not isinstance(got, kind):
        raise TypeError(f"{addon.name}.{hook} must return {wanted}, got {type(got).__name__}")
    return got


def check_records(addon: AddOn, hook: str, got: Any, data: LabeledImages, wanted: str = "") -> LabeledImages:
    """Check that a hook of an add-on returned a set that fits the client's, and return it."""
    found: LabeledImages = check_result(addon, hook, got, LabeledImages, f"a LabeledImages{wanted}")
    data.require_compatible(found, names=("client.data", f"{addon.name}.{hook}(local)"))
    return found


def batches_of(addon: AddOn, hook: str, stream: Iterable[Batch], *, endless: bool = False) -> Iterator[Batch]:
    """Yield the batches that a hook of an add-on returned. Refuse other values, and a stream that ends too early."""
    for batch in stream:
        yield check_result(addon, hook, batch, Batch, "batches (fl.Batch)")
    if endless:
        raise ValueError(f"{addon.name}.{hook} must return as many batches as there are steps: repeat them without end")


def correct_gradient(addon: AddOn, step: Step, grads: Tensors) -> None:
    """Call the hook `correct_gradient`, which must change `grads` in place and keep its names and shapes."""
    result: Any = addon.correct_gradient(step, grads)  # type: ignore[func-returns-value]
    check_result(addon, "correct_gradient", result, type(None), "None, as it changes `grads` in place")
    check_update(addon, "correct_gradient", grads, step.trained, "grads")


def _require_attributes(addon: AddOn) -> None:
    """Raise TypeError or ValueError if an attribute that `AddOn` declares has an invalid value in this add-on."""
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
    """Warn if `damping` is the default of an option, so that it ignores the option's value."""
    options: tuple[Field[Any], ...] = fields(addon) if is_dataclass(addon) else ()
    for option in options:
        if addon.damping and type(addon).damping is option.default:
            warn(
                f"{addon.name}.damping is the default of {option.name}, whatever value {option.name} is given: write a "
                f"property, `def damping(self): return self.{option.name}`"
            )


def _check_hooks(addon: AddOn) -> None:
    """Refuse hooks with other arguments, and warn of methods that look like misspelt hooks: nothing calls these."""
    hooks = [n for n, value in vars(AddOn).items() if callable(value) and not n.startswith("_")]
    for hook in hooks:
        arguments = list(inspect.signature(getattr(AddOn, hook)).parameters)
        example = f"def {hook}({', '.join(arguments)})"
        check.callable_with(getattr(addon, hook), f"{addon.name}.{hook}", arguments[1:], example)
    own = {n for kind in type(addon).__mro__[: type(addon).__mro__.index(AddOn)] for n in vars(kind)}
    for name in sorted(n for n in own - set(dir(AddOn)) if not n.startswith("_")):
        if not callable(getattr(type(addon), name)):
            continue
        if meant := difflib.get_close_matches(name, hooks, n=1, cutoff=0.85):
            warn(f"{addon.name}.{name} is not a hook, so it is never called: did you mean {meant[0]}?")
