"""Gradient descent on the pixels, which every condenser that optimises shares."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.progress import Bar
from distillkit.condense._state import Progress, Resume, pack_arguments, resumed

__all__ = ["Descent"]


class Descent:
    """The loop that every condenser that optimises pixels shares: SGD with momentum, resumable to the same bits.

    It checks its options, that the loss stays finite, and that a state to resume from belongs to this very call.

    Args:
        images: where to start, float [N, C, H, W]; changed in place.
        lr, momentum, steps: of the descent; `steps` in all.
        arguments: JSON values that decide the trajectory.
        identity: gives further ones that take a moment: fingerprints of the data and the network. Asked for only when
            a state is taken or resumed.
        seed: what the caller's draws derive from; a resumed descent has that of the state.
        resume: a state, or its file.
    """

    def __init__(
        self,
        images: Tensor,
        lr: float,
        momentum: float,
        steps: int,
        arguments: Mapping[str, Any],
        seed: int,
        resume: Resume | None,
        identity: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.lr = check.real_number(lr, "lr", above=0.0)
        self.momentum = check.real_number(momentum, "momentum", least=0.0, below=1.0)
        arguments = {**arguments, "lr": self.lr, "momentum": self.momentum, "shape": list(images.shape)}
        arguments["dtype"] = str(images.dtype)
        self.images, self.velocity = images, torch.zeros_like(images)
        self.steps, self.done, self.seed = steps, 0, seed
        self._said = functools.cache(lambda: {**arguments, **identity()})
        state = None if resume is None else resumed(resume, self._said(), steps)
        if state is not None:
            self.images, self.velocity = (state[name].to(images).clone() for name in ("images", "velocity"))
            self.done, self.seed = int(state["step"]), int(state["seed"])

    def descend(self, loss: Tensor, gradient: Tensor) -> float:
        """Do one step: v = momentum * v + gradient, images = images - lr * v.

        Args:
            loss: a scalar.
            gradient: of the loss in the images, [N, C, H, W].

        Returns:
            The loss as a number.

        Raises:
            FloatingPointError: the loss is no longer finite.
        """
        value = float(loss)
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value} in step {self.done + 1}: matching diverged; lower lr")
        self.velocity.mul_(self.momentum).add_(gradient)
        self.images.add_(self.velocity, alpha=-self.lr)
        return value

    def report(self, callback: Callable[[Progress], object] | None, loss: float, shown: Bar | None = None) -> None:
        """Count the step, and tell whoever watches.

        Args:
            callback: the caller's, given a `Progress`; or None.
            loss: of this step.
            shown: the bar, if the step is a unit of it.
        """
        self.done += 1
        if shown is not None:
            shown.set_postfix_str(f"loss {loss:.3g}", refresh=False)
            shown.update()
        if callback is not None:
            live = {"images": self.images, "velocity": self.velocity, "step": torch.tensor(self.done)}
            live["seed"] = torch.tensor(self.seed)
            packed = lambda: pack_arguments(self._said())  # noqa: E731
            callback(Progress(self.done, self.steps, loss, self.images, live, packed))
