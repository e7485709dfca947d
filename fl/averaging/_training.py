"""Local training of a client: its phases, batches and optimizer steps, and the add-on hooks that each step calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from distillkit._utils.eval_mode import train_mode
from distillkit.sets import LabeledImages
from fl.averaging._composition import batches_of, check_result, check_update, correct_gradient
from fl.averaging._entries import Entries
from fl.averaging.addon import AddOn, slot_owner
from fl.averaging.local import Local
from fl.averaging.optimizer import load_state, saved_state
from fl.averaging.step import Step
from fl.batches import Batch

_EXTRA = "an iterator of batches, or None"


def train(local: Local, addons: Sequence[AddOn], data: LabeledImages) -> None:
    """Run every phase of a client's training. Afterwards, `local.net` holds the trained weights.

    Args:
        local: training for which every add-on has run `before_training`.
        addons: the active add-ons, in the order in which they act.
        data: training set. With an add-on such as `DPSGD`, it holds the client's images, and `local.data` is empty to
            hide these images from all other add-ons. Otherwise, it is `local.data`.
    """
    streams: dict[str, Iterator[Batch]] = {
        addon.key: batches_of(
            addon, "extra_batches", check_result(addon, "extra_batches", stream, Iterator, _EXTRA), endless=True
        )
        for addon in addons
        if (stream := addon.extra_batches(local)) is not None
    }
    settings, slot = local.settings, slot_owner(addons, "batches")
    keeps_state, state = settings.optimizer.state == "client", dict[str, torch.Tensor]()
    for number, phase in enumerate(settings.phases):
        trained = local.trained_parameters(phase)
        optimizer, names = local.optimizer(list(trained.values())), [f"{number}/{n}" for n in trained]
        if keeps_state:
            load_state(optimizer, names, local.memory.get(Entries.moments) or {})
        real = local.batches(data, phase, f"batches{number}") if slot is None else slot.batches(local, data, phase)
        if slot is not None:
            real = batches_of(slot, "batches", check_result(slot, "batches", real, Iterable, "batches"))
        train_mode(local.net)
        before = local.steps
        for batch in real:
            local.client.check_running()
            extra = {key: next(stream) for key, stream in streams.items()}
            train_step(Step(local, batch, extra, trained), addons, optimizer)
            local.steps += 1
        local.phases.append((frozenset(trained), local.steps - before))
        if keeps_state:
            state |= saved_state(optimizer, names)
    if state:
        local.memory[Entries.moments] = state


def train_step(step: Step, addons: Sequence[AddOn], optimizer: torch.optim.Optimizer) -> None:
    """Take one optimizer step of local training, and call the add-ons' hooks for a step.

    First, the gradient is computed. If an add-on overrides the hook `gradient`, the hook computes it. Then the
    hook `correct_gradient` of each add-on changes the gradient, and the optimizer applies it. Finally, the hook
    `after_step` of each add-on is called.
    """
    if slot := slot_owner(addons, "gradient"):
        grads = check_update(slot, "gradient", slot.gradient(step, step.gradient), step.trained, "step.trained")
    else:
        grads = step.gradient()
    for addon in addons:
        correct_gradient(addon, step, grads)
    for name, param in step.trained.items():
        param.grad = grads[name]
    optimizer.step()
    for addon in addons:
        addon.after_step(step)
    for param in step.trained.values():
        param.grad = None  # frees the memory before the next gradient is computed
