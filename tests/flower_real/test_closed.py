"""TLS and node authentication on 127.0.0.1: unregistered nodes and connections without TLS are refused."""

from __future__ import annotations

import json

from tests.flower_real.certificates import write_certificates, write_key
from tests.flower_real.deployed import Flower, wait_for
from tests.flower_real.record import noting
from tests.flower_real.test_equal import run_with_threads

TLS = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key")
"""Arguments of the SuperLink; all processes run in the folder with these files."""
LOCAL = ("--ssl-ca-certfile", "local.crt", "--ssl-certfile", "local.crt", "--ssl-keyfile", "local.key")
"""Arguments for the connections between a node's own processes."""


def closed() -> Flower:
    """Return a SuperLink that accepts only TLS and registered nodes."""
    flower = Flower(link=(*TLS, "--enable-supernode-auth"), connection='root-certificates = "{folder}/ca.crt"')
    write_certificates(flower.folder)
    for name in ("known", "unknown"):
        write_key(flower.folder, name)
    return flower


def secured(key: str) -> tuple[str, ...]:
    """Return the arguments of a node with this key."""
    return ("--root-certificates", "ca.crt", *LOCAL, "--auth-supernode-private-key", key)


def test_unregistered_nodes_and_plain_connections_are_refused() -> None:
    with noting("closed") as told:
        with closed() as flower:
            registered = flower.ask("supernode", "register", "known.pub", "here")
            flower.start_node("unknown", 0, 1, secure=secured("unknown"))
            flower.start_node("plain", 0, 1)
            wait_for(
                lambda: len(flower.log("unknown")) > 300 or flower.ended("unknown"), "the node without a registered key"
            )
            flower.start_node("known", 0, 1, secure=secured("known"))
            out = flower.folder / "out"
            number = flower.begin("run", {"methods": "FedAvg", "setting": "once", "out": str(out)})
            run = flower.end("run", number)
            found = flower.results(out)
            nodes = flower.nodes()
            config = flower.folder / "home" / "config.toml"
            config.write_text(
                config.read_text(encoding="utf-8")
                + f'[superlink.plain]\naddress = "127.0.0.1:{flower.port}"\ninsecure = true\n',
                encoding="utf-8",
            )
            plain = flower.ask("list", "plain", "--format", "json")
            logs = {name: flower.log(name) for name in ("unknown", "plain", "known", "link", "run")}
        told["nodes"] = [node["status"] for node in nodes]
        print(
            registered, plain, json.dumps(nodes), *(f"== {name}\n{log[-2500:]}" for name, log in logs.items()), sep="\n"
        )
        assert run["status"] == "finished:completed"
        assert found["FedAvg"]["failed"] == [{}]
        assert found["FedAvg"]["hash"] == run_with_threads("FedAvg", "once", 1)
        assert [node["status"] for node in nodes].count("online") == 1
        assert '"success": false' in plain
        assert "Failed to activate SuperNode" in logs["unknown"]
        assert "Received" in logs["known"]
        for name in ("unknown", "plain"):
            assert "Received" not in logs[name]
