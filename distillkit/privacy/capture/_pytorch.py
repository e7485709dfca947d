"""Every private or experimental name of PyTorch that this package uses. A new release of PyTorch may move any of them.

A test names those that cannot be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch._C import _current_graph_task_id as current_backward
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import _defs as user_operators
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "DeviceContext",
    "FakeTensor",
    "OpOverload",
    "TorchDispatchMode",
    "chooses_by_values",
    "current_backward",
    "dispatch_modes",
    "function_modes",
    "is_functorch_wrapped_tensor",
    "make_fx",
    "traceable",
    "tree_leaves",
    "user_operators",
]


def chooses_by_values(error: Exception) -> bool:
    """Return whether a traced function failed because a branch or a shape depends on the values of a tensor."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # imports sympy

    kinds = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
    return isinstance(error, kinds)


@contextmanager
def traceable() -> Iterator[None]:
    """Trace through `torch.compile`, and without the checks of `torch.distributions`, which choose by values."""
    dynamo, checked = sys.modules.get("torch._dynamo"), Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with dynamo.config.patch(error_on_nested_fx_trace=False) if dynamo else nullcontext():
            yield
    finally:
        Distribution.set_default_validate_args(checked)
