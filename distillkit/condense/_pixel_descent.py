"""Gradient descent on pixels, shared by every condenser that optimizes images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from distillkit._optimizers import sgd_step
from distillkit._utils import check
from distillkit._utils.devices import CHECKED_STEPS, is_accelerator
from distillkit._utils.progress import Bar
from distillkit.condense._state import Progress, Resume, finite_loss, pack_arguments, restore_state

Distance = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function of synthetic images [N, C, H, W] that returns a scalar loss and its gradient with respect to the images."""


class PixelDescent:
    """SGD with momentum on pixels, which can be resumed from a saved state with a bit-identical result.

    The class checks that the options are valid, and that the loss stays finite. It refuses to resume a state that was
    saved with other `arguments`.

    Args:
        images: initial images, float [N, C, H, W]; changed in place.
        lr, momentum: learning rate and momentum of SGD. With `lr=None`, the caller sets the attribute `lr` before the
            first step. Saved states contain the learning rate.
        steps: total number of steps, including those that a resumed state has already taken.
        arguments: arguments of the condensing function that affect its results, as JSON values by name. They are stored
            in every saved state. A call that resumes a state must have equal arguments.
        seed: seed of the caller's random draws. A resumed descent uses the seed in its state.
        resume: a state from `Progress.state()`, or the path of a file with a state. None starts from the beginning.
        identity: function that returns fingerprints of the data and the network, which are added to `arguments`.
            Fingerprints are slow to compute, so the function is called only when a state is saved or resumed.
        callback: function that is called with a `Progress` after each step.

    Attributes:
        loss: loss of the last step; None before the first step. After resuming a state, it is the loss of the last step
            before the state was saved.
    """

    loss: float | None = None

    def __init__(
        self, images: Tensor, *, lr: float | None, momentum: float, steps: int, arguments: Mapping[str, Any],
        seed: int, resume: Resume | None, identity: Callable[[], Mapping[str, Any]],
        callback: Callable[[Progress], object] | None,
    ) -> None:  # fmt: skip
        self.lr = None if lr is None else check.learning_rate(lr)
        self.momentum = check.real_number(momentum, "momentum", least=0.0, below=1.0)
        arguments = {**arguments, "lr": self.lr, "momentum": self.momentum, "shape": list(images.shape)}
        arguments["dtype"] = str(images.dtype)
        self.images, self.velocity = images, torch.zeros_like(images)
        if callback is not None:
            check.callable_with(callback, "callback", ["progress"], "a function of a Progress")
        self.steps, self.done, self.seed, self.callback = steps, 0, seed, callback
        self._arguments = functools.cache(lambda: {**arguments, **identity()})
        self._automatic = lr is None
        state = None if resume is None else restore_state(resume, self._arguments(), steps)
        if state is not None:
            self.images, self.velocity = (state[name].to(images).clone() for name in ("images", "velocity"))
            self.done, self.seed = int(state["step"]), int(state["seed"])
            self.loss = float(state["loss"]) if "loss" in state else None
            if self._automatic:
                self.lr = float(state["lr"])

    def remaining_steps(self) -> Iterator[int]:
        """Iterate over the indices of the steps that are not done yet: from `done` (0 at the start) to `steps` - 1."""
        yield from range(self.done, self.steps)

    def step(self, distance: Distance) -> float | Tensor:
        """Take one step of SGD with momentum on the optimized images, and return the loss.

        It is a float on a CPU. On an accelerator it is a tensor, which `report` reads from time to time.

        Args:
            distance: function of the images [N, C, H, W] that returns the loss, a scalar tensor, and its gradient with
                respect to the images.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        assert self.lr is not None
        loss, gradient = distance(self.images)
        value = loss if is_accelerator(self.images.device) else finite_loss(loss, self.done + 1)
        sgd_step([self.images], [gradient], [self.velocity], lr=self.lr, momentum=self.momentum)
        return value

    def report(self, loss: float | Tensor, bar: Bar | None = None) -> None:
        """Count a finished step, and report it to the callback and the progress bar.

        Args:
            loss: the loss of this step. A tensor is read every `CHECKED_STEPS` steps, at the end, or by the callback.
            bar: progress bar to advance by one step, or None.

        Raises:
            FloatingPointError: a loss that was read is not finite.
        """
        self.done += 1
        if self.done % CHECKED_STEPS == 0 or self.done == self.steps:
            loss = finite_loss(loss, self.done)
        if not isinstance(loss, Tensor):
            self.loss = loss
        if bar is not None:
            if not isinstance(loss, Tensor):
                bar.set_postfix_str(f"loss {loss:.3g}", refresh=False)
            bar.update()
        if self.callback is not None:
            state = {"images": self.images, "velocity": self.velocity, "step": torch.tensor(self.done)}
            value = loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
            state |= {"seed": torch.tensor(self.seed), "loss": value}
            if self._automatic:
                state["lr"] = torch.tensor(self.lr, dtype=torch.float64)
            pack = lambda: pack_arguments(self._arguments())  # noqa: E731
            before = {n: t._version if is_accelerator(t.device) else t.clone() for n, t in state.items()}
            self.callback(Progress(self.done, self.steps, loss, self.images, state, pack))
            for name, old in before.items():
                now = state[name]
                if not (now.equal(old) if isinstance(old, Tensor) else now._version == old):
                    raise ValueError(f"callback must not change {name}, which the next step uses: change a clone")
