"""The field's tasks by name: which images, dealt how, on which network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distillkit._utils import check
from distillkit.data import (
    NAMES,
    Split,
    StoredSplit,
    load,
    load_cifar10c_domains,
    load_domains,
    load_femnist,
    open_celeba,
    open_dataset,
    open_flair,
    open_leaf_celeba,
    partition,
)
from distillkit.data._root import data_root
from distillkit.normalization import IDENTITY
from distillkit.study.task import Task

__all__ = ["TASK_NAMES", "named_task"]


@dataclass(frozen=True)
class _Known:
    """How a task is made.

    Attributes:
        read: the loader, or what opens more than fits in memory, with what it is always given.
        folder: below the data root, the loader's first argument; "" for one that reads by name and takes `root`.
        size: default height and width; None leaves the images as they are.
        natural: whether the data says whose images they are; else they are dealt by Dirichlet.
        deal: how natural clients are dealt; None: each has what is of one source, or of one person.
        options: further fields of the task.
    """

    read: Callable[..., Split | StoredSplit]
    folder: str = ""
    size: int | None = None
    natural: bool = False
    deal: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


_SMALL = {"factory_options": {"width": 32, "depth": 2}}
_FEW = {"participation": 10, "evaluate": "none"}
_TASKS: dict[str, _Known] = {
    **{name: _Known(partial(load, name)) for name in NAMES},
    "digits": _Known(partial(load, "digits"), size=16, options=_SMALL),
    "usps": _Known(partial(load, "usps"), options=_SMALL),
    "tinyimagenet": _Known(partial(open_dataset, "tinyimagenet")),
    "digits-domains": _Known(
        partial(load_domains, ["mnist", "svhn", "usps", "synthdigits", "mnistm"], channels=3), size=28, natural=True
    ),
    "cifar10c": _Known(
        partial(load_cifar10c_domains, normalization=IDENTITY), "CIFAR-10-C", 28, True, partition.domains_by_dirichlet
    ),
    "retina": _Known(partial(load_domains), "retina_balanced", 96, True),
    "femnist": _Known(partial(load_femnist), "femnist", natural=True, options=_FEW),
    "celeba": _Known(partial(open_celeba), "celeba", 84, True, options=_FEW),
    "leaf-celeba": _Known(partial(open_leaf_celeba), "leaf-celeba", 84, True, options=_FEW),
    "flair": _Known(partial(open_flair), "flair", 64, True, options=_FEW),
}

TASK_NAMES = tuple(_TASKS)
"""What `named_task` knows."""


def named_task(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    clients: int = 10,
    alpha: float = 0.1,
    size: int | None = None,
    **options: Any,
) -> Task:
    """Make one of the field's tasks by its name: `named_task("cifar10", alpha=0.01, rounds=20)`.

    Images without clients of their own are dealt by Dirichlet; those of several sources or people are dealt by these:

    | name | clients |
    |---|---|
    | any that `load` knows: digits, mnist, cifar10, pathmnist, ... | `clients` of them, by Dir(`alpha`) |
    | digits-domains | MNIST, SVHN, USPS, SynthDigits and MNIST-M, one each, 3x28x28 (FedLGD's DIGITS) |
    | cifar10c | 57: three parts of each of 19 corruptions (FedLGD) |
    | retina | Drishti, Acrima, RIM and REFUGE, one each, 3x96x96 (FedLGD) |
    | femnist, celeba, leaf-celeba, flair | a person each, of whom ten take part in a round |

    Tiny-ImageNet, CelebA and FLAIR are opened: a cache of bytes is made of them once, 1.4 GB, 4.3 GB and 5.3 GB at the
    default sizes, beside their folders or where `DISTILLKIT_CACHE` says (see `data.open_folder`).

    Args:
        name: one of `TASK_NAMES`.
        root: where the data sets lie (see `load`); the folders `CIFAR-10-C`, `retina_balanced`, `femnist`, `celeba`,
            `leaf-celeba` and `flair` in it. Default: the environment variable `DISTILLKIT_DATA`.
        clients, alpha: of the Dirichlet partition, for data that has no clients of its own.
        size: height and width of the images; default that of the papers, or as the data is.
        options: any field of `Task`, in place of the default.

    Raises:
        ValueError: no task of that name, or no root for one that lies in a folder.
        TypeError: no such field.
    """
    known = _TASKS[check.one_of(name, "name", TASK_NAMES)]
    given: dict[str, Any] = {}
    if root is not None and not known.folder:
        given["root"] = str(root)
    if known.size is not None or size is not None:
        given["size"] = known.size if size is None else check.positive_int(size, "size")
    where = (str(data_root(root, name) / known.folder),) if known.folder else ()
    title, deal = name, known.deal
    if not known.natural:
        title = f"{name}-dirichlet{check.real_number(alpha, 'alpha', above=0.0):g}-{clients}"
        deal = partial(partition.dirichlet, clients=check.positive_int(clients, "clients"), alpha=alpha)
    made = {"name": title, "data": partial(known.read, *where, **given), "partition": deal, **known.options}
    return Task(**{**made, **options})
