"""Compare all pairs of add-ons over the loopback and in threads: `python -m tests.fl.loopback_pairs` (some minutes).

The suite runs every add-on and every method this way (`test_loopback.py`). This script runs all pairs on one base, for
changes of the transport, the codec or the state of add-ons. Final states and histories (without seconds) must agree.
"""

from __future__ import annotations

import sys
import warnings

import torch

from fl import Loopback
from tests.fl.test_addon_combinations import PAIRS, REFUSED, addon, plain
from tests.fl.test_loopback import assert_equal, play


def main() -> int:
    """Print the differences and the number of equal pairs; the exit status is 1 if any pair differs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = [pair for pair in PAIRS if pair not in REFUSED]
    different = []
    for number, pair in enumerate(wanted, start=1):
        runs = [play(plain(*map(addon, pair)), backend=backend) for backend in ("threads", Loopback())]
        try:
            assert_equal(*runs)
        except AssertionError as error:
            different.append(pair)
            print(f"{' and '.join(pair)} differ: {error}"[:300], flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(wanted)}", flush=True)
    print(f"{len(wanted) - len(different)} of {len(wanted)} pairs agree bit by bit; {len(REFUSED)} are refused")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
