"""Federated averaging in plain loops, for reading beside the paper and as reference for `fl.FedAvg`: equal bitwise.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data" (AISTATS 2017), Algorithm 1,
with its symbols. One page of PyTorch: no messages, no engine, no add-ons. All that it takes from elsewhere is `derive`,
which gives the generator of (seed, round, client, purpose): what is drawn then depends on nothing that ran before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distillkit.rng import derive

Data = tuple[Tensor, Tensor]  # images [n, C, H, W], class indices [n]
State = dict[str, Tensor]  # parameters and buffers by name


def server_executes(
    net: nn.Module, clients: Sequence[Data], *, rounds: int, m: int, lr: float, momentum: float = 0.0,
    decay: float = 0.0, lr_decay: float = 1.0, epochs: int = 1, batch: int = 32, seed: int = 0,
) -> State:  # fmt: skip
    """Train for rounds of m clients from the weights of `net` and return the server's state."""
    w, learned = copy.deepcopy(net.state_dict()), {name for name, _ in net.named_parameters()}
    sizes = [len(images) for images, _ in clients]
    for t in range(1, rounds + 1):
        drawn = [k for k in random_set(len(clients), m, derive(seed, t, "draw")) if sizes[k] > 0]
        n, eta = sum(sizes[k] for k in drawn), lr * lr_decay ** (t - 1)
        total: State = {}
        for k in drawn:
            w_k = client_update(net, w, clients[k], eta, momentum, epochs, batch, derive(seed, t, k, "batches0"), decay)
            for name, value in w_k.items():
                if not value.is_floating_point():  # batch norm's count of batches: the largest
                    total[name] = torch.maximum(total.get(name, value), value)
                else:  # a parameter's change, a buffer's value, weighted and added up in float64
                    part = sizes[k] * (value - w[name] if name in learned else value).double()
                    total[name] = total[name] + part if name in total else part
        for name, value in total.items():  # w_{t+1} = sum_k n_k / n w_k = w_t + sum_k n_k / n (w_k - w_t)
            mean = (value / n).to(w[name].dtype) if value.is_floating_point() else value
            w[name] = w[name] + mean if name in learned else mean
    return w


def random_set(clients: int, m: int, generator: torch.Generator) -> list[int]:
    """Draw S_t: m of the clients, uniformly and without replacement (Floyd's algorithm)."""
    chosen: set[int] = set()
    for last in range(clients - m, clients):
        one = int(torch.randint(last + 1, (), generator=generator))
        chosen.add(last if one in chosen else one)
    return sorted(chosen)


def client_update(
    net: nn.Module, w: State, data: Data, eta: float, momentum: float, epochs: int, batch: int, orders: torch.Generator,
    decay: float,
) -> State:  # fmt: skip
    """ClientUpdate(k, w): from the server's weights, E epochs of SGD over batches of size B, shuffled in each epoch."""
    net = copy.deepcopy(net).train()
    net.load_state_dict(w)
    (images, labels), optimizer = data, torch.optim.SGD(net.parameters(), eta, momentum, weight_decay=decay)
    for _ in range(epochs):
        ends = range(batch, len(images) - 1, batch)  # with batch norm, a last batch of one image is merged
        for b in torch.randperm(len(images), generator=orders).tensor_split(list(ends)):
            optimizer.zero_grad()
            F.cross_entropy(net(images[b]), labels[b]).backward()
            optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
