"""Smoke test of an installed wheel without extras, outside the repository: public names and one use of each package.

    python -P tests/smoke.py FOLDER

FOLDER is where the three packages must come from: `make wheel` builds it, test_wheel.py copies it (-P keeps this folder
and its `fl` off the path). What only an extra brings cannot be imported, nor the repository's other folders.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGES = ("distillkit", "fl", "attacks")
ABSENT = {
    *("flwr", "ray", "cryptography", "dp_accounting", "opendp", "mkdocs", "material", "latex2mathml"),
    *("pytest", "hypothesis", "tests", "examples", "docs"),
}


class Alone(PathFinder):
    """Python's import system without modules that the wheel does not bring."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None for absent modules, as for any missing module."""
        return None if fullname.partition(".")[0] in ABSENT else super().find_spec(fullname, path, target)


def names(folder: Path) -> int:
    """Check that every public name exists and comes from the folder; return their number."""
    found = 0
    for top in PACKAGES:
        package = importlib.import_module(top)
        assert Path(str(package.__file__)).is_relative_to(folder), f"{top} is {package.__file__}"
        for module in (info.name for info in pkgutil.walk_packages(package.__path__, f"{top}.")):
            here = importlib.import_module(module)
            public = getattr(here, "__all__", ())
            assert not (missing := [name for name in public if not hasattr(here, name)]), (module, missing)
            found += len(public)
    return found


def work(out: Path) -> None:
    """Condense, save, draw and evaluate a set; run federated training, plan a privacy budget, and attack."""
    import torch

    from attacks import roc, ssim
    from attacks.membership import nearest
    from distillkit import LabeledImages, plot
    from distillkit.condense import distribution_matching
    from distillkit.data import clients, load, partition
    from distillkit.networks import ConvNet, RandomNetworks
    from distillkit.privacy import plan_noise
    from fl import FedAvg, simulate

    train, test = load("digits", size=8)

    def convnet(outputs: int = 10) -> ConvNet:
        return ConvNet(train.shape, outputs, width=8, depth=1)

    small = distribution_matching(train, networks=RandomNetworks(convnet), ipc=1, steps=2, batch_real=16)
    small.save(out / "small.safetensors")
    again = LabeledImages.load(out / "small.safetensors")
    assert again.images.equal(small.images)
    plot.grid(again).savefig(out / "small.png")
    assert (out / "small.png").stat().st_size > 1000
    held = clients(train, partition.dirichlet(train.labels, 3, alpha=1.0))
    run = simulate(FedAvg(factory=convnet, steps=1, lr=0.1), held, rounds=2, test=test, out=out / "run", progress=False)
    assert [row["round"] for row in run.rows] == [1, 2]
    assert 0 <= run.accuracy_last <= 1
    assert plan_noise(epsilon=8.0, delta=1e-5).sigma > 0
    real = train.pixels()[:40]
    assert ssim(real[:4], real[:4], window=3).eq(1).all()
    assert roc(nearest(real[:20], real), torch.arange(40) < 20).auc == 1.0


if __name__ == "__main__":
    sys.meta_path[:] = [Alone if finder is PathFinder else finder for finder in sys.meta_path]
    print(f"{names(Path(sys.argv[1]).resolve())} public names are there")
    assert not ABSENT & {name.partition(".")[0] for name in sys.modules}
    with tempfile.TemporaryDirectory() as folder:
        work(Path(folder))
    print("and a set, a federated run, a budget and an attack were made")
