"""Sections on models: one threshold on the last model's scores, and attacks with shadows of the whole pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from attacks.membership import Pipeline, leave_one_out, loss, margin, model_scorer
from attacks.membership import shadows as run_shadows
from attacks.reporting.folder import DamagedRun, RunFolder
from attacks.reporting.judged import finds, judged, percent
from attacks.reporting.page import Table
from attacks.reporting.records import Records
from attacks.reporting.verdict import Outcome

__all__ = ["of_model", "of_pipeline"]


def of_model(
    run: RunFolder, network: nn.Module, inside: Records, outside: Records, outcome: Outcome
) -> list[str | Table]:
    """The last model attacked with one threshold for all records: the weak attack that needs nothing else.

    Args:
        run: its folder.
        network: of the run's architecture.
        inside, outside: members, and others, with labels.
        outcome: gets the finding.
    """
    fitted = {name: _loaded(network, path) for name, path in run.models.items()}
    models = {name: model for name, model in fitted.items() if model is not None}
    if not models:
        raise ValueError(
            f"network must be of the run's architecture: its weights have other names or shapes than those in "
            f"{', '.join(p.name for p in run.models.values())}; build it as the run did"
        )
    tried, rows, points = 2 * len(models), [], []
    for name, model in models.items():
        for score in (loss, margin):
            area, point = judged(_scores(model, score, inside), _scores(model, score, outside), tried)
            rows.append([f"{score.__name__} {name}".strip(), f"{area:.3f}", str(point.tpr), str(point.fpr)])
            points.append(point)
            if finds(point):
                outcome.leaks.append(
                    f"one threshold on the last model's {score.__name__} finds {percent(point.tpr.value)} of the "
                    f"members at {percent(point.fpr.value)} false positives"
                )
    if not any(finds(point) for point in points):
        outcome.looked.append(
            f"one threshold on the last model, a weak attack, finds at most {percent(max(p.tpr.high for p in points))} "
            "of the members, not surely more than of strangers"
        )
    return [
        "One threshold for all records on the last model's scores. It needs no shadows and misses most of what a model "
        "gives away: a harmless line here is no acquittal.",
        Table(["score", "AUC", "true positives", "false positives"], rows),
    ]


def _loaded(network: nn.Module, path: Path) -> nn.Module | None:
    from safetensors.torch import load

    try:
        weights = load(path.read_bytes())
    except Exception as error:  # the parser fails in many ways, and all of them mean the same here
        raise DamagedRun(f"{path} cannot be read ({error}): take the folder from a backup, or run again") from error
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


def of_pipeline(
    pipeline: Pipeline, count: int, workers: int, out: Path, progress: bool, outcome: Outcome
) -> list[str | Table]:
    """Attacks with shadows of the whole pipeline, each shadow in turn the target.

    Args:
        pipeline, count, workers, out, progress: as `attacks.membership.shadows` takes them.
        outcome: gets the finding.
    """
    made = run_shadows(pipeline, count, out=out, workers=workers, progress=progress)
    wanted = min(1.0, max(0.01, (1 + 1e-9) / (len(pipeline.images) // 2)))
    rows, highest, leaked = [], 0.0, False
    for name in made.scores:
        tried = 5 * (len(made.scores) - 1)
        for attack, found in leave_one_out(made, name=name, fpr=wanted, also_tried=tried, progress=False).items():
            auc = f"{found.auc.value:.3f} ({found.auc.low:.3f} to {found.auc.high:.3f})"
            rates = [f"{100 * r.value:.1f} % ({100 * r.low:.1f} to {100 * r.high:.1f})" for r in (found.tpr, found.fpr)]
            rows.append([name, attack, auc, *rates])
            highest = max(highest, found.tpr.high)
            if found.tpr.low > found.fpr.high or found.auc.low > 0.5:
                leaked = True
                outcome.leaks.append(
                    f"{attack} on the {name} tells members from others: AUC {auc}, true positives {rates[0]} at "
                    f"{rates[1]} false ones ({len(made)} shadows)"
                )
    if not leaked:
        outcome.looked.append(
            f"with {len(made)} shadows at most {percent(highest)} of the members are found at about {percent(wanted)} "
            "false positives"
        )
    return [
        f"{len(made)} shadows: the whole pipeline run again on halves of the records; each is attacked in turn, with "
        "thresholds from the others. Intervals hold for all lines together.",
        Table(["scores of", "attack", "AUC", "true positives", "false positives"], rows),
    ]
