"""Node policies: refusals on the node, with their reason in the server's history."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distillkit.privacy import BudgetExhausted, Event, compose
from distillkit.privacy._child_ledger import ledger_lines
from fl import Client, FedAvg, Message, Method, NoUsableReply, Run
from fl._codec import from_parts
from fl.addons import DPSGD
from fl.deploy._wire import Job
from fl.deploy.flower import app_hash, client_app, read_policy
from fl.deploy.flower._node_ledger import NodeLedger
from fl.deploy.flower._policy import Policy, PolicyRefusal
from fl.deploy.flower._replies import reply_parts
from fl.engine._client_runtime import FAILED_PRIVATELY
from fl.engine._transport import ClientRequest, ClientResult, RequestHeader
from fl.method import short_name
from fl.methods import PrivateFedDM
from tests.fl import every_method
from tests.fl.flower import fake_flower
from tests.fl.flower.test_node_ledger import METHODS, SUM, events_of
from tests.fl.flower.test_runs import DM, FAST, client_data, grid, run_on_grid
from tests.fl.test_private_runs import SIGMA, NoisySum
from tests.refused import refused

GOOD: dict[str, str] = {
    "epsilon": "8.0", "delta": "1e-5", "smallest_sigma": "1.0", "largest_rate": "1.0", "largest_clip": "1.0",
    "methods": '["NoisySum", "FedAvg(DPSGD)", "FedAvg", "Uncharged", "Talking"]', "evaluation": "false",
    "app": '"any"',
}  # fmt: skip


def written(path: Path, **changes: str | None) -> Path:
    said = {**GOOD, **changes}
    lines = [f"{key} = {value}\n" for key, value in said.items() if value is not None]
    path.write_text("# Regeln für diesen Knoten\n" + "".join(lines), encoding="utf-8")
    return path


def one_strict(tmp_path: Path, method: Method, *, code: Path | None = None, **how: Any) -> Run:
    """Run with a policy on the node of partition 1 only."""
    tmp_path.mkdir(exist_ok=True)
    changes = {key: how.pop(key) for key in GOOD if key in how}
    policy = written(tmp_path / "policy.toml", **changes)
    nodes = {100 + k: fake_flower.context(100 + k, k, 5) for k in range(5)}
    free = client_app(method, client_data, folder=tmp_path / "nodes")
    strict = client_app(method, client_data, folder=tmp_path / "nodes", policy=policy, code=code)
    there = fake_flower.Grid({node: strict if node == 101 else free for node in nodes}, nodes)
    return run_on_grid(there, method, **{**SUM, "rounds": 1, **how})


def of_client_1(run: Run) -> list[str | None]:
    """Return the failures of client 1 by round."""
    assert all(set(row["failed"]) <= {"1"} for row in run.rows)
    return [row["failed"].get("1") for row in run.rows]


def test_allowed_request_is_answered(tmp_path: Path) -> None:
    assert of_client_1(one_strict(tmp_path, NoisySum())) == [None]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"smallest_sigma": "2.5"}, "smallest_sigma = 2.5, and pixel_sum has 2"),
        ({"methods": '["PrivateFedDM", "Noisy"]'}, "allows the methods PrivateFedDM, Noisy, and this is NoisySum"),
        ({"secret": 3}, "no noise that the server knows"),
    ],
)
def test_refused_releases_are_named_and_not_charged(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (found,) = of_client_1(one_strict(tmp_path, NoisySum(), **changes))
    assert found is not None
    assert found.startswith("refused: ")
    assert said in found
    assert "1" not in events_of(tmp_path / "nodes")


def test_clip_of_class_means_is_their_norm(tmp_path: Path) -> None:
    policy = read_policy(written(tmp_path / "policy.toml", methods='["PrivateFedDM"]'))
    policy.require_request(METHODS["PrivateFedDM"](), "local", None)
    steps = PrivateFedDM(sigma=2.0, sigma_sizes=2.0, mechanism="image_sgd", public_statistics=True, **DM)
    said = "largest_clip = 1, and PrivateFedDM has None"
    refused(lambda: policy.require_request(steps, "local", None), RuntimeError, said)


def test_spent_budget_refuses_by_name_and_the_run_continues(tmp_path: Path) -> None:
    budget = compose([(SIGMA, 1.0, 2)], 1e-5).epsilon
    run = one_strict(tmp_path, NoisySum(), rounds=3, epsilon=str(budget))
    first, second, third = of_client_1(run)
    assert first is second is None
    assert third is not None
    assert third.startswith("refused: the budget of its policy is spent")
    assert len(events_of(tmp_path / "nodes")["1"]) == 2
    assert of_client_1(one_strict(tmp_path, NoisySum(), epsilon=str(budget)))[0] is not None


def test_policy_may_change_between_rounds(tmp_path: Path) -> None:
    def stricter(row: dict[str, Any]) -> None:
        written(tmp_path / "policy.toml", smallest_sigma="2.5")

    first, second = of_client_1(one_strict(tmp_path, NoisySum(), rounds=2, on_round=stricter))
    assert first is None
    assert second == "refused: its policy says smallest_sigma = 2.5, and pixel_sum has 2"


def test_refusals_of_all_nodes_end_the_run_with_the_reason(tmp_path: Path) -> None:
    policy = written(tmp_path / "policy.toml", smallest_sigma="9.0")
    there = grid(NoisySum(), tmp_path / "nodes", policy=policy)
    said = "5 of 5 clients refused: its policy says smallest_sigma = 9"
    refused(lambda: run_on_grid(there, NoisySum(), **SUM), NoUsableReply, said)


def test_changed_app_code_is_refused_by_its_hash(tmp_path: Path) -> None:
    code = tmp_path / "app"
    code.mkdir()
    (code / "client_app.py").write_text("sigma = 2.0\n", encoding="utf-8")
    agreed = app_hash(code)
    assert of_client_1(one_strict(tmp_path, NoisySum(), code=code, app=f'"{agreed}"')) == [None]
    (code / "client_app.py").write_text("sigma = 0.2\n", encoding="utf-8")
    (found,) = of_client_1(one_strict(tmp_path, NoisySum(), code=code, app=f'"{agreed}"'))
    assert found == f"refused: its policy allows the app {agreed}, and this one is {app_hash(code)}"
    refused(lambda: one_strict(tmp_path, NoisySum(), app=f'"{agreed}"'), ValueError, r"code=Path\(__file__\).parent")


def test_app_hash_covers_names_and_bytes_but_no_byte_code(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("a", encoding="utf-8")
        (tmp_path / name / "sub" / "b.toml").write_text("b", encoding="utf-8")
    before = app_hash(tmp_path / "one")
    assert before == app_hash(tmp_path / "two")
    (tmp_path / "two" / "__pycache__").mkdir()
    (tmp_path / "two" / "__pycache__" / "a.pyc").write_text("x", encoding="utf-8")
    (tmp_path / "two" / ".git").write_text("x", encoding="utf-8")
    assert before == app_hash(tmp_path / "two")
    shutil.move(tmp_path / "two" / "a.py", tmp_path / "two" / "c.py")
    assert before != app_hash(tmp_path / "two")
    refused(lambda: app_hash(tmp_path / "nowhere"), FileNotFoundError, "nowhere")
    refused(lambda: app_hash(None), TypeError, "folder must be a path")  # type: ignore[arg-type]
    refused(lambda: read_policy(None), TypeError, "path must be a path")  # type: ignore[arg-type]


def test_accuracies_are_sent_only_if_the_policy_allows(tmp_path: Path) -> None:
    private = METHODS["DPSGD"]
    said = "refused: its policy says evaluation = false: accuracies on its test images are not sent"
    for word, failed in (("false", {"1": said}), ("true", None)):
        run = one_strict(tmp_path / word, private(), evaluation=word, evaluate="all")
        assert run.rows[0].get("failed_evaluation") == failed
        assert run.rows[0]["accuracy_clients"]


class Uncharged(NoisySum):
    """Claims to be private, but sends the exact sum."""

    def local(self, client: Client, message: Message) -> Message:
        return Message({self.total: client.data.images.double().sum(0)})


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (FedAvg(**FAST), "refused: its policy has epsilon = 8, and FedAvg is not private"),
        (Uncharged(), "refused: its policy has a finite epsilon, and the method charged nothing for its reply"),
    ],
    ids=["not private", "uncharged"],
)
def test_finite_epsilon_refuses_uncharged_replies(method: Method, said: str, tmp_path: Path) -> None:
    assert of_client_1(one_strict(tmp_path / "finite", method)) == [said]
    assert of_client_1(one_strict(tmp_path / "infinite", method, epsilon="inf")) == [None]


class Talking(NoisySum):
    """Reveals private facts in an error and in notes."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def local(self, client: Client, message: Message) -> Message:
        client.notes["images"] = len(client.data)
        reply = super().local(client, message)
        if self.fails and client.id == 1:
            raise KeyError(f"{len(client.data)} images")
        return reply


def test_finite_epsilon_withholds_errors_and_notes(tmp_path: Path) -> None:
    (found,) = of_client_1(one_strict(tmp_path / "fails", Talking(True)))
    assert found == f"{FAILED_PRIVATELY} (the message is in the node's log, because its owner has set a policy)"
    for epsilon in ("8.0", "inf"):
        assert "noted" not in one_strict(tmp_path / epsilon, Talking(False), epsilon=epsilon).rows[0]


@pytest.mark.parametrize("asked", [None, {}, "a", {"name": "a", "seen": "0"}, {"name": "a", "seen": None}], ids=str)
def test_malformed_ledger_position_gets_only_a_refusal(asked: Any, tmp_path: Path) -> None:
    """Otherwise the server would receive withheld facts and an uncharged release."""
    policy = read_policy(written(tmp_path / "policy.toml"))
    ledger = NodeLedger(tmp_path / "ledgers", 1, "a", policy)
    job = Job(RequestHeader("local", 1, "x", 0), 1, ClientRequest(Message()))
    error, reply = ClientResult(1, error="raised KeyError: 6 images"), Message({NoisySum.total: torch.ones(1)})
    for found in (error, ClientResult(1, reply), BudgetExhausted("6 images", remaining=0)):
        reply, facts = from_parts(*reply_parts(job, found, ledger, policy, asked))
        assert not len(reply)
        assert facts.keys() == {"refused"}
        assert "ledger position" in facts["refused"]


def test_ledger_position_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path, 1, "a", None)
    said = "its ledger has 0 lines, and had 2: restore the file"
    refused(lambda: ledger.report({"name": "a", "seen": 2}), ValueError, said)
    assert json.loads(ledger.report({"name": "b", "seen": 2})["ledger"])["since"] == 0


def test_report_holds_exactly_the_lines_after_the_position(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path, 1, "a", None)
    for _ in range(4):
        ledger.ledger.spend(Event("sum", 2.0, client=1))
    numbers = [number for number, _ in ledger_lines(ledger.ledger)]
    for seen in range(numbers[-1] + 1):
        account = json.loads(ledger.report({"name": "a", "seen": seen})["ledger"])
        assert [number for number, _ in account["lines"]] == [number for number in numbers if number > seen]
        assert (account["name"], account["since"]) == ("a", seen)
    said = f"its ledger has {seen} lines, and had {seen + 1}: restore the file; without all charges there is no"
    refused(lambda: ledger.report({"name": "a", "seen": seen + 1}), ValueError, said)
    assert json.loads(ledger.report({"name": "b", "seen": seen + 1})["ledger"])["since"] == 0


def test_node_with_an_unusable_policy_refuses_everything(tmp_path: Path) -> None:
    policy = written(tmp_path / "policy.toml")
    there = grid(NoisySum(), tmp_path / "nodes", policy=policy)
    policy.unlink()
    refused(lambda: run_on_grid(there, NoisySum(), **SUM), NoUsableReply, "did not report earlier charges")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"smalest_sigma": "1.0", "smallest_sigma": None}, "the unknown key smalest_sigma; did you mean smallest_sigm"),
        ({"delta": None, "app": None}, "lacks delta, app: every key is required"),
        ({"epsilon": "0"}, "epsilon must be"),
        ({"epsilon": '"8"'}, "epsilon must be"),
        ({"epsilon": "nan"}, "epsilon must be"),
        ({"delta": "1.0"}, "delta must be"),
        ({"smallest_sigma": "0.0"}, "smallest_sigma must be"),
        ({"largest_rate": "1.5"}, "largest_rate must be"),
        ({"largest_clip": "-1"}, "largest_clip must be"),
        ({"methods": "[]"}, "methods must hold at least one name"),
        ({"methods": '"NoisySum"'}, "methods"),
        ({"evaluation": "0"}, "evaluation must be"),
        ({"app": '"sha256:12"'}, "app must be 'any'"),
        ({"app": f'"sha256:{64 * "g"}"'}, "app must be 'any'"),
        ({"app": "yes"}, "cannot be read"),
    ],
    ids=str,
)
def test_policy_with_a_bad_key_or_value_is_refused(changes: dict[str, str | None], said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "policy.toml", **changes)
    error = TypeError if changes in ({"epsilon": '"8"'}, {"methods": '"NoisySum"'}, {"evaluation": "0"}) else ValueError
    refused(lambda: read_policy(path), error, f"the policy {path}.*{said}")
    refused(lambda: client_app(NoisySum(), client_data, folder=tmp_path, policy=path), (TypeError, ValueError), said)


def test_policy_name_lists_class_add_ons_and_filters() -> None:
    assert [short_name(every_method.METHODS[name]()) for name in ("PrivateFedDM", "DPSGD", "ClientDP")] == [
        "PrivateFedDM", "FedAvg(DPSGD)", "Filtered(FedAvg, ClientDP)",
    ]  # fmt: skip
    assert short_name(FedAvg(DPSGD(sigma=1.0, rate=0.5, size=9), **FAST, weights="uniform")) == "FedAvg(DPSGD)"


@pytest.mark.parametrize("verb", ["local", "answer", "evaluate"])
@pytest.mark.parametrize("charged", [False, True])
@pytest.mark.parametrize("epsilon", ["8.0", "inf"])
def test_only_charged_replies_pass_a_finite_epsilon(verb: str, charged: bool, epsilon: str, tmp_path: Path) -> None:
    """Whether a reply passes or not, it reports the charges that the server has not seen."""
    policy = read_policy(written(tmp_path / "policy.toml", epsilon=epsilon, delta="1e-6"))
    ledger = NodeLedger(tmp_path / "ledgers", 1, "a", policy)
    assert (ledger.ledger.delta, ledger.ledger.budget) == (1e-6, 8.0 if epsilon == "8.0" else None)
    ledger.charged = charged
    ledger.ledger.spend(Event("sum", 2.0, client=1))
    told = {"notes": {"images": 3}, "seconds": 2.0}
    result = ClientResult(1, Message({NoisySum.total: torch.ones(1)}), **told)
    hidden = {"notes": {}, "seconds": 0.0} if epsilon == "8.0" else told
    job, position = Job(RequestHeader(verb, 1, "x", 0), 1, ClientRequest(Message())), {"name": "a", "seen": 0}
    for reason in ("", "the budget of its policy is spent"):
        ledger.refused = reason
        reply, facts = from_parts(*reply_parts(job, result, ledger, policy, position))
        refused = bool(reason) or (epsilon == "8.0" and not charged and verb != "evaluate")
        assert ("refused" in facts) == refused
        assert bool(len(reply)) == (not refused)
        assert refused or {name: json.loads(facts["result"])[name] for name in told} == hidden
        assert facts["ledger"] == ledger.report(position)["ledger"]


def test_limits_of_a_policy_are_allowed_and_the_next_value_is_not(tmp_path: Path) -> None:
    def policy(**changes: str) -> Policy:
        return read_policy(written(tmp_path / "policy.toml", **changes))

    exact = policy(smallest_sigma="1.5", largest_rate="0.25")
    exact.require_events([Event("sum", 1.5, 0.25), Event("sum", 9.0, 0.01)])
    for sigma, rate, key in (
        (1.4999, 0.25, "smallest_sigma = 1.5, and sum has 1"),
        (1.5, 0.2501, "largest_rate = 0.25, and sum has 0"),
    ):
        with pytest.raises(PolicyRefusal, match=key):
            exact.require_events([Event("sum", 9.0, 0.01), Event("sum", sigma, rate)])
    method = FedAvg(DPSGD(sigma=1.0, rate=0.5, size=9, clip=2.0), **FAST, weights="uniform")
    policy(largest_clip="2.0").require_request(method, "local", None)
    refused(lambda: policy(largest_clip="1.9999").require_request(method, "local", None), PolicyRefusal, "largest_clip")
