"""Common benchmark tasks by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from distillkit._utils import check
from distillkit.data import NAMES, load, load_domains, open_dataset, partition
from distillkit.data._data_root import data_root
from distillkit.normalization import IDENTITY
from distillkit.study.task import Task

_SMALL = {"factory_options": {"width": 32, "depth": 2}}
_FEW = {"participation": 10, "evaluate": "none"}
_SOURCES = ["mnist", "svhn", "usps", "synthdigits", "mnistm"]
_TASKS: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    **{name: (partial(load, name), {}) for name in NAMES},
    "digits": (partial(load, "digits", size=16), _SMALL),
    "usps": (partial(load, "usps"), _SMALL),
    "tinyimagenet": (partial(open_dataset, "tinyimagenet"), {}),
    "digits-domains": (partial(load_domains, _SOURCES, channels=3, size=28), {}),
    "cifar10c": (
        partial(load, "cifar10c", size=28, normalization=IDENTITY), {"partition": partition.domains_by_dirichlet}
    ),
    "retina": (partial(load_domains, size=96), {}),
    "femnist": (partial(load, "femnist"), _FEW),
    "celeba": (partial(open_dataset, "celeba", size=84), _FEW),
    "leaf-celeba": (partial(open_dataset, "leaf-celeba", size=84), _FEW),
    "flair": (partial(open_dataset, "flair", size=64), _FEW),
}  # fmt: skip
"""Readers of data in the data root, whose large sets stay on disk, with options of `Task`."""

_NATURAL = ("digits-domains", "cifar10c", "retina", "femnist", "celeba", "leaf-celeba", "flair")
"""Tasks whose data state the person or the source of each image."""

TASK_NAMES = tuple(_TASKS)
"""Names that `named_task` accepts."""


def named_task(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    clients: int = 10,
    alpha: float = 0.1,
    size: int | None = None,
    **options: Any,
) -> Task:
    """Return a common benchmark task by name: `named_task("cifar10", alpha=0.01, rounds=20)`.

    Data from several sources or people has one client per source or person. All other data is partitioned by a
    Dirichlet distribution:

    | name | clients |
    |---|---|
    | any name that `load` accepts: digits, mnist, cifar10, pathmnist, ... | `clients` clients, by Dir(`alpha`) |
    | digits-domains | MNIST, SVHN, USPS, SynthDigits and MNIST-M, one each, 3x28x28 (FedLGD's DIGITS) |
    | cifar10c | 57 clients: three for each of 19 corruptions (FedLGD) |
    | retina | Drishti, Acrima, RIM and REFUGE, one each, 3x96x96 (FedLGD) |
    | femnist, celeba, leaf-celeba, flair | one client per person; ten of them take part in a round |

    The images of Tiny-ImageNet, CelebA and FLAIR stay on disk, in a cache of 1.4 GB, 4.3 GB and 5.3 GB at the default
    sizes. The cache is written once, to the folder in the environment variable `DISTILLKIT_CACHE` or, if it is not set,
    beside the folder of the data.

    Args:
        name: name of the task, one of `TASK_NAMES`.
        root: folder of the data sets (see `load`), with the subfolders `CIFAR-10-C`, `retina_balanced`, `femnist`,
            `celeba`, `leaf-celeba` and `flair`. Default: the environment variable `DISTILLKIT_DATA`.
        clients, alpha: number of clients and concentration of the Dirichlet partition.
        size: height and width of the images. Default: the task's own size if it has one, otherwise the size of the
            images in the data.
        options: other fields of `Task`.

    Raises:
        ValueError: the name is unknown, or the task needs a root.
        TypeError: `Task` has no such field.
    """
    check.one_of(name, "name", TASK_NAMES)
    given: dict[str, Any] = {} if size is None else {"size": check.positive_int(size, "size")}
    fields: dict[str, Any] = {"name": name}
    read, defaults = _TASKS[name]
    if name == "retina":
        read = partial(read, str(data_root(root, name) / "retina_balanced"))
    elif root is not None:
        given["root"] = str(root)
    if name not in _NATURAL:
        fields["name"] = f"{name}-dirichlet{check.real_number(alpha, 'alpha', above=0.0):g}-{clients}"
        count = check.positive_int(clients, "clients")
        fields["partition"] = partial(partition.dirichlet, clients=count, alpha=alpha)
    return Task(**{**fields, "data": partial(read, **given), **defaults, **options})
