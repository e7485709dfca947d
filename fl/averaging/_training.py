"""A local training and one step of it: the order in which the add-ons act."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fl.averaging._entries import Entries
from fl.averaging._optimizer_state import moments, resume
from fl.averaging.addon import AddOn, overrides, slot_owner
from fl.averaging.local import Local
from fl.averaging.step import Step
from fl.batches import Batch
from fl.message import Tensors

__all__ = ["take", "train"]


def train(local: Local, addons: Sequence[AddOn]) -> None:
    """Run every phase of a training; `local.net` then holds the trained weights.

    Args:
        local: a training that every add-on has begun.
        addons: all that are installed, in the order in which they act.
    """
    offered = {a.key: a.extra_batches(local) for a in addons if overrides(a, "extra_batches")}
    streams: dict[str, Iterator[Batch]] = {key: stream for key, stream in offered.items() if stream is not None}
    settings, slot = local.settings, slot_owner(addons, "batches")
    goes_on, kept = settings.optimizer_state == "client", dict[str, torch.Tensor]()
    for number, phase in enumerate(settings.phases):
        trained = local.trained_parameters(phase)
        optimizer, names = local.optimizer(list(trained.values())), [f"{number}/{n}" for n in trained]
        if goes_on:
            resume(optimizer, names, local.memory.get(Entries.moments) or {})
        real = slot.batches(local, local.data, phase) if slot else local.batches(local.data, phase, f"batches{number}")
        local.net.train()
        before = local.steps
        for batch in real:
            local.client.check_running()
            own = {key: next(stream) for key, stream in streams.items()}
            take(Step(local, batch, own, trained), addons, optimizer)
            local.steps += 1
        local.record_phase(trained, local.steps - before)
        if goes_on:
            kept |= moments(optimizer, names)
    if kept:
        local.memory[Entries.moments] = kept


def take(step: Step, addons: Sequence[AddOn], optimizer: torch.optim.Optimizer) -> None:
    """One step: the gradient of the loss (as an add-on may wrap it), corrections, the optimiser, what follows.

    Args:
        step: the batches that it reads and the parameters that it moves.
        addons: all that are installed, in the order in which they act.
        optimizer: of those parameters.
    """
    slot = slot_owner(addons, "gradient")
    grads: Tensors = slot.gradient(step, step.gradient) if slot else step.gradient()
    for addon in addons:
        addon.correct_gradient(step, grads)
    for name, param in step.trained.items():
        param.grad = grads[name]
    optimizer.step()
    for addon in addons:
        addon.after_step(step)
    for param in step.trained.values():
        param.grad = None  # else the next step's gradient is made beside this one, in memory that is new
