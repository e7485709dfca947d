"""Scripts of the repository (examples, generators of pages): run whole, or loaded as modules to test their parts."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


EXAMPLES = {
    path.parent.name if path.stem == "run" else path.stem: path
    for pattern in ("*.py", "*/run.py", "papers/*/run.py")
    for path in sorted((ROOT / "examples").glob(pattern))
}
"""The scripts with the common options, by name: that of the file, or that of the folder of a `run.py`."""


def load_script(path: Path | str) -> ModuleType:
    """Return a new module of the script at `path`, relative to the repository's root, without running `main`."""
    folder, name = Path(path).with_suffix("").parts[-2:]
    spec = importlib.util.spec_from_file_location(f"script_{folder}_{name}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that what it defines has a name in records
    spec.loader.exec_module(module)
    return module


def run_script(path: Path, folder: Path, *, alone: bool) -> str:
    """Run a script in an empty folder, and return its output. It may not write a warning.

    Args:
        path: file of the script.
        folder: working directory.
        alone: whether to start a new interpreter; otherwise the script becomes the main module of this process, which
            saves seconds of imports.
    """
    if alone:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, str(path)]
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, encoding="utf-8"
        )
        assert ran.returncode == 0, ran.stderr
        out, err = ran.stdout, ran.stderr
    else:
        shown = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(shown), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", DeprecationWarning)  # as in a new interpreter
            runpy.run_path(str(path), run_name="__main__")
        out, err = shown.getvalue(), "\n".join(f"{w.category.__name__}: {w.message}" for w in found)
    assert "Warning" not in err, err
    return out
