"""Profile of the examples' CPU time by kind of operation, for one or two rounds of each `cpu` preset.

    python -m tests.benchmarks profiles --data DATA                                        all five, in minutes
    python -m tests.benchmarks profiles --data DATA --only vhl --out docs/results/profiles.json

One process an example, one worker of one thread. It does the same three times: the first imports what is imported at
its first use, the second has its CPU seconds taken, the third is watched by PyTorch's profiler, which says how long
each operation took, less those that it calls. Shares are of the third's CPU seconds, for the profiler makes operations
seem longer too; what is left beside all operations is "Python", with the profiler's own work, so that there is at most
as much of it. It reads clocks that go on while another process has the core: the machine must be idle. With --out the
record is written after every example, and others stay in it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import git_commit
from distillkit._utils.tables import NONE, markdown_table
from tests.benchmarks.table import apart, processor

ROOT = Path(__file__).parents[2]
EXAMPLES: dict[str, tuple[str, list[str]]] = {
    "feddm": ("FedDM", ["--dataset", "mnist", "--only", "claim", "--tries", "1", "--rounds", "1"]),
    "vhl": ("FedAvg + VHL", ["--dataset", "cifar10", "--pair", "--rounds", "1"]),
    "fedcog": ("FedCOG", ["--datasets", "fashionmnist", "--headline", "--rounds", "1"]),
    "fedlgd": ("FedLGD", ["--no-ablations", "--rounds", "2", "--steps", "20"]),
    "single_image": ("", ["--headline", "--rounds", "1"]),
}
"""By example: the way that is profiled, "" for the first, and the words that make it short."""

KINDS: dict[str, tuple[str, ...]] = {
    "optimiser": ("Optimizer.",),
    "convolution": ("conv", "Conv"),
    "matrix product": ("aten::mm", "addmm", "bmm", "matmul", "linear"),
    "norm": ("group_norm", "GroupNorm", "batch_norm", "BatchNorm", "instance_norm", "layer_norm"),
    "pooling": ("pool", "Pool", "aten::maximum"),
    "resizing": ("upsample",),
    "activation": ("relu", "Relu", "threshold", "clamp_min", "tanh", "Tanh", "sigmoid", "gelu"),
    "loss": ("softmax", "SoftMax", "nll", "Nll", "cross_entropy"),
    "augmentation": ("grid_sampler", "affine_grid", "flip", "roll"),
    "drawing": ("normal_", "uniform_", "randperm", "random_", "randn", "multinomial"),
    "copies": ("copy_", "clone", "index", "aten::cat", "fill_", "zero_", "contiguous", "aten::to", "empty", "gather"),
    "arithmetic": (
        *("aten::add", "aten::mul", "aten::sub", "aten::div", "aten::sum", "aten::mean", "aten::pow", "aten::square"),
        *("sqrt", "aten::neg", "vector_norm", "Add", "Mul", "Sub", "Div", "Sum", "Mean", "Pow", "Accumulate"),
    ),
    "views": ("view", "View", "as_strided", "aten::t", "permute", "reshape", "slice", "select", "expand", "Expand"),
}
"""By kind: parts of the names of its operations; the first kind that fits counts."""

WHY = {
    "norm": "reads and writes every activation several times and computes little, so memory limits it; the time is "
    "in PyTorch's kernels. Instance norm of small maps without a gradient is written out and counts as arithmetic",
    "pooling": "max pooling with a gradient, where PyTorch's kernel looks up the position of each maximum; a "
    "version by whole rows saved little. Without a gradient, the larger of two rows, then columns, is taken; average "
    "pooling with a gradient is a matrix product",
    "resizing": "each crop of the shared image is downscaled by a filter that reads the whole crop, one crop at a "
    "time so that its bits depend on nothing else. A run does this once per crop, and this run has a single round",
    "activation": "one pass over memory each way. It runs in place without a gradient; with a gradient it cannot, "
    "because add-ons and hooks read the previous layer's output",
    "loss": "small batches with few classes; the time is the overhead of the call",
    "optimiser": "passes over all weights or all images in every step, and the overhead of each call",
    "copies": "gathering and shifting batches of the client's images, cutting out crops, and making a new network "
    "for each client in every round",
    "augmentation": "resampling the images of every batch, which PyTorch's kernel does pixel by pixel",
    "drawing": "initial weights and images, noise and orders, from generators derived from the seed",
    "arithmetic": "elementwise operations: norms that are written out, distances between means and gradients, "
    "gradient accumulation, momentum, colours of crops",
    "views": "the overhead of many small calls that touch no numbers",
    "Python": "time between operations: calling layers, copying networks, and the transformation matrices of each "
    "crop of an image. It does not grow with width or image size",
}
"""Explanation of the time that each kind takes."""

LIMIT = 0.05


class Found(BaseException):
    """Exception that ends an example before its study runs."""


def kind(name: str) -> str:
    """Return the kind of an operation by its name; an unknown operation is its own kind."""
    fitting = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
    return next(fitting, name.removeprefix("aten::"))


def study_of(example: str, words: Sequence[str]) -> Any:
    """Return the study that an example would run with these command-line words."""
    sys.path.insert(0, str(ROOT / "examples"))
    module, found = importlib.import_module(f"papers.{example}.run"), list[Any]()

    def run_study(study: Any, *_: Any, **__: Any) -> None:
        found.append(study)
        raise Found

    module.run_study = run_study  # type: ignore[attr-defined]
    try:
        module.main(list(words))
    except Found:
        return found[0]
    raise RuntimeError(f"{example} ran no study")


def shares(example: str, data: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """Return the kinds of operations of an example with their shares, largest first.

    Args:
        example: one of `EXAMPLES`.
        data: the root of the datasets.
        more: further words for its command line.
    """
    torch.set_num_threads(1)
    wanted, words = EXAMPLES[example]
    with tempfile.TemporaryDirectory() as folder:
        words = ["--preset", "cpu", "--device", "cpu", "--seeds", "0", *words, *more]
        study = study_of(example, [*words, "--data", data, "--out", folder])
        specs = [spec for spec in study.design.final_runs({}) if not wanted or spec.method == wanted]
        if not specs:
            raise ValueError(f"{example} has no candidate {wanted!r}; there are {', '.join(study.design.candidates)}")
        study._split(study.design.task(specs[0].task))

        def played() -> float:
            run, begun = study._prepare(specs[0]), time.process_time()
            run.trial(device="cpu", workers=1)
            return time.process_time() - begun

        first, spent = played(), played()
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere, acc_events=True) as profiled:
            watched = played()
    seconds: dict[str, float] = {}
    for event in profiled.key_averages():
        own = kind(event.key)
        seconds[own] = seconds.get(own, 0.0) + event.self_cpu_time_total / 1e6
    return {
        "example": example, "method": specs[0].method, "task": specs[0].task,
        "words": shlex.join(["python", f"examples/papers/{example}/run.py", *words]), "cpu_seconds": round(spent, 2),
        "first_seconds": round(first, 2), "profiled_seconds": round(watched, 2), "shares": shared(seconds, watched),
    }  # fmt: skip


def shared(seconds: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return the shares of the kinds in the total, largest first; the remainder is Python.

    Raises:
        ValueError: the operations took longer than the whole.
    """
    if (left := whole - sum(seconds.values())) < 0:
        raise ValueError(
            f"operations took {whole - left:.1f} s of {whole:.1f} CPU seconds: other processes had the cores; measure "
            "on an idle machine"
        )
    largest = sorted({**seconds, "Python": left}.items(), key=lambda item: -item[1])
    return {name: round(own / whole, 4) for name, own in largest if own / whole >= 0.001}


def table(record: dict[str, Any]) -> str:
    """Return a record as a table: convolutions and matrix products together, then each kind above a twentieth."""
    header, lines = ("example, method", "CPU s (profiled)", "convolution and matrix products", "above 5 %", "rest"), []
    for row in record["rows"]:
        both = sum(row["shares"].get(name, 0.0) for name in ("convolution", "matrix product"))
        large = {
            name: share for name, share in row["shares"].items()
            if share > LIMIT and name not in ("convolution", "matrix product")
        }  # fmt: skip
        cells = ", ".join(f"{name} {100 * share:.0f} %" for name, share in large.items()) or NONE
        rest = 100 * (1 - both - sum(large.values()))
        name = f"`{row['example']}`, {row['method']} on {row['task']}"
        took = f"{row['cpu_seconds']:.1f} ({row['profiled_seconds']:.1f})"
        lines.append((name, took, f"{100 * both:.0f} %", cells, f"{rest:.0f} %"))
    where = f"{record['processor']}, PyTorch {record['torch']}"
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in record["rows"]))
    much = {n for row in record["rows"] for n, share in row["shares"].items() if share > LIMIT}
    said = [f"- {name}: {why}." for name, why in WHY.items() if name in much]
    said += [f"- {name}: not examined." for name in sorted(much - {"convolution", "matrix product", *WHY})]
    head = f"`{record['command']}` at commit {commits}, {record['when']}: {where}."
    return "\n".join([head, "", markdown_table(header, lines), "", *said])


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Profile, write the record after every example, print the table."""
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks profiles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=os.environ.get("DISTILLKIT_DATA", ""), help="root of the datasets by name")
    parser.add_argument("--only", nargs="+", choices=list(EXAMPLES), default=list(EXAMPLES))
    parser.add_argument("--out", type=Path, help="a file for the record, JSON")
    o = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "command": "python -m tests.benchmarks profiles --data DATA", "when": f"{datetime.date.today():%Y-%m-%d}",
        "processor": processor(), "torch": str(torch.__version__), "python": platform.python_version(), "rows": [],
    }  # fmt: skip
    if o.out and o.out.exists():
        record["rows"] = [
            row for row in json.loads(o.out.read_text(encoding="utf-8"))["rows"] if row["example"] not in o.only
        ]
    failed = []
    for example in o.only:
        print(example, file=sys.stderr, flush=True)
        try:
            made = apart(partial(shares, example, o.data))
        except Exception as error:
            print(f"{example} failed: {error}", file=sys.stderr, flush=True)
            failed.append(example)
            continue
        rows = {row["example"]: row for row in [*record["rows"], {**made, "commit": git_commit()}]}
        record["rows"] = [rows[name] for name in EXAMPLES if name in rows]
        if o.out:
            write_atomically(o.out, f"{json.dumps(record, indent=1)}\n")
    print(table(record))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    return record


if __name__ == "__main__":
    main()
