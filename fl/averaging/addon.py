"""The base of every add-on to weight averaging: hooks that add up, and slots that one add-on may fill."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from distillkit.sets import LabeledImages
from fl.averaging.local import Local
from fl.averaging.server import AveragingServer
from fl.averaging.settings import Settings, floating_buffers
from fl.averaging.step import Step
from fl.batches import Batch, Phase
from fl.message import Message, Tensors
from fl.parts import Part, require_plain_options
from fl.reduce import Reduced, Schema

__all__ = ["SLOTS", "AddOn", "filling", "fills", "installed", "require_replied"]

SLOTS = (
    "dataset", "batches", "gradient", "normalise", "rescale", "server_step", "refine", "tested_model", "personal_model",
)  # fmt: skip
"""What does not commute: one add-on may fill each, a second is refused when the method is built."""


class AddOn(Part):
    """One idea on top of `FedAvg`: it overrides only the hooks that it needs.

    An add-on is built once and used by the server and by all clients, so it holds no run's state: what must live longer
    goes to `server.state`, a client's `memory`, or `local.scratch(self)`, a dict for one training. A frozen dataclass
    does all this by itself. Hooks run in the order of the add-ons' keys, so the order of arguments changes nothing.

    Attributes:
        extra_outputs: outputs beside the classes; `local.first_output(self)` is the first one's index.
        keeps_previous: wants this client's last trained weights, `local.previous`.
        layers: names of modules of the network whose outputs it reads, `step.output(...).inner[name]` [B, m].
        damping: strength of a pull to the start of the round, which enters `local.paths`.
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

    @classmethod
    def in_a_method(cls, part: str) -> str:
        """Inside weight averaging."""
        return f"FedAvg({part}, factory=...)"

    @property
    def asks(self) -> bool:
        """Whether it has a question for the clients before round 1 (`answer`)."""
        return fills(self, "answer")

    @property
    def off(self) -> bool:
        """Whether its terms are off (a weight of 0, say): then it is not installed at all."""
        return False

    @property
    def private(self) -> bool:
        """Whether it noises what the client releases and charges a ledger; see `Method.private`."""
        return False

    # Before round 1.

    def check(self, settings: Settings, addons: Sequence[AddOn]) -> None:
        """Raise ValueError with the reason if this combination makes no sense; called when the method is built.

        Args:
            settings: the method's options and its networks.
            addons: all that are installed, this one too.
        """

    def check_run(self, settings: Settings, names: Sequence[str]) -> None:
        """Raise ValueError if it can do nothing with networks whose parameters have these names; before round 1."""

    def start(self, server: AveragingServer) -> None:
        """On the server, once: prepare its state; the first weights are there already."""

    def try_out(self, local: Local) -> None:
        """Once for each architecture, before round 1: look at a training that is about to begin on images of noise.

        What cannot work is refused here, before anything is charged or trained. Every add-on has started and begun.
        """

    def answer(self, local: Local, reply: Message) -> None:
        """On every client, once before round 1: answer the one question (class statistics, say)."""

    def expect_answer(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """On the server: say what the add-on's part of that answer must look like."""

    def answered(self, server: AveragingServer, replies: Reduced) -> None:
        """On the server: take the clients' answers, reduced."""

    # A round, in this order: the server sends,

    def send(self, server: AveragingServer, client: int, message: Message) -> None:
        """On the server, for each drawn client: add to what it is told. Pure: it may be called any number of times."""

    def expect(self, server: AveragingServer, client: int, schema: Schema) -> None:
        """On the server: say what the add-on's part of the reply must look like; an entry without a line is refused."""

    # the client trains,

    def begin(self, local: Local) -> None:
        """On the client: prepare a local training."""

    def extra_records(self, local: Local) -> LabeledImages | None:
        """On the client: images that join the set that is trained on."""
        return None

    def own_batches(self, local: Local) -> Iterator[Batch] | None:
        """On the client: an endless stream of this add-on's own batches, of which each step reads one."""
        return None

    def loss(self, step: Step) -> Tensor | None:
        """In each step: a term to add to the loss."""
        return None

    def correct_gradient(self, step: Step, grads: Tensors) -> None:
        """In each step: change the gradient in place, after everything that computes it, before the optimiser."""

    def after_step(self, step: Step) -> None:
        """In each step: change the parameters after the optimiser's step."""

    def end(self, local: Local, update: Tensors, reply: Message) -> None:
        """On the client, at the end: add to the reply; `update` is what goes out, `local.delta` the raw change."""

    # and the server takes the replies.

    def read_reply(self, server: AveragingServer, reply: Message, out: Message) -> None:
        """On the server: derive further entries from one reply before it is folded and forgotten. Pure; may raise."""

    def receive(self, server: AveragingServer, replies: Reduced, old: Tensors) -> None:
        """On the server: use the reduced replies after the new model is set; `old` are the weights of before."""

    # Slots: at most one add-on fills each.

    def dataset(self, local: Local) -> LabeledImages:
        """On the client: the set to train on instead of the client's own."""
        return local.client.data

    def batches(self, local: Local, data: LabeledImages, phase: Phase) -> Iterator[Batch]:
        """On the client: the real batches of a phase."""
        return iter(())

    def gradient(self, step: Step, compute: Callable[[], Tensors]) -> Tensors:
        """In each step: wrap the computation of the gradient."""
        return compute()

    def normalise(self, local: Local, update: Tensors) -> Tensors:
        """On the client: rescale the update before it goes out."""
        return update

    def rescale(self, server: AveragingServer, replies: Reduced, mean: Tensors) -> Tensors:
        """On the server: rescale the mean update."""
        return mean

    def server_step(self, server: AveragingServer, mean: Tensors) -> Tensors:
        """On the server: turn the mean update into the server's step."""
        return mean

    def refine(self, server: AveragingServer, replies: Reduced, old: Tensors) -> Tensors:
        """On the server: improve the averaged model, which `server.state` holds (distillation); `old` as above."""
        raise LookupError(f"{self.name} does not fill the slot 'refine'")

    def tested_model(self, server: AveragingServer) -> Tensors:
        """On the server: the weights to test instead of the current ones."""
        raise LookupError(f"{self.name} does not fill the slot 'tested_model'")

    def personal_model(self, local: Local) -> Tensors:
        """On the client: its personal model (parameters and buffers), tested beside the global one. Pure.

        `local` is a training that is not begun: what was received, the client's memory, and `local.fit`.
        """
        raise LookupError(f"{self.name} does not fill the slot 'personal_model'")


def fills(addon: AddOn, hook: str) -> bool:
    """Whether the add-on overrides a hook or slot."""
    return getattr(type(addon), hook) is not getattr(AddOn, hook)


def filling(addons: Sequence[AddOn], slot: str) -> AddOn | None:
    """The add-on that fills a slot, if one does."""
    return next((a for a in addons if fills(a, slot)), None)


def installed(addons: Sequence[object]) -> tuple[AddOn, ...]:
    """The add-ons that are on, in the order of their keys.

    Raises:
        TypeError: something else than an add-on; a class (`FedProx` for `FedProx()`) is none; or an
            option of one bears the name of a hook or of another attribute of `AddOn`.
    """
    for addon in addons:
        if isinstance(addon, type) and issubclass(addon, AddOn):
            raise TypeError(
                f"an add-on must be an object, got the class {addon.__name__}: FedAvg({addon.__name__}(...), ...)"
            )
        if not isinstance(addon, AddOn):
            hint = "; what makes the network is an option: FedAvg(..., factory=...)" if callable(addon) else ""
            raise TypeError(f"FedAvg takes add-ons (`fl.addons`) before its options, got {type(addon).__name__}{hint}")
        require_plain_options(addon, AddOn)
    found = [a for a in addons if isinstance(a, AddOn) and not a.off]
    return tuple(sorted(found, key=lambda a: a.key))


def require_composable(addons: Sequence[AddOn]) -> None:
    """Refuse add-ons that cannot stand beside each other.

    Raises:
        ValueError: one is given twice, or two fill one slot.
    """
    for first, second in itertools.pairwise(addons):
        if type(first) is type(second):
            raise ValueError(f"{first.name} is given twice; an add-on may stand in a method once")
        if first.key == second.key:
            raise ValueError(f"{first.name} and {second.name} have the same key, {first.key!r}: state another")
    for slot in SLOTS:
        both = [a.name for a in addons if fills(a, slot)]
        if len(both) > 1:
            raise ValueError(f"{' and '.join(both)} cannot be combined: both fill the slot {slot!r}")


def require_expected(addons: Sequence[AddOn]) -> None:
    """Refuse an add-on whose answer nothing describes.

    Raises:
        ValueError: it writes `answer`, but not `expect_answer`.
    """
    for addon in addons:
        if fills(addon, "answer") and not fills(addon, "expect_answer"):
            raise ValueError(
                f"{addon.name}.answer answers, but nothing says what the answer looks like: write expect_answer"
            )


def require_replied(asking: AddOn, settings: Settings, addons: Sequence[AddOn]) -> None:
    """Raise ValueError unless replies hold whole models, which an add-on wants to run on the server.

    For the `check` of an add-on whose `read_reply` takes `server.trained(reply)`.
    """
    networks, some = settings.networks, 2  # classes: buffers do not depend on how many
    if settings.personal:
        raise ValueError(f"{asking.name} runs the clients' whole models on the server: nothing can be personal")
    if settings.buffers != "mean" and any(floating_buffers(networks.template(n, some)) for n in networks.names):
        raise ValueError(
            f"{asking.name} runs the clients' models on the server, but their batch statistics stay at home: give "
            "buffers='mean', or a network without them (norm='instance')"
        )
    for addon in addons:
        if fills(addon, "normalise"):
            raise ValueError(f"{asking.name} needs the clients' models, but {addon.name} rescales what they send")
