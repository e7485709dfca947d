"""What a node's owner allows: a file on the node, against which every request is held, whatever the server's app says.

    epsilon = 8.0              # what all runs together may cost a record; inf: no limit
    delta = 1e-5
    smallest_sigma = 1.0       # of a release: noise standard deviation / sensitivity
    largest_rate = 1.0         # with which a record takes part in a release
    largest_clip = 1.0         # of a record's gradient or vector; inf: any
    methods = ["PrivateFedDM", "FedAvg(DPSGD)"]
    evaluation = false         # whether accuracies on the node's own test images, exact numbers, are told
    app = "sha256:..."         # of the app's code (`app_hash`); "any": not looked at

**It protects** against a server that asks more than was agreed, by another setting, a further run, a seed for the
noise, or a changed app: nothing leaves the node that its file does not allow, charges stand in the node's ledger before
noise is drawn, and a refusal says nothing about the data. With a finite epsilon an answer leaves only if something was
charged for it, and of what fails there only the kind of error is told.

**It does not protect** against code that does not come by here. The policy is held by the distillkit that is installed
on the node, and asked for by the app's `client_app`: an app that reads the images itself, or leaves `policy` out, is
not stopped, and whether a mechanism adds the noise that it charges is for the method's code. So what a node runs must
be its owner's own: an app that the owner has read, installed there or signed by a key that the SuperNode trusts
(`flower-supernode --trusted-entities`); `app` then tells when a later version is another. Nor does it cover who takes
part, when a node answers and how long that takes, files that are copied from the node, or two nodes that hold the same
records: each has a ledger of its own.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from distillkit._utils import check
from distillkit.privacy import Event
from fl.method import Method

__all__ = ["Policy", "PolicyRefusal", "app_hash", "read_policy"]

ANY = "any"
"""Of an app that is not looked at."""


class PolicyRefusal(RuntimeError):
    """A node's policy does not allow what was asked; the key of its file is named, and what came."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a node's owner allows; a line of the file each, see above.

    Attributes:
        epsilon, delta: what all runs together may cost any record.
        smallest_sigma, largest_rate, largest_clip: of every release.
        methods: names, each with its add-ons and filters, as `FedAvg(DPSGD)`.
        evaluation: whether accuracies on the node's test images are told.
        app: hash of the app's code, or "any".
    """

    epsilon: float
    delta: float
    smallest_sigma: float
    largest_rate: float
    largest_clip: float
    methods: tuple[str, ...]
    evaluation: bool
    app: str

    def __post_init__(self) -> None:
        if self.epsilon != math.inf:
            check.real_number(self.epsilon, "epsilon", above=0.0)
        check.real_number(self.delta, "delta", above=0.0, below=1.0)
        check.real_number(self.smallest_sigma, "smallest_sigma", above=0.0)
        check.real_number(self.largest_rate, "largest_rate", above=0.0, most=1.0)
        if self.largest_clip != math.inf:
            check.real_number(self.largest_clip, "largest_clip", above=0.0)
        names = check.sequence(self.methods, "methods", "names, as 'FedAvg(DPSGD)'")
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"methods must be names, as 'FedAvg(DPSGD)', at least one; got {list(names)!r}")
        object.__setattr__(self, "methods", tuple(names))
        check.boolean(self.evaluation, "evaluation")
        digits = self.app.removeprefix("sha256:") if isinstance(self.app, str) else ""
        if self.app != ANY and (digits == self.app or len(digits) != 64 or set(digits) - set("0123456789abcdef")):
            raise ValueError(
                f"app must be 'any' or what app_hash(folder) gives, 'sha256:' and 64 digits; got {self.app!r}"
            )

    @property
    def budget(self) -> float | None:
        """Epsilon, None where there is no limit."""
        return None if self.epsilon == math.inf else self.epsilon

    def require_request(self, method: Method, verb: str, app: str | None) -> None:
        """Refuse what can be told before the client computes anything.

        Args:
            method: which the node would run.
            verb: which of its verbs.
            app: the hash of the code that asks, None if that is not known.

        Raises:
            PolicyRefusal: naming the key of the file.
        """
        name = name_of(method)
        if self.app not in (ANY, app):
            raise PolicyRefusal(f"its policy allows the app {self.app}, and this one is {app or 'not named'}")
        if name not in self.methods:
            raise PolicyRefusal(f"its policy allows the methods {', '.join(self.methods)}, and this is {name}")
        if verb == "evaluate" and not self.evaluation:
            raise PolicyRefusal("its policy says evaluation = false: accuracies on its test images are not told")
        if self.budget is not None and not method.private:
            raise PolicyRefusal(f"its policy has epsilon = {self.epsilon:g}, and {name} is not private at all")
        if self.largest_clip == math.inf:
            return
        for part in method.parts:
            if getattr(part, "private", False) and hasattr(part, "clip"):
                clip = getattr(part, "clip_bound", part.clip)
                if not isinstance(clip, int | float) or not clip <= self.largest_clip:
                    raise PolicyRefusal(
                        f"its policy says largest_clip = {self.largest_clip:g}, and {type(part).__name__} has {clip}"
                    )

    def require_events(self, events: Sequence[Event]) -> None:
        """Refuse releases of too little noise, or of too large a share of the records.

        Args:
            events: what would be charged.

        Raises:
            PolicyRefusal: naming the key of the file.
        """
        for event in events:
            if event.seeded:
                raise PolicyRefusal(
                    f"its policy allows no noise that the server knows, and that of {event.mechanism} was seeded"
                )
            if event.sigma < self.smallest_sigma:
                said = f"smallest_sigma = {self.smallest_sigma:g}, and {event.mechanism} has {event.sigma:g}"
                raise PolicyRefusal(f"its policy says {said}")
            if event.rate > self.largest_rate:
                said = f"largest_rate = {self.largest_rate:g}, and {event.mechanism} has {event.rate:g}"
                raise PolicyRefusal(f"its policy says {said}")


def read_policy(path: str | os.PathLike[str]) -> Policy:
    """The policy in a file; write yours with this at hand, since a node with an unusable file answers nothing.

    Args:
        path: of the file, in TOML.

    Raises:
        ValueError: it cannot be read, a key is missing or not known, or a value is out of range; the file is named.
    """
    try:
        found: dict[str, Any] = tomllib.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"the policy {path} cannot be read: {error}") from error
    known = [f.name for f in fields(Policy)]
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ValueError(f"the policy {path} says {key}, which is no key{f'; {near[0]} is' if near else ''}")
    missing = [key for key in known if key not in found]
    if missing:
        raise ValueError(f"the policy {path} does not say {', '.join(missing)}: every key must be there")
    try:
        return Policy(**found)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the policy {path}: {error}") from error


def app_hash(folder: str | os.PathLike[str]) -> str:
    """The hash of an app's code, for `app` in a policy: of the names and bytes of all files in its folder.

    Left out are byte code and names that begin with a dot.

    Args:
        folder: of the app's code, as `Path(__file__).parent` in it.

    Raises:
        FileNotFoundError: no such folder, or nothing in it.
    """
    top = Path(folder).expanduser()
    paths = sorted((p.relative_to(top).as_posix(), p) for p in top.rglob("*") if p.is_file())
    said = [(n, p) for n, p in paths if not any(x == "__pycache__" or x.startswith(".") for x in n.split("/"))]
    if not said:
        raise FileNotFoundError(f"{top} is no folder with an app's code in it")
    state = hashlib.sha256()
    for name, path in said:
        data = path.read_bytes()
        state.update(f"{len(name.encode())} {name} {len(data)} ".encode() + data)
    return f"sha256:{state.hexdigest()}"


def name_of(method: Method) -> str:
    """A method as a policy calls it: its class with its add-ons, and the filters around it.

    `FedAvg(DPSGD)`, or `Filtered(FedAvg(DPSGD), ClientDP)`.
    """
    inner = method.inner
    addons = [type(part).__name__ for part in inner.parts if part is not inner]
    name = f"{type(inner).__name__}({', '.join(addons)})" if addons else type(inner).__name__
    filters = [type(part).__name__ for part in method.parts if all(part is not p for p in inner.parts)]
    return f"{type(method).__name__}({', '.join([name, *filters])})" if filters else name
