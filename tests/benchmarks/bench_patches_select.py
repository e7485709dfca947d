"""Selection of 5,000 from 50,000 crops of one image: CPU time of each part and peak memory.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_patches_select.py [--crops 50000] [--keep 5000] [--threads 1]

The server's step of the single-image method: crops are rendered in chunks, embedded by a ResNet-8 and forgotten;
k-means and confidence choose; only the chosen ones are rendered again. Fails above 2 GiB of resident memory.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from sklearn.datasets import load_sample_image

from distillkit.generate import Patches
from distillkit.networks import build, named_network, split
from distillkit.normalization import Normalization
from distillkit.select import select

LIMIT_MIB = 2048


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Clock:
    def __init__(self) -> None:
        self.begun = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        print(f"{name:<32} {now - self.begun:8.1f} CPU s   peak {memory():5.0f} MiB", flush=True)
        self.begun = now


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crops", type=int, default=50_000)
    parser.add_argument("--keep", type=int, default=5_000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = Clock()
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)
    patches = Patches(photo, seed=0, count=options.crops)
    half = Normalization((0.5,) * 3, (0.25,) * 3)
    model = split(build(lambda: named_network("resnet8", (3, 32, 32), 10), 0).eval())
    patches[0]
    clock.lap("libraries, image, network")

    embeddings, logits = [], []
    for crops in patches.chunks(16):
        embedding = model.features(half.encode(crops).to(memory_format=torch.channels_last))
        embeddings.append(embedding)
        logits.append(model.classifier(embedding))
    clock.lap(f"render and embed {options.crops}")

    chosen = select(torch.cat(embeddings), torch.cat(logits), keep=options.keep)
    clock.lap(f"select {len(chosen)}")

    kept = patches.set(chosen, torch.cat(logits)[chosen].softmax(1), normalization=half)
    clock.lap(f"render the {len(kept)} chosen")
    assert len(kept) == options.keep
    if memory() > LIMIT_MIB:
        raise SystemExit(f"peak memory {memory():.0f} MiB is above {LIMIT_MIB} MiB")


if __name__ == "__main__":
    main()
