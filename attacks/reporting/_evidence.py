"""Evidence of a privacy report: the recorded run, what its adversaries observe, and the user's records."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.reporting._recorded_run import RecordedRun
from attacks.reporting.published_set import SHARED, digests
from distillkit._utils import check
from distillkit.rng import derive
from distillkit.sets import LabeledImages

_LEAST = 20
"""Smallest number of non-members for a false-positive rate, which is counted on half of them. The threshold is chosen
on the other half."""


class IncompatibleImages(ValueError):
    """Error: images are not pixels in [0, 1], differ from the run's in shape, or non-members are members."""


@dataclass(frozen=True, eq=False)
class Records:
    """Records that the user passed to `report`: either members (training records) or non-members.

    Attributes:
        pixels: pixels of all records, float [N, C, H, W] in [0, 1].
        index: indices of the records that are attacked, int64 [n]. Their number n is at most the argument `max_records`
            of `report`.
        data: the set that the user passed; None if the user passed only pixels.
    """

    pixels: Tensor
    index: Tensor
    data: LabeledImages | None

    @property
    def selected(self) -> Tensor:
        """Pixels of the records that are attacked, float [n, C, H, W]."""
        return self.pixels[self.index]


@dataclass(frozen=True, eq=False)
class ObservedData:
    """Images, updates and counts that an adversary of a run observes.

    Attributes:
        rounds: pixels of all images sent in each round, [M, C, H, W]; a published set counts as one round.
        sets: pairs of a client's index and a set that the client sent.
        updates: a triple for each update: the client's index, the change of the last layer's bias, and the client's
            number of records (None if the client did not send this number).
        replies: number of training requests to which each client replied, by client index.
    """

    rounds: list[Tensor]
    sets: list[tuple[int, LabeledImages]]
    updates: list[tuple[int, Tensor, int | None]]
    replies: dict[int, int]

    @staticmethod
    def from_run(run: RecordedRun) -> ObservedData:
        """Return the data in a run's transcript and in its published set, as far as the run has them."""
        rounds: dict[int, list[Tensor]] = {}
        sets, updates, replies = [], [], dict[int, int]()
        sized = (run.plain_fedavg or {}).get("weights") == "samples"
        for message in run.messages():
            if message.direction == "down":
                continue
            if message.exchange == "local":
                replies[message.client] = replies.get(message.client, 0) + 1
            for data in filter(len, message.sets.values()):
                rounds.setdefault(message.round, []).append(data.pixels().float())
                sets.append((message.client, data))
            samples = next((v for k, v in message.values.items() if k.endswith(".samples")), None)
            count = float(samples) if sized and isinstance(samples, float | int) else 0.0
            size = int(count) if count > 0 and count.is_integer() else None
            for key, value in message.values.items():
                if key.endswith(".update") and isinstance(value, dict):
                    biases = [t for n, t in value.items() if n.endswith("bias") and t.ndim == 1]
                    updates += [(message.client, biases[-1], size)] if biases else []
        if run.published_set is not None:
            rounds.setdefault(0, []).append(run.published_set.pixels().float())
        return ObservedData([torch.cat(rounds[r]) for r in sorted(rounds)], sets, updates, replies)


@dataclass(frozen=True, eq=False)
class Evidence:
    """Inputs of all sections of a report.

    Attributes:
        run: the recorded run.
        observed: what its adversaries observe.
        members: training records; None if the user passed none.
        non_members: records that were not used for training; None if the user passed none.
        network: network of the run's architecture, with any weights; None if the user passed none.
    """

    run: RecordedRun
    observed: ObservedData
    members: Records | None = None
    non_members: Records | None = None
    network: nn.Module | None = None

    @staticmethod
    def gather(
        run: RecordedRun, members: LabeledImages | Tensor | None, non_members: LabeledImages | Tensor | None,
        network: nn.Module | None, most: int,
    ) -> Evidence:  # fmt: skip
        """Check what the user passed, and read what the run's adversaries observe.

        Args:
            run: the recorded run.
            members, non_members, network: arguments of `report`.
            most: largest number of members and of non-members to attack.

        Raises:
            IncompatibleImages: images differ from the run's, are not pixels, or non-members are members.
            ValueError: there are too few non-members, or records have no labels although a network was passed.
        """
        given = {"members": members, "non_members": non_members}
        found = {name: None if one is None else _selected(one, name, run, most) for name, one in given.items()}
        inside, outside = found.values()
        if network is not None and any(one is not None and one.data is None for one in found.values()):
            raise ValueError("members and non_members must be LabeledImages if a network is given, for their labels")
        if outside is not None and len(outside.index) < _LEAST:
            raise ValueError(f"non_members must be at least {_LEAST}, got {len(outside.index)}: give the test set")
        if inside is not None and outside is not None:
            known = set(digests(inside.pixels))
            shared, count = sum(one in known for one in digests(outside.pixels)), len(outside.pixels)
            if shared > SHARED * count:
                words = f"but {shared} of {count} non_members are also members, which training must not have used"
                raise IncompatibleImages(f"members and non_members must not share records, {words}")
        return Evidence(run, ObservedData.from_run(run), inside, outside, network)


def _selected(given: LabeledImages | Tensor, name: str, run: RecordedRun, most: int) -> Records:
    data = given if isinstance(given, LabeledImages) else None
    images = check.batch_of_images(given if data is None else data.images, name)  # type: ignore[arg-type]
    pixels = images if data is None else data.normalization.decode(images)
    if float(pixels.min()) < -0.01 or float(pixels.max()) > 1.01:
        raise IncompatibleImages(
            f"{name} must be pixels in [0, 1] or a set with its normalization, got {float(pixels.min()):.3g} to "
            f"{float(pixels.max()):.3g}: give LabeledImages(images, labels, normalization=...)"
        )
    if run.shape is not None and tuple(images.shape[1:]) != run.shape:
        raise IncompatibleImages(
            f"{name} must have the shape of the run's images, {list(run.shape)}, got {list(images.shape[1:])}: load "
            "them as the run did (the same size=)"
        )
    if data is not None and (space := run.normalization) is not None:
        own = data.normalization
        if (own.mean, own.std, own.zca) != (space.mean, space.std, None):
            data = data.renormalize(space)  # a network gets its images as the run's clients did
    count, purpose = len(images), "members" if name == "members" else "outsiders"
    order = torch.randperm(count, generator=derive(0, purpose)) if count > most else torch.arange(count)
    return Records(pixels.clamp(0, 1).float().cpu(), order[:most].sort().values, data)


def with_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module | None:
    """Return a copy of the network with these weights; None if they are those of another architecture."""
    model = copy.deepcopy(network).cpu()
    own = model.state_dict()
    if set(own) != set(weights) or any(own[n].shape != t.shape for n, t in weights.items()):
        return None
    model.load_state_dict(weights)
    return model
