"""The report: a self-contained page, findings without false assurance, and refusal of invalid folders."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks import report
from attacks.membership import Pipeline, run_shadows
from attacks.reporting import DamagedRun, IncompatibleImages, NoRun, _section_models
from attacks.reporting._page import Findings, Section
from attacks.reporting._recorded_run import open_run
from attacks.reporting.similarity import random_baseline
from attacks.transcript import DamagedTranscript
from distillkit.data import Split, load, partition
from distillkit.networks import ConvNet
from distillkit.rng import derive
from distillkit.study import Study, Task
from fl import FedAvg, FedDM, RunFolder, simulate
from fl.study import Federated
from tests.refused import refused

DIGITS = load("digits", size=16)
ORDER = torch.randperm(len(DIGITS.train), generator=derive(0))
TRAIN, TEST = DIGITS.train[ORDER[:120]], DIGITS.test[ORDER[len(DIGITS.test) > ORDER][:120]]
PARTS = [TRAIN[TRAIN.labels < 5], TRAIN[TRAIN.labels >= 5]]
GIVEN: dict[str, Any] = {"members": TRAIN, "non_members": TEST}


def convnet(outputs: int) -> ConvNet:
    return ConvNet((1, 16, 16), outputs, width=4, depth=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    real = FedDM(
        factory=convnet, ipc=4, batch_real=16, steps=2, init="real", server_epochs=1, server_batch=32, rho=20.0
    )
    methods = {"real": real, "average": FedAvg(factory=convnet, batch=16, epochs=1, lr=0.1)}
    for name, method in methods.items():
        simulate(method, PARTS, rounds=2, seed=0, out=RunFolder(out / name, transcript=True), progress=False)
    return out


def copied(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to / "run"))


def test_real_initial_images_reveal_private_records(runs: Path, tmp_path: Path) -> None:
    found = report(runs / "real", **GIVEN, network=convnet(10), out=tmp_path)
    start = "This run sends private records: its images start from real ones, and"
    pattern = rf"{start} (\d+) % of all records are recovered above 25 dB \(of held-out images ([\d.]+) %\)\."
    [(share, outside)] = re.findall(f"^{pattern}$", found.verdict)
    assert int(share) > 5 > float(outside)
    assert any("of the records as members" in leak for leak in found.leaks)
    text = found.markdown.read_text(encoding="utf-8")
    lists = ["Also found"] * bool(found.leaks) + ["No leak found"] * bool(found.not_found)
    titles = (
        "Who sees what, Sent images and the nearest records, How many records are recovered, Membership inference from "
        "the images, Membership inference from the model, Which classes clients hold, The claimed epsilon, What this "
        "report cannot determine"
    )
    assert re.findall("^## (.*)", text, re.M) == [*lists, *titles.split(", ")]
    assert all(line in text for line in (found.verdict, *found.missing))
    headers = [re.sub(" *[|] *", "|", line) for line in re.findall(r"^(\|.*)\n\| ?:?-", text, re.M)]
    rates, levels = "AUC|true positives|false positives|", "at least 20 dB|at least 25 dB|at least 30 dB|"
    seen, classes = "|adversary|sees|attacked here|", "|client|certainly holds|certainly lacks|unknown|"
    assert headers == [seen, f"|group|number|{levels}", f"|attack|{rates}", f"|score|{rates}", classes]


def test_page_is_self_contained(runs: Path, tmp_path: Path) -> None:
    found = report(runs / "real", **GIVEN, out=tmp_path)
    page = found.html.read_text(encoding="utf-8")
    assert len(re.findall(r'<img[^>]* src="data:image/png;base64,', page)) == page.count("<img") == 3
    assert not re.search(r"<script|<link|<iframe|@import|url\(|src=\"(?!data:)|href=| on\w+=", page)
    assert all(len(alt) > 20 for alt in re.findall(r'alt="([^"]*)"', page))
    shown = re.findall(r"<h2>(.*?)</h2>\n<ul>(.*?)</ul>", html.unescape(page).replace("\xa0", " "))
    lists = {"Also found": found.leaks, "No leak found": found.not_found}
    wanted = lists | {"What this report cannot determine": found.missing}
    items = {title: tuple(re.findall("<li>(.*?)</li>", lines)) for title, lines in shown}
    assert items == {title: lines for title, lines in wanted.items() if lines}


def test_report_of_a_run_without_transcript_says_so(runs: Path, tmp_path: Path) -> None:
    run = copied(runs / "real", tmp_path)
    shutil.rmtree(run / "transcript")
    (run / "transcript").mkdir()
    found = report(run, **GIVEN)
    assert found.html == run / "report" / "report.html"
    assert any("run again with simulate(..., out=RunFolder(path, transcript=True))" in line for line in found.missing)
    assert found.verdict == "This run sends private records: its images start from real ones."
    shutil.rmtree(run / "checkpoint")
    (run / "history.jsonl").unlink()  # before the first round
    assert report(run).verdict.startswith("No verdict yet")


def test_report_on_a_study_explains_how_to_keep_a_transcript(tmp_path: Path) -> None:
    one = Task("few", Split(TRAIN[:40], TEST[:20], DIGITS.classes), partial(partition.iid, clients=2), rounds=1)
    way = Federated(FedAvg, settings={"batch": 16, "steps": 1})
    [record] = Study(tmp_path, one, {"FedAvg": way}, seeds=(0,)).run(trial=False, progress=False)
    [said] = [line for line in report(record.folder).missing if line.startswith("what was sent")]
    assert said.endswith("run the study again in another folder, with Federated(..., transcript=True)")


def test_published_set_alone_is_attacked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"format": "distillkit.run/2"}', encoding="utf-8")
    TRAIN[:30].replace(info={"init": "real"}).save(tmp_path / "set.safetensors")
    found = report(tmp_path, members=TRAIN, non_members=DIGITS.test, started_from=torch.arange(30))
    assert "25 % of all records are recovered above 25 dB" in found.verdict
    text = found.markdown.read_text(encoding="utf-8")
    assert "recipients of the published set" in text
    assert "images started from 30 of 120 members" in text
    for name in ("distance", "nearest"):  # the groups share the threshold of all
        share = rf"\| {name} +(?:\| +[\d.]+ )?\| +([\d.]+) % \([^|]*\| +([\d.]+) %"
        (rate, _), (started, rest) = ([float(v) for v in pair] for pair in re.findall(share, text))
        assert (30 * started + 90 * rest) / 120 == pytest.approx(rate, abs=0.2)
    assert any("of the records as members" in leak for leak in found.leaks)
    assert re.search(r"\| distance +\| +100.0 % \(", text)


def test_shadows_are_run_and_evaluated(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(_section_models, "run_shadows", lambda *a, **k: asked.append((a[1], k)) or run_shadows(*a, **k))

    def fit(indices: torch.Tensor, seed: int) -> dict[str, Any]:
        noise = 0.1 * torch.randn(120, generator=derive(seed))
        return {"model": lambda x, y: torch.isin(torch.arange(len(x)), indices).double() + noise[: len(x)]}

    pipeline = Pipeline(fit, TRAIN.images, TRAIN.labels)
    options: dict[str, Any] = {"workers": 3, "progress": False}
    given = {"shadows": 10, "baselines": {"a/raw": replace(pipeline, tag="raw")}}
    found = report(runs / "average", pipeline, **GIVEN, out=tmp_path, **given, **options)
    assert any("separates members from non-members" in leak for leak in found.leaks)
    shown = found.markdown.read_text(encoding="utf-8")
    assert "10 shadows: the whole pipeline" in shown
    assert re.findall(r"\n\| ([\w/ ]+?) +\| model +\| LiRA offline ", shown) == ["this run", "a/raw"]
    folders = [tmp_path / name for name in ("shadows", "shadows-a%2Fraw")]
    assert asked == [(10, {"out": folder, **options}) for folder in folders]


ONE = Pipeline(lambda indices, seed: {}, TRAIN.images, TRAIN.labels)
PIXELS = {"members": TRAIN.pixels(), "non_members": TEST.pixels()}
FEW = {**GIVEN, "max_records": 25}
ODD = [{"members": torch.rand(9, *shape)} for shape in ((1, 8, 16), (1, 16, 8), (3, 16, 16))]
STARTED = ValueError, "started_from must hold at least one index of a member, 0 to 119"
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *((given, IncompatibleImages, r"members .* \[1, 16, 16\], got .*: load them as") for given in ODD),
    ({**GIVEN, "non_members": TEST.images}, IncompatibleImages, r"non_members must be pixels in \[0, 1\]"),
    ({**GIVEN, "non_members": TEST[:5]}, ValueError, "non_members must be at least 20, got 5"),
    *(({**GIVEN, k: v, "network": convnet(10)}, ValueError, "LabeledImages if a network") for k, v in PIXELS.items()),
    ({"members": [3]}, TypeError, "members must be"),
    ({"network": convnet}, TypeError, "network must be of torch.nn.Module"),
    ({"pipeline": print}, TypeError, "pipeline must be"),
    *(({**FEW, "started_from": torch.tensor(odd).long()}, *STARTED) for odd in ([3, 120], [-1, 3], [], [[1]])),
    ({**FEW, "started_from": torch.tensor([0.5])}, TypeError, "started_from must be an int .* got torch.float32"),
    ({**FEW, "started_from": torch.ones(120).bool()}, TypeError, "started_from must be an int .* got torch.bool"),
    ({**FEW, "started_from": [3]}, TypeError, r"started_from must be an int .* got list"),
    *(({**own, "started_from": torch.arange(3)}, ValueError, "started_from needs members= and non_members=")
        for own in ({}, {"members": TRAIN}, {"non_members": TEST})),
    ({"shadows": 7}, ValueError, "shadows must be at least 8"),
    ({"shadows": 9}, ValueError, "shadows must be even because they come in pairs of complements, got 9"),
    ({"workers": 0, "shadows": 10}, ValueError, "workers must be at least 1"),
    ({"progress": 1}, TypeError, "progress must be True or False"),
    ({"max_records": 0}, ValueError, "max_records must be"),
    ({"out": 3}, TypeError, "out must be"),
    ({"pipeline": ONE, "baselines": 3}, TypeError, "baselines must map names to values, got int"),
    *(({"baselines": odd}, ValueError, "compared with the run's own pipeline: give pipeline= too")
        for odd in ({}, {"a": ONE})),
    *(({"pipeline": ONE, "baselines": {"a": ONE, **odd}}, TypeError, f"to Pipelines, got {said}")
        for odd, said in (({"b": 3}, "'b': int"), ({" ": ONE}, "' ': Pipeline"))),
    ({"pipeline": ONE, "baselines": {"a": replace(ONE, labels=ONE.labels.flip(0))}}, ValueError,
        r"baselines\['a'\] must be on the pipeline's records in the same order, but its labels differ: give it"),
]  # fmt: skip


def test_refusals(runs: Path, tmp_path: Path) -> None:
    refused(lambda: report(tmp_path), NoRun, r"no config.json\): give the out= folder")
    for odd in (None, 3):
        refused(lambda odd=odd: report(odd), TypeError, "folder must be a path")
    refused(lambda: report(runs / "real" / "config.json"), NotADirectoryError, "folder must be a folder, but")
    for given, error, said in REFUSALS:
        refused(lambda given=given: report(runs / "real", **{"out": tmp_path, **given}), error, said)
    assert not list(tmp_path.iterdir())


def test_damaged_folders_are_refused(runs: Path, tmp_path: Path) -> None:
    def broken(name: str, where: str, data: bytes) -> Path:
        run = copied(runs / "real", tmp_path / name)
        (run / where).write_bytes(data)
        return run

    message = "transcript/1/0-up.safetensors"
    with pytest.raises(DamagedTranscript, match="0-up.safetensors is damaged"):
        report(broken("cut", message, (runs / "real" / message).read_bytes()[:-1]))
    lost = copied(runs / "real", tmp_path / "lost")
    for client, down, named in ((0, 5, "0"), (1, 0, "0, 1")):  # then client 0 got nothing, and no reply is left
        (lost / f"transcript/1/{client}-up.safetensors").unlink()
        lines = [json.loads(line) for line in (lost / "history.jsonl").read_text(encoding="utf-8").splitlines()]
        lines[0]["bytes_by_client"] |= {"0": [lines[0]["bytes_by_client"]["0"][0], down], "7": [0, 5]}
        lines[1]["bytes_by_client"] = None
        (lost / "history.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        refused(lambda: report(lost), DamagedRun, rf"transcript/1 lacks the messages of clients \[{named}\], ")
    shutil.rmtree(lost / "transcript" / "1")  # a part of the rounds may be kept
    shutil.copy(lost / "checkpoint" / "model.safetensors", lost / "checkpoint" / "model-x.safetensors")
    assert {message.round for message in open_run(lost).messages()} == {2}
    assert list(open_run(lost).models) == ["x", ""]
    first = (runs / "real" / "history.jsonl").read_bytes().splitlines()[0]
    assert len(open_run(broken("long", "history.jsonl", b"\n".join([first] * 3))).history) == 3
    words = r"history\.jsonl holds 1 rounds, but the checkpoint is of round 2:"
    refused(lambda: report(broken("short", "history.jsonl", first)), DamagedRun, words)
    for where, data in product(("config.json", "history.jsonl"), (b'{"a": ', b"\xff\xfe")):
        with pytest.raises(DamagedRun, match=f"{where} is damaged"):
            report(broken(f"{where}{len(data)}", where, data))
    refused(lambda: report(broken("list", "history.jsonl", b"{}\n[]")), DamagedRun, r"history.jsonl holds list")
    for number, (text, form) in enumerate(((b'{"format": "a/9"}', "'a/9'"), (b"{}", "None"))):
        with pytest.raises(DamagedRun, match=f"has the format {form}, but this version supports 'distillkit.run/2'"):
            report(broken(f"later{number}", "config.json", text))
    for where in ("set.safetensors", "checkpoint/model.safetensors"):
        with pytest.raises(DamagedRun, match=f"{where} cannot be read .*: restore (it|the folder) from a") as caught:
            report(broken(where, where, b"no"), **FEW, network=convnet(10))
        assert f"({caught.value.__cause__})" in str(caught.value)


def test_verdict_is_one_sentence_about_the_worst_finding() -> None:
    """It names the worst leak, the strongest attack without one, or nothing, and never that records are safe."""
    leaks = ["claim", "inversion", "images", "shadows", "model", "classes"]
    clear = ["images", "shadows", "inversion", "model", "classes", "claim"]
    for found, negatives in product((leaks, ["classes", "images"], []), (clear, ["model", "shadows"], [])):
        worse = [(kind, f"{kind} at 5 %") for kind in sorted(found)]
        none = [(kind, f"{kind} at most 3 %") for kind in sorted(negatives)]
        sections = [Section("a", leaks=worse[::2], negatives=none[::2], missing=["b", "a"])]
        sections.append(Section("b", leaks=worse[1::2], negatives=none[1::2], missing=["c"]))
        made = Findings(sections, False)
        assert made.leaks == tuple(f"{kind} at 5 %" for kind in leaks if kind in found)
        assert made.not_found == tuple(f"{kind} at most 3 %" for kind in clear if kind in negatives)
        assert (made.other_leaks, made.missing) == (made.leaks[1:], ("b", "a", "c"))
        rest = "; smaller leaks and other attacks remain possible."
        assert made.verdict == (
            f"This run leaks: {made.leaks[0]}." if found
            else f"No leak found at this resolution: {made.not_found[0]}{rest}" if negatives
            else "No verdict yet: no attack on individual records was run (see the last section)."
        )  # fmt: skip
        sends = Findings([*sections, Section("c", recovered="9 % are recovered")], True)
        start = "This run sends private records: its images start from real ones"
        assert sends.verdict == f"{start}, and 9 % are recovered."
        assert sends.other_leaks == sends.leaks == made.leaks


def test_baseline_draws_equally_many_distinct_records_a_round() -> None:
    records = torch.arange(9.0).view(9, 1, 1, 1).repeat(1, 1, 2, 2)
    drawn = random_baseline([records[:4], records[:9], records], records)
    assert [len(set(one[:, 0, 0, 0].tolist())) for one in drawn] == [4, 9, 9]
    assert not torch.equal(drawn[1], drawn[2])
