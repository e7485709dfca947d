"""Conditions under which gradients of single examples may be clipped and noised."""

from __future__ import annotations

import torch

from distillkit.privacy.validation._independence import require_independent_augmentation, require_mean_objective
from distillkit.rng import derive
from fl._noise_images import empty_set, noise_set
from fl.averaging import AddOn, AveragingServer, Local
from fl.averaging.addon import overrides

__all__ = ["public_examples", "refuse_mixing_parts", "unsound"]

_DERIVED = {
    "answer": "asks the clients for statistics of their data, which have no noise",
    "dataset": "trains on a set derived from the private images without noise",
    "extra_records": "adds records to the private set, so that other records are drawn than those accounted for",
    "extra_batches": "adds images of its own to every step, whose gradient no per-example clip covers",
}
_BESIDE_A_TERM = ("correct_gradient", "after_step", "scale_update", "after_training")


def unsound(addon: AddOn) -> str:
    """Return the reason why an add-on would leak private data besides the noised gradients, or "".

    The reason is the end of a sentence.
    """
    for hook, why in _DERIVED.items():
        if overrides(addon, hook) and (hook != "answer" or addon.has_query):
            return why
    if addon.data_access == "batch":
        return "reads the images of a batch together, or more (data_access = 'batch'): no clip bounds one record's part"
    beside = [hook for hook in _BESIDE_A_TERM if overrides(addon, hook)]
    if addon.data_access == "example" and beside:
        return f"reads private examples (data_access = 'example') and fills {beside[0]!r}: only a loss can be clipped"
    return ""


def refuse_mixing_parts(server: AveragingServer, generator: torch.Generator) -> None:
    """Refuse an augmentation or objective that mixes the examples of a batch, by a trial on public noise.

    Args:
        server: server with the task, the options and the space of the images.
        generator: generator of the noise.

    Raises:
        BatchStatistics, NotSeparable: the augmentation or the objective mixes the examples of a batch.
    """
    settings, data = server.settings, noise_set(server.task, empty_set(server), generator)
    logits = torch.randn(len(data), server.outputs, generator=generator).to(data.images.device)
    require_mean_objective(settings.objective_of(server.task), logits, data.labels)
    if settings.augment is not None:
        require_independent_augmentation(settings.augment, data.images)


def public_examples(local: Local) -> list[torch.Tensor]:
    """Return six noise images in the space of the client's set, labels, and ones for each further column of the set."""
    data = noise_set(local.task, local.data, derive(local.client.seed, "trial"))
    columns = [local.data.columns[name] for name in sorted(local.data.columns)]
    ones = [c.new_ones((len(data), *c.shape[1:])) for c in columns]
    return [data.images, data.labels, *ones]
