"""Checks before round 1. The augmentation and the add-ons are tried on noise images, and the objective on random
logits.

The options `personal` and `phases` contain patterns of parameter names. Each pattern must match a parameter.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from distillkit._utils.user_warnings import warn
from distillkit.augment import require_normalization
from distillkit.privacy import Ledger
from distillkit.rng import derive
from fl._noise_images import empty_set, noise_set, two_noise_images
from fl.averaging._entries import Entries
from fl.averaging.addon import AddOn, overrides
from fl.averaging.local import Local, received_state
from fl.averaging.settings import Settings
from fl.message import Message
from fl.participants import Client, Server


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def try_augmentation(server: Server, augment: Callable[..., Tensor] | None, name: str = "augment") -> None:
    """Apply the augmentation to two noise images, and refuse it if it fails or changes the shape or dtype of the batch.

    Args:
        server: server of the run, which knows the clients' image shape, dtype and normalization.
        augment: the option `augment` of a method or an add-on. If it is None, nothing is checked.
        name: name of the option in error messages.

    Raises:
        ValueError: the augmentation fails on noise images, changes their shape or dtype, or returns NaN or Inf.
    """
    if augment is None:
        return
    require_normalization(augment, server.normalization)
    images = two_noise_images(server)
    try:
        changed = augment(images.clone(), derive(0, "trial augment"))
    except Exception as error:
        raise ValueError(
            f"{name} fails on images like the clients', {list(images.shape)}: {_error_text(error)}"
        ) from error
    if not isinstance(changed, Tensor) or changed.shape != images.shape or changed.dtype != images.dtype:
        got = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
        raise ValueError(f"{name} must return {images.dtype} {list(images.shape)} for such images, got {got}")
    if not bool(torch.isfinite(changed).all()):
        raise ValueError(f"{name} must return finite images, but returns NaN or Inf for finite ones")


def try_objective(server: Server, objective: Callable[[Tensor, Tensor], Tensor] | None, outputs: int) -> None:
    """Call the objective with random logits and labels of the task.

    Refuse it unless it returns a differentiable scalar.

    Args:
        server: server of the run, which knows the task and the dtype of the clients' images.
        objective: the option `objective` of `FedAvg`. If it is None, nothing is checked.
        outputs: number of a network's outputs.

    Raises:
        ValueError: the objective takes log-probabilities, fails on random logits, or returns no differentiable scalar.
    """
    if objective is None:
        return
    if isinstance(objective, nn.NLLLoss):
        raise ValueError(
            "objective is called with logits, but NLLLoss takes log-probabilities; give torch.nn.CrossEntropyLoss, "
            "whose result for log-probabilities is the same"
        )
    logits = torch.randn(2, outputs, generator=derive(0, "trial logits"), dtype=server.dtype).requires_grad_()
    classes = server.task.num_classes
    labels = torch.tensor([0, classes - 1])
    if not server.task.single_label:
        labels = torch.eye(classes, dtype=server.dtype)[labels]
    try:
        loss = objective(logits, labels)
    except Exception as error:
        raise ValueError(
            f"objective fails on logits [2, {outputs}] and the task's labels: {_error_text(error)}"
        ) from error
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"objective must return one number, the mean over the batch, that depends on the logits; got {got}"
            f"{'' if isinstance(loss, Tensor) and loss.ndim else ' without a gradient'}"
        )
    once = float(loss.detach())
    if not math.isfinite(once):
        raise ValueError(f"objective must return a finite number for finite logits, got {once}")
    twice = float(objective(logits.detach().repeat(2, 1), torch.cat([labels, labels])))
    if once and abs(twice / once - 2) < 1e-3:
        warn(
            f"objective must return the mean over the batch, but returns {once:.3g} for a batch and "
            f"{twice:.3g} for the batch twice, as a sum does: use reduction='mean'"
        )


def require_patterns(settings: Settings, templates: Mapping[str, nn.Module]) -> list[str]:
    """Check the patterns in the options `personal` and `phases`, and return the parameter names of all architectures.

    Args:
        settings: the method's options.
        templates: one network of each architecture, by name.

    Raises:
        ValueError: a pattern matches no parameter, none is shared, or a phase trains none.
    """
    parameters = {name: [n for n, _ in net.named_parameters()] for name, net in templates.items()}
    known = list(dict.fromkeys(n for names in parameters.values() for n in names))
    require_matches(settings.personal, known, "personal")
    require_matches([p.train for p in settings.phases], known, "Phase(train=...)")
    for name, names in parameters.items():
        where = f" of architecture {name!r}" if name else ""
        if all(settings.is_personal(n) for n in names):
            raise ValueError(
                f"personal={settings.personal} keeps every parameter{where} with its client: none is averaged; give "
                "patterns that leave some"
            )
        for phase in settings.phases:
            if not any(phase.trains(n) for n in names):
                raise ValueError(
                    f"{phase} trains no parameter{where}: its pattern excludes all of them; give another pattern"
                )
    return known


def require_matches(patterns: Sequence[str], names: Sequence[str], option: str) -> None:
    """Refuse a pattern that matches no parameter's name.

    Args:
        patterns: patterns such as "classifier.*"; "!pattern" matches all names that "pattern" does not.
        names: names of the parameters.
        option: name of the option that holds the patterns, for the error message.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern.removeprefix("!")):
            known = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise ValueError(f"{option}: the pattern {pattern!r} matches no parameter; there are {known}")


def trial_trainings(
    settings: Settings, addons: Sequence[AddOn], server: Server, send: Callable[[Server, int], Message]
) -> Iterator[Local]:
    """Yield a `Local` on noise images for each architecture that any client has, if an add-on overrides `dry_run`.

    Every add-on has run `before_training` on it, but no training step has run.

    Args:
        settings: the method's options and its networks.
        addons: the active add-ons.
        server: server with the initial weights.
        send: the function `send` of the method, which returns the message to a client.
    """
    if not any(overrides(a, "dry_run") for a in addons):
        return
    networks, draws = settings.networks, derive(server.seed, 0, "server", "trial")
    for number in {networks.architecture(k): k for k in reversed(range(server.clients))}.values():
        data = noise_set(server.task, empty_set(server), draws)
        ledger = None if server.ledger is None else Ledger()  # an add-on may charge in `before_training`
        client = Client(number, data, None, server.task, 1, server.seed, device=server.device, ledger=ledger)
        message = send(server, number)
        if any(a.needs_previous for a in addons):
            client.memory[Entries.last] = received_state(settings, client, message)
        local = Local(settings, client, message, addons)
        for addon in addons:
            addon.before_training(local)
        yield local
