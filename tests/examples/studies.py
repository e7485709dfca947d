"""The studies requested by an example's command line, without running them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distillkit.serialization import to_config
from distillkit.study import Records, Study, Task

__all__ = ["configurations", "requested_studies", "requested_study"]


class RequestedStudy(Exception):
    """Exception that is raised instead of running a study."""


def requested_study(script: ModuleType, patch: pytest.MonkeyPatch, *words: object) -> Study:
    """Return the first study that this command line requests, without running it."""
    studies: list[Study] = []

    def stop(study: Study, *_: object, **__: object) -> None:
        studies.append(study)
        raise RequestedStudy

    with patch.context() as inside:
        inside.setattr(script, "run_study", stop)
        with pytest.raises(RequestedStudy):
            script.main(list(map(str, words)))
    return studies[0]


def requested_studies(script: ModuleType, patch: pytest.MonkeyPatch, *words: str) -> list[Study]:
    """Return all studies that this command line requests, without running them; none has a record."""
    studies: list[Study] = []
    with patch.context() as inside:
        inside.setattr(script, "require_data", lambda tasks: None, raising=False)
        inside.setattr(script, "run_study", lambda study, *_, **__: studies.append(study) or Records([]))
        script.main(list(words))
    return studies


def configurations(candidates: Mapping[str, Any], task: Task, store: Path) -> dict[str, list[str]]:
    """Return the configuration of every method that each candidate's search gives: each can be built again."""
    split, found = task.load(), dict[str, list[str]]()
    for name, candidate in candidates.items():
        source = candidates[candidate.like or name]
        tried = [{**source.settings, **settings, **candidate.settings} for settings in source.search]
        found[name] = [json.dumps(to_config(candidate.build(task, split, one), store=store)) for one in tried]
    return found
