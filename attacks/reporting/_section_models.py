"""Section of a report on membership inference from models: from the last global model alone, or with shadow models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from torch import Tensor, nn

from attacks.membership import AttackResult, Pipeline, leave_one_out, loss, margin, model_scorer, run_shadows
from attacks.reporting._evidence import Evidence, Records, with_weights
from attacks.reporting._page import Section
from attacks.reporting._rates import format_percent, judge, rate_table
from attacks.reporting._recorded_run import DamagedRun
from distillkit._utils.tables import Table


def last_model_section(found: Evidence) -> Section:
    """Return the section on models, with membership inference by one threshold on the last global model.

    This is a weak attack, which needs no shadow models.
    """
    section, network = Section("Membership inference from the model"), found.network
    if network is None or found.members is None or found.non_members is None:
        section.missing.append("what the last model reveals of records: give network=, members= and non_members=")
        return section
    if not found.run.models:
        section.missing.append("what the last model reveals of records: the folder has no checkpoint/model.safetensors")
        return section
    loaded = {name: _loaded(network, path) for name, path in found.run.models.items()}
    models = {name: model for name, model in loaded.items() if model is not None}
    if not models:
        files = f"those in {', '.join(p.name for p in found.run.models.values())}; build it as the run did"
        raise ValueError(f"network must have the run's architecture: names or shapes of weights differ from {files}")
    groups = [_set_of(found.members), _set_of(found.non_members)]
    scores: dict[str, tuple[Tensor, Tensor]] = {}
    for name, model in models.items():
        for score in (loss, margin):
            inside, outside = (model_scorer(model, score)(*one) for one in groups)
            scores[f"{score.__name__} {name}".strip()] = inside, outside
    table, points = rate_table("score", scores, len(scores))
    judge(section, "model", points, "one threshold on the last model's scores, a weak attack, identifies")
    section.add(
        "One threshold for all records on the last model's scores. This attack needs no shadow models and misses most "
        "of what a model leaks, so a negative result says little.",
        table,
    )
    return section


def _set_of(records: Records) -> tuple[Tensor, Tensor]:
    assert records.data is not None
    part = records.data[records.index]
    return part.images, part.labels


def _loaded(network: nn.Module, path: Path) -> nn.Module | None:
    """Return a copy of the network with the weights in a file; None if they are those of another architecture."""
    from safetensors.torch import load

    try:
        return with_weights(network, load(path.read_bytes()))
    except Exception as error:  # the parser raises many types, all for a damaged file
        raise DamagedRun(f"{path} cannot be read ({error}): restore the folder from a backup, or run again") from error


def add_shadows(
    section: Section, pipeline: Pipeline, baselines: Mapping[str, Pipeline], count: int, workers: int, out: Path,
    progress: bool,
) -> None:  # fmt: skip
    """Run attacks with shadow models, and add their results to the section on models.

    Each shadow model is the result of the whole `pipeline` on a part of the records, and is attacked once. For
    comparison, the shadow models of each baseline are attacked in the same way.

    Args:
        section: the section.
        pipeline, count, workers, out, progress: arguments of `attacks.membership.run_shadows`.
        baselines: other pipelines with the same records as `pipeline`, by name.
    """

    def attacked(one: Pipeline, folder: str) -> dict[tuple[str, str], AttackResult]:
        made = run_shadows(one, count, out=out / folder, workers=workers, progress=progress)
        wanted = max(0.01, (1 + 1e-9) / (len(one.images) // 2))
        tried = 5 * (len(made.scores) - 1)
        return {
            (name, attack): result
            for name in made.scores
            for attack, result in leave_one_out(made, scorer=name, fpr=wanted, also_tried=tried, progress=False).items()
        }

    found = attacked(pipeline, "shadows")
    others = {name: attacked(one, f"shadows-{quote(name, safe='')}") for name, one in baselines.items()}
    leaks = {key: one for key, one in found.items() if one.tpr.low > one.fpr.high or one.auc.low > 0.5}
    for scorer in dict.fromkeys(name for name, _ in leaks):
        own = {attack: one for (name, attack), one in leaks.items() if name == scorer}
        attack, best = max(own.items(), key=lambda one: one[1].auc.low)
        auc, tpr, fpr = _cells(best)
        words = f"AUC {auc}, true positives {tpr} at {fpr} false positives ({count} shadows)"
        section.leak("shadows", f"{attack} on the {scorer} separates members from non-members: {words}")
    if not leaks:
        highest = max(found.values(), key=lambda one: one.tpr.high)
        upper, errors = format_percent(highest.tpr.high), format_percent(highest.nominal_fpr)
        words = f"identify at most {upper} of the members at about {errors} false positives"
        section.negatives.append(("shadows", f"attacks with {count} shadows {words}"))
    if not baselines:
        section.missing.append(
            "whether the model leaks less than one trained on the raw data, or by DP-SGD at equal accuracy: give "
            "baselines={'model on raw data': Pipeline(...)}"
        )
    header = ("pipeline", "scores of", "attack", "AUC", "true positives", "false positives")
    groups = [("this run", found), *others.items()]
    cells = [(name, *key, *_cells(one)) for name, group in groups for key, one in group.items()]
    section.add(
        f"{count} shadows: the whole pipeline repeated on halves of the records. Each shadow is attacked in turn, with "
        "thresholds from the others. The intervals hold simultaneously for all rows of one pipeline."
        + (" The baselines are attacked in the same way, on the same halves." if baselines else ""),
        Table(header, cells, left=3),
    )


def _cells(found: AttackResult) -> list[str]:
    auc = f"{found.auc.value:.3f} ({found.auc.low:.3f} to {found.auc.high:.3f})"
    rates = [f"{100 * r.value:.1f} % ({100 * r.low:.1f} to {100 * r.high:.1f})" for r in (found.tpr, found.fpr)]
    return [auc, *rates]
