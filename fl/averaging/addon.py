"""The base of every add-on to weight averaging: hooks that add up, and slots that one add-on may fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from distillkit.sets import LabeledImages
from fl.batches import Batch, Phase
from fl.message import Message, Tensors
from fl.method import Part, Server
from fl.reduce import Reduced, Schema

if TYPE_CHECKING:
    from fl.averaging.core import Core
    from fl.averaging.local import Local
    from fl.averaging.step import Step

__all__ = ["SLOTS", "AddOn", "fills", "installed"]

SLOTS = (
    "dataset",
    "batches",
    "gradient",
    "normalise",
    "rescale",
    "server_step",
    "refine",
    "tested_model",
    "personal_model",
)
"""What does not commute: one add-on may fill each, a second is refused when the method is built."""


class AddOn(Part):
    """One idea on top of `FedAvg`: it overrides only what it needs. Add-ons are frozen and hold no run's state.

    Hooks run in the order of the add-ons' keys, so the order of arguments changes nothing. Scratch values that
    live for one local training go to `local.scratch(self)`, a dict.

    Attributes:
        extra_outputs: extra rows of the classifier; `local.first_output(self)` is the first one's index.
        keeps_previous: wants this client's last trained weights, `local.previous`.
        layers: names of modules of the network whose outputs it reads, `step.output(...).inner[name]` [B, m].
        damping: strength of a pull to the start of the round, which enters `local.path`.
        reads: what it reads of private data besides trained weights, in its loss terms and for what it sends:
            "nothing"; in its terms alone, one "example" at a time; or anything, the "batch" together.
        single_label: its terms make sense for one class an image only.
        first_round: the first round that it can change anything in; a run with fewer rounds says so.
    """

    extra_outputs: int = 0
    keeps_previous: bool = False
    layers: tuple[str, ...] = ()
    damping: float = 0.0
    reads: Literal["nothing", "example", "batch"] = "batch"
    single_label: ClassVar[bool] = False
    first_round: int = 1

    def whole(self) -> str:
        """Inside weight averaging."""
        return f"FedAvg({type(self).__name__}(...), network=...)"

    @property
    def asks(self) -> bool:
        """Whether it has a question for the clients before round 1 (`answer`)."""
        return fills(self, "answer")

    @property
    def off(self) -> bool:
        """Its terms are off (a weight of 0): then it is not installed at all."""
        return False

    @property
    def private(self) -> bool:
        """Whether it noises what the client releases and charges a ledger; see `Method.private`."""
        return False

    def check(self, method: Core) -> None:
        """Raise ValueError with the reason if this combination makes no sense."""

    def check_run(self, method: Core, names: Sequence[str]) -> None:
        """Raise ValueError if it can do nothing with networks whose parameters have these names; before round 1."""

    def start(self, server: Server) -> None:
        """Prepare the server's state; the model is there already."""

    def ready(self, server: Server) -> None:
        """Look at the whole method before the first round, when every add-on has started."""

    def send(self, server: Server, client: int, message: Message) -> None:
        """Add to what this client is told. Pure."""

    def expect(self, server: Server, client: int, schema: Schema) -> None:
        """Say what the add-on's part of the reply must look like; an entry without a line is refused."""

    def answer(self, local: Local, reply: Message) -> None:
        """Answer the one question before round 1 (class statistics, say)."""

    def expect_answer(self, server: Server, client: int, schema: Schema) -> None:
        """Say what the add-on's part of the answer must look like."""

    def answered(self, server: Server, replies: Reduced) -> None:
        """Take the clients' answers, reduced."""

    def begin(self, local: Local) -> None:
        """Prepare a local training."""

    def extra_records(self, local: Local) -> LabeledImages | None:
        """Images that join the loader's set for this training."""
        return None

    def own_batches(self, local: Local) -> Iterator[Batch] | None:
        """An endless stream of this add-on's own batches, one a step."""
        return None

    def loss(self, step: Step) -> Tensor | None:
        """A term to add to the loss of this step."""
        return None

    def correct_gradient(self, step: Step, grads: Tensors) -> None:
        """Change the gradient in place, after everything that computes it and before the optimiser."""

    def after_step(self, step: Step) -> None:
        """Change the parameters after the optimiser's step."""

    def end(self, local: Local, update: Tensors, reply: Message) -> None:
        """Add to the reply; `update` is what goes out, `local.delta` the raw change."""

    def read_reply(self, server: Server, reply: Message, out: Message) -> None:
        """Derive further entries from one reply on the server, before it is forgotten. Pure: it may raise."""

    def receive(self, server: Server, replies: Reduced, old: Tensors) -> None:
        """Use the reduced replies after the new model is set; `old` are the weights of before."""

    # Slots: at most one add-on fills each.

    def dataset(self, local: Local) -> LabeledImages:
        """The set to train on instead of the client's own."""
        return local.client.data

    def batches(self, local: Local, data: LabeledImages, phase: Phase) -> Iterator[Batch]:
        """The real batches of a phase."""
        return iter(())

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """Wrap the computation of the gradient."""
        return compute()

    def normalise(self, local: Local, update: Tensors) -> Tensors:
        """Rescale the update on the client."""
        return update

    def rescale(self, server: Server, replies: Reduced, mean: Tensors) -> Tensors:
        """Rescale the mean update on the server."""
        return mean

    def server_step(self, server: Server, mean: Tensors) -> Tensors:
        """Turn the mean update into the server's step."""
        return mean

    def refine(self, server: Server, replies: Reduced, old: Tensors) -> Tensors:
        """The averaged model, which `server.state` holds, improved on the server (distillation); `old` as above."""
        raise LookupError(f"{self.name} does not fill the slot 'refine'")

    def tested_model(self, server: Server) -> Tensors:
        """The weights to test instead of the current ones."""
        raise LookupError(f"{self.name} does not fill the slot 'tested_model'")

    def personal_model(self, local: Local) -> Tensors:
        """The personal model of a client (parameters and buffers) to test beside the global one; memory is read-only.

        `local` is a training that is not begun: what was received, the client's memory, and `local.fit`.
        """
        raise LookupError(f"{self.name} does not fill the slot 'personal_model'")


def fills(addon: AddOn, hook: str) -> bool:
    """Whether the add-on overrides a hook or slot."""
    return getattr(type(addon), hook) is not getattr(AddOn, hook)


def installed(addons: Sequence[object]) -> tuple[AddOn, ...]:
    """The add-ons that are on, in the order of their keys.

    Raises:
        TypeError: something else than an add-on; a class (`Proximal` for `Proximal()`) is none.
    """
    for addon in addons:
        if isinstance(addon, type) and issubclass(addon, AddOn):
            raise TypeError(
                f"an add-on must be an object, got the class {addon.__name__}: FedAvg({addon.__name__}(...), ...)"
            )
        if not isinstance(addon, AddOn):
            hint = "; the network is an option: FedAvg(..., network=...)" if callable(addon) else ""
            raise TypeError(f"FedAvg takes add-ons (`fl.addons`) before its options, got {type(addon).__name__}{hint}")
    found = [a for a in addons if isinstance(a, AddOn) and not a.off]
    return tuple(sorted(found, key=lambda a: a.key))
