"""Privacy report of a finished run, made from the run's folder and from images that the user passes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attacks.membership import Pipeline
from attacks.reporting._findings import MIN_NON_MEMBERS, Findings
from attacks.reporting._findings import verdict as verdict_of
from attacks.reporting._recorded_run import RecordedRun, open_run
from attacks.reporting._rendering import BulletList, Section, render_html, render_markdown
from attacks.reporting._section_images import Records, membership_section, nearest_section, recovery_section
from attacks.reporting._section_messages import ObservedData, adversary_section, class_section
from attacks.reporting._section_models import last_model_parts, shadow_parts
from attacks.reporting.inversion import Inversion, inversion_section
from attacks.reporting.privacy_claim import Audit, claim_section
from attacks.reporting.published_set import SHARED, digests
from distillkit._utils import check
from distillkit._utils.files import write_atomically
from distillkit.rng import derive
from distillkit.sets import LabeledImages

__all__ = ["IncompatibleImages", "Report", "report"]

_INVERSION = Inversion()


class IncompatibleImages(ValueError):
    """Error: images are not pixels in [0, 1], or differ from the run's images in shape or normalization."""


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
        IncompatibleImages: images differ from the run's in shape or normalization, or are not pixels; or more than 1 %
            of `non_members` are also in `members`.
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
    for value, name, kind in (
        (pipeline, "pipeline", Pipeline), (network, "network", nn.Module), (invert, "invert", Inversion),
        (audit, "audit", Audit)
    ):  # fmt: skip
        if value is not None and not isinstance(value, kind):
            wanted = "an nn.Module" if kind is nn.Module else f"of {kind.__module__.rsplit('.', 1)[0]}.{kind.__name__}"
            raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")
    others = _check_baselines(pipeline, baselines)
    member_records = _select_records(members, "members", run, max_records)
    non_member_records = _select_records(non_members, "non_members", run, max_records)
    if network is not None and any(r is not None and r.data is None for r in (member_records, non_member_records)):
        raise ValueError("members and non_members must be LabeledImages if a network is given, which needs the labels")
    if non_member_records is not None and len(non_member_records.index) < MIN_NON_MEMBERS:
        raise ValueError(
            f"non_members must be at least {MIN_NON_MEMBERS}, got {len(non_member_records.index)}: give the whole test "
            "set"
        )
    if member_records is not None and non_member_records is not None:
        _require_other_records(member_records, non_member_records)
    if network is not None:
        for name, records in (("members", member_records), ("non_members", non_member_records)):
            _require_normalization(run, name, records)
    folder_out = check.folder(out, "out") if out is not None else run.path / "report"
    findings, sections = Findings(), [adversary_section(run)]
    observed = ObservedData.from_run(run)
    sections += _image_sections(run, observed, member_records, non_member_records, started_from, findings)
    if observed.updates or (invert is not None and invert.build_message is not None):
        if member_records is None or invert is None:
            wanted = "give members=" if member_records is None else "give invert=Inversion(...), not None"
            findings.missing.append(f"what the update of a single client shows of its images: {wanted}")
        else:
            sections.append(inversion_section(run, invert, network, member_records, non_member_records, findings))
    section = _model_section(run, network, member_records, non_member_records, findings)
    if pipeline is not None:
        section.parts += shadow_parts(pipeline, others, shadows, workers, folder_out, progress, findings)
    else:
        findings.missing.append(
            "what attacks with shadow models find, which are the strongest: give pipeline=; without them a model may "
            "look safer than it is"
        )
    if not section.parts:
        section.parts.append("Not attacked: see the last section.")
    sections += [section, class_section(run, observed, findings), claim_section(run, observed, audit, findings)]
    verdict = verdict_of(findings)
    title = f"Privacy report of the run {run.path.resolve().name}"
    lists = [BulletList("Also found", findings.other_leaks), BulletList("No leak found", findings.not_found)]
    sections.append(Section("What this report cannot determine", [BulletList("", findings.missing)]))
    footer = "Generated by attacks.report. Intervals: 95 %, corrected for the number of attacks in each section."
    page = (title, verdict, [one for one in lists if one.items], sections, footer)
    write_atomically(folder_out / "report.html", render_html(*page))
    write_atomically(folder_out / "report.md", render_markdown(*page))
    return Report(
        verdict, folder_out / "report.html", folder_out / "report.md",
        *map(tuple, (findings.leaks, findings.not_found, findings.missing)),
    )  # fmt: skip


def _check_baselines(pipeline: Pipeline | None, baselines: Mapping[str, Pipeline] | None) -> Mapping[str, Pipeline]:
    """Check that the baselines are pipelines on the same records as `pipeline`, and return them (empty for None)."""
    if baselines is None:
        return {}
    check.mapping(baselines, "baselines")
    if pipeline is None:
        raise ValueError("baselines are compared with the run's own pipeline: give pipeline= too")
    for name, other in baselines.items():
        if not isinstance(name, str) or not name.strip() or not isinstance(other, Pipeline):
            raise TypeError(f"baselines must map names to Pipelines, got {name!r}: {type(other).__name__}")
        if not torch.equal(other.labels.cpu(), pipeline.labels.cpu()):
            raise ValueError(
                f"baselines[{name!r}] must be on the pipeline's records in the same order, but its labels differ: "
                "give it the same images and labels"
            )
    return baselines


def _image_sections(
    run: RecordedRun,
    observed: ObservedData,
    members: Records | None,
    non_members: Records | None,
    started_from: Tensor | None,
    findings: Findings,
) -> list[Section]:
    if not run.transcript and run.published_set is None:
        findings.missing.append(f"what was sent: the run kept no transcript; {run.transcript_hint}")
    if run.starts_from_real and (observed.rounds or run.sends_sets):
        findings.sends_records = True
    if not observed.rounds:
        return []
    if members is None:
        findings.missing.append("which records the sent images show: give members=, the private training images")
        return [nearest_section(observed, None, None)]
    if non_members is None:
        findings.missing.append("whether similarity is a leak: give non_members=, such as the test set")
    sections = [
        nearest_section(observed, members, non_members),
        recovery_section(observed, members, non_members, findings),
    ]
    if non_members is not None:
        sections.append(membership_section(observed, members, non_members, started_from, findings))
    return sections


def _model_section(
    run: RecordedRun,
    network: nn.Module | None,
    members: Records | None,
    non_members: Records | None,
    findings: Findings,
) -> Section:
    section = Section("Membership inference from the model")
    if network is None or members is None or non_members is None:
        findings.missing.append("what the last model reveals of records: give network=, members= and non_members=")
    elif not run.models:
        findings.missing.append(
            "what the last model reveals of records: the folder has no checkpoint/model.safetensors"
        )
    else:
        section.parts += last_model_parts(run, network, members, non_members, findings)
    return section


def _require_other_records(members: Records, non_members: Records) -> None:
    known = set(digests(members.pixels))
    shared, count = sum(one in known for one in digests(non_members.pixels)), len(non_members.pixels)
    if shared > SHARED * count:
        raise IncompatibleImages(
            f"members and non_members must not share records, but {shared} of {count} non_members are also members: "
            "non_members must not have been used for training"
        )


def _require_normalization(run: RecordedRun, name: str, records: Records | None) -> None:
    """Check that records have the run's normalization, because the network gets their images without conversion.

    Args:
        run: the recorded run.
        name: name of the argument that holds the records, for error messages.
        records: the records; None if the user passed none.

    Raises:
        IncompatibleImages: the normalizations differ.
    """
    own = records.data.normalization if records is not None and records.data is not None else None
    wanted = run.normalization
    if own is None or wanted is None:
        return
    if own.zca is not None or [[round(v, 6) for v in part] for part in (own.mean, own.std)] != wanted:
        raise IncompatibleImages(
            f"{name} must be normalized as in the run, by mean {wanted[0]} and std {wanted[1]}, got {own}: call "
            "renormalize on the set"
        )


def _select_records(given: LabeledImages | Tensor | None, name: str, run: RecordedRun, most: int) -> Records | None:
    if given is None:
        return None
    data = given if isinstance(given, LabeledImages) else None
    images = check.batch_of_images(data.images if data is not None else given, name)  # type: ignore[arg-type]
    pixels = data.normalization.decode(images) if data is not None else images
    if float(pixels.min()) < -0.01 or float(pixels.max()) > 1.01:
        raise IncompatibleImages(
            f"{name} must be pixels in [0, 1] or a set with its normalization, got {float(pixels.min()):.3g} to "
            f"{float(pixels.max()):.3g}: give LabeledImages(images, labels, normalization=...)"
        )
    if run.shape is not None and tuple(images.shape[1:]) != run.shape:
        raise IncompatibleImages(
            f"{name} must have the shape of the run's images, {list(run.shape)}, got {list(images.shape[1:])}: load "
            "them as the run did (the same size=)"
        )
    count, purpose = len(images), "members" if name == "members" else "outsiders"
    order = torch.randperm(count, generator=derive(0, purpose)) if count > most else torch.arange(count)
    return Records(pixels.clamp(0, 1).float().cpu(), order[:most].sort().values, data)
