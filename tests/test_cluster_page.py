"""The programs of docs/cluster.md run as they stand, with smaller numbers, and give the results of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distillkit import LabeledImages
from distillkit.study import read_records

PAGE = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S) if not block.startswith(">>>")]
STUDY, DASK, SLURM, CONDENSE = BLOCKS
SMALLER = {
    "steps=1000)": "steps=2, batch_real=40)",
    "ipc=10": "ipc=2",
    "Condense(condenser)": "Condense(condenser, num_networks=1, protocol=Protocol(epochs=1))",
    "Condense(lambda factory: partial(herding, ipc=2))": (
        "Condense(lambda factory: partial(herding, ipc=2), num_networks=1, protocol=Protocol(epochs=1))"
    ),
    "range(10))\n": "range(2))\n",
    "import Condense": "import Condense, Protocol",
}
"""What the test makes smaller in the study."""


def run(folder: Path, code: str, *launcher: str) -> str:
    """Run a program in a folder, and return what it prints."""
    (folder / "program.py").write_text(code, encoding="utf-8")
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(folder)])
    command = [sys.executable, *launcher, "program.py"]
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Return a folder with the study's module."""
    code = STUDY
    for before, after in SMALLER.items():
        if "Protocol" in after and before.startswith("import"):
            code = code.replace("from functools", "from distillkit.training import Protocol\nfrom functools", 1)
            continue
        assert before in code, before
        code = code.replace(before, after)
    (tmp_path / "comparison.py").write_text(code, encoding="utf-8")
    return tmp_path


def accuracies(folder: Path) -> list[tuple[str, float]]:
    return [(r.line["run"], r.line["accuracy_last"]) for r in read_records(folder / "runs" / "digits")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "code", "before", "after"),
    [
        ("distributed", DASK, "n_workers=4", "n_workers=2, dashboard_address=None"),
        ("submitit", SLURM, 'folder="runs/jobs"', 'folder="runs/jobs", cluster="local"'),
    ],
    ids=["Dask", "Slurm"],
)
def test_study_on_a_cluster_gives_the_records_of_one_process(
    module: str, code: str, before: str, after: str, study: Path
) -> None:
    pytest.importorskip(module, reason=f"{module} is not installed")
    assert before in code
    run(study, code.replace(before, after))
    found = accuracies(study)
    (study / "runs").rename(study / "first")
    run(study, "from comparison import study\nstudy().run(trial=False, progress=False)")
    assert found == accuracies(study)
    assert len(found) == 4


@pytest.mark.slow
def test_condensation_under_torchrun_gives_the_set_of_one_process(tmp_path: Path) -> None:
    code = CONDENSE
    for before, after in {
        "ipc=10": "ipc=2, steps=2, chunk=8",
        "num_networks=1": "num_networks=1, protocol=Protocol(epochs=1)",
        ", 20)": ", 3)",
        "import torch\n": "import torch\nfrom distillkit.training import Protocol\ntorch.set_num_threads(1)\n",
    }.items():
        assert before in code
        code = code.replace(before, after)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(tmp_path, code, *launcher)
    together = LabeledImages.load(tmp_path / "digits.safetensors")
    alone = run(tmp_path, code, *launcher[:-1], "1")
    assert printed == alone
    one = LabeledImages.load(tmp_path / "digits.safetensors")
    assert (together.images.equal(one.images), together.labels.tolist()) == (True, one.labels.tolist())
    assert printed.count(",") == 2
