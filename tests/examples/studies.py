"""The study that an example's words ask for, without running it."""

from __future__ import annotations

from types import ModuleType

import pytest

from distillkit.study import Study

__all__ = ["asked"]


class Asked(Exception):
    """Raised in place of a run."""


def asked(script: ModuleType, patch: pytest.MonkeyPatch, *words: object) -> Study:
    """The first study that these words ask for, which is not run."""
    studies: list[Study] = []

    def stop(study: Study, *_: object, **__: object) -> None:
        studies.append(study)
        raise Asked

    with patch.context() as inside:
        inside.setattr(script, "run_study", stop)
        with pytest.raises(Asked):
            script.main(list(map(str, words)))
    return studies[0]
