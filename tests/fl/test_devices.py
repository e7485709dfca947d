"""Devices: the engine moves all tensors to the device that uses them, so algorithms do not handle devices.

There is no accelerator here: `emulated_device` turns the CPU into one, with the rules of CUDA for mixed devices.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fl.addons
import fl.methods
from distillkit import LabeledImages
from distillkit.normalization import IDENTITY
from fl import Classification, Client, Entry, FedAvg, Message, Method, NoUsableReply, Run, Server
from fl.addons._server_training import Projection
from fl.aggregation import Aggregator
from fl.averaging.local import received_state
from fl.averaging.optimizer import load_state
from fl.engine import _threads
from fl.engine._devices import placed
from fl.engine._threads import ServerThread
from fl.methods import FedDM, FedProto, FedRep, PrivateFedDM, SummedFedDM
from tests.fl.emulated_device import DEVICE, Mixed, on_second_device, second_device
from tests.fl.every_method import DM, DP, METHODS, play, rows
from tests.fl.federations import images
from tests.fl.invariances import assert_same, tensors
from tests.fl.test_addon_combinations import NAMES, OPTIONS, Net, addon, digits, plain


@pytest.fixture
def run_on_second_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run a method with `cpu:1` as a separate device on every thread of clients and server."""
    respond, run = _threads.respond, ServerThread.run

    def client_side(*given: Any) -> Any:
        with second_device():
            return respond(*given)

    def server_side(self: ServerThread, work: Callable[[], Any]) -> Any:
        def also_there() -> Any:
            with second_device():
                return work()

        return run(self, also_there)

    def play_there(method: Method, **how: Any) -> Run:
        with monkeypatch.context() as patch, second_device():
            patch.setattr(_threads, "respond", client_side)
            patch.setattr(ServerThread, "run", server_side)
            for name in ("dispatch_modes", "function_modes"):
                patch.setattr(f"distillkit.privacy.capture._captured_function.{name}", list)
            return play(method, **{"device": DEVICE, "evaluate": "drawn", **how})

    return play_there


ROUNDED = ("DPSGD", "VHL", "FedLGD")
"""Methods whose operators or layouts the emulation changes, which some processors round differently."""


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_devices_are_never_mixed(name: str, run_on_second_device: Callable[..., Run]) -> None:
    """Every add-on and method runs on an accelerator with the CPU's bits, and its final state is there.

    Private training refuses modes such as the emulation; the fixture takes that check away.
    """
    run = run_on_second_device(METHODS[name]())
    assert [(row["failed"], row.get("failed_evaluation")) for row in run.rows] == [({}, None)] * 2
    assert all(on_second_device(t) for t in tensors(run.server.state).values())
    wanted = play(METHODS[name](), evaluate="drawn")
    if name not in ROUNDED:
        assert_same(run, wanted)
        assert rows(run) == rows(wanted)
        return
    mine, others = tensors(run.server.state), tensors(wanted.server.state)
    assert mine.keys() == others.keys()
    assert all(torch.allclose(t, others[n], rtol=1e-5, atol=1e-6) for n, t in mine.items())


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.skipif("DISTILLKIT_DEVICE" not in os.environ, reason="no accelerator is named")
@pytest.mark.parametrize("name", METHODS)
def test_methods_run_on_the_accelerator_of_this_machine(name: str) -> None:
    run = play(METHODS[name](), evaluate="drawn", device=os.environ["DISTILLKIT_DEVICE"])
    assert [(row["failed"], row.get("failed_evaluation")) for row in run.rows] == [({}, None)] * 2


def test_memory_of_later_rounds_is_kept(run_on_second_device: Callable[..., Run], tmp_path: Path) -> None:
    """A memory that is read from disk and moved to the device is a copy, and the changes of the copy count."""
    first = play(plain(addon("SCAFFOLD")), rounds=3, evaluate="drawn")
    second = run_on_second_device(plain(addon("SCAFFOLD")), rounds=3, out=tmp_path)
    assert_same(first, second)
    assert rows(first) == rows(second)


def test_client_state_starts_on_the_compute_device() -> None:
    """This includes the first use, with initial weights drawn on the CPU or given on any device."""
    with second_device():
        given = {n: t.to(DEVICE) for n, t in Net(3).state_dict().items()}
        for initial in (None, given):
            method = FedAvg(factory=Net, personal="classifier.*", initial=initial)
            assert not any(on_second_device(t) for t in method.networks.first("", 3, 0).values())
            server = Server(Classification(3), (1, 8, 8), IDENTITY, 1, 0, device=DEVICE)
            server.state[FedAvg.model] = method.networks.all_first(server)
            client = Client(0, digits()[:4], None, Classification(3), 1, 0, device=DEVICE)
            state = received_state(method.settings, client, method.send(server, 0))
            assert state.keys() == given.keys()
            assert all(on_second_device(t) for t in state.values())


def test_all_that_a_method_gets_is_on_the_device(
    run_on_second_device: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes a resumed state, and replies that have waited in a file for comparison with each other."""
    monkeypatch.setattr("fl.engine._exchange.LEAST_REPLIES", 2)
    monkeypatch.setattr("fl.engine._outliers._IN_MEMORY", 0)
    seen: set[str] = set()

    def watched(function: str) -> Callable[..., Any]:
        def work(method: Method, side: Any, *given: Any) -> Any:
            seen.add(function)
            server = isinstance(side, Server)
            held = [side.state, *side.data.values()] if server else [side.data, side.test, side.memory]
            for value in (*held, *(one for one in given if isinstance(one, Message))):
                parts = [value.images, value.labels] if isinstance(value, LabeledImages) else tensors(value).values()
                assert all(on_second_device(part) for part in parts), function
            if function == "local":
                side.memory[FedAvg.update] = {"w": torch.ones(2)}
            return getattr(FedAvg, function)(method, side, *given)

        return work

    functions = ("start", "send", "local", "read_reply", "receive")
    watching = type("Watching", (FedAvg,), {name: watched(name) for name in functions})
    for rounds in (1, 2):
        run = run_on_second_device(watching(factory=Net, steps=1), out=tmp_path, resume=rounds == 2, rounds=rounds)
        assert run.rows[-1]["failed"] == {}
    assert seen == {*functions}


class Mixing(FedAvg):
    """Reads tensors that nothing moved to the device in use."""

    def local(self, client: Client, message: Message) -> Message:
        _ = client.data.images + torch.ones(8)
        return super().local(client, message)


def test_tensor_created_on_the_wrong_device_fails_on_an_accelerator(run_on_second_device: Callable[..., Run]) -> None:
    assert play(Mixing(factory=Net), rounds=1).rows[0]["failed"] == {}
    with pytest.raises(NoUsableReply, match=r"Mixed: aten::add takes tensors of both devices"):
        run_on_second_device(Mixing(factory=Net))


def test_emulated_device_follows_the_rules_of_cuda() -> None:
    with second_device():
        far, near = torch.zeros(3, device=DEVICE), torch.ones(3)
        assert (far.device, (far + 1).device, near.device) == (DEVICE, DEVICE, torch.device("cpu"))
        assert far.to(DEVICE) is far
        assert (near.to(far).device, far.cpu().device) == (DEVICE, torch.device("cpu"))
        assert far[torch.tensor([0])].device == DEVICE
        assert (far + near.sum()).device == DEVICE
        net = torch.nn.Linear(3, 2).to(DEVICE)
        net(far).sum().backward()
        assert net.weight.grad is not None
        assert {net.weight.device, net.weight.grad.device, copy.deepcopy(net).weight.device} == {DEVICE}
        leaf = far.clone().requires_grad_()
        for cast in (leaf.double().to(leaf.dtype), leaf.double().square().float()):
            (gradient,) = torch.autograd.grad((leaf * cast).sum(), leaf)
            assert gradient.device == DEVICE
        for wrong in (
            lambda: far + near,
            lambda: near + far.sum(),
            lambda: torch.cat([far, near]),
            lambda: far.index_select(0, torch.tensor([1])),
            lambda: torch.randn(3, generator=torch.Generator(), device=DEVICE),
            lambda: far.numpy(),
        ):
            with pytest.raises(Mixed):
                wrong()


def client_steps(*names_and_batch: Any) -> Method:
    *names, batch = names_and_batch
    return plain(*map(addon, names), steps=None, epochs=2, batch=batch)


def with_option(name: str, option: str, value: int, **options: Any) -> Method:
    """Return FedAvg with an add-on, one of whose options is a number of steps."""
    return plain(getattr(fl.addons, name)(**{**OPTIONS[name], **options, option: value}))


def matching(kind: Any, option: str, value: int, **options: Any) -> Method:
    return kind(**{**(DM if "sigma" not in options else {}), **options, option: value})


SUMS: dict[str, Any] = {**DP, "sizes": [10, 10, 10], "noise": "shares"}
IMAGE: dict[str, Any] = {**DP, "sigma_sizes": 2.0, "least": 0}
LOOPS: dict[str, tuple[Callable[[int], Method], int, int]] = {
    **{name: (partial(client_steps, name), 8, 2) for name in NAMES},
    "several": (partial(client_steps, "FedProx", "FedReg", "VHL"), 8, 4),
    "drawing": (partial(client_steps, "FedGen", "VFA"), 8, 4),
    "FedProto": (lambda n: FedProto(factory=Net, lr=0.05, batch=n), 8, 2),
    "FedRep": (lambda n: FedRep(factory=Net, head_epochs=1, lr=0.05, batch=n), 8, 2),
    "FedDM, images": (partial(matching, FedDM, "steps"), 3, 8),
    "FedDM, server": (partial(matching, FedDM, "server_batch"), 4, 2),
    "PrivateFedDM": (partial(matching, PrivateFedDM, "steps", **IMAGE), 3, 8),
    "SummedFedDM": (partial(matching, SummedFedDM, "steps", **SUMS), 3, 8),
    "FedDF, server": (partial(with_option, "FedDF", "steps", batch=1), 1, 5),
    "SharedImage, server": (partial(with_option, "SharedImage", "steps", batch=1, rate=1.0), 1, 4),
    "FedGen, server": (partial(with_option, "FedGen", "steps"), 2, 8),
    "FedCOG, images": (partial(with_option, "FedCOG", "steps"), 2, 8),
    "Anchors, server": (partial(with_option, "Anchors", "steps"), 2, 8),
    "Condensed, images": (partial(with_option, "Condensed", "steps"), 2, 8),
    "Condensed, refinement": (partial(with_option, "Condensed", "refine_steps"), 2, 8),
    "FedReg, iterations": (partial(with_option, "FedReg", "iterations"), 1, 4),
}
"""Loops of methods, with a number that makes them longer, without more passes over the images."""
OFTEN = ("several", "drawing", "FedProto", "FedDF, server")
COPIED = {
    "drawing": "both of the next", "VFA": "random features", "FedGen": "noise and classes",
    "FedGen, server": "noise and classes",
    "Anchors": "an order of the anchors, all of which are one batch", "FedDM, images": "a network",
    "PrivateFedDM": "a network", "SummedFedDM": "a network", "Condensed, images": "the layers of a network",
}  # fmt: skip
"""What is drawn on the CPU in each step. It is copied without waiting."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in LOOPS])
def test_steps_of_methods_wait_for_nothing(name: str, run_on_second_device: Callable[..., Run]) -> None:
    """Each pass over the images brings one order of them, without waiting; more steps only bring what is drawn."""
    make, *lengths = LOOPS[name]
    found = []
    for length in lengths:
        with second_device() as events:
            events.clear()
            events.places.clear()
            run = run_on_second_device(make(length), rounds=1 if name in OFTEN and name != "drawing" else 2)
            assert all(row["failed"] == {} for row in run.rows)
            found.append((events["wait"], events["copy"], events.places.copy()))
    (waits, copies, where), (more_waits, more_copies, there) = found
    assert more_waits == waits, there - where
    assert (more_copies > copies) == (name in COPIED), there - where


def test_the_step_count_of_a_continued_optimizer_stays_on_the_cpu() -> None:
    """PyTorch's Adam reads it in every step. Its moments are on the device of the parameters."""
    with second_device() as events:
        found = []
        for device in (torch.device("cpu"), DEVICE):
            weight = torch.ones(3, device=device, requires_grad=True)
            saved = {
                f"w/{key}": torch.tensor(value).to(device) for key, value in (("step", 2.0), ("exp_avg", [0.5] * 3))
            }
            saved["w/exp_avg_sq"] = torch.tensor([0.1, 0.2, 0.3]).to(device)
            optimizer = torch.optim.Adam([weight], lr=0.1, foreach=False)
            load_state(optimizer, ["w"], saved)
            weight.grad = torch.ones_like(weight)
            events.clear()
            optimizer.step()
            assert events["wait"] == 0
            assert float(saved["w/step"]) == 2.0
            found.append(weight.detach().cpu())
    assert found[0].equal(found[1])


@pytest.mark.parametrize("length", [0.0, 1.9, 2.0, 2.1])
def test_a_projection_waits_for_nothing(length: float) -> None:
    for device in (torch.device("cpu"), DEVICE):
        with second_device() as events:
            net = torch.nn.Linear(4, 1, bias=False).to(device)
            start, project = net.weight.detach().clone(), Projection(net, 2.0)
            with torch.no_grad():
                net.weight += torch.tensor([[0.6, 0.0, 0.0, 0.8]], device=device) * length
            moved = net.weight.detach().clone()
            events.clear()
            project()
            assert (events["wait"], events["copy"]) == (0, 0)
            if length < 2:
                assert net.weight.equal(moved)
            assert float((net.weight - start).norm()) == pytest.approx(min(length, 2.0), abs=1e-6)


def test_the_union_of_sets_is_on_their_device() -> None:
    total = Aggregator({_Kinds.images.key: _Kinds.images})
    with second_device():
        for client in (4, 7):
            total.fold(client, Message({_Kinds.images: images(3, 1).to(DEVICE)}))
        union = total.result()[_Kinds.images]
        assert all(on_second_device(t) for t in (union.images, union.labels, union.columns["client"]))
        assert union.columns["client"].tolist() == [4] * 3 + [7] * 3


# Placement of messages and sets on a device.


class _Kinds:
    tensor = Entry[torch.Tensor]()
    group = Entry[dict[str, torch.Tensor]]()
    images = Entry[LabeledImages]("union")
    number = Entry[float]()


def test_placed_moves_every_tensor_and_returns_unmoved_values_themselves() -> None:
    """This includes the images, labels and columns of a set; values of other types are returned unchanged."""
    data = images(3, 1).replace(columns={"client": torch.zeros(3)})
    message = Message(
        {_Kinds.tensor: torch.ones(2), _Kinds.group: {"a": torch.ones(1)}, _Kinds.images: data, _Kinds.number: 2.0}
    )
    here = torch.device("cpu")
    assert placed(message, here) is message
    with second_device():
        moved = placed(message, DEVICE)
        assert placed(moved, DEVICE) is moved
        found = moved[_Kinds.images]
        parts = [moved[_Kinds.tensor], moved[_Kinds.group]["a"], found.images, found.labels, found.columns["client"]]
        assert all(on_second_device(t) for t in parts)
        assert not on_second_device(message[_Kinds.tensor])
        assert moved[_Kinds.number] == 2.0
        assert placed(placed(moved, here), here)[_Kinds.images].images.equal(data.images)
    strange: list[Any] = [None, "x", 3, [torch.ones(1)], torch.ones(1, device="meta")]
    assert all(placed(value, here) is value for value in strange)
