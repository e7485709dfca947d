"""Memory and speed of components with images that stay in a file.

`python -m tests.benchmarks stored`, or with `--pictures 200`, which take seconds; `--out` writes a record.
All stages of 224 pixels run in this process: its peak memory is to stay below 3 GiB, where 20,000 pictures would take
12 GB as floats. The stages of 32 pixels compare the CPU seconds of a stored set, without the cache of small sets, with
those of the same set in memory; their ratio is to be at least .9. The file (3 GB) is removed.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distillkit.condense import distribution_matching, k_center, random_subset, stitch
from distillkit.data import store_dataset
from distillkit.networks import ConvNet, RandomNetworks, build
from distillkit.sets import StoredImages, _stored
from distillkit.training import Protocol, train

CLASSES, GIB = 10, 2**30


def pictures(count: int, side: int) -> Iterator[tuple[Tensor, int]]:
    """Yield pictures of noise on stripes, uint8; the class is the direction and width of the stripes."""
    draws = torch.Generator().manual_seed(0)
    ramp = torch.arange(side)
    lines = [70 * (ramp // (side // (4 + 2 * k)) % 2) for k in range(CLASSES // 2)]
    kinds = [wave.view(1, -1, 1).expand(3, side, side) for wave in lines] + [
        wave.expand(3, side, side) for wave in lines
    ]
    noise = torch.randint(0, 180, (64, 3, side, side), generator=draws)
    for i in range(count):
        own = noise[int(torch.randint(64, (), generator=draws))].roll(i, -1)
        yield (own + kinds[i % CLASSES]).to(torch.uint8), i % CLASSES


def measured(call: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Return the wall-clock and CPU seconds of a call, the process's peak memory after it, and its result."""
    began, worked = time.perf_counter(), time.process_time()
    result = call()
    found = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - worked}
    return found | {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}, result


def matched(data: Any, width: int, steps: int, batch: int = 256) -> Any:
    """Run some steps of distribution matching with one image per class."""
    networks = RandomNetworks(partial(ConvNet, data.shape, CLASSES, width=width, depth=3 if data.shape[1] < 64 else 5))
    return distribution_matching(data, networks=networks, ipc=1, steps=steps, batch_real=batch, progress=False)


def trained(data: Any, width: int, batch: int = 64) -> Any:
    """Train a network for an epoch."""
    network = build(partial(ConvNet, data.shape, CLASSES, width=width, depth=3 if data.shape[1] < 64 else 5), 0)
    return train(network, data, Protocol(epochs=1, schedule="constant", batch=batch), progress=False)


def observer(data: StoredImages) -> nn.Module:
    """Train a linear network on shrunk images of a part of the set, which is enough to choose crops."""
    layers = [nn.AdaptiveAvgPool2d(56), nn.Flatten(), nn.Linear(3 * 56 * 56, CLASSES)]
    network = build(lambda: nn.Sequential(*layers), 0)
    protocol = Protocol(epochs=10, schedule="constant", batch=16, lr=0.001)
    return train(network, data[:500].read(), protocol, progress=False)


def memory(folder: Path, count: int) -> list[dict[str, Any]]:
    """Measure the stages of 224 pixels."""
    rows = [{"stage": "imports", **measured(lambda: None)[0]}]

    def stage(name: str, call: Callable[[], Any]) -> Any:
        found, result = measured(call)
        rows.append({"stage": name, **found})
        print(
            f"{name:<24} {found['seconds']:7.1f} s {found['cpu']:7.1f} s CPU  peak {found['peak_gib']:.2f} GiB",
            flush=True,
        )
        return result

    path = folder / "large.npy"
    data: StoredImages = stage("store_dataset", lambda: store_dataset(pictures(count, 224), path, num_classes=CLASSES))
    stage("random_subset, 10 ipc", lambda: random_subset(data, ipc=10))
    stage("DM, 2 steps, 1 ipc", lambda: matched(data, 8, 2))
    network = observer(data)
    stage("stitch, 10 ipc", lambda: stitch(data, observer=network, ipc=10, crops=2, progress=False))
    stage("k_center, 10 ipc", lambda: k_center(data, ipc=10, network=network, progress=False))
    stage("an epoch of training", lambda: trained(data, 8, 16))
    return rows


def speed(folder: Path, count: int, repeats: int = 5) -> list[dict[str, Any]]:
    """Measure the stages of 32 pixels, alternately stored and in memory; the fewest CPU seconds count."""
    data = store_dataset(pictures(count, 32), folder / "small.npy", num_classes=CLASSES)
    whole, rows = data.read(), []
    _stored._CACHED = 0
    calls = {"DM step": partial(matched, width=32, steps=2), "epoch of training": partial(trained, width=32)}
    for name, call in calls.items():
        times: dict[str, list[float]] = {"stored": [], "memory": []}
        call(data)  # the first pass fills the file cache
        for _ in range(repeats):
            for kind, own in (("memory", whole), ("stored", data)):
                times[kind].append(measured(partial(call, own))[0]["cpu"])
        best = {kind: min(each) for kind, each in times.items()}
        rows.append({"stage": f"{name}, 32 px", **best, "throughput": best["memory"] / best["stored"]})
        print(
            f"{name:<24} memory {best['memory']:.2f} s  stored {best['stored']:.2f} s  {rows[-1]['throughput']:.2f}",
            flush=True,
        )
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run all stages, and return the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        record: dict[str, Any] = {"pictures": given.pictures, "threads": torch.get_num_threads()}
        record["memory"] = memory(Path(folder), given.pictures)
        record["speed"] = speed(Path(folder), min(given.pictures, 5_000))
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


if __name__ == "__main__":
    main()
