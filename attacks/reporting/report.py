"""Privacy report of a finished run, made from the run's folder and from images that the user passes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attacks.membership import Pipeline
from attacks.reporting._evidence import Evidence
from attacks.reporting._page import Findings, Section
from attacks.reporting._recorded_run import open_run
from attacks.reporting._section_images import membership_section, nearest_section, recovery_section
from attacks.reporting._section_messages import adversary_section, class_section
from attacks.reporting._section_models import add_shadows, last_model_section
from attacks.reporting.inversion import Inversion, inversion_section
from attacks.reporting.privacy_claim import Audit, claim_section
from attacks.reporting.published_set import checked_indices
from distillkit._utils import check
from distillkit._utils.files import write_atomically
from distillkit._utils.pages import render_html, render_markdown
from distillkit.sets import LabeledImages

_INVERSION = Inversion()


@dataclass(frozen=True)
class Report:
    """Result of `report`. Prints as its verdict.

    Attributes:
        verdict: one sentence that states the worst leak and its size, or that no leak was found.
        html: path of the HTML file, which needs no other files.
        markdown: path of the same report as Markdown.
        leaks: one phrase for each leak, the most serious first. If it is empty, leaks may still exist.
        not_found: attacks that found no leak, each with the smallest leak that it would have detected.
        missing: questions that could not be answered, each with the argument of `report` that would allow an answer.
    """

    verdict: str
    html: Path
    markdown: Path
    leaks: tuple[str, ...]
    not_found: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.verdict} ({self.html})"


def report(
    folder: str | os.PathLike[str],
    pipeline: Pipeline | None = None,
    *,
    members: LabeledImages | Tensor | None = None,
    non_members: LabeledImages | Tensor | None = None,
    network: nn.Module | None = None,
    started_from: Tensor | None = None,
    invert: Inversion | None = _INVERSION,
    audit: Audit | None = None,
    baselines: Mapping[str, Pipeline] | None = None,
    shadows: int = 8,
    workers: int = 1,
    max_records: int = 2000,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Report:
    """Attack a finished run, and write an HTML and a Markdown report on what it leaks.

    Call it before you publish or share anything from a run. With `folder` alone, it uses only the files in the folder.
    Each additional argument allows more attacks. The report lists the questions that it could not answer, and the
    missing arguments. It never states that a method protects records. At most it states that no leak was found, and the
    smallest leak that would have been detected.

    Args:
        folder: path of the run's folder, from `simulate(..., out=RunFolder(folder, transcript=True))` or from a study.
        pipeline: the whole run as a function of its records, for attacks with shadow models. Use
            `fl.study.repeat(folder, keep=indices, seed=seed)` in the function `fit` of an
            `attacks.membership.Pipeline`. None omits these attacks.
        members: the training records of all clients together: a set, or pixels [N, C, H, W] in [0, 1].
        non_members: records of the same distribution that no client had, such as the test set; at least 20. They are
            needed to distinguish a leak from mere similarity.
        network: network of the run's architecture, with any weights. It is needed to attack the last global model, and
            requires members and non-members with labels.
        started_from: indices of the members with which the run initialized its synthetic images, int [S], if you know
            them. Rates are then given separately for these members and for all other members.
        invert: options of gradient inversion: the client whose update is inverted, its records, and a time limit. By
            default, the client with the fewest records in plain FedAvg is attacked for at most a minute. None omits the
            inversion.
        audit: scores of many runs of the mechanism with and without one record, or a comparison of the drawn noise with
            the recorded noise; see `Audit`. The report tests the claimed epsilon with them.
        baselines: other pipelines on the same records, by name, which are attacked in the same way for comparison:
            `{"model on raw data": Pipeline(...), "DP-SGD at equal accuracy": ...}`.
        shadows: number of shadow models per pipeline; even, at least 8. Use 32 for narrow intervals.
        workers: number of shadow models that are trained in parallel.
        max_records: largest number of members and of non-members to attack. If there are more, a fixed random subset is
            used.
        out: folder for `report.html`, `report.md` and the shadow models' scores. Default: `report` in the run's folder.
        progress: whether to show progress bars.

    Returns:
        The verdict, the findings and the paths of the files.

    Raises:
        attacks.reporting.NoRun: the folder does not contain a run.
        attacks.reporting.DamagedRun, attacks.transcript.DamagedTranscript: a file is damaged or missing.
        IncompatibleImages: images differ from the run's in shape, or are not pixels; or more than 1 % of `non_members`
            are also in `members`.
        TypeError, ValueError: another argument is not valid.
    """
    run = open_run(folder)
    check.positive_int(max_records, "max_records")
    if check.positive_int(shadows, "shadows", least=8) % 2:
        raise ValueError(f"shadows must be even because they come in pairs of complements, got {shadows}")
    check.positive_int(workers, "workers")
    check.boolean(progress, "progress")
    if started_from is not None and (members is None or non_members is None):
        raise ValueError("started_from needs members= and non_members=, without which no rate can be computed")
    for name, value, kind, home in (
        ("pipeline", pipeline, Pipeline, "attacks.membership"), ("network", network, nn.Module, "torch.nn"),
        ("invert", invert, Inversion, "attacks.reporting"), ("audit", audit, Audit, "attacks.reporting"),
    ):  # fmt: skip
        if value is not None:
            check.instance(value, kind, name, f"of {home}.{kind.__name__}")
    others = _check_baselines(pipeline, baselines)
    evidence = Evidence.gather(run, members, non_members, network, max_records)
    folder_out = check.folder(out, "out") if out is not None else run.path / "report"
    sections = [adversary_section(run), *_image_sections(evidence, started_from)]
    if evidence.observed.updates or (invert is not None and invert.build_message is not None):
        if evidence.members is None or invert is None:
            wanted = "give members=" if evidence.members is None else "give invert=Inversion(...), not None"
            sections[0].missing.append(f"what the update of a single client shows of its images: {wanted}")
        else:
            sections.append(inversion_section(evidence, invert, evidence.members))
    models = last_model_section(evidence)
    if pipeline is not None:
        add_shadows(models, pipeline, others, shadows, workers, folder_out, progress)
    else:
        why = "without them a model may look safer than it is"
        models.missing.append(f"what attacks with shadow models find, the strongest ones: give pipeline=; {why}")
    if not models.parts:
        models.add("Not attacked: see the last section.")
    sections += [models, class_section(evidence), claim_section(evidence, audit)]
    found = Findings(sections, run.starts_from_real and bool(evidence.observed.rounds or run.sends_sets))
    lists = {"Also found": found.other_leaks, "No leak found": found.not_found}
    page = [Section(title, [[*items]]) for title, items in lists.items() if items]
    page += [*sections, Section("What this report cannot determine", [[*found.missing]])]
    title = f"Privacy report of the run {run.path.resolve().name}"
    footer = "Generated by attacks.report. Intervals: 95 %, corrected for the number of attacks in each section."
    paths = folder_out / "report.html", folder_out / "report.md"
    for path, render in zip(paths, (render_html, render_markdown)):
        write_atomically(path, render(title, found.verdict, page, footer))
    return Report(found.verdict, *paths, found.leaks, found.not_found, found.missing)


def _check_baselines(pipeline: Pipeline | None, baselines: Mapping[str, Pipeline] | None) -> Mapping[str, Pipeline]:
    """Check that the baselines are pipelines on the same records as `pipeline`, and return them (empty for None)."""
    if baselines is None:
        return {}
    check.mapping(baselines, "baselines")
    if pipeline is None:
        raise ValueError("baselines are compared with the run's own pipeline: give pipeline= too")
    for name, other in baselines.items():
        if not name.strip() or not isinstance(other, Pipeline):
            raise TypeError(f"baselines must map names to Pipelines, got {name!r}: {type(other).__name__}")
        if not torch.equal(other.labels.cpu(), pipeline.labels.cpu()):
            words = "but its labels differ: give it the same images and labels"
            raise ValueError(f"baselines[{name!r}] must be on the pipeline's records in the same order, {words}")
    return baselines


def _image_sections(found: Evidence, started_from: Tensor | None) -> list[Section]:
    if not found.observed.rounds:
        return []
    if started_from is not None and found.members is not None:
        checked_indices(started_from, "started_from", len(found.members.pixels), "a member")  # before long computations
    sections = [nearest_section(found)]
    if found.members is not None:
        sections.append(recovery_section(found, found.members))
    if found.members is not None and found.non_members is not None:
        sections.append(membership_section(found, found.members, found.non_members, started_from))
    return sections
