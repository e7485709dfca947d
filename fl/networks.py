"""Architectures of a federated method: their assignment to clients, their initial weights, and checks before a run."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distillkit._utils import check
from distillkit.networks import build, split
from distillkit.networks._base import require_network
from distillkit.networks._validation import check_network
from distillkit.rng import derive
from fl.message import Tensors
from fl.participants import Client, Server

Factory = Callable[[int], nn.Module]
"""Function that takes the number of outputs and returns a network."""

_LOOKED_UP = 1000
"""Maximum number of clients for which a function `assign` is called before a run."""

_EXAMPLE = "a function that makes a network, as `factory=lambda outputs: ConvNet((3, 32, 32), outputs)`"


class Networks:
    """Architectures of one method. Every method builds a `Networks` object from its options `factory` and `assign`.

    A single architecture has the name "". With several architectures, one dict holds the tensors of all of them, each
    under the name "architecture/tensor". `prefixed` and `unprefixed` add and remove this prefix.

    Each architecture is built once for each number of outputs. Later networks are copies of it. A lock guards the first
    build, because clients run in threads.

    Args:
        factory: function that takes the number of outputs and returns a network; or, for several architectures, a
            mapping from the name of each architecture to its function.
        assign: mapping or function from a client's index to the name of its architecture. Required if there are several
            architectures, and refused otherwise.
        several: whether the method supports several architectures.
        extra: number of outputs in addition to those of the task's classes, for additional label classes that add-ons
            use.
        initial: initial weights, by parameter or buffer name. Weights that it lacks are drawn at random.

    Raises:
        TypeError: `factory` is not a function of one argument (for example, it is a network) or a mapping of such
            functions; or `assign` or `initial` has another type.
        ValueError: `factory` is an empty mapping, or a name in it is empty or contains "/"; `assign` is given although
            there is one architecture, or is missing although there are several.
    """

    def __init__(
        self,
        factory: Factory | Mapping[str, Factory] | None,
        assign: Mapping[int, str] | Callable[[int], str] | None = None,
        *,
        several: bool = True,
        extra: int = 0,
        initial: Tensors | None = None,
    ) -> None:
        self.factories = _factories(factory, several=check.boolean(several, "several"))
        self.names = tuple(self.factories)
        if (len(self.names) > 1) != (assign is not None):
            given = "none" if assign is None else repr(assign) if isinstance(assign, Mapping) else "a function"
            raise ValueError(
                "assign must say which client has which architecture if and only if there are several, got "
                f"assign={given} for {len(self.names)} architecture{'s' * (len(self.names) > 1)}"
            )
        if assign is not None and not isinstance(assign, Mapping):
            check.callable_with(assign, "assign", ["client"], "a mapping client number -> architecture, or a function")
        if initial is not None and not isinstance(initial, Mapping):
            raise TypeError(f"initial must be a state dict, names to tensors, got {type(initial).__name__}")
        self.extra = check.positive_int(extra, "extra", least=0)
        self.assign, self.initial = assign, initial
        self._built: dict[tuple[str, int], nn.Module] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle for another process, without the built networks and the lock."""
        return {**vars(self), "_built": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def architecture(self, client: int) -> str:
        """Return the name of a client's architecture ("" if there is only one).

        Args:
            client: index of the client.

        Raises:
            ValueError: the option `assign`, which maps clients to names of architectures, gives no name or an unknown
                name for this client.
        """
        if self.assign is None:
            return self.names[0]
        name = self.assign(client) if callable(self.assign) else self.assign.get(client, "")
        return check.one_of(name, f"assign({client})", self.names)

    def assigned_architectures(self, clients: int) -> list[str]:
        """Return the name of each client's architecture, for the record of a run.

        The list is empty if there is only one architecture. If `assign` is a function, the list covers only the first
        thousand clients.

        Args:
            clients: number of clients.
        """
        if self.assign is None:
            return []
        most = clients if isinstance(self.assign, Mapping) else min(clients, _LOOKED_UP)
        return [self.architecture(client) for client in range(most)]

    def outputs(self, classes: int) -> int:
        """Return the number of a network's outputs for `classes` classes, including the outputs that add-ons need."""
        return classes + self.extra

    def template(self, name: str, classes: int) -> nn.Module:
        """Return a network of an architecture, to read the names and shapes of its parameters and buffers.

        Do not use its weights, and do not change it: it is built once and shared by all threads. `on` and `draw` return
        networks that you may change.

        Args:
            name: name of the architecture; "" if there is only one.
            classes: number of classes of the task.
        """
        key = name, self.outputs(classes)
        with self._lock:
            if key not in self._built:
                self._built[key] = self.draw(name, classes, torch.Generator())
            return self._built[key]

    def templates(self, classes: int) -> dict[str, nn.Module]:
        """Return one network of every architecture for a task of `classes` classes, by name of the architecture.

        The networks are shared (see `template`), so only read the names and shapes of their tensors.
        """
        return {name: self.template(name, classes) for name in self.names}

    def draw(self, name: str, classes: int, generator: torch.Generator) -> nn.Module:
        """Return a new network on the CPU with randomly drawn weights.

        Args:
            name: name of the architecture; "" if there is only one.
            classes: number of classes of the task.
            generator: generator from which all weights are drawn.
        """
        return build(partial(self.factories[name], self.outputs(classes)), generator)

    def first(self, name: str, classes: int, seed: int) -> Tensors:
        """Return the initial weights w_0 of an architecture.

        They come from the argument `initial` of the constructor. Weights that `initial` lacks are drawn from the run's
        seed. All methods with the same `initial` and seed start from the same weights.

        Args:
            name: name of the architecture; "" if there is only one.
            classes: number of classes of the task.
            seed: seed of the run.

        Returns:
            Parameters and buffers, by the names in the network's state dict, on the CPU.
        """
        net = self.draw(name, classes, derive(seed, 0, "server", f"init {name}"))
        shapes = {n: list(t.shape) for n, t in self.template(name, classes).state_dict().items()}
        other = [n for n, t in net.state_dict().items() if shapes.pop(n, None) != list(t.shape)] + list(shapes)
        if other:
            label = f"factory[{name!r}]" if name else "factory"
            raise ValueError(f"{label} must return the same architecture in every call; {other[0]} differs between two")
        given = self.unprefixed(self.initial or {}, name)
        found = {n: given.get(n, t).detach().to("cpu", copy=True) for n, t in net.state_dict().items()}
        return found | {n: found[first].clone() for n, first in _aliases(net).items()}

    def all_first(self, server: Server) -> Tensors:
        """Return the initial weights w_0 of all architectures in one dict, on the server's device.

        Args:
            server: server of the run, which knows the task, the seed and the device.
        """
        found = self.for_each(lambda name: self.first(name, server.task.num_classes, server.seed))
        return {n: t.to(server.device) for n, t in found.items()}

    def aliases(self, classes: int) -> dict[str, str]:
        """Return further names of tensors that have several, such as tied weights, each with the first name.

        Args:
            classes: number of classes of the task.
        """
        found: dict[str, str] = {}
        for name, net in self.templates(classes).items():
            prefix = f"{name}/" if name else ""
            found |= {prefix + n: prefix + first for n, first in _aliases(net).items()}
        return found

    def for_each(self, compute: Callable[[str], Tensors]) -> Tensors:
        """Call `compute` with the name of each architecture, and return all resulting tensors in one dict.

        Args:
            compute: function that takes the name of an architecture and returns tensors by name. If there are several
                architectures, a name in the result is the name of the architecture, "/" and the name of the tensor.
        """
        groups = ((name, compute(name)) for name in self.names)
        return {n: t for name, tensors in groups for n, t in self.prefixed(tensors, name).items()}

    def on(self, side: Server | Client, weights: Tensors, name: str | None = None) -> nn.Module:
        """Return a new network with the given weights and buffers on a participant's device.

        Args:
            side: participant (server or client) on whose device to put the network.
            weights: parameters and buffers, by the names in the network's state dict.
            name: name of the architecture. Default: the client's architecture, or the only architecture if the
                participant is the server.
        """
        if name is None:
            name = self.architecture(side.id) if isinstance(side, Client) else self.names[0]
        template = self.template(name, side.task.num_classes)
        net = copy.deepcopy(template, _blanks(template, weights)).to(side.device)
        net.load_state_dict(weights)
        return net

    @staticmethod
    def unprefixed(group: Tensors, name: str) -> Tensors:
        """Select the tensors of one architecture, and return them by the names in the network's state dict.

        Args:
            group: tensors of all architectures, by name. The names are "architecture/tensor", or only "tensor" if there
                is one architecture.
            name: name of the architecture; "" if there is only one.
        """
        if not name:
            return dict(group)
        prefix = f"{name}/"
        return {n.removeprefix(prefix): t for n, t in group.items() if n.startswith(prefix)}

    @staticmethod
    def prefixed(tensors: Tensors, name: str) -> Tensors:
        """Return the tensors of an architecture with names that start with its `name` and a slash.

        One dict can then hold the tensors of all architectures. If there is only one architecture, the names do not
        change. This function is the inverse of `unprefixed`.

        Args:
            tensors: tensors of the architecture, by the names in the network's state dict.
            name: name of the architecture; "" if there is only one.
        """
        return {f"{name}/{n}": t for n, t in tensors.items()} if name else tensors

    def check_run(self, server: Server, *, features: bool = False) -> None:
        """Try every architecture on two noise images of the clients' shape and dtype.

        Also check the options `assign` (each client's architecture) and `initial` (initial weights) of `Networks`.

        Call this function in a method's own `check_run`, before round 1. It does not change the networks.

        Args:
            server: server of the run, which knows the shape and dtype of the clients' images and the number of clients.
            features: whether the method uses embeddings. The network must then be splittable into features and
                classifier.

        Raises:
            ValueError: a network fails on such images, or does not return finite logits [2, outputs]; `assign` gives a
                client no architecture (if `assign` is a function, only the first thousand clients are checked); or a
                tensor in `initial` has a name that no network has, or another shape or dtype than in the network.
        """
        like = torch.empty(0, *server.shape, dtype=server.dtype)
        for name, net in self.templates(server.task.num_classes).items():
            outputs, label = self.outputs(server.task.num_classes), f"factory[{name!r}]" if name else "factory"
            with torch.random.fork_rng(devices=[]):
                check_network(split(net), like, classes=outputs, features=features, name=f"{label}({outputs})")
            if not any(parameter.requires_grad for parameter in net.parameters()):
                raise ValueError(
                    f"{label}({outputs}) must have parameters to train, but all of them have requires_grad=False"
                )
        self.assigned_architectures(server.clients)
        self._require_initial(server.task.num_classes)

    def _require_initial(self, classes: int) -> None:
        known = self.for_each(lambda name: dict(self.template(name, classes).state_dict()))
        given = self.initial or {}
        unknown = sorted(set(given) - set(known), key=str)
        if unknown:
            raise ValueError(
                f"initial holds names that the network lacks: {', '.join(map(str, unknown[:5]))}; it has "
                f"{', '.join(list(known)[:5])}{', ...' * (len(known) > 5)}"
            )
        for name, tensor in given.items():
            wanted = known[name]
            if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
                got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"initial[{name!r}] must be {wanted.dtype} {list(wanted.shape)}, got {got}")
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"initial[{name!r}] must be finite, but holds NaN or Inf")


def _aliases(network: nn.Module) -> dict[str, str]:
    """Return further names of tensors in a state dict, each with the first name of its tensor."""
    first: dict[int, str] = {}
    names = [(n, first.setdefault(id(t), n)) for n, t in network.state_dict(keep_vars=True).items()]
    return {n: own for n, own in names if n != own}


def _blanks(network: nn.Module, weights: Tensors) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` that makes copying a network cheaper.

    With the memo, `deepcopy` does not copy parameters that `weights` will overwrite anyway; the copy gets uninitialized
    ones. The memo also contains a new empty dict or set for every empty dict or set in the network. Each module has
    about a dozen of them, for hooks, and copying them is most of the cost.
    """
    plain = [p for n, p in network.named_parameters() if n in weights and type(p) is nn.Parameter and not vars(p)]
    attributes = (value for module in network.modules() for value in vars(module).values())
    bare = (v for v in attributes if type(v) in (dict, OrderedDict, set) and not v and not getattr(v, "__dict__", None))
    empty = {id(value): type(value)() for value in bare}
    return empty | {id(p): nn.Parameter(torch.empty_like(p), p.requires_grad) for p in plain}


@torch.no_grad()
def embedding_size(network: nn.Module, images: Tensor) -> int:
    """Return the length of a network's embeddings. The function puts the network into eval mode.

    Args:
        network: network with a feature extractor and a classifier.
        images: [B, C, H, W], with arbitrary values.

    Raises:
        TypeError, ValueError: the network does not accept the images or returns no embeddings [B, d].
    """
    check.batch_of_images(images)
    parts = split(require_network(network).eval())
    check_network(parts, images, features=True)
    return parts.features(images).shape[1]


def copied(network: nn.Module) -> Tensors:
    """Return copies of the parameters and buffers of `network`, by name."""
    return {n: t.detach().clone() for n, t in require_network(network).state_dict().items()}


def _factories(factory: Factory | Mapping[str, Factory] | None, *, several: bool) -> dict[str, Factory]:
    if factory is None:
        raise TypeError(f"factory must be given: {_EXAMPLE} (outputs: the classes and the add-ons' extra outputs)")
    if isinstance(factory, Mapping) and not several:
        raise TypeError(f"factory must be one architecture for this method: {_EXAMPLE}, got a mapping")
    given = factory if isinstance(factory, Mapping) else {"": factory}
    if not given:
        raise ValueError("factory must hold at least one architecture, name -> factory, got none")
    for name, one in given.items():
        if not isinstance(name, str):
            raise TypeError(f"factory must map names of architectures to factories, got the name {name!r}")
        if isinstance(factory, Mapping) and (not name or "/" in name):
            raise ValueError(
                f"factory must map names that are not empty and hold no '/', which parts an architecture from its "
                f"tensors, got {name!r}"
            )
        label = f"factory[{name!r}]" if name else "factory"
        if isinstance(one, nn.Module):
            raise TypeError(
                f"{label} must be {_EXAMPLE}, got a {type(one).__name__} that is built already; to start "
                "from its weights give `KeepInit(lambda outputs: copy.deepcopy(net))` (`distillkit.networks`)"
            )
        check.callable_with(one, label, ["outputs"], _EXAMPLE, classes=True)
    return dict(given)
