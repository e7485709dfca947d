"""Federated methods on Flower, with the same method objects, checks, files and results as `fl.simulate`.

`server_app(method, rounds=...)` and `client_app(method, load_client, folder=...)` return the two apps of a Flower
project. If you write the two apps yourself, call `serve` in the server app and `reply_to` in the client app. All four
are in the module `_apps`. This package can be imported without Flower; the apps then raise `MissingFlower`.

A message passes through these modules:

1. `_grid` (server): `GridTransport.exchange` builds a client's request, which states how many lines of the node's
   privacy ledger the server has seen.
2. `_messages`: the message is converted to Flower's records, and Flower's grid sends it to the node of the client.
3. `_node`: `Node.handle_job` loads the client's data (`_client_loading`) and reads the request, with cached values
   from the node's folder (`_node_folder`).
4. `_policy`: before anything is computed, `Policy.require_request` checks the request.
5. The engine runs the client. Each private release is checked against the policy and the node's budget, and is written
   to the node's ledger (`NodeLedger` in `_node_ledger`), before its noise is drawn.
6. `_replies`: `reply_parts` adds the new ledger lines. If the policy limits epsilon, it withholds results for which
   nothing was charged to the ledger.
7. `_grid` (server): the reply is read as untrusted data. The new ledger lines are copied to the run's ledger
   (`mirror_report` in `_node_ledger`) before the engine gets the result.

Before the first round, every node sends a description of itself (`_handshake`), and the server checks that all nodes
are compatible (`_node_registry`).
"""

from fl.deploy.flower._apps import FlowerConfig, client_app, reply_to, serve, server_app
from fl.deploy.flower._grid import ConnectionOptions
from fl.deploy.flower._handshake import IncompatibleNode
from fl.deploy.flower._messages import MissingFlower
from fl.deploy.flower._policy import Policy, app_hash, read_policy

__all__ = [
    "ConnectionOptions", "FlowerConfig", "IncompatibleNode", "MissingFlower", "Policy", "app_hash", "client_app",
    "read_policy", "reply_to", "serve", "server_app",
]  # fmt: skip
__dir__ = __all__.copy
