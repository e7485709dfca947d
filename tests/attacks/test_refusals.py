"""Every refusal that tests of attacks call, with its whole message, as in `refusals.txt`.

`python -m tests.attacks.test_refusals` writes the list; its difference shows what changes for users.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks import leaks
from tests.attacks import test_audit, test_audit_noise, test_leaks, test_statistics
from tests.attacks.inversion import test_analytic, test_client_classes, test_comparison, test_reconstruction
from tests.attacks.membership import test_label_only, test_membership, test_shadow_models, test_weaker_attacks

LIST = Path(__file__).with_name("refusals.txt")
TABLES: list[Any] = [
    test_statistics, test_audit, test_audit_noise, test_label_only, test_membership, test_shadow_models,
    test_weaker_attacks, test_analytic, test_client_classes, test_comparison, test_reconstruction,
]  # fmt: skip


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    for module in TABLES:
        [cases] = module.test_invalid_arguments_are_named.pytestmark
        yield from ((module.__name__, call) for call, _ in cases.args[1])
    yield from ((test_leaks.__name__, lambda own=own: leaks(*own)) for own, _ in test_leaks.BAD)  # type: ignore[misc]


def outcomes() -> Iterator[str]:
    """Yield a line for each refusal, in which messages of other packages are left out."""
    for name, call in calls():
        try:
            call()
        except (TypeError, ValueError, ArithmeticError) as error:
            text, cause = str(error), str(error.__cause__ or "").split("\n")[0]
            text = text.replace(cause, "...") if cause else text
            text = re.sub(r" at 0x\w+|(?<=[.]\d{3})\d+", "", text).replace("\n", " ")
            yield f"{name.rpartition('.')[2]}: {type(error).__name__}: {text}"


def test_all_messages_of_the_list_are_given() -> None:
    found = set(outcomes())  # new ones may be missing in the list
    assert [line for line in LIST.read_text(encoding="utf-8").splitlines() if line not in found] == []


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in outcomes()), encoding="utf-8")
