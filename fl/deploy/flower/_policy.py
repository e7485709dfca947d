"""Policy of a node's owner: a file on the node that limits which requests of the server are allowed.

    epsilon = 8.0              # maximum epsilon that all runs together may spend on a record; inf: no limit
    delta = 1e-5               # delta at which epsilon is computed
    smallest_sigma = 1.0       # minimum noise multiplier of a release (standard deviation / sensitivity)
    largest_rate = 1.0         # maximum sampling rate of a record in a release
    largest_clip = 1.0         # maximum norm of a record's clipped gradient or vector; inf: no limit
    methods = ["PrivateFedDM", "FedAvg(DPSGD)"]  # allowed methods
    evaluation = false         # whether exact accuracies on the node's own test images may be sent
    app = "sha256:..."         # hash of the app's code (`app_hash`); "any": the code is not checked

**Protection.** The policy protects against a server that does more than was agreed, for example uses other options,
starts another run, sets a seed for the noise, or changes the app. Only replies that the file allows leave the node.
Charges are written to the node's ledger before noise is drawn, and a refusal reveals nothing about the data. If
`epsilon` is finite, a reply is sent only if it was charged to the ledger, and an error is sent only as its type.

**Limits.** The policy does not protect against code that bypasses it. It is enforced by the distillkit installed on the
node, when the app's `client_app` is called. It does not stop an app that reads the images itself, or does not pass the
option `policy` to `client_app`. Whether a mechanism adds the noise that it charges depends on the method's code. Owners
must therefore control the code on their nodes. They should run only an app that they have read, and that is installed
on the node or signed by a key that the SuperNode trusts (`flower-supernode --trusted-entities`). The setting `app` then
detects a different version. The policy hides neither that the node takes part nor when it replies. It does not account
for copies of the node's files, or for a second node with the same records, which has its own ledger.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from distillkit._utils import check
from distillkit._utils.options import Positive, Rate, Share, check_options
from distillkit.privacy import Event
from fl.method import Method, short_name

ANY = "any"
"""Value of the key `app` that turns off the check of the app's code."""


class PolicyRefusal(RuntimeError):
    """Error: the node's policy does not allow a request.

    The message names the setting in the policy file that forbids the request, such as `methods`.
    """


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Contents of a node owner's policy file. Each attribute is a key of the file, see this module's docstring.

    Attributes:
        epsilon: maximum epsilon that all runs together may spend on a record; inf: no limit.
        delta: delta at which epsilon is computed.
        smallest_sigma: minimum noise multiplier of a release (noise standard deviation divided by sensitivity).
        largest_rate: maximum sampling rate of a record in a release.
        largest_clip: maximum norm to which a record's contribution to a sum (such as its gradient or embedding) is
            clipped; inf: no limit.
        methods: allowed methods with their add-ons and filters, such as `FedAvg(DPSGD)`.
        evaluation: whether the exact accuracies on the node's test images may be sent.
        app: hash of the app's code (`app_hash`); "any" if the code is not checked.
    """

    epsilon: float
    delta: Share
    smallest_sigma: Positive
    largest_rate: Rate
    largest_clip: float
    methods: tuple[str, ...]
    evaluation: bool
    app: str

    def __post_init__(self) -> None:
        check_options(self)
        for name, value in (("epsilon", self.epsilon), ("largest_clip", self.largest_clip)):
            if value != math.inf:
                check.real_number(value, name, above=0.0)
        names = check.sequence(self.methods, "methods", "names such as 'FedAvg(DPSGD)'")
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"methods must hold at least one name such as 'FedAvg(DPSGD)'; got {list(names)!r}")
        object.__setattr__(self, "methods", tuple(names))
        digits = self.app.removeprefix("sha256:") if isinstance(self.app, str) else ""
        if self.app != ANY and (digits == self.app or len(digits) != 64 or set(digits) - set("0123456789abcdef")):
            raise ValueError(
                f"app must be 'any' or a result of app_hash(folder), 'sha256:' and 64 digits; got {self.app!r}"
            )

    @property
    def budget(self) -> float | None:
        """The attribute `epsilon` as a ledger's budget: None if it is infinite, that is, if there is no limit."""
        return None if self.epsilon == math.inf else self.epsilon

    def require_request(self, method: Method, verb: str, app: str | None) -> None:
        """Check the method, the kind of request and the app's code, before the client computes anything.

        Args:
            method: the node's method.
            verb: name of the method's function that the server requests, such as "local" or "evaluate".
            app: hash of the app's code; None if unknown.

        Raises:
            PolicyRefusal: the policy does not allow the request; the message names the setting that forbids it.
        """
        name = short_name(method)
        if self.app not in (ANY, app):
            raise PolicyRefusal(f"its policy allows the app {self.app}, and this one is {app or 'unknown'}")
        if name not in self.methods:
            raise PolicyRefusal(f"its policy allows the methods {', '.join(self.methods)}, and this is {name}")
        if verb == "evaluate" and not self.evaluation:
            raise PolicyRefusal("its policy says evaluation = false: accuracies on its test images are not sent")
        if self.budget is not None and not method.private:
            raise PolicyRefusal(f"its policy has epsilon = {self.epsilon:g}, and {name} is not private")
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
        """Check the noise and the sampling rate of private releases before they are charged.

        Args:
            events: the releases, as they would be written to the privacy ledger.

        Raises:
            PolicyRefusal: a release has too little noise, noise from a seed, or too high a sampling rate.
        """
        for event in events:
            if event.seeded:
                raise PolicyRefusal(
                    f"its policy allows no noise that the server knows, and the noise of {event.mechanism} was seeded"
                )
            if event.sigma < self.smallest_sigma:
                limit = f"smallest_sigma = {self.smallest_sigma:g}, and {event.mechanism} has {event.sigma:g}"
                raise PolicyRefusal(f"its policy says {limit}")
            if event.rate > self.largest_rate:
                limit = f"largest_rate = {self.largest_rate:g}, and {event.mechanism} has {event.rate:g}"
                raise PolicyRefusal(f"its policy says {limit}")


def read_policy(path: str | os.PathLike[str]) -> Policy:
    """Read a policy file.

    Use this function to check your file before you start a node, because a node with an invalid file refuses every
    request.

    Args:
        path: path of the TOML file.

    Raises:
        ValueError: the file cannot be read, a key is missing or unknown, or a value is out of range. The message names
            the file.
    """
    file = check.path(path, "path")
    try:
        found: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the policy {path} cannot be read: {error}") from error
    known = [f.name for f in fields(Policy)]
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ValueError(
                f"the policy {path} has the unknown key {key}{f'; did you mean {near[0]}?' if near else ''}"
            )
    missing = [key for key in known if key not in found]
    if missing:
        raise ValueError(f"the policy {path} lacks {', '.join(missing)}: every key is required")
    try:
        return Policy(**found)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the policy {path}: {error}") from error


def app_hash(folder: str | os.PathLike[str]) -> str:
    """Return the hash of an app's code, for the `app` key of a policy.

    The hash covers the names and bytes of all files in the folder, except bytecode and names that begin with a dot.

    Args:
        folder: folder of the app's code, `Path(__file__).parent` within the app.

    Raises:
        FileNotFoundError: the folder does not exist or is empty.
    """
    top = check.path(folder, "folder")
    paths = sorted((p.relative_to(top).as_posix(), p) for p in top.rglob("*") if p.is_file())
    files = [(n, p) for n, p in paths if not any(x == "__pycache__" or x.startswith(".") for x in n.split("/"))]
    if not files:
        raise FileNotFoundError(f"{top} is not a folder with the code of an app")
    state = hashlib.sha256()
    for name, path in files:
        data = path.read_bytes()
        state.update(f"{len(name.encode())} {name} {len(data)} ".encode() + data)
    return f"sha256:{state.hexdigest()}"
