"""What a made set says about its making beside its method: the seed, and the versions of the software."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["VERSION", "provenance"]

VERSION = "0.1.0"
"""Of this distribution."""


def provenance(generator: int | torch.Generator | None = None, **facts: Any) -> dict[str, Any]:
    """What a made set says in its `info` of its making, beside the method: the seed, and the versions of the software.

    Args:
        generator: the caller's; its seed is said if it is an integer.
        facts: further JSON values.

    The code's commit is not among them: it is the business of whoever runs from a checkout.
    """
    given = {} if generator is None or isinstance(generator, torch.Generator) else {"generator": int(generator)}
    return {**given, **facts, "distillkit": VERSION, "torch": str(torch.__version__)}
