"""Whatever is wrong with one argument of a loss is refused with the message in `refusals.txt`.

`python -m tests.distillkit.losses.test_refusals` writes the list; its difference shows what changes for users.
`tests/distillkit/test_odd_calls.py` tries unusual types; here are the bounds, and arguments that contradict each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import torch
from torch import Tensor, nn

from distillkit import losses

LIST = Path(__file__).with_name("refusals.txt")
ROWS, LABELS, NARROW = torch.ones(3, 4), torch.tensor([0, 1, 0]), torch.ones(3, 2)
VALID: dict[str, Any] = {
    **dict.fromkeys(("embeddings", "global_embeddings", "previous_embeddings", "other_embeddings"), ROWS),
    **dict.fromkeys(("student_logits", "teacher_logits", "p_logits", "q_logits", "logits"), ROWS),
    **dict.fromkeys(("real", "synthetic", "x", "y"), ROWS),
    **dict.fromkeys(("labels", "other_labels", "real_labels", "synthetic_labels"), LABELS),
    **dict.fromkeys(("gradients", "targets", "parameters", "reference"), (ROWS, ROWS)),
    **{"images": torch.ones(2, 3, 4, 4), "network": nn.BatchNorm2d(3), "num_classes": 2, "mu": 0, "unbiased": True},
    **{"prototypes": torch.ones(2, 4), "present": torch.ones(2).bool(), "temperature": 1e-6, "high": 1, "kernels": 1},
}
BAD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("temperature", "bandwidth", "multiplier", "low", "max_norm", "eps"), (0, -0.5)),
    **dict.fromkeys(("mu", "first_multiplier"), (0, -0.5)),
    **{"temperature": (9e-7,), "high": (0.01, 1.5), "kernels": (0,), "num_classes": (0,)},
    "network": (3, nn.ReLU(), nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm2d(3, device="meta")),
    "present": (torch.ones(2), torch.ones(3).bool()),
}


def odd_values(key: str, kind: Any) -> Iterator[Any]:
    """Yield invalid values of an argument, or values at a bound."""
    right = VALID.get(key)
    if key.endswith("labels"):
        yield from (None, torch.tensor([0, 1]), torch.tensor([0, 1, -1]), torch.tensor([0, 2, 1]))
    elif isinstance(right, Tensor) and right.is_floating_point():
        yield from (None, 3, right.long(), right.to("meta"), right[0], right[:, :0], NARROW, right[:1])
    elif isinstance(right, tuple):
        yield from (list, 3, [], [ROWS], [ROWS[0]] * 2, [ROWS, ROWS[:2]])
        yield from ([ROWS, odd] for odd in (None, ROWS.long(), ROWS.to("meta")))
    yield from (["odd"] if get_origin(kind) is Literal else ["no", True] if kind is bool else [])
    yield from BAD.get(key, ())


def outcomes() -> Iterator[str]:
    """Yield a line for each call: what is wrong with which argument, and the error, if there is one."""
    for name in losses.__all__:
        loss = getattr(losses, name)
        parameters = inspect.signature(loss, eval_str=True).parameters
        right = {key: VALID[key] for key in parameters if key in VALID}
        yield outcome(name, right)
        for key, parameter in parameters.items():
            for odd in odd_values(key, parameter.annotation):
                yield outcome(name, right | {key: odd}, key, odd)
    for odd in ([], [ROWS[0]]):
        yield outcome("gradient_distance", {"gradients": odd, "targets": odd})
        yield outcome("proximal", {"parameters": odd, "reference": odd, "mu": 1})


def outcome(name: str, arguments: dict[str, Any], key: str = "", odd: Any = None) -> str:
    shown = f"{list(odd.shape)} {odd.dtype} {odd.device}" if isinstance(odd, Tensor) else type(odd).__name__
    try:
        getattr(losses, name)(**arguments)
    except (TypeError, ValueError) as error:
        return f"{name}({key}: {shown}): {type(error).__name__}: {error}"
    return f"{name}({key}: {shown}): accepted"


def test_outcomes_are_as_listed() -> None:
    assert [*outcomes()] == LIST.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in outcomes()), encoding="utf-8")
