"""Check, measure and use the accelerator of this machine in pieces of a few minutes. `make gpu` calls this.

    python examples/gpu.py --data DATA     # an interrupted call continues
    python examples/gpu.py --smoke         # tiny sizes, on a CPU too

`tests` compares every component with the CPU; `speed` measures steps beside PyTorch's layers; `dm`, `dm-1` and `dm-50`
condense CIFAR-10 by DM to 10, 1 and 50 images per class in the paper's 20,000 steps; `cells` runs cells of the papers'
tables at their size (FedLGD's: digits from fonts for SynthDigits, no SVHN). `gpu.jsonl` has a line for each result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distillkit.augment import DSA
from distillkit.condense import Progress, distribution_matching, load_state, save_state
from distillkit.data import load
from distillkit.evaluate import evaluate
from distillkit.networks import ConvNet, RandomNetworks
from distillkit.study import git_commit
from distillkit.training import Protocol
from shared.study import UNFINISHED

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/distillkit/test_devices.py", "tests/fl/test_devices.py")
CELLS = {
    "vhl-cifar10-two-classes": ("vhl", "--pair", "--dataset cifar10 --split two-classes --rounds 100", "+30.1"),
    "vhl-fashionmnist": ("vhl", "--pair", "--dataset fashionmnist --rounds 150", "+5.2"),
    "feddm-cifar10-0.01": ("feddm", "--only claim", "--dataset cifar10 --split 0.01 --tries 1", "+24.5"),
    "fedcog-cifar10-two-classes": ("fedcog", "--headline", "--datasets cifar10 --division two-classes", "+3.45"),
    "feddm-cifar10-0.1": ("feddm", "--only claim", "--dataset cifar10 --split 0.1 --tries 1", "+10.1"),
    "vhl-cifar10": ("vhl", "--pair", "--dataset cifar10", "+7.8"),
    "single-image": ("single_image", "--headline", "", "+1.8"),
    "fedlgd-digits": ("fedlgd", "--no-ablations", "--domains mnist usps mnistm synthdigits-like", "+4.7"),
}
"""Script of each cell, its options at any size and at the paper's, and the gain in points that the paper reports."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the pieces that are not finished yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", help="root of the datasets; default: $DISTILLKIT_DATA")
    add("--pieces", nargs="+", choices=PIECES, default=PIECES, help="default: all")
    add("--cells", nargs="+", choices=CELLS, help="cells of the piece `cells`; default: all, or one with --smoke")
    add("--seconds", type=int, default=420, help="largest number of seconds of a piece of `dm` and `cells`")
    add("--device", default=str(torch.accelerator.current_accelerator(check_available=True) or "cpu"), help="cpu, ...")
    add("--smoke", action="store_true", help="tiny sizes")
    add("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    o = parser.parse_args(words)
    o.out.mkdir(parents=True, exist_ok=True)
    log = o.out / "gpu.jsonl"
    name = torch.cuda.get_device_name(o.device) if o.device.startswith("cuda") else o.device
    known = {"device": name, "commit": git_commit(ROOT), "torch": str(torch.__version__), "smoke": o.smoke}

    def write(piece: str, **row: Any) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"piece": piece, **row, **known}) + "\n")
        print(piece, *(f"{key}={value}" for key, value in row.items()), flush=True)

    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    done = {line["piece"] for line in lines if line.get("finished") and line["device"] == name}
    for piece in (piece for piece in o.pieces if piece not in done):
        began = time.perf_counter()
        finished = PIECES[piece](o, partial(write, piece))
        write(piece, finished=finished, seconds=round(time.perf_counter() - began, 1))
        if not finished:
            raise SystemExit(UNFINISHED)


def tests(o: argparse.Namespace, write: Callable[..., None]) -> bool:
    """Run the tests that are marked `device` on the device."""
    some = ["-k", "herding or train or invert or FedAvg"] if o.smoke else []
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "device", "-q", *some, *TESTS], cwd=ROOT, check=False, text=True,
        env={**os.environ, "DISTILLKIT_DEVICE": o.device}, stdout=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    said = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  ")) or "passed" in line]
    write(status=ran.returncode, said=said)
    return True


def speed(o: argparse.Namespace, write: Callable[..., None]) -> bool:
    """Measure the device and steps of components, and write the times to `speed.jsonl`."""
    words = ["--device", o.device, "--out", str((o.out / "speed.jsonl").resolve()), *["--smoke"] * o.smoke]
    write(status=subprocess.call([sys.executable, "-m", "tests.benchmarks", "device", *words], cwd=ROOT))
    return True


def dm(o: argparse.Namespace, write: Callable[..., None], ipc: int, paper: str) -> bool:
    """Condense CIFAR-10 to `ipc` images per class, and test the set with three networks."""
    train, test = load("digits", size=16) if o.smoke else load("cifar10", root=o.data)
    steps, path = 30 if o.smoke else 20_000, o.out / f"dm-{ipc}.safetensors"
    make = partial(ConvNet, train.shape, train.num_classes, width=16 if o.smoke else 128)
    how: dict[str, Any] = {"networks": RandomNetworks(make), "ipc": ipc, "augment": DSA(), "device": o.device}
    began = time.perf_counter()
    distribution_matching(train, steps=20, progress=False, **how)
    fits = (time.perf_counter() - began) * steps / 20 < 0.8 * o.seconds  # a callback reads the loss of every step

    def callback(progress: Progress) -> None:
        if time.perf_counter() - began > o.seconds:
            save_state(path, progress.state())
            raise TimeoutError

    try:
        how |= {"resume": load_state(path) if path.exists() else None, "callback": None if fits else callback}
        small = distribution_matching(train, steps=steps, **how)
    except TimeoutError:
        return False
    small.save(o.out / f"dm-{ipc}-set.safetensors")
    protocol = Protocol(epochs=5 if o.smoke else 1000, augment=DSA())
    row = evaluate(small, test, make, protocol=protocol, num_networks=1 if o.smoke else 3, device=o.device).rows[0]
    write(what=f"DM, {ipc} per class", steps=steps, accuracies=row.accuracies, published=paper)
    return True


def cells(o: argparse.Namespace, write: Callable[..., None]) -> bool:
    """Run or continue cells of the papers' tables, the most useful first."""
    for name in o.cells or ([*CELLS][1:2] if o.smoke else CELLS):
        script, always, paper, gain = CELLS[name]
        words = [sys.executable, str(ROOT / "examples" / "papers" / script / "run.py"), "--preset"]
        words += ["smoke"] if o.smoke else ["paper", *paper.split()]
        words += [*always.split(), "--seeds", "0", "--device", o.device, "--workers", "1", "--seconds", str(o.seconds)]
        words += ["--out", str(o.out / "cells" / name), *(["--data", o.data] if o.data and not o.smoke else [])]
        began = time.perf_counter()
        while (status := subprocess.run(words, check=False).returncode) == UNFINISHED:
            pass
        write(cell=name, status=status, minutes=round((time.perf_counter() - began) / 60, 1), published=gain)
        if status:
            raise SystemExit(status)
    return True


PIECES: dict[str, Callable[..., bool]] = {"tests": tests, "speed": speed, "dm": partial(dm, ipc=10, paper="48.9 %")}
PIECES |= {"dm-1": partial(dm, ipc=1, paper="26.0 %"), "dm-50": partial(dm, ipc=50, paper="63.0 %"), "cells": cells}


if __name__ == "__main__":
    main()
