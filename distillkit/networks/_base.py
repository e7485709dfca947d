"""Interface of networks that consist of a feature extractor, which computes an embedding, and a classifier."""

from __future__ import annotations

from typing import Any, Protocol, cast

from torch import Tensor, nn

from distillkit._utils.configurable import Configurable


class Network(Protocol):
    """Interface of networks: an `nn.Module` whose forward pass is `classifier(features(images))`.

    All networks of this package implement it. `split` gives any other image classifier this interface.
    """

    def features(self, images: Tensor) -> Tensor:
        """Compute the embedding of each image. Distribution matching and coreset selection use embeddings.

        Args:
            images: float [N, C, H, W].

        Returns:
            float [N, d].
        """
        ...

    def classifier(self, embedding: Tensor) -> Tensor:
        """Compute the logits from the embeddings.

        Args:
            embedding: float [N, d], from `features`.

        Returns:
            float [N, K].
        """
        ...

    def __call__(self, images: Tensor) -> Tensor:
        """Compute the logits [N, K] of images.

        Args:
            images: float [N, C, H, W].
        """
        ...


class SplitNetwork(Configurable, nn.Module):
    """Network that was split by `split`: its embedding is the input of one of its modules, the classifier.

    Args:
        network: the whole network. The names of its parameters get the prefix `model.`.
        name: name of the classifier module, as in `network.named_modules()`.
    """

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.model = network
        self._name = name

    def features(self, images: Tensor) -> Tensor:
        """Run the network on `images` [N, C, H, W] and return the classifier's input, flattened to [N, d]."""
        return self.outputs(images)[0]

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute embeddings [N, d] and logits [N, K] in one forward pass.

        Args:
            images: float [N, C, H, W].

        Raises:
            ValueError: the forward pass does not call the classifier module, or calls it more than once.
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
                f"classifier {self._name!r} must run exactly once in a forward pass, but ran {len(seen)} times; "
                "name another module: split(network, classifier='...')"
            )
        return seen[0].flatten(1), logits

    def classifier(self, embedding: Tensor) -> Tensor:
        """Compute the logits [N, K] of an `embedding` [N, d] with the classifier module alone."""
        return self.model.get_submodule(self._name)(embedding)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits [N, K] of `images` [N, C, H, W] with the whole network."""
        return self.model(images)


def _has_split(network: nn.Module) -> bool:
    # `features` must be a method: torchvision's VGG, MobileNet and DenseNet have submodules of these names.
    return callable(getattr(type(network), "features", None)) and callable(getattr(network, "classifier", None))


def split(network: nn.Module, classifier: str | None = None) -> Network:
    """Wrap an image classifier, so that it has the methods `features` and `classifier` of the interface `Network`.

    Use it for your own networks or those of torchvision. Functions of this package that accept a network, or a sampler
    of networks, call `split` themselves. The wrapper shares the network's parameters. Their names get the prefix
    `model.`.

    Args:
        network: network to split. A network that already has a method `features` and a `classifier` is returned
            unchanged.
        classifier: name of the module whose input is the embedding and whose output are the logits, as in
            `network.named_modules()`. Default: the last `nn.Linear`, which is right for torchvision's ResNets.

    Raises:
        TypeError: `network` is not an `nn.Module`.
        ValueError: the network has no module with this name or, by default, no `nn.Linear`.
    """
    network = require_network(network)
    if classifier is None:
        if _has_split(network):
            return cast(Network, network)
        linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ValueError(
                f"{type(network).__name__} has no nn.Linear to use as classifier; name one of its modules: "
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
    """Check that `network` is an `nn.Module`. Return it, or the module inside if it is the result of `torch.compile`.

    Compiled code does not call the hooks of modules, so components that look into a network use the module inside.

    Args:
        network: value to check.
        name: name of the argument in error messages.

    Raises:
        TypeError: `network` is not an `nn.Module`, for example a class or a factory.
    """
    if isinstance(network, nn.Module):
        return getattr(network, "_orig_mod", network)
    came = f"the class {network.__name__}" if isinstance(network, type) else type(network).__name__
    remedy = "; call it and pass the result" if callable(network) else ""
    raise TypeError(f"{name} must be an nn.Module, got {came}{remedy}")
