"""What a report reads of a run and of the user's records, and how scores are rated: against plain loops."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from attacks.membership import AttackResult, Pipeline, leave_one_out, loss, margin, model_scorer, run_shadows
from attacks.reporting import _page, _section_models
from attacks.reporting._evidence import Evidence, IncompatibleImages, ObservedData, Records
from attacks.reporting._page import Section, histogram
from attacks.reporting._rates import evaluate_scores, format_percent, judge, rate_table
from attacks.reporting._recorded_run import RecordedRun
from attacks.reporting._section_images import membership_section, nearest_section, recovery_section
from attacks.reporting._section_models import add_shadows, last_model_section
from attacks.reporting.copies import find_copies
from attacks.reporting.similarity import PSNR_LEVELS, random_baseline, record_scores
from attacks.statistics import Estimate, OperatingPoint, Rate
from attacks.transcript import TranscriptMessage
from distillkit import LabeledImages
from distillkit._utils.pages import Picture, image_grid
from distillkit._utils.tables import Table
from distillkit.networks import ConvNet, build
from distillkit.normalization import ZCA, Normalization
from distillkit.rng import derive
from tests.refused import refused

SHAPE = (2, 6, 4)


def pixels(seed: int, n: int = 30) -> Tensor:
    return torch.rand(n, *SHAPE, generator=derive(seed))


def folder(**parts: Any) -> RecordedRun:
    none: dict[str, Any] = {"config": {}, "history": [], "published_set": None, "models": {}}
    return RecordedRun(**{"path": Path("run"), "transcript": False, **none, **parts})


def observed(rounds: list[Tensor]) -> Evidence:
    return Evidence(folder(history=[{}] * 7), ObservedData(rounds, [], [], {}))


def rows(section: Section) -> list[Any]:
    return [row for part in section.parts if isinstance(part, Table) for row in part.cells]


def point(hits: int, members: int, false: int, others: int) -> OperatingPoint:
    return OperatingPoint(0.5, Rate.of(hits, members), Rate.of(false, others), False)


# Rates.


@pytest.mark.parametrize("others", [21, 240, 401])
@pytest.mark.parametrize("tried", [1, 3])
def test_scores_are_rated_at_the_threshold_of_the_other_half(others: int, tried: int) -> None:
    """At most one in a hundred of the first half lies above it; ties with it do not count."""
    inside, outside = (torch.randn(n, generator=derive(others, n)).mul(4).round().double() / 3 for n in (90, others))
    area, found = evaluate_scores(inside + 1, outside, tried)
    order = torch.randperm(others, generator=derive(0, "threshold"))
    first, second = outside[order].tensor_split([others // 2])
    edge = sorted(first.tolist(), reverse=True)[others // 2 // 100]
    level = 1 - 0.05 / (2 * tried)
    assert (found.threshold, found.few) == (math.nextafter(edge, math.inf), int((second > edge).sum()) < 10)
    for rate, values in ((found.tpr, inside + 1), (found.fpr, second)):
        wanted = Rate.of(int((values > edge).sum()), len(values), level)
        assert (rate.hits, rate.trials) == (wanted.hits, wanted.trials)
        assert [rate.low, rate.high, rate.confidence] == pytest.approx([wanted.low, wanted.high, level])
    pairs = inside[:, None] + 1 - outside
    assert area == pytest.approx(float(((pairs > 0).double() + 0.5 * (pairs == 0)).mean()))
    table, points = rate_table("attack", {"b": (inside, outside), "a": (inside + 1, outside)}, tried)
    assert table.header == ("attack", "AUC", "true positives", "false positives")
    assert points == {name: evaluate_scores(inside + shift, outside, tried)[1] for name, shift in (("b", 0), ("a", 1))}
    assert table.cells[1] == ("a", f"{area:.3f}", str(found.tpr), str(found.fpr))


def test_the_attack_with_the_clearest_intervals_is_judged() -> None:
    """One with few records has the larger rate, which says less."""
    found, none = Section("found"), Section("none")
    clear, few = point(500, 1000, 10, 900), point(3, 3, 0, 3)
    noisy = point(900, 1000, 700, 900)  # of the largest lower bound
    judge(found, "images", {"few": few, "noisy": noisy, "clear": clear}, "this attack identifies", " (end)")
    words = "this attack identifies 50 % of the records as members, with 10 false positives among 900 (end)"
    assert (found.leaks, found.negatives) == ([("images", words)], [])
    unclear = point(70, 1000, 50, 1000)
    assert unclear.fpr.value < unclear.tpr.low < unclear.fpr.high
    judge(none, "model", {"unclear": unclear, "few": point(2, 3, 1, 3)}, "this attack identifies", " (end)")
    most = format_percent(point(2, 3, 1, 3).tpr.high)
    more = "of the records as members, not significantly more than of non-members (end)"
    words = f"this attack identifies at most {most} {more}"
    assert (none.leaks, none.negatives) == ([], [("model", words)])


def test_histogram_shows_the_share_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bins of 2 dB; each bar is a share of its own group, and infinite values are in the last bin."""
    seen: list[Any] = []
    monkeypatch.setattr(_page, "drawn", lambda figure, caption: seen.append((figure, caption)))
    groups = {
        "one": torch.cat([60 * torch.rand(37, generator=derive(0)) + 3, torch.tensor([math.inf] * 3)]),
        "other": 20 + 5 * torch.randn(9, generator=derive(1)),
    }
    for values, low, high in ((groups, 2, 50), ({"few": torch.tensor([12.5, 40.5, math.inf])}, 10, 42)):
        histogram(values, "told", "dB", (20, 25))
        figure, caption = seen.pop()
        [axes] = figure.axes
        assert (caption, axes.get_xlabel(), axes.get_xlim()) == ("told", "dB", (low, high))
        assert axes.get_ylabel() == "share of the group (%)"
        assert len({patch.get_linestyle() for patch in axes.patches}) == len(values)
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(values)
        assert [line.get_xdata()[0] for line in axes.lines] == [20, 25]
        assert set(axes.get_xticks()) == {10, 20, 25, 30, 40, 50} & set(range(low, high + 1))
        assert len({patch.get_edgecolor() for patch in axes.patches}) == len(values)
        for patch, group in zip(axes.patches, values.values(), strict=True):
            ends = list(zip(corners := patch.get_xy().tolist(), corners[1:]))
            for edge in range(low, high, 2):
                inside = [edge <= v < edge + 2 or (edge == high - 2 and v >= high) for v in group.tolist()]
                height = max(a[1] for a, b in ends if {a[0], b[0]} == {edge, edge + 2})
                assert height == pytest.approx(100 * sum(inside) / len(group))


# Images.


def near(images: Tensor, candidates: Tensor) -> tuple[Tensor, list[int]]:
    """Return the PSNR and the index of the image that is nearest to each candidate, pair by pair."""
    errors = (candidates[:, None].double() - images.double()).square().flatten(2).mean(2)
    return -10 * errors.amin(1).log10(), errors.argmin(1).tolist()


def test_sent_images_are_above_the_nearest_records() -> None:
    """At random, and the closest of each record; only the attacked records are shown."""
    sent, index = pixels(1, 40), torch.arange(1, 30, 2)
    scale = torch.linspace(0.0005, 0.004, 12).view(12, 1, 1, 1)  # about 71 to 53 dB
    sent[:12] = pixels(2)[index[:12]].repeat_interleave(2, 0)[:12] + scale * pixels(3, 12)
    sent[5] = pixels(2)[5]  # equal to the third attacked record
    members, others = Records(pixels(2), index, None), Records(pixels(4), index + 0, None)
    level, which = near(members.selected, sent)
    closest: list[int] = []
    for image in level.argsort(descending=True, stable=True).tolist():
        closest += [image] if which[image] not in [which[i] for i in closest] else []
    rows = {"at random": torch.randperm(40, generator=derive(0, "shown"))[:10].tolist(), "the closest": closest[:10]}
    said = {None: "", others: " and the nearest held-out image"}
    for outside, more in said.items():
        base = observed([sent[:25], sent[25:]])
        found = nearest_section(Evidence(base.run, base.observed, members, outside))
        for shown, (words, chosen) in zip(found.parts, rows.items()):
            wanted = [sent[chosen], members.selected[[which[i] for i in chosen]]]
            wanted += [outside.selected[near(outside.selected, sent[chosen])[1]]] if outside is not None else []
            decibels = ", ".join("equal" if level[i] > 60 else f"{level[i]:.0f}" for i in chosen)
            caption = f"Sent images ({words}), and below each the nearest private record{more}. PSNR to the record: "
            assert shown == image_grid(wanted, f"{caption}{decibels} dB.")
        assert found.parts[2:] == ["40 images were sent in 2 round(s)."]
        assert found.missing == ["whether similarity is a leak: give non_members=, such as the test set"] * (not more)
    alone = nearest_section(observed([sent]))
    shown = image_grid([sent[rows["at random"]]], "Sent images, chosen at random.")
    assert alone.parts == [shown, "40 images were sent in 1 round(s)."]
    assert alone.missing == ["which records the sent images show: give members=, the private training images"]


def test_flat_images_are_copies_within_a_level_of_eight_bits() -> None:
    """No change of colors is tried on them; an eighth of the longer side is more than the shorter one."""
    shifts = torch.tensor([0.99, -0.99, 1.01, -1.01]) / 255
    sent, real = (x.view(-1, 1, 1, 1).expand(-1, 1, 8, 80) for x in (0.5 + shifts, torch.tensor([0.5, 0.9])))
    found, nearest = find_copies(sent, real), torch.stack([shifts[0], 0.4 - shifts[2]])
    assert found.copied.tolist() == [True, True, False, False]
    for level, gap in ((found.level, shifts), (found.record_level, nearest)):
        assert level.tolist() == pytest.approx((-20 * gap.abs().log10()).tolist(), abs=1e-3)


def test_halved_records_and_tiles_of_odd_sides_are_copies() -> None:
    noise, coarse = (torch.rand(8, 2, *sides, generator=derive(0)) for sides in ((25, 27), (9, 10)))
    real = 0.2 * noise + 0.8 * F.interpolate(coarse, size=(25, 27), mode="bilinear")
    half = F.adaptive_avg_pool2d(real, (12, 13))
    tiles = torch.cat([torch.cat([*half[k : k + 2]], 2) for k in (0, 2)], 1)
    sent = torch.cat([F.interpolate(half, size=(25, 27), mode="bilinear"), F.pad(tiles, (0, 1, 0, 1))[None]])
    found = find_copies(sent, real)
    assert (found.copied & (found.level > 60)).all()
    darker = torch.tensor([0.2, 1]).view(2, 1, 1) * real[:3]  # in one channel, so that gray pixels differ, too
    assert find_copies(darker, real[:3]).copied.all()
    many = real[:1] + 0.05 * noise  # more than the candidates of an image
    assert (find_copies(1 - real[:1], many).record_level > 25).all()


def test_large_images_are_compared_as_pillow_shrinks_them() -> None:
    real, noise = torch.rand(2, 3, 1, 60, 135, generator=derive(0))
    sent = 0.4 - 0.4 * real + 0.1 * noise

    def shrunk(images: Tensor) -> Tensor:
        small = [Image.fromarray(one[0].numpy()).resize((48, 21), Image.Resampling.BILINEAR) for one in images]
        return torch.stack([torch.from_numpy(np.array(one)) for one in small])[:, None]

    found, wanted = (asdict(find_copies(*pair)) for pair in ((sent, real), (shrunk(sent), shrunk(real))))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("outside", "pairs", "most"), [(False, 300, 20), (True, 314, 20), (True, 14, 1)])
def test_recovered_records_are_counted_at_each_level(
    outside: bool, pairs: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("attacks.reporting._section_images.histogram", lambda *a: shown.append(a) or Picture(b"", ""))
    monkeypatch.setattr("attacks.reporting._section_images._PAIRS", pairs)
    index = torch.arange(0, 30, 2)
    real = pixels(2, 90)
    real[:30:2] = 1 - real[31:61:2]  # altered copies do not count in the baseline
    members, others = Records(real, index, None), Records(pixels(4), index, None)
    noise = torch.tensor([0.01, 0.02, 0.04, 0.08, 0.3]).repeat(6).view(-1, 1, 1, 1) * torch.randn(30, *SHAPE)
    sent = torch.cat([(real[:30] + noise).clamp(0, 1), 1 - real[:30], pixels(4)[:2], 1 - pixels(4)[:9]])
    base = observed([sent[:20], sent[20:]])
    section = recovery_section(Evidence(base.run, base.observed, members, others if outside else None), members)
    tried = sent[torch.randperm(len(sent), generator=derive(0, "altered"))[:most]]
    groups = {"private records": members, **({"held-out images": others} if outside else {})}
    levels = {
        name: torch.maximum(near(sent, one.selected)[0], find_copies(tried, one.selected).record_level)
        for name, one in groups.items()
    }
    drawn = torch.cat(random_baseline([sent[:20], sent[20:]], members.pixels))
    every = {**levels, "baseline: random real images": near(drawn, members.selected)[0]}
    assert rows(section) == [
        (name, "15", *(str(Rate.of(int((values >= d).sum()), 15)) for d in (20, 25, 30)))
        for name, values in every.items()
    ]
    assert len({cells[2:] for cells in rows(section)}) == len(every)
    assert section.parts[0] == (
        "For each record, the PSNR (in pixel space; higher is closer) of the nearest image sent in any round. Flips, "
        "shifts, changes of color and tiling are undone first. Held-out images show how close unrelated images come. "
        "The baseline sends as many random real images per round; a method whose images are safer than the data must "
        "stay far below it."
    )
    [(series, caption, unit, marks)] = shown
    assert (list(series), unit, marks) == (list(levels), "PSNR in dB", PSNR_LEVELS)
    assert caption == "Shares of records by the PSNR of the nearest sent image."
    shares = [format_percent(sum(v >= 25 for v in values.tolist()) / 15) for values in levels.values()]
    more = f" (of held-out images {shares[1]})" if outside else ""
    assert section.recovered == f"{shares[0]} of all records are recovered above 25 dB{more}"


@pytest.mark.parametrize("kind", ["single", "new", "leaking"])
def test_members_are_identified_from_the_images_of_each_round(kind: str) -> None:
    members = Records(pixels(2, 60), torch.arange(1, 60, 2), None)
    others = Records(pixels(4, 80), torch.arange(9, 80), None)
    rounds = [pixels(2, 60)[:40] if kind == "leaking" else pixels(5, 40), pixels(6, 20)]
    rounds = [one[:1] for one in rounds] if kind == "single" else rounds
    names = ("distance",) if kind == "single" else ("distance", "nearest")
    section = membership_section(observed(rounds), members, others, None)
    scores = {"": rounds, ", baseline": random_baseline(rounds, members.pixels)}
    cells, points = [], {}
    for name in names:
        for end, sent in scores.items():
            both = [record_scores(sent, one.selected)[name] for one in (members, others)]
            area, found = evaluate_scores(both[0], both[1], len(names))
            cells.append((f"{name}{end}", f"{area:.3f}", str(found.tpr), str(found.fpr)))
            points |= {} if end else {name: found}
    assert rows(section) == cells
    assert section.parts[0] == (
        "An adversary with the images scores a candidate by its distance to the nearest image, or by how much closer "
        "that image is than the second nearest. No model or shadow model is needed. Thresholds for 1 % false positives "
        "come from one half of the held-out images; rates are counted on the other half. Guessing has equal true- and "
        "false-positive rates."
    )
    wanted = Section("")
    judge(wanted, "images", points, "the sent images identify", " (30 members and 71 non-members)")
    assert (section.leaks, section.negatives) == (wanted.leaks, wanted.negatives)
    assert bool(section.leaks) == (kind == "leaking")
    assert section.missing == ["rates for records that images started from, and for the rest: give started_from="]


def test_a_record_is_scored_by_the_round_that_shows_it_best() -> None:
    """With one image, or copies of it, no image is nearer than another, so one of the attacks does not apply."""
    one, several, candidates = pixels(1, 1), [pixels(2, 3), pixels(3, 4), pixels(5, 4)], pixels(4, 9)
    assert list(record_scores([one, one.repeat(3, 1, 1, 1)], candidates)) == ["distance"]
    found = record_scores([several[0], one.repeat(2, 1, 1, 1), *several[1:]], candidates)
    assert found["distance"].tolist() == pytest.approx(near(torch.cat([*several, one]), candidates)[0].tolist())
    gaps = [(candidates[:, None].double() - x.double()).flatten(2).norm(dim=2).sort(1).values for x in several]
    scores = torch.stack([1 - gap[:, 0] / gap[:, 1] for gap in gaps])
    assert found["nearest"].tolist() == pytest.approx(scores.amax(0).tolist())
    assert len(scores.argmax(0).unique()) == 3


# Models.


def network() -> nn.Module:
    return build(lambda: ConvNet(SHAPE, 3, width=2, depth=1, norm="batch"), 0)


def records(seed: int, n: int, index: Tensor) -> Records:
    labels, space = torch.randint(3, (n,), generator=derive(seed, 1)), Normalization((0.5, 0.4), (0.2, 0.3))
    made = LabeledImages.from_pixels(pixels(seed, n), labels, num_classes=3, normalization=space)
    return Records(made.pixels(), index, made)


def test_last_models_are_attacked_with_each_score(tmp_path: Path) -> None:
    inside, outside = records(1, 60, torch.arange(1, 60, 2)), records(2, 90, torch.arange(10, 90))
    cells, points, models = [], {}, {}
    for seed, name in enumerate(("", "a", "b")):
        model = build(network, seed)
        with torch.no_grad():
            model(pixels(seed, 50))  # other statistics
        models[name] = tmp_path / f"model{name}.safetensors"
        state = nn.Linear(2, 3).state_dict() if name == "b" else model.state_dict()  # of another architecture
        save_file({n: t.contiguous() for n, t in state.items()}, models[name])
        for score in (loss, margin) if name != "b" else ():
            sets = [one.data[one.index] for one in (inside, outside) if one.data is not None]
            both = [model_scorer(model, score)(one.images, one.labels) for one in sets]
            area, found = evaluate_scores(both[0], both[1], 4)
            points[f"{name}-{score.__name__}"] = found
            cells.append((f"{score.__name__} {name}".strip(), f"{area:.3f}", str(found.tpr), str(found.fpr)))
    evidence = Evidence(folder(models=models), ObservedData([], [], [], {}), inside, outside, network())
    section = last_model_section(evidence)
    assert rows(section) == cells
    wanted = Section("")
    judge(wanted, "model", points, "one threshold on the last model's scores, a weak attack, identifies")
    assert (section.leaks, section.negatives) == (wanted.leaks, wanted.negatives)
    for run, one, other in ((evidence.run, None, outside), (evidence.run, inside, None), (folder(), inside, outside)):
        [said] = last_model_section(Evidence(run, evidence.observed, one, other, network())).missing
        assert said.startswith("what the last model reveals of records: ")
        assert ("checkpoint" in said) == (run is not evidence.run)
    files = "those in model.safetensors, modela.safetensors, modelb.safetensors; build"
    other = replace(evidence, network=nn.Linear(2, 4))
    refused(lambda: last_model_section(other), ValueError, f"network must have the run's architecture: .* {files}")


@pytest.mark.parametrize("effects", [(0.0, 0.0), (2.0, 4.0)])
def test_shadows_are_attacked_with_each_scorer(effects: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """All rows are those of `leave_one_out`, corrected for the number of attacks on all scorers."""
    n = 240 if any(effects) else 40  # of which the smallest measurable rate is 1/20
    images, labels, asked = pixels(1, n), (torch.arange(2 * n) // 2 % 2)[::2], []
    monkeypatch.setattr(_section_models, "run_shadows", lambda *a, **k: asked.append(k) or run_shadows(*a, **k))

    def pipeline(scale: float) -> Pipeline:
        def fit(indices: Tensor, seed: int) -> dict[str, Any]:
            inside, noise = torch.isin(torch.arange(n), indices), torch.randn(2, n, generator=derive(seed))
            both = [scale * effect * inside + one for effect, one in zip(effects, noise.double())]
            return {"model": lambda x, y: both[0][: len(x)], "set": lambda x, y: both[1][: len(x)]}

        return Pipeline(fit, images, labels, (pixels(2, 20), labels[:20]))

    baselines = {"raw data": pipeline(0.5), "raw-data": pipeline(2.0)} if any(effects) else {}
    add_shadows(section := Section(""), pipeline(1.0), baselines, 8, 3, tmp_path, False)
    cells = []
    for name, one in {"this run": pipeline(1.0), **baselines}.items():
        shadows = run_shadows(one, 8, progress=False)
        for scorer in ("model", "set"):
            tried = leave_one_out(shadows, scorer=scorer, fpr=2 / n if n < 200 else 0.01, also_tried=5, progress=False)
            for attack, result in tried.items():
                parts = [f"{result.auc.value:.3f} ({result.auc.low:.3f} to {result.auc.high:.3f})"]
                for r in (result.tpr, result.fpr):
                    parts.append(f"{100 * r.value:.1f} % ({100 * r.low:.1f} to {100 * r.high:.1f})")
                cells.append((name, scorer, attack, *parts))
    header = ("pipeline", "scores of", "attack", "AUC", "true positives", "false positives")
    assert section.parts[1] == Table(header, cells, left=3)
    assert ("The baselines are attacked in the same way" in str(section.parts[0])) == bool(baselines)
    assert bool(section.leaks) == any(effects) != bool(section.negatives)
    assert [line.split(": give ")[1].split("=")[0] for line in section.missing] == ["baselines"] * (not baselines)
    assert {(k["workers"], k["progress"]) for k in asked} == {(3, False)}
    assert len({k["out"] for k in asked}) == 1 + len(baselines)  # although two names differ in punctuation only


def estimate(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, low, high, 0.95)


def test_the_attack_with_the_clearest_area_is_told_for_each_scorer(tmp_path: Path, monkeypatch: Any) -> None:
    def result(auc: Any, tpr: Any, fpr: Any = (0.07, 0.02, 0.2)) -> AttackResult:
        return AttackResult(estimate(*auc), estimate(*tpr), estimate(*fpr), 0.05, (), False)

    unclear = {"d": result((0.52, 0.5, 0.56), (0.1, 0.05, 0.3)), "e": result((0.5, 0.4, 0.6), (0.2, 0.2, 0.25))}
    rate, other = (result(auc, (0.4, 0.3, 0.5)) for auc in ((0.62, 0.52, 0.7), (0.52, 0.48, 0.56)))
    model = {"b": rate, "a": result((0.6, 0.55, 0.65), (0.1, 0.01, 0.2))}
    found = {"model": model, "none": unclear, "set": {**unclear, "c": other}}
    told, asked = [], list[float]()
    for given, n in ((found, 240), ({"none": unclear}, 9)):
        monkeypatch.setattr(_section_models, "run_shadows", lambda *a, g=given, **k: SimpleNamespace(scores=g))
        attack = lambda made, *, scorer, fpr, **k: asked.append(fpr) or made.scores[scorer]  # noqa: E731
        monkeypatch.setattr(_section_models, "leave_one_out", attack)
        pipeline = Pipeline(lambda indices, seed: {}, pixels(1, n), torch.arange(n) % 2)
        add_shadows(section := Section(""), pipeline, {}, 8, 1, tmp_path, False)
        told.append((section.leaks, section.negatives))
    start, end = "separates members from non-members: AUC", "% (2.0 to 20.0) false positives (8 shadows)"
    words = [f"a on the model {start} 0.600 (0.550 to 0.650), true positives 10.0 % (1.0 to 20.0) at 7.0 {end}"]
    words += [f"c on the set {start} 0.520 (0.480 to 0.560), true positives 40.0 % (30.0 to 50.0) at 7.0 {end}"]
    most = "attacks with 8 shadows identify at most 30 % of the members at about 5 % false positives"
    assert asked == pytest.approx([0.01, 0.01, 0.01, 0.25])  # no rate is below 1/4 of 9 records
    assert told == [([("shadows", line) for line in words], []), ([], [("shadows", most)])]


# Folders.


def config(method: dict[str, Any], **more: Any) -> RecordedRun:
    labels = {"object": "fl:Classification", "with": {"num_classes": 2}}
    return folder(config={"method": {"object": "fl:FedAvg", "args": [], "with": {}} | method, "labels": labels} | more)


def test_options_of_plain_fedavg_are_read_with_those_of_its_parts() -> None:
    phase = {"object": "fl:Phase", "with": {"train": "*", "epochs": 2, "steps": None}}
    part = {"object": "fl:Phase", "with": {"train": "head", "epochs": 3}}
    named = {"object": "fl:ClientOptimizer", "with": {"name": "adam", "momentum": 0.5}}
    for options, wanted in (
        ({"lr": 0.1}, {"lr": 0.1, "optimizer": "sgd", "phases": []}),
        ({"optimizer": "adam", "phases": [phase]}, {"optimizer": "adam", **phase["with"]}),  # type: ignore[dict-item]
        ({"optimizer": named, "lr": 1}, {"optimizer": "adam", "name": "adam", "momentum": 0.5, "phases": [], "lr": 1}),
        ({"phases": [part]}, {"optimizer": "sgd", "phases": [part]}),
        ({"phases": [phase, part]}, {"optimizer": "sgd", "phases": [phase, part]}),
    ):
        assert config({"with": options}).plain_fedavg == wanted
    assert config({"object": "fl:FedDM"}).plain_fedavg is None
    assert config({"args": [1]}).plain_fedavg is None
    assert config({}, labels={"object": "fl:Other", "with": {}}).plain_fedavg is None
    assert folder().plain_fedavg is None


def test_options_of_all_parts_of_a_method_are_listed() -> None:
    inner = {"object": "fl:ClientDP", "with": {"sigma": 2, "sigma_count": 0.5, "sigmas": "x", "rate": True}}
    parts = [inner, {"object": "fl:plain"}, {"object": "fl:Other", "with": {"sigma": 1.5}}]
    run = config({"args": [{"parts": parts}], "with": {"rate": 0.25}})
    assert sorted(run.options("sigma")) == [0.5, 1.5, 2.0]
    assert run.options("rate") == [0.25]
    assert not run.starts_from_real
    for real in ({"object": "fl:Real", "with": {}}, {"object": "fl:Other", "with": {"init": "real"}}):
        assert config({"with": {"init": real}}).starts_from_real
    made = LabeledImages(pixels(0, 2), [0, 1], num_classes=2, info={"init": "real"})
    assert folder(published_set=made, history=[{}]).starts_from_real
    assert not folder(published_set=made.replace(info={"init": "noise"})).starts_from_real
    assert folder(published_set=made).shape == SHAPE


def test_recorded_facts_of_the_images_are_read() -> None:
    parts = {"mean": {"tuple": [0.5]}, "std": {"tuple": [0.25]}}
    said = [["shape", {"tuple": [1, 8, 9]}], ["normalization", {"object": "distillkit:Normalization", "with": parts}]]
    run = config({}, images={"dict": said})
    assert (run.shape, run.normalization, run.num_classes) == ((1, 8, 9), Normalization((0.5,), (0.25,)), 2)
    said[1] = ["normalization", {**said[1][1], "with": {**parts, "zca": "whitening.safetensors"}}]  # type: ignore[dict-item]
    assert config({}, images={"dict": said}).normalization is None  # not shown in pixels
    for other in (folder(), config({}, images="own", labels=["own"])):
        assert (other.shape, other.normalization, other.num_classes) == (None, None, None)
    for keys, sends in ((["a:labels"], True), (["labels", "a"], False)):
        assert folder(history=[{}, {"up": dict.fromkeys(keys, 1)}, {"up": {}}]).sends_sets is sends
    hints = [folder(config={"notes": notes}).transcript_hint for notes in ({"candidate": "a"}, {"a": 1}, "candidate")]
    assert [hint.startswith("run the study again in another folder") for hint in hints] == [True, False, False]


def test_observed_data_are_the_replies_of_all_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images by round in order, sets by client; what the server sends is not the client's."""

    space = Normalization((0.4,), (0.3,))

    def made(seed: int, n: int) -> LabeledImages:
        return LabeledImages.from_pixels(pixels(seed, n), torch.arange(n) % 2, num_classes=2, normalization=space)

    sent = [
        TranscriptMessage(2, 1, "up", {"a": made(1, 3), "b": made(2, 2)}, "local"),
        TranscriptMessage(2, 1, "down", {"a": made(3, 1)}, "answer"),
        TranscriptMessage(1, 0, "up", {"a": made(4, 2)}, "announce"),
        TranscriptMessage(2, 0, "up", {"a": made(5, 1), "empty": made(6, 0)}, "local"),
        TranscriptMessage(1, 1, "up", {"x.update": {"w": torch.ones(2, 2)}}, "local"),
    ]
    monkeypatch.setattr(RecordedRun, "messages", lambda self: iter(sent))
    found = ObservedData.from_run(folder(published_set=made(7, 4)))
    assert [(client, one.pixels().shape[0]) for client, one in found.sets] == [(1, 3), (1, 2), (0, 2), (0, 1)]
    wanted = [[made(7, 4)], [made(4, 2)], [made(1, 3), made(2, 2), made(5, 1)]]
    assert len(found.rounds) == 3
    for one, parts in zip(found.rounds, wanted):
        assert torch.equal(one, torch.cat([part.pixels() for part in parts]))
    assert (found.replies, found.updates) == ({1: 2, 0: 1}, [])


@pytest.mark.parametrize("most", [40, 39, 20])
def test_records_are_selected_and_normalized_for_the_run(most: int) -> None:
    space = Normalization((0.5, 0.25), (0.25, 0.5))
    white = Normalization((0.5, 0.25), (0.25, 0.5), zca=ZCA.fit(space.encode(pixels(1, 40))))
    parts = {"mean": {"tuple": [0.5, 0.25]}, "std": {"tuple": [0.25, 0.5]}}
    said = [["shape", {"tuple": [*SHAPE]}], ["normalization", {"object": "distillkit:Normalization", "with": parts}]]
    run = config({}, images={"dict": said})
    moved = Normalization((0.1, 0.1), space.std), Normalization(space.mean, (1.0, 1.0))
    for given in (space, white, *moved):
        data = LabeledImages.from_pixels(pixels(1, 40), torch.arange(40) % 2, num_classes=2, normalization=given)
        found = Evidence.gather(run, data, pixels(2, 40).double(), None, most)
        for one, seed in ((found.members, 1), (found.non_members, 2)):
            assert one is not None
            torch.testing.assert_close(one.pixels, pixels(seed, 40))
            index = one.index.tolist()
            assert index == sorted(set(index))
            assert len(index) == most
            assert (index[-1] > most) == (most == 20)
            assert torch.equal(one.selected, one.pixels[index])
        assert found.members is not None
        assert found.non_members is not None
        assert (found.members.index.tolist() == found.non_members.index.tolist()) == (most == 40)
        assert found.members.data is not None
        torch.testing.assert_close(found.members.data.images, space.encode(pixels(1, 40)))
        assert found.non_members.data is None
    assert Evidence.gather(run, None, None, None, 9).members is None


def test_shared_and_odd_records_are_refused() -> None:
    """At most one in a hundred non-members may be a member; values may leave [0, 1] by 0.01."""
    inside, outside = pixels(1, 150), pixels(2, 200)
    for shared, few in ((2, 300), (3, 300), (1, 99)):
        others = torch.cat([inside[-shared:], pixels(3, few - shared)])
        if shared <= 0.01 * few:
            assert len(Evidence.gather(folder(), inside, others, None, 50).non_members.index) == 50  # type: ignore[union-attr]
        else:
            words = f"but {shared} of {few} non_members are also members"
            refused(lambda o=others: Evidence.gather(folder(), inside, o, None, 50), IncompatibleImages, words)  # type: ignore[misc]
    for shift, fits in ((0.009, True), (-0.009, True), (0.02, False), (-0.02, False)):
        odd = outside.clone()
        odd[3] = (1.0 if shift > 0 else 0.0) + shift
        if fits:
            found = Evidence.gather(folder(), None, odd, None, 200).non_members
            assert found is not None
            assert 0 <= float(found.pixels.min()) <= float(found.pixels.max()) <= 1
        else:
            words = f"must be pixels in .* got {float(odd.min()):.3g} to {float(odd.max()):.3g}: give"
            refused(lambda o=odd: Evidence.gather(folder(), None, o, None, 9), IncompatibleImages, words)  # type: ignore[misc]
    refused(lambda: Evidence.gather(folder(), None, outside, None, 19), ValueError, "at least 20, got 19")
    assert Evidence.gather(folder(), None, outside[:20], None, 20).non_members is not None
