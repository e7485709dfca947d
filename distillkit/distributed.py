"""Condensation and evaluation in several processes, with `torch.distributed`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distillkit._utils import check
from distillkit._utils.files import contiguous_cpu
from distillkit._utils.shares import share_of
from distillkit.sets import LabeledImages, TiledImages
from distillkit.sets._class_index import class_indices

__all__ = ["over_classes", "over_repeats"]

Content = tuple[dict[str, Tensor], Any]
"""Result of a process: named tensors, and JSON values."""


def over_classes(
    function: Callable[..., LabeledImages], classes: Sequence[int], *, group: dist.ProcessGroup | None = None,
    timeout: float = 3600.0,
) -> LabeledImages:  # fmt: skip
    """Condense the classes of a set in several processes, each process some of them.

    Every process calls this function with equal arguments, for example under `torchrun`:

        torch.distributed.init_process_group("gloo")
        condense = partial(distribution_matching, real, networks=networks, lr=1.0)
        condensed = over_classes(condense, range(10))

    The processes communicate only at the end. The result is that of one call with all classes: to the bit for `stitch`,
    `herding` and `k_center`. It is up to rounding for `distribution_matching`, and `gradient_matching` without inner
    training, because processors may round the sums of a network by the number of images in a call.

    Args:
        function: function that condenses the classes in its argument `classes`, with equal results in every process for
            equal classes. Without `torch.distributed`, this process condenses all classes.
        classes: the classes to condense, in any order.
        group: processes that share the classes; default: all.
        timeout: seconds that a process waits at the end for the slowest one.

    Returns:
        The set with the images of all classes, sorted by class, in every process. A process keeps the device of its
        share.

    Raises:
        TypeError, ValueError: an argument is invalid; `function` returns no set, or other classes; the processes of
            `torchrun` have not called `init_process_group`; or a result depends on all classes: `lr=None`, a random
            `init` other than "real", `random_subset`, batch statistics, training on the synthetic set, and private
            releases, which one call must charge.
        RuntimeError: another process failed, was killed, or is later than `timeout`. A process notices this when its
            own share is finished.
    """
    check.accepts(function, {"classes": classes}, "classes")
    wanted = class_indices(classes, 2**31)
    rank, size = _place(group)
    share = [int(c) for c in torch.tensor(wanted).tensor_split(size)[rank]]

    def compute() -> Content:
        if not share:
            return {}, None
        made = function(classes=share)
        if not isinstance(made, LabeledImages):
            raise TypeError(f"function must return a LabeledImages, got {type(made).__name__}")
        if made.labels.ndim == 1 and not set(made.labels.tolist()) <= set(share):
            raise ValueError(f"function must return images of classes={share}, got {sorted(set(made.labels.tolist()))}")
        devices.append(made.images.device)
        return made.parts()

    devices: list[torch.device] = []
    found = _gathered("over_classes", compute, group, timeout)
    parts = [LabeledImages.from_parts(tensors, facts) for tensors, facts in found if tensors]
    joined = LabeledImages.concatenate(parts)
    if tiled := [part for part in parts if isinstance(part, TiledImages)]:
        joined = TiledImages._of(joined, torch.cat([part.stored for part in tiled]), tiled[0].tiles)
    return joined.to(devices[0]) if devices else joined


def over_repeats(
    function: Callable[[int], Any], count: int, *, group: dist.ProcessGroup | None = None, timeout: float = 3600.0
) -> list[Any]:
    """Call a function for each repetition of an experiment, in several processes.

    Use it to evaluate a set with several networks:

        accuracies = over_repeats(lambda i: evaluate(small, test, factory, num_networks=1, generator=i).accuracy, 20)

    Args:
        function: function of the number of the repetition, from 0, that returns JSON values.
        count: number of repetitions.
        group, timeout: as in `over_classes`.

    Returns:
        The results in the order of the repetitions, in every process.

    Raises:
        TypeError, ValueError, RuntimeError: as for `over_classes`; or `function` returns no JSON value.
    """
    check.callable_with(function, "function", ["i"], "a function of the number of a repetition", classes=True)
    count = check.positive_int(count, "count")
    rank, size = _place(group)

    def compute() -> Content:
        own = {i: function(i) for i in range(rank, count, size)}
        try:
            return {}, json.loads(json.dumps(own))
        except (TypeError, ValueError) as error:
            raise TypeError(f"function must return JSON values, such as numbers and lists: {error}") from error

    merged = {i: value for _, own in _gathered("over_repeats", compute, group, timeout) for i, value in own.items()}
    return [merged[str(i)] for i in range(count)]


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank of this process in the group, and the size of the group."""
    if not (dist.is_available() and dist.is_initialized()):
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError("the processes are not connected: call torch.distributed.init_process_group() first")
        return 0, 1
    if (rank := dist.get_rank(group)) < 0:
        raise ValueError("group must contain this process; call the function only in the processes of the group")
    return rank, dist.get_world_size(group)


def _gathered(
    name: str, compute: Callable[[], Content], group: dist.ProcessGroup | None, timeout: float
) -> list[Content]:
    """Return what `compute` returns in each process of the group, or raise an error in all of them."""
    from safetensors.torch import load, save

    timeout = check.real_number(timeout, "timeout", above=0.0)
    rank, size = _place(group)
    gloo: Any = None
    failure: Exception | None = None
    try:
        if size > 1:  # of its own backend and time limit, and connected before the work
            members = dist.get_process_group_ranks(group or dist.group.WORLD)
            gloo = dist.new_group(members, timedelta(seconds=timeout), "gloo", use_local_synchronization=True)
        try:
            with share_of(name):
                tensors, facts = compute()
        except Exception as error:
            failure, tensors, facts = error, {}, None
        content = {"failure": failure and f"{type(failure).__name__}: {failure}", "facts": facts}
        words = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        own = save({**contiguous_cpu(tensors), "": words})
        messages = [own] if gloo is None else _exchanged(own, rank, size, gloo)
    except RuntimeError as error:
        raise RuntimeError(
            f"{name} lost a process, which was killed or did not answer for {timeout:g} s; run it again ({error})"
        ) from (failure or error)
    finally:
        if gloo is not None:
            dist.destroy_process_group(gloo)
    if failure is not None:
        raise failure
    found = list[Content]()
    for other, message in enumerate(messages):
        tensors = load(message)
        content = json.loads(bytes(tensors.pop("").tolist()))
        if content["failure"] is not None:
            raise RuntimeError(f"{name} failed in process {other} of the group: {content['failure']}")
        found.append((tensors, content["facts"]))
    return found


def _exchanged(own: bytes, rank: int, size: int, group: dist.ProcessGroup) -> list[bytes]:
    """Return the message of each process of the group."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=group)
    messages = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    messages[rank] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    for source, message in enumerate(messages):
        dist.broadcast(message, group=group, group_src=source)
    return [message.numpy().tobytes() for message in messages]
