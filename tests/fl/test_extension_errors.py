"""Errors in user-written add-ons and methods are reported by name."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from distillkit.privacy import BudgetExhausted, Event, Ledger
from fl import AddOn, CheckpointError, ClientData, Entry, EntrySpec, FedAvg, NoUsableReply, Predictor, simulate
from fl.averaging.addon import SLOTS
from fl.engine._round_stats import RoundStats
from fl.message import Message
from fl.method import Method
from fl.methods import FedProto
from fl.participants import Interrupted
from tests.fl.federations import Tiny, federation
from tests.refused import refused


def play(method: Method, **options: Any) -> Any:
    return simulate(method, federation()[:3], **{"rounds": 1, "progress": False, **options})


@pytest.mark.parametrize(
    ("got", "reason"),
    [
        (None, "got NoneType"),
        ({}, "it lacks ['body.0.bias', 'body.0.weight', 'classifier.bias']"),
        ({"other": 0}, "it lacks ['body.0.bias', 'body.0.weight', 'classifier.bias'] and has unknown ['other']"),
    ],
)
@pytest.mark.parametrize(
    ("slot", "like"),
    [("aggregate", "mean"), ("server_step", "mean"), ("refine", "old"), ("scale_update", "update"),
     ("gradient", "step.trained"), ("evaluation_model", "server.state[FedAvg.model]")],
)  # fmt: skip
def test_hook_must_return_a_tensor_for_every_name(slot: str, like: str, got: Any, reason: str) -> None:
    wrong = type("Wrong", (AddOn,), {slot: lambda *_: got})
    said = f"Wrong.{slot} must return a tensor for every name of `{like}`"
    with pytest.raises((TypeError, ValueError, NoUsableReply), match=f"{re.escape(said)}.*{re.escape(reason)}"):
        play(FedAvg(wrong(), factory=Tiny))


@pytest.mark.parametrize(
    ("got", "said"), [(3, "tensors for names of `local.start`, got int"), ({"other": 0}, r"has unknown \['other'\]")]
)
def test_personal_model_must_have_names_of_the_model(got: Any, said: str) -> None:
    wrong = type("Wrong", (AddOn,), {"personal_model": lambda *_: got})
    clients = [ClientData(data, data[:3]) for data in federation()[:2]]
    row = simulate(FedAvg(wrong(), factory=Tiny), clients, rounds=1, progress=False).rows[0]
    assert all(
        re.search(f"Wrong.personal_model must return .*{said}", why) for why in row["failed_evaluation"].values()
    )
    assert len(row["failed_evaluation"]) == 2


@pytest.mark.parametrize("slot", SLOTS)
def test_slot_is_filled_by_one_active_add_on(slot: str) -> None:
    one, other = (type(name, (AddOn,), {slot: lambda *_: None}) for name in "ZA")
    said = f"^A and Z cannot be combined: both fill the slot '{slot}'; leave one out$"
    refused(lambda: FedAvg(one(), other(), factory=Tiny), ValueError, said)
    off = type("Off", (one,), {"disabled": True})
    assert [addon.name for addon in FedAvg(off(), other(), factory=Tiny).addons] == ["A"]


def test_answers_need_a_schema() -> None:
    said = r"^Asks.answer returns a reply, but the schema of this reply is missing: write expect_answer$"
    asks = type("Asks", (AddOn,), {"answer": lambda *_: None, "receive_answers": lambda *_: None})
    refused(lambda: FedAvg(asks(), factory=Tiny), ValueError, said)


CLASSES = {"num_classes": 9}


@pytest.mark.parametrize(
    ("hook", "function", "words"),
    [("loss", lambda _, step: step.batch.images.sum((1, 2, 3)), r"a loss tensor, or None, got a tensor \[\d+\]"),
     ("correct_gradient", lambda _, step, grads: grads.update({k: g[:1] for k, g in grads.items()}), "of its shape: "),
     ("dataset", lambda _, local: local.client.data.replace(**CLASSES), r"Wrong.dataset\(local\) have different class"),
     ("extra_records", lambda _, local: local.client.data.replace(**CLASSES), "Wrong.extra_records.* different class"),
     ("batches", lambda *_: [torch.zeros(1)], r"Wrong.batches must return batches \(fl.Batch\), got Tensor"),
     ("extra_batches", lambda *_: iter([torch.zeros(1)]), r"must return batches \(fl.Batch\), got Tensor"),
     ("extra_batches", lambda *_: iter(()), "as many batches as there are steps"),
     ("server_step", lambda _, server, mean: {n: t.to_sparse() for n, t in mean.items()}, "torch.sparse_coo on cpu"),
     ("refine", lambda _, server, replies, old: {n: t.to("meta") for n, t in old.items()}, "on cpu, got .* on meta"),
     ("after_step", lambda _: None, r"Wrong.after_step is called as Wrong.after_step\(step\)"),
     *((hook, lambda *_: 3, f"3 of 3 clients raised TypeError: Wrong.{hook} must return {wanted}, got")
       for hook, wanted in (
        ("dataset", "a LabeledImages"), ("extra_records", "a LabeledImages, or None"), ("batches", "batches"),
        ("extra_batches", "an iterator of batches, or None"), ("loss", "a loss tensor, or None"),
        ("correct_gradient", "None, as it changes `grads` in place")))],
)  # fmt: skip
def test_result_of_a_hook_must_fit_and_its_arguments_too(hook: str, function: Any, words: str) -> None:
    wrong = type("Wrong", (AddOn,), {hook: function})
    refused(lambda: play(FedAvg(wrong(), factory=Tiny)), (TypeError, ValueError, NoUsableReply), words)


HOOKS = (
    "start", "dry_run", "send", "before_training", "extra_records", "extra_batches", "loss", "correct_gradient",
    "after_step", "after_training", "expect", "read_reply", "receive",
)  # fmt: skip


def test_hooks_are_called_in_the_order_of_keys() -> None:
    calls: list[tuple[str, str]] = []

    def traced(key: str) -> AddOn:
        return type(key, (AddOn,), {h: lambda self, *_, h=h: calls.append((h, self.key)) for h in HOOKS})()

    play(FedAvg(traced("B"), traced("A"), factory=Tiny))
    for hook in HOOKS:
        keys = [key for name, key in calls if name == hook]
        assert keys, hook
        assert keys == ["A", "B"] * (len(keys) // 2), hook


def test_misspelt_hook_is_warned_of_and_a_helper_is_not(recwarn: pytest.WarningsRecorder) -> None:
    class Own(AddOn):
        def helper(self) -> None:
            """A helper, not a hook."""

    FedAvg(Own(), factory=Tiny)
    assert not recwarn.list
    misspelt = type("Misspelt", (AddOn,), {"serverstep": lambda self, server, mean: mean})
    with pytest.warns(UserWarning, match=r"Misspelt.serverstep is not a hook.*: did you mean server_step"):
        FedAvg(misspelt(), factory=Tiny)


def test_run_that_cannot_be_resumed_warns_at_its_start(tmp_path: Path) -> None:
    class Quiet(FedAvg):
        def arguments(self) -> Any:
            return None

    with pytest.warns(UserWarning, match=r"its method does not state its options.*frozen dataclass"):
        play(Quiet(factory=Tiny), out=tmp_path / "run")


@pytest.mark.parametrize("kind", [FedAvg, FedProto])
@pytest.mark.parametrize("function", [False, True])
def test_other_architecture_assignment_is_another_run(kind: Any, function: bool, tmp_path: Path) -> None:
    def method(names: str) -> Method:
        given = dict(enumerate(names))
        return kind(factory={"a": Tiny, "b": Tiny}, assign=given.__getitem__ if function else given)

    play(method("aab"), out=tmp_path / "run")
    play(method("aab"), out=tmp_path / "run", rounds=2, resume=True)
    refused(lambda: play(method("aba"), out=tmp_path / "run", rounds=3, resume=True), CheckpointError, "assigned: was")


def test_error_shows_only_the_differing_settings(tmp_path: Path) -> None:
    play(FedAvg(factory=Tiny, lr=0.1), out=tmp_path / "run")
    with pytest.raises(CheckpointError) as refusal:
        play(FedAvg(factory=Tiny, lr=0.25), out=tmp_path / "run", resume=True)
    assert "other settings (method.lr: was 0.1, now 0.25); give another folder" in str(refusal.value)


def test_undeclared_entry_is_reported_with_its_writer() -> None:
    class Sends(AddOn):
        def after_training(self, local: Any, update: Any, reply: Message) -> None:
            reply[FedAvg.last] = {"a": update["body.0.bias"]}

    refused(lambda: play(FedAvg(Sends(), factory=Tiny)), Exception, r"FedAvg.last is not expected: .*in `expect`")


@pytest.mark.parametrize(
    "work", [lambda: torch.zeros(2) @ torch.zeros(3), lambda: json.loads("{")], ids=["torch", "standard library"]
)
def test_failing_client_names_the_line_that_failed(work: Callable[[], object]) -> None:
    """The user's line, not the one of the library in which the error occurred."""

    class Oops(AddOn):
        def after_training(self, local: Any, update: Any, reply: Message) -> None:
            if local.client.id == 1:
                work()

    row = play(FedAvg(Oops(), factory=Tiny)).rows[0]
    assert row["failed"].keys() == {"1"}
    line = inspect.getsourcelines(work)[1]
    assert re.match(rf"raised \w+: .* \(line {line} of test_extension_errors.py, in <lambda>\)", row["failed"]["1"])


def test_failing_send_is_no_client_failure() -> None:
    class Lists(AddOn):
        def send(self, server: Any, client: int, message: Message) -> None:
            message[FedAvg.last] = [1, 2]

    said = r"3 of 3 clients got no request, because the server's send raised TypeError: FedAvg.last must .*, in send\)"
    refused(lambda: play(FedAvg(Lists(), factory=Tiny)), NoUsableReply, said)


class Ends(AddOn):
    """`send` charges more than the remaining budget; at module level for pickling."""

    private = True

    event = Event("m", 1.0)

    def send(self, server: Any, client: int, message: Message) -> None:
        server.ledger.spend(self.event)


@pytest.mark.parametrize(("event", "remaining"), [(Event("m", 1.0), 0), (Event("m", 8.0, count=9), 4)])
def test_budget_exceeded_in_send_ends_the_run(event: Event, remaining: int) -> None:
    method = FedAvg(type("Ends", (Ends,), {"event": event})(), factory=Tiny, weights="uniform")
    said = f"{remaining} of {event.count} .*; round 1 was not finished; the state after round 0 is kept"
    with pytest.raises(BudgetExhausted, match=said) as caught:
        play(method, ledger=Ledger(budget=1.0))
    assert caught.value.remaining == remaining


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("raises", [True, False], ids=["raises", "is refused"])
@pytest.mark.parametrize("use", [{}, {"out": "run"}], ids=["RAM", "files"])
def test_failed_client_leaves_no_change_in_its_memory(
    use: dict[str, Any], raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = play(FedAvg(Counts(raises), factory=Tiny), rounds=4, **use).rows
    assert [len(row["failed"]) for row in rows] == [0, 0, 1, 0]
    assert [row["noted"]["rounds"] for row in rows] == [3, 6, 6, 11]  # client 0 did not train in round 3


@dataclass(frozen=True)
class Counts(AddOn):
    """Add-on that counts a client's rounds in place; in round 3 client 0 fails, or its reply is refused."""

    raises: bool
    own = Entry[torch.Tensor]("first")

    def after_training(self, local: Any, update: Any, reply: Message) -> None:
        if self.own not in local.memory:
            local.memory[self.own] = torch.zeros(())
        count = local.memory[self.own]
        count += 1
        if local.client.id == 0 and local.round == 3:
            if self.raises:
                raise RuntimeError("gone")
            reply[FedAvg.samples] = float("nan")
        local.client.notes["rounds"] = float(count)


def test_equal_reasons_of_failed_clients_are_counted() -> None:
    class Broken(AddOn):
        def after_training(self, local: Any, update: Any, reply: Message) -> None:
            raise TypeError("no shape")

    with pytest.raises(
        NoUsableReply, match=r"\(3 of 3 clients raised TypeError: no shape \(line \d+ of [\w.]+, in \w+\)\)"
    ):
        play(FedAvg(Broken(), factory=Tiny))
    five = "3 of 9 clients sent 2; client 3 sent 3; client 4 sent 4; client 5 sent 5; client 6 sent 6"
    for failed, more in ((7, ""), (8, "; and 1 more"), (9, "; and 2 more")):
        stats = RoundStats(by_client={str(k): [0, 0] for k in range(9)})
        for client in range(failed):
            stats.fail("local", client, f"sent {max(client, 2)}", after_local=False)
        assert stats.reasons() == five + more


@pytest.mark.filterwarnings("error")
def test_constant_damping_of_an_option_is_warned_of() -> None:
    @dataclass(frozen=True)
    class Constant(AddOn):
        alpha: float = 0.1
        damping = alpha

    @dataclass(frozen=True)
    class Follows(AddOn):
        alpha: float = 0.1

        @property
        def damping(self) -> float:  # type: ignore[override]
            return self.alpha

    with pytest.warns(
        UserWarning, match=r"Constant.damping is the default of alpha.*def damping\(self\): return self.alpha"
    ):
        FedAvg(Constant(0.5), factory=Tiny)
    FedAvg(Follows(0.5), factory=Tiny)


# What a method's functions may not change, and must return.


def first_of(group: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(group.values()))


def after(function: str, change: Callable[..., object]) -> FedAvg:
    """Return a method one of whose functions works as usual, and then makes a change to its arguments."""

    def changing(self: FedAvg, *given: Any) -> Any:
        found = getattr(FedAvg, function)(self, *given)
        change(*given)
        return found

    return type("Changing", (FedAvg,), {function: changing})(factory=Tiny, steps=1, batch=4)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("function", "change", "what"), [
    ("local", lambda client, message: first_of(message[FedAvg.model]).add_(1), "message[FedAvg.model][body.0.weight]"),
    ("local", lambda client, message: message[FedAvg.model].popitem(), "message[FedAvg.model][classifier.bias]"),
    ("local", lambda client, message: message.__setitem__(FedAvg.samples, 1.0), "message[FedAvg.samples]"),
    ("local", lambda client, message: client.data.images[0].zero_(), "client.data.images"),
    ("local", lambda client, message: client.data.images.data.mul_(-1), "client.data.images"),
    ("local", lambda client, message: first_of(message[FedAvg.model]).numpy().fill(0), "message[FedAvg.model]"),
    ("local", lambda client, message: setattr(client, "id", 7), "client.id"),
    ("local", lambda client, message: (setattr(client, "seed", 7), 1 / 0), "client.seed"),
    ("evaluate", lambda client, message: setattr(client, "test", client.test[:1]), "client.test"),
    ("evaluate", lambda client, message: client.test.columns["c"].add_(1), "client.test.c"),
    *(("send", lambda server, client, n=n: setattr(server, n, 7), f"server.{n}") for n in ("round", "seed", "clients")),
    ("evaluate", lambda client, message: client.test.labels.add_(1), "client.test.labels"),
    ("send", lambda server, client: first_of(server.state[FedAvg.model]).mul_(2), "server.state[FedAvg.model]"),
    ("send", lambda server, client: setattr(server, "state", Message()), "server.state[FedAvg.model]"),
    ("expect", lambda server, client: server.state.__delitem__(FedAvg.model), "server.state[FedAvg.model]"),
    ("read_reply", lambda server, reply: server.data["proxy"].images.zero_(), "server.data['proxy'].images"),
    ("read_reply", lambda server, reply: first_of(reply[FedAvg.update]).zero_(), "reply[FedAvg.update]"),
])  # fmt: skip
def test_function_that_changes_what_it_may_only_read_ends_the_run(function: str, change: Any, what: str) -> None:
    """In threads, other clients, the server and the caller share these values."""
    own = {"columns": {"c": torch.zeros(3)}}
    clients = [ClientData(data[torch.arange(len(data))], data[:3].replace(**own)) for data in federation()[:3]]
    proxy = clients[0].train[torch.arange(5)]
    with pytest.raises(ValueError, match=f"Changing.{function} changed {re.escape(what)}.*it may only read"):
        simulate(after(function, change), clients, rounds=1, server_data={"proxy": proxy}, progress=False)


def mine(**functions: Any) -> FedAvg:
    return type("Mine", (FedAvg,), functions)(factory=Tiny, steps=1, batch=4)  # type: ignore[no-any-return]


def returning(value: Any) -> Callable[..., Any]:
    return lambda self, *given: value


DRAWN = r"Mine.draw must return a list of clients' indices from 0 to 2 in ascending order, each at most once, got "
MODELS = r"Mine.predictors must return a mapping of names to Predictor objects.*, got "
SCHEMA = r"Mine.expect must return a mapping of entry keys to EntrySpec.*, got "
WRONG: list[tuple[str, Any, str]] = [
    *(("draw", value, DRAWN + shown) for value, shown in (
        ("ab", "'ab'"), (None, "NoneType"), (3, "3"), ([0.0], "list"), ([True], r"\[True\]"), (torch.ones(1), "Tensor"),
        ([0, 0.5], "list"), ("x" * 99, "'x{79}$"),
        ([3], r"\[3\]"), ([-1], r"\[-1\]"), ([0, 0], r"\[0, 0\]"), ([0, 2, 1], r"\[0, 2, 1\]"),
    )),
    *(("predictors", value, MODELS + shown) for value, shown in (
        (None, "NoneType"), (Tiny(3), "Tiny"), ([Predictor(Tiny(3))], "list"), ({"": Tiny(3)}, "dict of '': Tiny"),
        ({3: Predictor(Tiny(3))}, "dict of 3: Tiny"),
    )),
    *(("predictors", {"": Predictor(Tiny(k), outputs)}, rf"give \[N, 3\] logits or more .*, got \[6, {shown}\]")
      for k, outputs, shown in ((2, None, 2), (4, 2, 2), (2, 3, 2))),
    ("predictors", {"": Predictor(torch.nn.Identity())}, r"give \[N, 3\] logits or more .*, got \[6, 1, 4, 4\]"),
    ("predictors", {"": Predictor(torch.nn.MaxPool2d(4, return_indices=True))},
     "^the model '' of Mine.predictors must return logits as a tensor, got tuple$"),
    ("entries", None, "Mine.entries must return a list of Entry objects, got NoneType"),
    ("entries", [Entry()], "Mine.entries must return a list of Entry objects, declared as class attributes, got Entry"),
    ("send", None, "the server's send raised TypeError: Mine.send must return a Message .*, got NoneType"),
    ("read_reply", None, r"Mine.read_reply must return a Message \(empty .*, got NoneType"),
    ("expect", None, SCHEMA + "NoneType"),
    ("expect", {FedAvg.update: EntrySpec(0.0)}, SCHEMA + "dict of Entry.*: EntrySpec"),
    ("expect", {FedAvg.update.key: 0.0}, SCHEMA + "dict of 'FedAvg.update': float"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "value", "said"), WRONG)
def test_wrong_result_of_a_function_is_named(function: str, value: Any, said: str) -> None:
    refused(lambda: play(mine(**{function: returning(value)})), (TypeError, ValueError, NoUsableReply), said)


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        (("local", "local"), ValueError, r"must hold 'local', and each name once, got \('local', 'local'\)"),
        ((), ValueError, r"must hold 'local', and each name once, got \(\)"),
        ("local", TypeError, r"must be names of functions, as \('local',\), got 'local'"),
        ((3, "local"), TypeError, "must be names of functions"),
        (("local", "other"), ValueError, r"names 'other', but there is no function other\(client, message\)"),
        (("local", "evaluate"), ValueError, "names 'evaluate', but there is no function"),
    ],
)
def test_exchanges_without_a_function_of_their_own_are_refused(names: Any, error: Any, said: str) -> None:
    refused(lambda: play(mine(exchanges=names)), error, f"Mine.exchanges {said}")


@pytest.mark.parametrize(("rejected", "shown"), [(None, "NoneType"), ({9: "slow"}, "9: 'slow'"), ({1: 3}, "1: 3")])
def test_rejections_must_name_clients_of_the_round(rejected: Any, shown: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"Mine.receive_exchange must return .*got .*{shown}"):
        play(mine(exchanges=("local", "evaluated"), evaluated=FedAvg.evaluate, receive_exchange=returning(rejected)))


def test_factory_must_always_make_the_same_shapes_and_no_lazy_ones() -> None:
    def changing(hidden: Iterator[list[int]], outputs: int) -> torch.nn.Module:
        widths = itertools.pairwise([16, *next(hidden), outputs])
        return torch.nn.Sequential(torch.nn.Flatten(), *(torch.nn.Linear(*pair) for pair in widths))

    for hidden in ([[4], [5]], [[3], []], [[], [3]]):
        method = FedAvg(factory=partial(changing, itertools.cycle(hidden)))
        refused(partial(play, method), ValueError, r"same architecture in every call; [12]\.weight differs")
    lazy = lambda k: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(k))  # noqa: E731
    refused(lambda: play(FedAvg(factory=lazy)), ValueError, "1.weight is lazy: give the layer its input size")


@pytest.mark.parametrize(
    "error", [BudgetExhausted("no", remaining=0, ledger=own) for own in (None, Ledger())] + [Interrupted("late")]
)
def test_client_cannot_end_a_run_itself(error: Exception) -> None:
    end = after("local", Mock(side_effect=error))
    refused(lambda: play(end), NoUsableReply, f"raised {type(error).__name__}: {error}")
    with pytest.raises(type(error), match=str(error)):  # the server can
        play(after("read_reply", Mock(side_effect=error)))
