"""Ensemble distillation on the server: a student learns what the clients' models say of a set of images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from distillkit.losses import clip_logit_norm, knowledge_distillation
from fl.local import seed_dropout, shuffled

__all__ = ["distill"]


def distill(
    student: nn.Module,
    images: Tensor,
    teacher_logits: Tensor,
    *,
    steps: int,
    batch: int,
    lr: float,
    generator: torch.Generator,
    clip: float | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = knowledge_distillation,
    running: Callable[[], None] = lambda: None,
    score: Callable[[nn.Module], float] | None = None,
    every: int = 50,
) -> nn.Module:
    """Train `student` in place by Adam to say what the teacher says; return it in eval mode.

    Args:
        student: the network, on the images' device; trained in train mode, so that batch-norm statistics follow.
        images: float [N, C, H, W], normalised.
        teacher_logits: float [N, K]; for averaged probabilities give their logarithms.
        steps: optimiser steps; whole shuffled passes, the last short batch of each kept.
        batch: images a step.
        lr: Adam's rate, constant; betas 0.9 and 0.999.
        generator: of the order and of dropout.
        clip: norm s to which the student's logits are rescaled (`losses.clip_logit_norm`); the teacher's never are.
        loss: of the student's and the teacher's logits; by default KL(softmax(teacher) || softmax(student)), mean over
            images. A task has its own: `task.distill`.
        running: called in every step; raises to stop.
        score: with it the best of the weights after step 1, every `every` steps and the last are kept, else the last.
        every: how often `score` is asked; the network is in eval mode then.
    """
    seed_dropout(student, generator)
    optimizer = torch.optim.Adam(student.parameters(), lr=lr, foreach=False)
    best, kept = float("-inf"), None
    for step, index in enumerate(shuffled(len(images), batch, generator, 1, steps), start=1):
        running()
        logits = student.train()(images.index_select(0, index.to(images.device)))
        if clip is not None:
            logits = clip_logit_norm(logits, clip)
        target = teacher_logits.index_select(0, index.to(teacher_logits.device)).to(logits)
        optimizer.zero_grad()
        loss(logits, target).backward()
        optimizer.step()
        if score is not None and (step == 1 or step % every == 0 or step == steps):
            reached = score(student.eval())
            if reached > best:
                best, kept = reached, {n: t.detach().clone() for n, t in student.state_dict().items()}
    if kept is not None:
        student.load_state_dict(kept)
    return student.eval()
