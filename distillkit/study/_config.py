"""What the folder of a run says of it, so that it can be read and repeated: for ways that write their own."""

from __future__ import annotations

import json
from typing import Any

from distillkit._utils.files import write_atomically
from distillkit._utils.provenance import RUN_FORMAT, versions
from distillkit.serialization import SerializationError, to_config
from distillkit.study.candidate import Job

__all__ = ["write_config"]


def write_config(made: Any, job: Job) -> None:
    """Write `config.json`: what was made, on which task, with which seed and versions.

    Args:
        made: what the run's way built.
        job: the run.
    """
    missing = None
    try:
        said = to_config(made, store=job.folder / "arguments")
    except SerializationError as error:
        said, missing = None, str(error)
    found = {
        "format": RUN_FORMAT, "recipe": said, "recipe_missing": missing, "seed": job.seed, "device": job.device,
        "notes": dict(job.notes), "versions": versions(),
    }  # fmt: skip
    write_atomically(job.folder / "config.json", json.dumps(found, indent=2) + "\n")
