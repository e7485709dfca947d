"""Cost of `evaluate` under RDED's protocol with a teacher's labels per view, against a bare loop with the same work.

    python tests/benchmarks/bench_relabel.py [--epochs 60] [--rounds 5] [--width 32]

Both sides train one network on 100 images of 3x32x32 with crops, CutMix, the teacher and AdamW, and test it on 1,000
images, on one thread. They alternate; the ratio is that of the medians of their CPU seconds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

from distillkit import LabeledImages, Normalization
from distillkit.evaluate import evaluate
from distillkit.networks import ConvNet, build
from distillkit.protocols import PROTOCOLS
from distillkit.rng import derive
from distillkit.training import Protocol, train


def some(count: int, seed: int) -> LabeledImages:
    labels = torch.arange(count) % 10
    images = torch.randn(count, 3, 32, 32, generator=derive(seed)) + labels.view(-1, 1, 1, 1) / 3
    return LabeledImages(images, labels, num_classes=10, normalization=Normalization((0.5,) * 3, (0.25,) * 3))


def bare(data: LabeledImages, test: LabeledImages, factory: Callable[[], ConvNet], protocol: Protocol) -> float:
    """Do the work of `evaluate` in the plainest way."""
    assert protocol.relabel is not None
    assert protocol.relabel.mix is not None
    assert protocol.augment is not None
    teacher, temperature, draws = protocol.relabel.teacher, protocol.relabel.temperature, derive(0)
    network = build(factory, derive(1)).train()
    weights = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": protocol.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=protocol.lr)
    for epoch in range(protocol.epochs):
        for group in optimizer.param_groups:
            group["lr"] = protocol.lr * (1 + math.cos(math.pi * epoch / (2 * protocol.epochs))) / 2
        for rows in torch.randperm(len(data), generator=draws).split(protocol.batch):
            views = protocol.augment(data.images[rows], draws, siamese=False)
            views = protocol.relabel.mix(views, draws)[0]
            with torch.no_grad():
                wanted = (teacher(views) / temperature).softmax(1)
            loss = F.kl_div((network(views) / temperature).log_softmax(1), wanted, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        correct = [(network(x).argmax(1) == y).sum() for x, y in zip(*(t.split(100) for t in test), strict=True)]
    return float(torch.stack(correct).sum()) / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=32)
    o = parser.parse_args()
    torch.set_num_threads(1)
    data, test = some(100, 0), some(1000, 1)
    factory = partial(ConvNet, data.shape, 10, width=o.width, depth=3)
    teacher = train(build(factory, derive(2)), some(500, 3), Protocol(epochs=5, lr=0.01), generator=0, progress=False)
    protocol = replace(PROTOCOLS["rded"], epochs=o.epochs).with_teacher(teacher.eval())
    sides: dict[str, Callable[[], object]] = {
        "evaluate": lambda: evaluate(data, test, factory, protocol=protocol, num_networks=1, progress=False),
        "bare loop": lambda: bare(data, test, factory, protocol),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(o.rounds + 1):
        for name, work in sides.items():
            begun = time.process_time()
            work()
            if turn:  # the first turn warms up
                seconds[name].append(time.process_time() - begun)
    for name, found in seconds.items():
        print(f"{name:<12} {statistics.median(found):6.2f} CPU s (median of {o.rounds})")
    print(f"ratio {statistics.median(seconds['evaluate']) / statistics.median(seconds['bare loop']):.2f}")


if __name__ == "__main__":
    main()
