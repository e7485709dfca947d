"""What every component asks of a network: an embedding, and a classifier on top of it."""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn

from distillkit._utils.configurable import Configurable

__all__ = ["Network", "SplitNetwork", "require_network", "split"]


class Network(Protocol):
    """What components ask of a network: an `nn.Module` whose forward is `classifier(features(images))`.

    All networks of this package are one, and `split` makes one of any other classifier.
    """

    def features(self, images: Tensor) -> Tensor:
        """The embedding of each image: what distribution matching compares, and what coresets measure distances in.

        Args:
            images: float [N, C, H, W].

        Returns:
            float [N, d].
        """
        ...

    def classifier(self, embedding: Tensor) -> Tensor:
        """The logits of each embedding.

        Args:
            embedding: float [N, d], from `features`.

        Returns:
            float [N, K].
        """
        ...

    def __call__(self, images: Tensor) -> Tensor:
        """The logits [N, K] of images, by way of their embeddings.

        Args:
            images: float [N, C, H, W].
        """
        ...


class SplitNetwork(Configurable, nn.Module):
    """A network whose embedding is what reaches one of its modules, the classifier: what `split` makes.

    Args:
        network: the whole; its parameters are this one's too, under the prefix `model.`.
        name: of the module that is the classifier, as in `network.named_modules()`.
    """

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.model = network
        self._name = name

    def features(self, images: Tensor) -> Tensor:
        """The classifier's input when the network runs on `images` [N, C, H, W], flattened to [N, d]."""
        return self.outputs(images)[0]

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [N, d] and logits [N, K] from one run: half the work of asking for them one by one.

        Args:
            images: float [N, C, H, W].

        Raises:
            ValueError: the classifier does not run exactly once in a forward pass.
        """
        seen: list[Tensor] = []

        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0])

        hook = self.model.get_submodule(self._name).register_forward_pre_hook(note)
        try:
            logits = self.model(images)
        finally:
            hook.remove()
        if len(seen) != 1:
            raise ValueError(
                f"classifier {self._name!r} ran {len(seen)} times in one forward, want exactly once; "
                "name another module: split(network, classifier='...')"
            )
        return seen[0].flatten(1), logits

    def classifier(self, embedding: Tensor) -> Tensor:
        """The logits [N, K] of an `embedding` [N, d]: the named module alone."""
        return self.model.get_submodule(self._name)(embedding)

    def forward(self, images: Tensor) -> Tensor:
        """The logits [N, K] of `images` [N, C, H, W]: the whole network as it is."""
        return self.model(images)


def _has_split(network: nn.Module) -> bool:
    # A method: torchvision's VGG, MobileNet and DenseNet have submodules of these names, which are no such split.
    return callable(getattr(type(network), "features", None)) and callable(getattr(network, "classifier", None))


def split(network: nn.Module, classifier: str | None = None) -> Network:
    """Give any classifier network the `features` / `classifier` split that components ask for.

    Call it on torchvision's networks and on your own; where a component takes a network or a sampler, it is called for
    you. The wrapper shares the network's parameters under the prefix `model.`.

    Args:
        network: one that has the split already (a method `features` and a `classifier`) is returned as it is.
        classifier: the name of the module whose input is the embedding (as in `network.named_modules()`).
            Default: the last `nn.Linear`, as in torchvision's ResNets. What follows it must be nothing:
            the logits must be its output.

    Raises:
        TypeError: not an `nn.Module`.
        ValueError: no such module, or no `nn.Linear` to choose.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must be an nn.Module, got {type(network).__name__}")
    if classifier is None:
        if _has_split(network):
            return cast(Network, network)
        linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ValueError(
                f"{type(network).__name__} has no nn.Linear to take as classifier; name one of its modules: "
                "split(network, classifier='...')"
            )
        classifier = linear[-1]
    elif not isinstance(classifier, str) or classifier not in dict(network.named_modules()) or not classifier:
        names = ", ".join(name for name, _ in network.named_children())
        raise ValueError(
            f"classifier must name a module of {type(network).__name__}, got {classifier!r}; its children are {names}"
        )
    return cast(Network, SplitNetwork(network, classifier))


def require_network(network: Any, name: str = "network") -> nn.Module:
    """Return `network` if it is an `nn.Module`, else raise a TypeError that says what came and the remedy.

    Args:
        network: what a user gave.
        name: what the argument is called in the message.
    """
    if isinstance(network, nn.Module):
        return network
    came = f"the class {network.__name__}" if isinstance(network, type) else type(network).__name__
    remedy = "; call it, and give the network" if callable(network) else ""
    raise TypeError(f"{name} must be an nn.Module, got {came}{remedy}")
