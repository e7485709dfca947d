"""Former names of functions and arguments. Nothing in the packages is deprecated yet, so nothing else calls them."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest

from distillkit._utils import deprecation
from distillkit._utils.deprecation import renamed, renamed_argument


@pytest.fixture(autouse=True)
def nothing_warned() -> None:
    deprecation._warn_once.cache_clear()


@renamed_argument("step_size", "lr", removal="0.3")
def descend(x: float, lr: float = 0.1, *, steps: int = 1) -> float:
    """Descend."""
    return x - lr * steps


def test_former_argument_gives_the_same_and_warns_once() -> None:
    with pytest.warns(FutureWarning) as said:
        found = [descend(5.0, step_size=size, steps=2) for size in (2.0, 1.0)]  # type: ignore[call-arg]
    assert found == [1.0, 3.0]
    assert [str(one.message) for one in said] == [
        "step_size of descend is deprecated and will be removed in distillkit 0.3; use lr"
    ]
    assert said[0].filename == __file__


def test_new_argument_and_default_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (descend(5.0, lr=2.0), descend(5.0, 3.0), descend(5.0)) == (3.0, 2.0, 4.9)


def test_both_names_are_refused() -> None:
    for args, kwargs in (((5.0, 1.0), {}), ((5.0,), {"lr": 1.0})):
        with pytest.raises(TypeError, match="descend got lr and its former name step_size; pass lr only"):
            descend(*args, step_size=2.0, **kwargs)  # type: ignore[call-arg,arg-type]


def test_other_unknown_arguments_are_refused_as_ever() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        descend(5.0, size=2.0)  # type: ignore[call-arg]


def test_former_function_is_the_new_one_with_a_warning() -> None:
    fall = renamed("fall", descend, removal="1.0")
    other = renamed("drop", descend, removal="1.0")
    with pytest.warns(FutureWarning) as said:
        assert (fall(5.0, lr=2.0), fall(5.0, 3.0), other(5.0)) == (3.0, 2.0, 4.9)
    assert [str(one.message) for one in said] == [
        f"{name} is deprecated and will be removed in distillkit 1.0; use descend" for name in ("fall", "drop")
    ]
    assert (fall.__name__, fall.__qualname__, fall.__doc__) == ("fall", "fall", "Descend.")


def test_signature_stays_that_of_the_function() -> None:
    expected = "(x: 'float', lr: 'float' = 0.1, *, steps: 'int' = 1) -> 'float'"
    assert str(inspect.signature(descend)) == str(inspect.signature(renamed("f", descend, removal="1"))) == expected


def test_warning_that_is_an_error_comes_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(FutureWarning, match="removed in distillkit 0.3"):
                descend(5.0, step_size=2.0)  # type: ignore[call-arg]


def test_nothing_is_deprecated_yet() -> None:
    """The first use needs a line in the changelog and a test that its removal is not overdue; then this test goes."""
    root = Path(__file__).parents[2]
    files = [file for top in ("distillkit", "fl", "attacks") for file in (root / top).rglob("*.py")]
    users = [file.name for file in files if "_utils.deprecation" in file.read_text(encoding="utf-8")]
    assert users == []
