"""Seconds that a ledger takes to compute epsilon, when every release has a noise scale of its own.

    python tests/benchmarks/bench_accounting.py [--kinds 30 300 3000]

Each row is a new process: `guarantee()` of a new ledger, the same again, and after one more release. Imports are not
counted. "above RDP" compares epsilon with the RDP bound of the releases without groups.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

from distillkit.privacy import Event, Ledger, compose
from distillkit.privacy.accounting.composition import _rdp
from distillkit.rng import derive

RATES = (1.0, 0.1, 0.01)


def seconds(ledger: Ledger) -> float:
    begun = time.perf_counter()
    ledger.guarantee()
    return time.perf_counter() - begun


def measure(kinds: int, rate: float) -> None:
    compose([(1.0, 0.5, 1)], 1e-5)
    ledger, draws = Ledger(), (2 + 18 * torch.rand(kinds, generator=derive(0))).tolist()
    ledger.spend(*(Event("sum", sigma, rate) for sigma in draws))
    first, again = seconds(ledger), seconds(ledger)
    ledger.spend(Event("sum", 7.0, rate))
    after, found = seconds(ledger), ledger.guarantee()
    above = found.nominal / _rdp(tuple(ledger.spends()), ledger.delta) - 1
    print(
        f"{kinds:>6} kinds at rate {rate:<5g} first {first:6.3f} s   again {again:6.3f} s   one more {after:6.3f} s   "
        f"epsilon {found.nominal:.4g} ({found.accountant}), {100 * above:+.2f} % above RDP",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=int, nargs="+", default=[30, 300, 3000])
    parser.add_argument("--rate", type=float, help="only this one, in this process")
    options = parser.parse_args()
    for kinds in options.kinds:
        for rate in RATES if options.rate is None else ():
            own = ["--kinds", str(kinds), "--rate", str(rate)]
            subprocess.run([sys.executable, __file__, *own], check=True)
        if options.rate is not None:
            measure(kinds, options.rate)


if __name__ == "__main__":
    main()
