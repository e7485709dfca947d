"""Draw the pictures of the component pages into docs/pictures: all or those named.

    python docs/scripts/pictures_components.py [augment coresets ...]

All of it is drawn of seeds, scikit-learn's digits and photograph, and the records in docs/results: no files are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from _drawing import OUT
from _pictures_learn import augment, coresets, loss_curves, matched, networks
from _pictures_protect import audit, membership

PICTURES: dict[str, Callable[[], None]] = {
    "audit": audit,
    "augment": augment,
    "coresets": coresets,
    "gradient_matching": matched,
    "losses": loss_curves,
    "membership": membership,
    "networks": networks,
}
"""The file in docs/pictures, which is its page's name, and who draws it."""


def main(names: list[str]) -> None:
    """Draw the pictures."""
    unknown = sorted({*names} - {*PICTURES})
    if unknown:
        raise SystemExit(f"no such picture: {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    for name in names or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
