"""Parts of a report on membership inference from models: from the last global model alone, or with shadow models."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from attacks.membership import AttackResult, Pipeline, leave_one_out, loss, margin, model_scorer, run_shadows
from attacks.reporting._findings import Findings, evaluate_scores, format_percent, is_significant
from attacks.reporting._recorded_run import DamagedRun, RecordedRun
from attacks.reporting._rendering import Table
from attacks.reporting._section_images import Records

__all__ = ["last_model_parts", "shadow_parts"]


def last_model_parts(
    run: RecordedRun, network: nn.Module, members: Records, non_members: Records, findings: Findings
) -> list[str | Table]:
    """Run membership inference with one threshold on the last global model, and return the report's text and table.

    This is a weak attack, which needs no shadow models.

    Args:
        run: the recorded run.
        network: network of the run's architecture, with any weights.
        members: training records, with labels.
        non_members: records that were not used for training, with labels.
        findings: findings of the report, to which the result is added.
    """
    fitted = {name: _loaded(network, path) for name, path in run.models.items()}
    models = {name: model for name, model in fitted.items() if model is not None}
    if not models:
        raise ValueError(
            f"network must have the run's architecture: names or shapes of its weights differ from those in "
            f"{', '.join(p.name for p in run.models.values())}; build it as the run did"
        )
    tried, rows, points = 2 * len(models), [], []
    for name, model in models.items():
        for score in (loss, margin):
            area, point = evaluate_scores(_scores(model, score, members), _scores(model, score, non_members), tried)
            rows.append([f"{score.__name__} {name}".strip(), f"{area:.3f}", str(point.tpr), str(point.fpr)])
            points.append(point)
    leaks = [point for point in points if is_significant(point)]
    if leaks:
        best = max(leaks, key=lambda point: point.tpr.low - point.fpr.high)
        findings.add_leak(
            "model",
            f"one threshold on the last model's scores identifies {format_percent(best.tpr.value)} of the members at "
            f"{format_percent(best.fpr.value)} false positives",
        )
    else:
        findings.add_negative(
            "model",
            f"one threshold on the last model, a weak attack, identifies at most "
            f"{format_percent(max(p.tpr.high for p in points))} of the members, not significantly more than of "
            "non-members",
        )
    return [
        "One threshold for all records on the last model's scores. This attack needs no shadow models and misses most "
        "of what a model leaks, so a negative result says little.",
        Table(["score", "AUC", "true positives", "false positives"], rows),
    ]


def _loaded(network: nn.Module, path: Path) -> nn.Module | None:
    from safetensors.torch import load

    try:
        weights = load(path.read_bytes())
    except Exception as error:  # the parser raises many types, all for a damaged file
        raise DamagedRun(f"{path} cannot be read ({error}): restore the folder from a backup, or run again") from error
    model = copy.deepcopy(network).cpu()
    own = model.state_dict()
    if set(own) != set(weights) or any(own[n].shape != t.shape for n, t in weights.items()):
        return None
    model.load_state_dict(weights)
    return model


def _scores(network: nn.Module, score: Callable[[Tensor, Tensor], Tensor], records: Records) -> Tensor:
    assert records.data is not None
    part = records.data[records.index]
    return model_scorer(network, score)(part.images, part.labels)


def shadow_parts(
    pipeline: Pipeline, baselines: Mapping[str, Pipeline], count: int, workers: int, out: Path, progress: bool,
    findings: Findings
) -> list[str | Table]:  # fmt: skip
    """Run attacks with shadow models, and return the report's text and table.

    Each shadow model is the result of the whole `pipeline` on a part of the records, and is attacked once. For
    comparison, the shadow models of each baseline are attacked in the same way.

    Args:
        pipeline, count, workers, out, progress: arguments of `attacks.membership.run_shadows`.
        baselines: other pipelines with the same records as `pipeline`, by name.
        findings: findings of the report, to which the result for `pipeline` is added.
    """
    found = _shadowed(pipeline, count, workers, out / "shadows", progress)
    rows = [[*key, *_cells(one)] for key, one in found.items()]
    highest = max(found.values(), key=lambda one: one.tpr.high)
    leaks = {k: one for k, one in found.items() if one.tpr.low > one.fpr.high or one.auc.low > 0.5}
    for scorer in dict.fromkeys(name for name, _ in leaks):
        own = {attack: one for (name, attack), one in leaks.items() if name == scorer}
        attack, best = max(own.items(), key=lambda one: one[1].auc.low)
        auc, tpr, fpr = _cells(best)
        findings.add_leak(
            "shadows",
            f"{attack} on the {scorer} separates members from non-members: AUC {auc}, true positives {tpr} at {fpr} "
            f"false positives ({count} shadows)",
        )
    if not leaks:
        findings.add_negative(
            "shadows",
            f"attacks with {count} shadows identify at most {format_percent(highest.tpr.high)} of the members at about "
            f"{format_percent(highest.nominal_fpr)} false positives",
        )
    header = ["scores of", "attack", "AUC", "true positives", "false positives"]
    words = (
        f"{count} shadows: the whole pipeline repeated on halves of the records. Each shadow is attacked in turn, with "
        "thresholds from the others. The intervals hold simultaneously for all rows."
    )
    if not baselines:
        findings.missing.append(
            "whether the model leaks less than one trained on the raw data, or by DP-SGD at equal accuracy: give "
            "baselines={'model on raw data': Pipeline(...)}"
        )
        return [words, Table(header, rows)]
    rows = [["this run", *row] for row in rows]
    for name, other in baselines.items():
        folder = re.sub(r"\W+", "_", name)
        baseline = _shadowed(other, count, workers, out / f"shadows-{folder}", progress)
        rows += [[name, *key, *_cells(one)] for key, one in baseline.items()]
    together = words.replace("all rows", "all rows of one pipeline")
    return [
        f"{together} The baselines are attacked in the same way, on the same halves.",
        Table(["pipeline", *header], rows),
    ]


def _shadowed(
    pipeline: Pipeline, count: int, workers: int, out: Path, progress: bool
) -> dict[tuple[str, str], AttackResult]:
    """Train shadow models by repeating a `Pipeline`, and evaluate all attacks on the membership scores.

    Args:
        pipeline, count, workers, out, progress: arguments of `attacks.membership.run_shadows`.

    Returns:
        The result of each attack, by a pair: name of the scoring function, name of the attack.
    """
    made = run_shadows(pipeline, count, out=out, workers=workers, progress=progress)
    wanted = min(1.0, max(0.01, (1 + 1e-9) / (len(pipeline.images) // 2)))
    tried = 5 * (len(made.scores) - 1)
    return {
        (name, attack): one
        for name in made.scores
        for attack, one in leave_one_out(made, scorer=name, fpr=wanted, also_tried=tried, progress=False).items()
    }


def _cells(found: AttackResult) -> list[str]:
    auc = f"{found.auc.value:.3f} ({found.auc.low:.3f} to {found.auc.high:.3f})"
    rates = [f"{100 * r.value:.1f} % ({100 * r.low:.1f} to {100 * r.high:.1f})" for r in (found.tpr, found.fpr)]
    return [auc, *rates]
