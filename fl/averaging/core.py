"""What a weight-averaging method is made of: its options, its add-ons, and who has which network."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distillkit import check
from distillkit.plausible import warn
from distillkit.rng import derive
from fl.averaging.addon import SLOTS, AddOn, fills, installed
from fl.averaging.options import learning_rate, local_phases, patterns, require_assigned, require_assignment
from fl.averaging.trial import require_matches, try_augmentation, try_network, try_objective
from fl.batches import Phase
from fl.codec import digest
from fl.message import Entry, Tensors, declared
from fl.method import Client, Method, Server
from fl.networks import Factory, Templates
from fl.schema import MOST
from fl.task import Task

__all__ = ["Core"]

Objective = Callable[[Tensor, Tensor], Tensor]


class Core(Method):
    """Options and composition of `FedAvg`, which adds the verbs.

    Args:
        addons: see `AddOn`; their order does not matter. One that is off is left out.
        network: called with the number of outputs, gives the network; or a mapping architecture -> such a factory.
        assign: with several architectures, client number -> architecture (a mapping or a function).
        initial: weights to begin with (a state dict); default: drawn from the run's seed.
        lr, momentum, weight_decay, optimizer: the clients' optimiser ("sgd" or "adam"). The rate is by default 0.1 for
            SGD, without momentum as in Algorithm 1 of McMahan et al.: with ten clients, Dirichlet(0.1), one local epoch
            and five rounds 0.01 ends at 68 % and 0.1 at 86 % on digits, at 54 and 66 % on 3,000 images of FashionMNIST
            (ConvNets, means of two seeds). For Adam 0.001, its authors'.
        optimizer_state: its momentum begins anew in each "round", or stays with the "client" from one participation to
            the next, as in VHL's release (where the client's optimiser is never cleared).
        lr_decay: the rate of round t is lr * lr_decay ** (t - 1).
        epochs: passes over the local data in a round (default 1). More cost clients' time and save rounds: 5 end at 92
            and 71 % in the same comparison. Or:
        steps: an exact number of steps in a round.
        phases: several parts of a local training instead of `epochs`/`steps` (FedRep).
        batch: images a step.
        augment: applied to the real batches, `augment(images, generator)`.
        objective: `objective(logits, labels)`; default: the task's loss.
        weights: "samples" or "uniform".
        most_samples: with "samples", the largest sample count that a client may claim; a reply that claims more is
            refused. It is public, and bounds what one client can do to an average: give your largest client's count.
        buffers: float buffers (batch-norm statistics) are averaged ("mean"), kept by each client ("local"), or left
            at their initial values on the server ("drop", integers too). Else integer buffers take the maximum.
        personal: patterns of parameter names that stay with the client (FedRep: "classifier.*").
        predict: with extra outputs, test the argmax over the "real" classes or over "all" outputs.

    Raises:
        TypeError: an argument of another kind: an add-on's class, say, or a network instead of a factory.
        ValueError: a bad option, two add-ons for one slot, an add-on given twice, or a combination that one refuses.
    """

    def __init__(
        self,
        *addons: AddOn,
        network: Factory | Mapping[str, Factory] | None = None,
        assign: Mapping[int, str] | Callable[[int], str] | None = None,
        initial: Tensors | None = None,
        lr: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        optimizer: Literal["sgd", "adam"] = "sgd",
        optimizer_state: Literal["round", "client"] = "round",
        lr_decay: float = 1.0,
        epochs: int | None = None,
        steps: int | None = None,
        phases: Sequence[Phase] | None = None,
        batch: int = 32,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        objective: Objective | None = None,
        weights: Literal["samples", "uniform"] = "samples",
        most_samples: float = MOST,
        buffers: Literal["mean", "local", "drop"] = "mean",
        personal: str | Sequence[str] = (),
        predict: Literal["real", "all"] = "real",
    ) -> None:
        self.addons = installed(addons)
        self.momentum = check.real_number(momentum, "momentum", least=0.0, most=1.0)
        self.weight_decay = check.real_number(weight_decay, "weight_decay", least=0.0)
        self.lr_decay = check.real_number(lr_decay, "lr_decay", above=0.0)
        self.optimizer = check.one_of(optimizer, "optimizer", ("sgd", "adam"))
        default = 0.1 if optimizer == "sgd" else 0.001
        self.lr = default if lr is None else learning_rate(lr, "lr")
        self.optimizer_state = check.one_of(optimizer_state, "optimizer_state", ("round", "client"))
        if optimizer_state == "client" and optimizer == "sgd" and not momentum:
            raise ValueError("optimizer_state='client' keeps momentum, but momentum is 0: give one, or leave it out")
        self.batch = check.positive_int(batch, "batch")
        self.phases = local_phases(epochs, steps, phases)
        if augment is not None:
            check.callable_with(augment, "augment", ["images", "generator"], "`distillkit.augment.DSA()`, say")
        if objective is not None:
            check.callable_with(objective, "objective", ["logits", "labels"], "`torch.nn.CrossEntropyLoss()`, say")
        self.augment, self.objective = augment, objective
        self.weights = check.one_of(weights, "weights", ("samples", "uniform"))
        self.most_samples = check.real_number(most_samples, "most_samples", above=0.0)
        self.buffer_rule = check.one_of(buffers, "buffers", ("mean", "local", "drop"))
        self.personal = patterns(personal)
        self.predict = check.one_of(predict, "predict", ("real", "all"))
        self.templates = Templates(network)
        self.networks = tuple(self.templates.factories)
        self.assign, self.initial = assign, initial
        require_assignment(assign, self.networks)
        if initial is not None and not isinstance(initial, Mapping):
            raise TypeError(f"initial must be a state dict, names to tensors, got {type(initial).__name__}")
        self.tried: dict[tuple[object, ...], str] = {}
        self._compose()

    def _compose(self) -> None:
        for first, second in itertools.pairwise(self.addons):
            if type(first) is type(second):
                raise ValueError(f"{first.name} is given twice; an add-on may stand in a method once")
            if first.key == second.key:
                raise ValueError(f"{first.name} and {second.name} have the same key, {first.key!r}: state another")
        for slot in SLOTS:
            filling = [a.name for a in self.addons if fills(a, slot)]
            if len(filling) > 1:
                raise ValueError(f"{' and '.join(filling)} cannot be combined: both fill the slot {slot!r}")
        for addon in self.addons:
            addon.check(self)
        silent = [a.name for a in self.addons if fills(a, "answer") and not fills(a, "expect_answer")]
        if silent:
            raise ValueError(
                f"{silent[0]}.answer answers, but nothing says what the answer looks like: write expect_answer"
            )

    def architectures(self, classes: int) -> Mapping[str, nn.Module]:
        """The template of every architecture."""
        return {name: self.template(name, classes) for name in self.networks}

    def check_run(self, server: Server, rounds: int) -> None:
        """Try networks, augmentation and objective on noise; every pattern must match, `initial` must fit.

        Raises:
            ValueError: one of them does not; the argument is named.
        """
        outputs = self.output_count(server.task.num_classes)
        templates = {name: self.template(name, server.task.num_classes) for name in self.networks}
        for name, net in templates.items():
            try_network(server, net, outputs, f"network[{name!r}]" if name else "network")
        require_assigned(self.assign, self.architecture, server.clients)
        parameters = {name: [n for n, _ in net.named_parameters()] for name, net in templates.items()}
        known = list(dict.fromkeys(n for names in parameters.values() for n in names))
        require_matches(self.personal, known, "personal")
        require_matches([p.train for p in self.phases], known, "Phase(train=...)")
        for name, names in parameters.items():
            where = f" of architecture {name!r}" if name else ""
            if all(self.is_personal(n) for n in names):
                raise ValueError(
                    f"personal={self.personal} keeps every parameter{where} with its client: none is averaged"
                )
            for phase in self.phases:
                if not any(phase.trains(n) for n in names):
                    raise ValueError(f"{phase} trains no parameter{where}: its pattern takes all of them out")
        self._require_initial(
            {n: t for a, net in templates.items() for n, t in self.named(dict(net.state_dict()), a).items()}
        )
        for addon in self.addons:
            addon.check_run(self, known)
        try_augmentation(server, self.augment)
        try_objective(server, self.objective, outputs)
        late = [a for a in self.addons if a.first_round > rounds]
        for addon in late:
            warn(
                f"{addon.name} changes nothing before round {addon.first_round}, and the run has {rounds}: it is "
                f"as without {addon.name}"
            )

    def _require_initial(self, state: Mapping[str, Tensor]) -> None:
        given = self.initial or {}
        unknown = sorted(set(given) - set(state), key=str)
        if unknown:
            raise ValueError(f"initial holds names that the network lacks: {', '.join(map(str, unknown[:5]))}")
        for name, tensor in given.items():
            wanted = state[name]
            if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
                got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"initial[{name!r}] must be {wanted.dtype} {list(wanted.shape)}, got {got}")

    def arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The add-ons, and the options that are not empty; of `initial` a digest."""
        options = {
            "lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay, "optimizer": self.optimizer,
            "optimizer_state": None if self.optimizer_state == "round" else self.optimizer_state,
            "lr_decay": self.lr_decay, "batch": self.batch, "phases": self.phases, "weights": self.weights,
            "buffers": self.buffer_rule, "personal": self.personal, "predict": self.predict,
            "architectures": [n for n in self.networks if n], "objective": self.objective, "augment": self.augment,
            "initial": digest("initial", self.initial) if self.initial is not None else None,
            "most_samples": self.most_samples if self.most_samples != MOST else None,
        }  # fmt: skip
        return self.addons, {k: v for k, v in options.items() if v not in ((), [], None)}

    def require_replied(self, asking: AddOn) -> None:
        """Raise ValueError unless replies hold whole models, which an add-on wants to run on the server."""
        if self.personal:
            raise ValueError(f"{asking.name} runs the clients' whole models on the server: nothing can be personal")
        some = 2  # classes: buffers do not depend on how many
        if self.buffer_rule != "mean" and any(self.floating_buffers(self.template(n, some)) for n in self.networks):
            raise ValueError(
                f"{asking.name} runs the clients' models on the server, but their batch statistics stay at home: give "
                "buffers='mean', or a network without them (norm='instance')"
            )
        for addon in self.addons:
            if fills(addon, "normalise"):
                raise ValueError(f"{asking.name} needs the clients' models, but {addon.name} rescales what they send")

    # Who has what.

    def entries(self) -> list[Entry[Any]]:
        """The core's entries and every add-on's."""
        return [*declared(self), *(e for a in self.addons for e in declared(a))]

    def slot(self, name: str) -> AddOn | None:
        """The add-on that fills a slot, if one does."""
        return next((a for a in self.addons if fills(a, name)), None)

    def first_output(self, addon: AddOn, num_classes: int) -> int:
        """The index of an add-on's first extra output."""
        return num_classes + sum(a.extra_outputs for a in self.addons[: self.addons.index(addon)])

    def output_count(self, num_classes: int) -> int:
        """How many outputs the network has: the classes, and the add-ons' extra rows."""
        return num_classes + sum(a.extra_outputs for a in self.addons)

    def objective_of(self, task: Task) -> Objective:
        """The base objective."""
        return self.objective or task.loss

    def is_personal(self, name: str) -> bool:
        """Whether a parameter stays with its client."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.personal)

    def architecture(self, client: int) -> str:
        """The name of a client's architecture ("" if there is only one)."""
        if self.assign is None:
            return next(iter(self.networks))
        name = self.assign(client) if callable(self.assign) else self.assign.get(client, "")
        return check.one_of(name, f"assign({client})", self.networks)

    def template(self, architecture: str, num_classes: int) -> nn.Module:
        """A network of an architecture, not to be changed (its weights mean nothing)."""
        return self.templates.of(architecture, self.output_count(num_classes))

    def network_at(self, client: Client, weights: Tensors) -> nn.Module:
        """A fresh network of the client's architecture, on its device, with the given weights and buffers."""
        outputs = self.output_count(client.task.num_classes)
        return self.templates.at(self.architecture(client.id), outputs, weights, client.device)

    def network_on(self, server: Server, architecture: str, weights: Tensors) -> nn.Module:
        """A fresh network of an architecture on the server's device, with the given weights and buffers."""
        return self.templates.at(architecture, self.output_count(server.task.num_classes), weights, server.device)

    def beginning(self, architecture: str, num_classes: int, seed: int) -> Tensors:
        """The state that an architecture starts from (`initial`, else drawn from the run's seed), on every side."""
        generator = derive(seed, 0, "server", f"init {architecture}")
        net = self.templates.draw(architecture, self.output_count(num_classes), generator)
        given = self.part(self.initial or {}, architecture)
        return {n: given.get(n, t).detach().clone() for n, t in net.state_dict().items()}

    def part(self, group: Tensors, architecture: str) -> Tensors:
        """The tensors of one architecture, under the network's own names."""
        if not architecture:
            return group
        prefix = f"{architecture}/"
        return {n.removeprefix(prefix): t for n, t in group.items() if n.startswith(prefix)}

    def named(self, tensors: Tensors, architecture: str) -> Tensors:
        """The inverse of `part`."""
        return {f"{architecture}/{n}": t for n, t in tensors.items()} if architecture else tensors

    def floating_buffers(self, net: nn.Module) -> list[str]:
        """Names of the buffers that have a mean (batch-norm statistics)."""
        return [n for n, b in net.named_buffers() if b.is_floating_point()]

    def kept_by_client(self, net: nn.Module) -> set[str]:
        """Names of the parameters and buffers that stay with the client."""
        kept = {n for n, _ in net.named_parameters() if self.is_personal(n)}
        return kept | (set(self.floating_buffers(net)) if self.buffer_rule == "local" else set())
