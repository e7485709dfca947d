"""`report`: everything that a finished run gives away, as far as its folder and the caller's images can tell."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attacks.membership import Pipeline
from attacks.reporting.charges import Audit, charged
from attacks.reporting.claims import held, saw
from attacks.reporting.folder import RunFolder, opened
from attacks.reporting.inverted import inverted
from attacks.reporting.judged import LEAST
from attacks.reporting.models import of_model, of_pipelines
from attacks.reporting.page import Listed, Section, as_markdown, as_page
from attacks.reporting.records import Records, Sent, beside, recovered, told_apart
from attacks.reporting.replays import Inversion
from attacks.reporting.verdict import Outcome, sentence
from distillkit._utils import check
from distillkit._utils.files import write_atomically
from distillkit.rng import derive
from distillkit.sets import LabeledImages

__all__ = ["OtherSpace", "Report", "report"]


_INVERSION = Inversion()


class OtherSpace(ValueError):
    """Images that were given are not of the run's kind, or no pixels; the message says what would be."""


@dataclass(frozen=True)
class Report:
    """What came of looking at a run. Made by `report`; printed, it is the verdict.

    Attributes:
        verdict: one sentence, with the worst that was found and its number.
        html: the page, one file that opens alone.
        markdown: the same as text.
        leaks: what was found, a phrase each, the gravest first; none says no more than the verdict does.
        looked: what was looked at without a finding, with the size of the leak that would have been noticed.
        missing: what could not be told, and what to give for it.
    """

    verdict: str
    html: Path
    markdown: Path
    leaks: tuple[str, ...]
    looked: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.verdict} ({self.html})"


def report(
    folder: str | os.PathLike[str],
    pipeline: Pipeline | None = None,
    *,
    members: LabeledImages | Tensor | None = None,
    outsiders: LabeledImages | Tensor | None = None,
    network: nn.Module | None = None,
    started: Tensor | None = None,
    invert: Inversion | None = _INVERSION,
    audit: Audit | None = None,
    baselines: Mapping[str, Pipeline] | None = None,
    shadows: int = 8,
    workers: int = 1,
    most: int = 2000,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Report:
    """Say what a finished run gives away: one call on its folder, one HTML file, and the same as Markdown.

    Call it before anything of a run is published or passed on. It reads the folder's files alone. The more it is given
    the more it can tell; what it cannot tell, it says, with what to give. It never says that a method protects: at most
    that no leak was found, and how small a one could have been.

    Args:
        folder: of the run: `simulate(..., out=folder, transcript=True)`, or a run of a study.
        pipeline: the run as a function of its records, for attacks with shadow models: `attacks.membership.Pipeline`,
            with `fl.study.repeat(folder, keep=indices, seed=seed)` in its `fit`. None leaves these out.
        members: the records that the run was made with, all clients' together: a set, or pixels [N, C, H, W] in [0, 1].
        outsiders: records of the same kind that no client had (the test set), at least 20 for shares to mean anything.
            Nothing tells a leak from likeness without them.
        network: as the run trained it, with any weights: its last model is attacked too. It wants sets, for the labels.
        started: int [S], numbers of the members that images were started from, if you know them: found shares are then
            given for these and for the rest.
        invert: which client's update is inverted, whose records stand behind it, and how long it may take; without
            being told, the smallest client's of plain FedAvg, in a minute at most. None leaves it out.
        audit: outcomes of runs of the mechanism with and without one record, which may refute the claimed epsilon.
        baselines: pipelines on the same records, by name, that the same attacks are tried on, so that the run's numbers
            have something beside them: `{"model on raw data": Pipeline(...), "DP-SGD at equal accuracy": ...}`.
        shadows: how many times each pipeline is run: even, at least 8, and 32 for narrow intervals.
        workers: shadows at a time.
        most: members, and outsiders, that are looked at; more are drawn at random, always the same.
        out: where `report.html` and `report.md` are written, and the shadows are kept. Default: the folder's `report`.
        progress: whether the shadows' bar is shown.

    Returns:
        The verdict and the files.

    Raises:
        attacks.reporting.NoRun: the folder holds none.
        attacks.reporting.DamagedRun, attacks.transcript.DamagedTranscript: a file is damaged or missing.
        OtherSpace: images of another shape than the run's, or values that are no pixels.
        TypeError, ValueError: other arguments that do not fit.
    """
    run = opened(folder)
    check.positive_int(most, "most")
    if check.positive_int(shadows, "shadows", least=8) % 2:
        raise ValueError(f"shadows must be even, as they come in pairs of complements, got {shadows}")
    check.positive_int(workers, "workers")
    check.boolean(progress, "progress")
    if started is not None and (members is None or outsiders is None):
        raise ValueError("started are numbers of members: give members=, and outsiders=, without which no rate is told")
    for value, name, kind in (
        (pipeline, "pipeline", Pipeline), (network, "network", nn.Module), (invert, "invert", Inversion),
        (audit, "audit", Audit),
    ):  # fmt: skip
        if value is not None and not isinstance(value, kind):
            wanted = "an nn.Module" if kind is nn.Module else f"of {kind.__module__.rsplit('.', 1)[0]}.{kind.__name__}"
            raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")
    compared = _compared(pipeline, baselines)
    inside, outside = _records(members, "members", run, most), _records(outsiders, "outsiders", run, most)
    if network is not None and any(r is not None and r.data is None for r in (inside, outside)):
        raise ValueError("members and outsiders must be LabeledImages where a network is given, which wants labels")
    if outside is not None and len(outside.index) < LEAST:
        raise ValueError(f"outsiders must be at least {LEAST}, got {len(outside.index)}: give the whole test set")
    if network is not None:
        for name, records in (("members", inside), ("outsiders", outside)):
            _require_space(run, name, records)
    at = Path(out) if out is not None else run.path / "report"
    outcome, sections = Outcome(), [saw(run)]
    sent = Sent.of(run)
    sections += _messages(run, sent, inside, outside, started, outcome)
    if sent.updates or (invert is not None and invert.victim is not None):
        if inside is None or invert is None:
            wanted = "give members=" if inside is None else "give invert=Inversion(...), not None"
            outcome.missing.append(f"what the update of a single client shows of its images: {wanted}")
        else:
            sections.append(inverted(run, invert, network, inside, outside, outcome))
    section = _model(run, network, inside, outside, outcome)
    if pipeline is not None:
        section.parts += of_pipelines(pipeline, compared, shadows, workers, at, progress, outcome)
    else:
        outcome.missing.append(
            "what attacks with shadow models find, the strong ones: give pipeline=; a model that looks harmless "
            "without them may not be"
        )
    if not section.parts:
        section.parts.append("Nobody looked: see the last section.")
    sections += [section, held(run, sent, outcome), charged(run, sent, audit, outcome)]
    said = sentence(outcome)
    title = f"What the run {run.path.resolve().name} gives away"
    lists = [Listed("Also found", outcome.also), Listed("Not found at this resolution", outcome.looked)]
    sections.append(Section("What this report cannot tell", [Listed("", outcome.missing)]))
    footer = "Made by attacks.report. Intervals: 95 %, corrected for the number of attacks in each section."
    page = (title, said, [one for one in lists if one.items], sections, footer)
    write_atomically(at / "report.html", as_page(*page))
    write_atomically(at / "report.md", as_markdown(*page))
    return Report(
        said, at / "report.html", at / "report.md", *map(tuple, (outcome.leaks, outcome.looked, outcome.missing))
    )


def _compared(pipeline: Pipeline | None, baselines: Mapping[str, Pipeline] | None) -> Mapping[str, Pipeline]:
    """The baselines, if they are pipelines on the run's own records."""
    if baselines is None:
        return {}
    check.mapping(baselines, "baselines")
    if pipeline is None:
        raise ValueError("baselines stand beside the run's own pipeline: give pipeline= too")
    for name, other in baselines.items():
        if not isinstance(name, str) or not name.strip() or not isinstance(other, Pipeline):
            raise TypeError(f"baselines must map names to Pipelines, got {name!r}: {type(other).__name__}")
        if not torch.equal(other.labels.cpu(), pipeline.labels.cpu()):
            raise ValueError(
                f"baselines[{name!r}] must be on the pipeline's records, in their order, but its labels are others: "
                "give it the same images and labels"
            )
    return baselines


def _messages(
    run: RunFolder,
    sent: Sent,
    inside: Records | None,
    outside: Records | None,
    started: Tensor | None,
    outcome: Outcome,
) -> list[Section]:
    if not run.transcript and run.published is None:
        outcome.missing.append(f"what was sent: the run kept no transcript; {run.kept_by}")
    if run.from_real and (sent.rounds or run.sent_sets):
        outcome.sends_records = True
    if not sent.rounds:
        return []
    if inside is None:
        outcome.missing.append("which records the sent images show: give members=, the private training images")
        return [beside(sent, None, None)]
    if outside is None:
        outcome.missing.append("what is a leak and what likeness: give outsiders=, such as the test set")
    sections = [beside(sent, inside, outside), recovered(sent, inside, outside, outcome)]
    if outside is not None:
        sections.append(told_apart(sent, inside, outside, started, outcome))
    return sections


def _model(
    run: RunFolder, network: nn.Module | None, inside: Records | None, outside: Records | None, outcome: Outcome
) -> Section:
    section = Section("Who was in it: the model")
    if network is None or inside is None or outside is None:
        outcome.missing.append("what the last model says of records: give network=, members= and outsiders=")
    elif not run.models:
        outcome.missing.append("what the last model says of records: the folder has no checkpoint/model.safetensors")
    else:
        section.parts += of_model(run, network, inside, outside, outcome)
    return section


def _require_space(run: RunFolder, name: str, records: Records | None) -> None:
    """The network is called with the records as they are, so they must be as the run had them."""
    own, known = records.data.normalization if records is not None and records.data is not None else None, run.space
    if own is None or known is None:
        return
    if own.zca is not None or [[round(v, 6) for v in part] for part in (own.mean, own.std)] != known:
        raise OtherSpace(
            f"{name} must be normalized as in the run, by mean {known[0]} and std {known[1]}, got {own}: call "
            "renormalize on the set"
        )


def _records(given: LabeledImages | Tensor | None, name: str, run: RunFolder, most: int) -> Records | None:
    if given is None:
        return None
    data = given if isinstance(given, LabeledImages) else None
    images = check.batch_of_images(data.images if data is not None else given, name)  # type: ignore[arg-type]
    pixels = data.normalization.decode(images) if data is not None else images
    if float(pixels.min()) < -0.01 or float(pixels.max()) > 1.01:
        raise OtherSpace(
            f"{name} must be pixels in [0, 1], or a set that knows its normalization, got {float(pixels.min()):.3g} to "
            f"{float(pixels.max()):.3g}: give LabeledImages(images, labels, normalization=...)"
        )
    if run.shape is not None and tuple(images.shape[1:]) != run.shape:
        raise OtherSpace(
            f"{name} must have the shape of the run's images, {list(run.shape)}, got {list(images.shape[1:])}: load "
            "them as the run did (the same size=)"
        )
    order = torch.randperm(len(images), generator=derive(0, name)) if len(images) > most else torch.arange(len(images))
    return Records(pixels.clamp(0, 1).float().cpu(), order[:most].sort().values, data)
