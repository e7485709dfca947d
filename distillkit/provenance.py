"""What a made set says about its making beside its method: the seed, and the versions of the software."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["provenance"]


def provenance(generator: int | torch.Generator | None = None, **facts: Any) -> dict[str, Any]:
    """JSON values for a set's `info`: the seed that was given (`generator`, if an integer), `facts`, and versions.

    The code's commit is not among them: it is the business of whoever runs from a checkout.
    """
    from distillkit import __version__

    given = {} if generator is None or isinstance(generator, torch.Generator) else {"generator": int(generator)}
    return {**given, **facts, "distillkit": __version__, "torch": str(torch.__version__)}
