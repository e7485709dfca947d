"""The door of `simulate`: every argument is checked before round 1; what is odd but possible is warned of."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real

import torch
from torch import Tensor

from distillkit._sanity_checks import warn
from distillkit._utils import check
from distillkit.privacy import Ledger
from distillkit.privacy.validation._arguments import refuse_measured_normalization, require_given_num_classes
from distillkit.sets import Images, LabeledImages, StoredImages
from fl.engine._clients import grown, read_or_stored, read_set, require_like
from fl.method import Method
from fl.task import Classification, LabelTask

__all__ = [
    "device_at",
    "drawn_count",
    "panel",
    "require_ledger",
    "require_public",
    "server_sets",
    "task_at",
    "test_set",
]


def device_at(device: torch.device | str) -> torch.device:
    """The `device` as a `torch.device`, if this machine can compute on it.

    Raises:
        TypeError, ValueError: no device, or none that is here.
    """
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be a torch.device or its name, got {type(device).__name__}")
    try:
        found = torch.device(device)
        torch.zeros((), device=found).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device {str(device)!r} cannot be used here ({reason}); there is {', '.join(here)}"
        ) from error
    return found


# The task and the sets.


def task_at(task: LabelTask | None, first: LabeledImages) -> LabelTask:
    """The task, by default one class an image among as many as the first client's set has.

    Args:
        task: as it was given to `simulate`, or None.
        first: the first client's set.

    Raises:
        TypeError: no task.
        ValueError: a task of other labels, or of another class count, than the clients'.
    """
    rows = first.labels.ndim == 2
    if task is None:
        if rows:
            raise ValueError(
                "the clients' labels are rows: give task=MultiLabel(num_classes) if an image may have any number of "
                "classes, or class indices, `data.replace(labels=data.labels.argmax(1))`"
            )
        return Classification(first.num_classes)
    if isinstance(task, type) or not all(hasattr(task, n) for n in ("num_classes", "single_label", "loss", "sums")):
        got = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
        raise TypeError(f"task must be an object, as Classification(10) or MultiLabel(10), got {got}")
    if task.num_classes != first.num_classes:
        raise ValueError(
            f"the task has {task.num_classes} classes, the clients' sets have {first.num_classes}; say how many there "
            "are with `data.replace(num_classes=...)`"
        )
    if task.single_label == rows:
        wanted, got = ("class indices [N]", "rows [N, K]") if rows else ("rows [N, K] of 0 and 1", "class indices [N]")
        raise ValueError(f"{task!r} wants labels as {wanted}, the clients have {got}")
    return task


def test_set(test: object, first: LabeledImages, progress: bool) -> LabeledImages | StoredImages | None:
    """The global test set, if it fits the clients' sets.

    Args:
        test: as it was given to `simulate`; a dataset, loader or pair is read, a stored set is not.
        first: the first client's set.
        progress: whether long reading shows a bar.

    Raises:
        TypeError, ValueError: no set, an empty one, or one in another space.
    """
    if test is None:
        return None
    data = grown(read_or_stored(test, "test", progress), first.num_classes, True)
    if not len(data):
        raise ValueError("test holds no images: leave it out, or give some")
    require_like(first, data, "test")
    return data


def server_sets(given: Mapping[str, Images] | None, first: LabeledImages, progress: bool) -> dict[str, LabeledImages]:
    """The server's sets by name, if they are in the clients' space; their classes may be others (a proxy set's are).

    Args:
        given: `server_data` as it was given to `simulate`.
        first: the first client's set.
        progress: whether long reading shows a bar.

    Raises:
        TypeError, ValueError: no mapping of names to sets, an empty one, or one in another space.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"server_data must map names to sets, as {{'proxy': data}}, got {type(given).__name__}")
    sets = {
        name: grown(
            read_set(data, f"server_data[{name!r}]", progress), first.num_classes if name == "validation" else 0, True
        )
        for name, data in (given or {}).items()
    }
    for name, data in sets.items():
        if not len(data):
            raise ValueError(f"server_data[{name!r}] holds no images: leave it out, or give some")
        require_like(first, data, f"server_data[{name!r}]", classes=name == "validation")
    return sets


# Who takes part, and who is tested.


def drawn_count(participation: float | int, clients: int, min_replies: int, *, drawn_by_method: bool) -> int:
    """How many clients take part in a round.

    Args:
        participation: a share of the clients in (0, 1], or their number, as it was given to `simulate`.
        clients: how many there are.
        min_replies: the fewest usable replies that a round needs.
        drawn_by_method: whether the method draws its clients itself.

    Raises:
        TypeError, ValueError: no share in (0, 1] and no number of clients; fewer than `min_replies`; or anything but
            the defaults where the method draws.
    """
    check.positive_int(min_replies, "min_replies")
    if drawn_by_method and (isinstance(participation, Integral) or participation != 1.0 or min_replies != 1):
        raise ValueError(
            "the method draws its clients itself, and every round counts: leave participation at 1.0 and min_replies "
            f"at 1, got {participation} and {min_replies} (a privacy filter has a rate of its own)"
        )
    if isinstance(participation, Integral) and not isinstance(participation, bool):
        wanted = check.positive_int(int(participation), "participation")
        if wanted == 1 and clients > 1:
            warn(
                f"participation=1 is one client a round, of {clients}; all of them are participation=1.0 (one without "
                "this warning: participation=1 / len(clients))"
            )
    else:
        number = isinstance(participation, Real) and not isinstance(participation, bool)
        share = float(participation) if number else participation
        wanted = max(1, round(check.real_number(share, "participation", above=0.0, most=1.0) * clients))
    if wanted > clients:
        raise ValueError(f"participation asks for {wanted} clients, but there are {clients}")
    if min_replies > wanted:
        raise ValueError(
            f"min_replies is {min_replies}, but only {wanted} clients take part in a round: give at most {wanted}"
        )
    return wanted


def panel(evaluate: object, clients: int, *, hidden: bool) -> str | list[int]:
    """Whose own test images are used: "drawn", "all", "none", or clients' numbers.

    Args:
        evaluate: as it was given to `simulate`; None is the default: "drawn", and "none" where clients are hidden.
        clients: how many there are.
        hidden: whether the method is private or sealed, so that a single client's numbers are to stay with it.

    Raises:
        TypeError, ValueError: another word, or numbers of clients that do not exist, or twice.
    """
    if evaluate is None:
        return "none" if hidden else "drawn"
    if isinstance(evaluate, str):
        return check.one_of(evaluate, "evaluate", ("drawn", "all", "none"))
    wanted = "evaluate must be 'drawn', 'all', 'none' or a list of clients' numbers"
    if isinstance(evaluate, type | Mapping) or not hasattr(evaluate, "__iter__"):
        raise TypeError(f"{wanted}, got {type(evaluate).__name__}")
    given = [n.item() if isinstance(n, Tensor) and n.ndim == 0 else n for n in evaluate]
    if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in given):
        raise TypeError(f"{wanted}, got {given!r}")
    numbers = [int(n) for n in given]
    missing = [n for n in numbers if not 0 <= n < clients]
    if missing or not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{wanted}, each once, from 0 to {clients - 1}; got {numbers}")
    return numbers


def require_public(method: Method, first: LabeledImages, task: LabelTask | None) -> None:
    """Refuse a private run whose images were normalised, or whose classes were counted, on the clients' own data.

    Args:
        method: what is to run; one that is not private is not looked at.
        first: the first client's set.
        task: as it was given to `simulate`: it says how many classes there are, or is None.

    Raises:
        PrivacyError: one of its kinds, with what to do.
    """
    if method.private:
        # A method with an option of that name has its own say (`PrivateFedDM`).
        if getattr(method.inner, "public_statistics", None) is None:
            refuse_measured_normalization(first.normalization, type(method.inner).__name__)
        if task is None:
            require_given_num_classes(first)


def require_ledger(method: Method, ledger: object, secret: object, out: object) -> None:
    """Refuse a ledger or a secret that a run would not use, or a ledger that would not outlive the run's folder.

    Args:
        method: what is to run.
        ledger, secret, out: as they were given to `simulate`.

    Raises:
        TypeError, ValueError: as said.
    """
    if ledger is not None and not isinstance(ledger, Ledger):
        raise TypeError(f"ledger must be a distillkit.privacy.Ledger, got {type(ledger).__name__}")
    for name, value in {"ledger": ledger, "secret": secret}.items():
        if value is not None and not method.private:
            raise ValueError(
                f"{name} is given, but the method is not private and charges nothing, so that it would promise what "
                "does not hold: leave it out, or take a private method (DPSGD, ClientDP, PrivateFedDM)"
            )
    if secret is not None:
        check.positive_int(secret, "secret", least=0)  # type: ignore[arg-type]
    if isinstance(ledger, Ledger) and ledger.path is None and out is not None:
        raise ValueError("ledger must outlive the process as the run in `out` does: give it a file, Ledger(path, ...)")
