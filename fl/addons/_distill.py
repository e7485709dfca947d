"""Ensemble distillation on the server: a student network learns the outputs of the clients' models."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distillkit._utils.batches import require_batch_statistics, uses_batch_statistics
from distillkit.losses import clip_logit_norm, knowledge_distillation
from distillkit.networks._dropout import seed_dropout
from fl.averaging import AveragingServer
from fl.batches import select_rows, shuffled_indices
from fl.message import Tensors
from fl.method import Predictor
from fl.networks import copied


def distill(
    student: nn.Module,
    images: Tensor,
    teacher_logits: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float,
    generator: torch.Generator,
    schedule: Literal["constant", "cosine"] = "constant",
    clip: float | None = None,
    gradient_norm: float | None = None,
    check_running: Callable[[], None] = lambda: None,
    score: Callable[[nn.Module], float] | None = None,
    every: int = 50,
    patience: int | None = None,
) -> int:
    """Train `student` in place with Adam to match the teacher's logits; return the number of steps taken."""
    seed_dropout(student, generator)
    optimizer = torch.optim.Adam(student.parameters(), lr=lr, foreach=False)
    best, found_at, kept = float("-inf"), 0, None
    require_batch_statistics(student.train(), images, min(batch, len(images)), "factory")
    batches = shuffled_indices(len(images), batch, generator, 1, steps, uses_batch_statistics(student), like=images)
    for step, index in enumerate(batches, start=1):
        check_running()
        if schedule == "cosine":
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
        logits = student.train()(select_rows(images, index))
        if clip is not None:
            logits = clip_logit_norm(logits, clip)
        target = select_rows(teacher_logits, index).to(logits)
        optimizer.zero_grad()
        knowledge_distillation(logits, target).backward()
        if gradient_norm is not None:
            nn.utils.clip_grad_norm_(student.parameters(), gradient_norm, foreach=False)
        optimizer.step()
        if score is not None and (step == 1 or step % every == 0 or step == steps):
            reached = score(student.eval())
            if reached > best:
                best, found_at = reached, step
                kept = copied(student)
            elif patience is not None and step - found_at >= patience:
                break
    if kept is not None:
        student.load_state_dict(kept)
    return step


def distill_models(
    server: AveragingServer,
    start: Tensors,
    images: Tensor,
    teacher_logits: Tensor,
    *,
    owner: str,
    best: bool,
    **options: Any,
) -> Tensors:
    """Train the server's model of each architecture by distillation, and return the weights of all models.

    The function writes `distillation_steps`, the largest number of steps of any architecture, to the history.

    Args:
        server: server of the run, with the networks and, for `best`, the validation images.
        start: initial weights of all architectures, by name.
        images: normalized images, float [N, C, H, W].
        teacher_logits: logits of the teacher, float [N, K].
        owner: key of the add-on that calls this function. The random draws depend on this key.
        best: whether to return the weights that are best on `server.data["validation"]` instead of the last weights.
        options: further options of `distill`.
    """
    networks = server.settings.networks
    found: Tensors = {}
    score = partial(validation_accuracy, server) if best else None
    options |= {"check_running": server.check_running, "score": score}
    steps = 0
    for name in networks.names:
        net, generator = server.network(name, server.weights(name, of=start)), server.generator(f"{owner} {name}")
        steps = max(steps, distill(net, images, teacher_logits, generator=generator, **options))
        found |= networks.prefixed(copied(net), name)
    server.notes["distillation_steps"] = steps
    return found


def validation_accuracy(server: AveragingServer, network: nn.Module) -> float:
    """Return the accuracy of `network`, in eval mode, on `server.data["validation"]`."""
    data = server.data["validation"]
    return server.task.metrics(Predictor(network, server.task.num_classes).sums(data, server.task))["accuracy"]


def starts_from_average(number: int, rate: float, warm_rounds: int) -> bool:
    """Return whether distillation in round `number` >= 1 starts from the average of the clients' models.

    This is the case in the first `warm_rounds` rounds. It is also the case in a share `rate` of all rounds, evenly
    spaced: with a rate of 0.2, in rounds 5, 10, ... In all other rounds, distillation starts from the server's previous
    model.
    """
    exact = Fraction(rate).limit_denominator(1000)
    return number <= warm_rounds or math.floor(exact * number) > math.floor(exact * (number - 1))


def falling_steps(most: int, least: int, period: int, number: int) -> int:
    """Return the number of distillation steps in round `number` >= 1.

    The number is `most` in round 1 and in every round whose index is a multiple of `period`. Between these rounds, it
    falls along half a cosine to `least`. Fractions are truncated, as in the authors' code of "Federated Learning with a
    Single Shared Image" (`cosine_annealing_round` in strategy/common.py, truncation in strategy/fed_df.py).
    """
    phase = number % period if number > 1 else 0
    return int(least + 0.5 * (most - least) * (1 + math.cos(phase / max(1, period - 1) * math.pi)))
