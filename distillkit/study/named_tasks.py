"""Common benchmark tasks by name."""

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
from distillkit.data._data_root import data_root
from distillkit.normalization import IDENTITY
from distillkit.study.task import Task

__all__ = ["TASK_NAMES", "named_task"]


@dataclass(frozen=True)
class _TaskTemplate:
    """Data and default options from which `named_task` creates a task.

    Attributes:
        read: function that reads the data; some arguments are already set by `partial`. Large data sets are opened as a
            `StoredSplit`, whose images stay on disk.
        folder: name of a subfolder of the data root. Its path is passed to `read` as the first argument. "" if `read`
            receives the data root itself, as the argument `root`.
        size: default height and width; None keeps the images' size.
        natural: whether the data contain, for each image, the person or the original data set (such as MNIST or USPS)
            from which the image comes. Data without this information are partitioned by a Dirichlet distribution.
        partition: function that partitions natural data; None for one client per person or original data set.
        options: default values of further arguments of `Task`.
    """

    read: Callable[..., Split | StoredSplit]
    folder: str = ""
    size: int | None = None
    natural: bool = False
    partition: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


_SMALL = {"factory_options": {"width": 32, "depth": 2}}
_FEW = {"participation": 10, "evaluate": "none"}
_TASKS: dict[str, _TaskTemplate] = {
    **{name: _TaskTemplate(partial(load, name)) for name in NAMES},
    "digits": _TaskTemplate(partial(load, "digits"), size=16, options=_SMALL),
    "usps": _TaskTemplate(partial(load, "usps"), options=_SMALL),
    "tinyimagenet": _TaskTemplate(partial(open_dataset, "tinyimagenet")),
    "digits-domains": _TaskTemplate(
        partial(load_domains, ["mnist", "svhn", "usps", "synthdigits", "mnistm"], channels=3), size=28, natural=True
    ),
    "cifar10c": _TaskTemplate(
        partial(load_cifar10c_domains, normalization=IDENTITY), "CIFAR-10-C", 28, True, partition.domains_by_dirichlet
    ),
    "retina": _TaskTemplate(partial(load_domains), "retina_balanced", 96, True),
    "femnist": _TaskTemplate(partial(load_femnist), "femnist", natural=True, options=_FEW),
    "celeba": _TaskTemplate(partial(open_celeba), "celeba", 84, True, options=_FEW),
    "leaf-celeba": _TaskTemplate(partial(open_leaf_celeba), "leaf-celeba", 84, True, options=_FEW),
    "flair": _TaskTemplate(partial(open_flair), "flair", 64, True, options=_FEW),
}

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
    template = _TASKS[check.one_of(name, "name", TASK_NAMES)]
    given: dict[str, Any] = {}
    if root is not None and not template.folder:
        given["root"] = str(root)
    if template.size is not None or size is not None:
        given["size"] = template.size if size is None else check.positive_int(size, "size")
    folder = (str(data_root(root, name) / template.folder),) if template.folder else ()
    title, rule = name, template.partition
    if not template.natural:
        title = f"{name}-dirichlet{check.real_number(alpha, 'alpha', above=0.0):g}-{clients}"
        rule = partial(partition.dirichlet, clients=check.positive_int(clients, "clients"), alpha=alpha)
    fields = {"name": title, "data": partial(template.read, *folder, **given), "partition": rule, **template.options}
    return Task(**{**fields, **options})
