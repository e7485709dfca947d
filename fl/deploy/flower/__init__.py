"""Federated methods on Flower, the engine this field uses on many machines: the same methods, the same bits.

`server_app(method, rounds=...)` and `client_app(method, load_client, folder=...)` are the two apps that a Flower
project names. What lies here, and what each file knows:

* `apps`: the two apps, and `serve` and `reply_to` for apps of one's own. Nothing else here is for users.
* `cohort`: the seam's third implementation. Letters out and answers in, over Flower's grid; it sees no client.
* `mail`, `arrivals`: messages on their way, and which nodes are there.
* `node`: the other side. What a node does with a message, and its folder, which outlasts the process of a message.
* `account`, `policy`, `guard`: what private runs charge to a node's data, and what its owner allows; `books`: the
  server's mirror of these ledgers.
* `hello`: what a node says of itself before the first round, and which nodes are refused.
* `records`: our messages as Flower's records, the same to the bit.
* `library`: the only file that imports Flower, when it is needed.

Jobs, answers, checks, memories, rounds and files are those of `fl.simulate`. Flower is not needed to import this:
the apps raise `MissingFlower` without it.
"""

from fl.deploy.flower._handshake import Misfit
from fl.deploy.flower._import import MissingFlower
from fl.deploy.flower.apps import Options, client_app, reply_to, serve, server_app
from fl.deploy.flower.policy import Policy, app_hash, read_policy

__all__ = [
    "Misfit",
    "MissingFlower",
    "Options",
    "Policy",
    "app_hash",
    "client_app",
    "read_policy",
    "reply_to",
    "serve",
    "server_app",
]
__dir__ = __all__.copy
