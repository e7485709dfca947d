"""Power of audits of several steps: whole private runs, correct or with a planted mistake, many times.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/bench_audit_steps.py [--audits 10] [--out records.jsonl]

The audits are those of `tests/distillkit/privacy/test_audit_steps.py`, each with seeds of its own. Each mistake is
planted in a copy of the repository, in which this script runs again. Correct programs are audited four times as often.
A line of `--out` is a setting with a mistake, and a second call goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from distillkit._utils.provenance import git_commit
from distillkit.study import Record, Records, read_records, write_records
from tests.distillkit.privacy.audited_runs import Runs, condense_sets, step_images, train
from tests.mutants import ROOT

SETTINGS: dict[str, tuple[int, Callable[[range], Runs]]] = {
    "DP-SGD, sigma 0.7, rate 0.25, 8 steps": (48, partial(train, sigma=0.7, rate=0.25, steps=8)),
    "DP-SGD, sigma 1, rate 0.1, 16 steps": (48, partial(train, sigma=1.0, rate=0.1, steps=16)),
    "DP-SGD, sigma 0.25, rate 0.25, 500 steps": (1, partial(train, sigma=0.25, rate=0.25, steps=500)),
    "image SGD, sigma 0.7, rate 0.25, 8 steps": (64, partial(step_images, sigma=0.7, rate=0.25, steps=8)),
    "condensed set, epsilon 4, rate 1, one release": (32, condense_sets),
}
"""Number of runs in an audit, and the runs, by setting."""
NOISE = ("right", "noise-drawn-once", "gradient-noise-halved", "clipped-to-twice-the-clip", "batch-of-fixed-size")
MISTAKES = {
    "DP-SGD": (*NOISE, "steps-charged-at-half-the-rate", "half-of-the-steps-charged", "batch-drawn-once"),
    "image SGD": (*NOISE, "image-steps-charged-at-half-the-rate", "image-batch-drawn-once"),
    "condensed set": ("right", "noise-of-sums-halved", "set-published-as-replace-one"),
}

PLANTED = {
    "noise-drawn-once": (
        "gradients/private_gradient.py",
        "        noised = self._secret.add_noise(torch.cat(self._sums), std).div_(self._denominator)",
        '        if not hasattr(self, "_noise"):\n'
        "            self._noise = self._secret.add_noise(torch.zeros_like(torch.cat(self._sums)), std)\n"
        "        noised = (torch.cat(self._sums) + self._noise).div_(self._denominator)",
    ),
    "gradient-noise-halved": (
        "gradients/private_gradient.py",
        "std = self._sigma * self._clip if self._sigma else 0.0",
        "std = self._sigma * self._clip / 2 if self._sigma else 0.0",
    ),
    "clipped-to-twice-the-clip": (
        "gradients/private_gradient.py",
        "(self._clip * _MARGIN / norm)",
        "(2 * self._clip * _MARGIN / norm)",
    ),
    "batch-of-fixed-size": (
        "secret.py",
        "(self.uniform(count) < rate).nonzero().flatten()",
        "self.uniform(count).argsort()[: round(rate * count)].sort().values",
    ),
    "steps-charged-at-half-the-rate": (
        "gradients/dp_sgd.py",
        'account.spend("dp_sgd", sigma, rate=rate, count=steps)',
        'account.spend("dp_sgd", sigma, rate=rate / 2, count=steps)',
    ),
    "half-of-the-steps-charged": (
        "gradients/dp_sgd.py",
        'account.spend("dp_sgd", sigma, rate=rate, count=steps)',
        'account.spend("dp_sgd", sigma, rate=rate, count=(steps + 1) // 2)',
    ),
    "batch-drawn-once": (
        "gradients/dp_sgd.py",
        "        for _ in range(steps):\n"
        "            for rows in secret.poisson(len(real), rate).to(real.images.device).split(chunk):",
        "        drawn = secret.poisson(len(real), rate).to(real.images.device)\n"
        "        for _ in range(steps):\n"
        "            for rows in drawn.split(chunk):",
    ),
    "image-steps-charged-at-half-the-rate": (
        "condensation/image_sgd.py",
        'account.spend("image_sgd", sigma, rate=rate, count=steps)',
        'account.spend("image_sgd", sigma, rate=rate / 2, count=steps)',
    ),
    "image-batch-drawn-once": (
        "condensation/image_sgd.py",
        "        for step in range(steps):\n"
        "            phi = embedders[step]\n"
        "            rows = secret.poisson(len(real), rate).to(real.images.device)",
        "        rows = secret.poisson(len(real), rate).to(real.images.device)\n"
        "        for step in range(steps):\n"
        "            phi = embedders[step]",
    ),
    "noise-of-sums-halved": (
        "condensation/class_means.py",
        "account.secret.add_noise(sums, sigma * sensitivity if sigma else 0.0)",
        "account.secret.add_noise(sums, sigma * sensitivity / 2 if sigma else 0.0)",
    ),
    "set-published-as-replace-one": (
        "condensation/condense_private.py",
        'info = {"method": "class_means", **account.guarantee().info()}',
        'info = {"method": "class_means", **account.guarantee().info(), "relation": "replace one record"}',
    ),
}
"""File in `distillkit/privacy`, correct text, which stands there once, and mistaken text, by name of the mistake."""


def audits(setting: str, number: int) -> dict[str, float]:
    """Return how many audits of a setting refute the claim, and how many find a law of the charged event violated."""
    runs, run = SETTINGS[setting]
    found = {"refuted": 0, "law_violated": 0, "audits": number}
    for first in range(0, number * runs, runs):
        seen = run(range(first, first + runs))
        found["law_violated"] += bool(seen.deviations())
        found["refuted"] += seen.audit().refuted
        found |= {"scores": len(seen.inside), "stated_epsilon": seen.ledger.guarantee(delta=1e-5).nominal}
    return found


def planted(setting: str, mistake: str, number: int) -> dict[str, float]:
    """Return the result of `audits` in a copy of the repository with the mistake."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("distillkit", "attacks", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        if mistake != "right":
            file, right, wrong = PLANTED[mistake]
            path = Path(folder) / "distillkit" / "privacy" / file
            text = path.read_text(encoding="utf-8")
            assert text.count(right) == 1, f"{path} has changed: say how {mistake} is planted now"
            path.write_text(text.replace(right, wrong), encoding="utf-8")
        command = [sys.executable, "tests/benchmarks/bench_audit_steps.py", "--audits", str(number), "--here", setting]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True, encoding="utf-8")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audits", type=int, default=10)
    parser.add_argument("--here", choices=SETTINGS, help="print the result of one setting, without planting a mistake")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.here:
        print(json.dumps(audits(options.here, options.audits)))
        return
    facts = {"command": shlex.join(["python", *sys.argv]), "commit": git_commit(), "accuracy_last": None}
    known = read_records(options.out) if options.out and options.out.exists() else Records([])
    done = {(r.task, r.method) for r in known}
    for setting, mistake in ((s, m) for s in SETTINGS for m in MISTAKES[s.split(",")[0]]):
        if (f"audit of {setting}", mistake) in done:
            continue
        found = planted(setting, mistake, options.audits * (4 if mistake == "right" else 1))
        new = Record({"task": f"audit of {setting}", "method": mistake, "seed": 0, **found, **facts})
        known = Records([*known, new], known.missing)
        if options.out:
            write_records(known, options.out)
        print(setting, mistake, found, flush=True)


if __name__ == "__main__":
    main()
