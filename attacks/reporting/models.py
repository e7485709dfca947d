"""Sections on models: one threshold on the last model's scores, and attacks with shadows of the whole pipeline."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from attacks.membership import Found, Pipeline, leave_one_out, loss, margin, model_scorer
from attacks.membership import shadows as run_shadows
from attacks.reporting.folder import DamagedRun, RunFolder
from attacks.reporting.judged import finds, judged, percent
from attacks.reporting.page import Table
from attacks.reporting.records import Records
from attacks.reporting.verdict import Outcome

__all__ = ["of_model", "of_pipelines"]


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
    leaks = [point for point in points if finds(point)]
    if leaks:
        best = max(leaks, key=lambda point: point.tpr.low - point.fpr.high)
        outcome.find(
            "model",
            f"one threshold on the last model's scores finds {percent(best.tpr.value)} of the members at "
            f"{percent(best.fpr.value)} false positives",
        )
    else:
        outcome.clear(
            "model",
            f"one threshold on the last model, a weak attack, finds at most {percent(max(p.tpr.high for p in points))} "
            "of the members, not surely more than of strangers",
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


def of_pipelines(
    pipeline: Pipeline, baselines: Mapping[str, Pipeline], count: int, workers: int, out: Path, progress: bool,
    outcome: Outcome,
) -> list[str | Table]:  # fmt: skip
    """Attacks with shadows of the whole pipeline, each shadow in turn the target; and the same on others beside it.

    Args:
        pipeline, count, workers, out, progress: as `attacks.membership.shadows` takes them.
        baselines: pipelines on the same records to compare with, by name.
        outcome: gets the finding on `pipeline`.
    """
    found = _shadowed(pipeline, count, workers, out / "shadows", progress)
    rows = [[*key, *_cells(one)] for key, one in found.items()]
    highest = max(found.values(), key=lambda one: one.tpr.high)
    leaks = {k: one for k, one in found.items() if one.tpr.low > one.fpr.high or one.auc.low > 0.5}
    for scorer in dict.fromkeys(name for name, _ in leaks):
        own = {attack: one for (name, attack), one in leaks.items() if name == scorer}
        attack, best = max(own.items(), key=lambda one: one[1].auc.low)
        auc, tpr, fpr = _cells(best)
        outcome.find(
            "shadows",
            f"{attack} on the {scorer} tells members from others: AUC {auc}, true positives {tpr} at {fpr} false ones "
            f"({count} shadows)",
        )
    if not leaks:
        outcome.clear(
            "shadows",
            f"with {count} shadows at most {percent(highest.tpr.high)} of the members are found at about "
            f"{percent(highest.wanted)} false positives",
        )
    header = ["scores of", "attack", "AUC", "true positives", "false positives"]
    words = (
        f"{count} shadows: the whole pipeline run again on halves of the records; each is attacked in turn, with "
        "thresholds from the others. Intervals hold for all lines together."
    )
    if not baselines:
        outcome.missing.append(
            "whether the model gives away less than one trained on the raw data, or by DP-SGD at equal accuracy: give "
            "baselines={'model on raw data': Pipeline(...)}"
        )
        return [words, Table(header, rows)]
    rows = [["this run", *row] for row in rows]
    for name, other in baselines.items():
        beside = _shadowed(other, count, workers, out / f"shadows-{_folder(name)}", progress)
        rows += [[name, *key, *_cells(one)] for key, one in beside.items()]
    together = words.replace("all lines together", "all lines of one pipeline together")
    return [f"{together} The same attacks on the baselines, with the same halves.", Table(["pipeline", *header], rows)]


def _shadowed(pipeline: Pipeline, count: int, workers: int, out: Path, progress: bool) -> dict[tuple[str, str], Found]:
    """What each attack finds by each scorer."""
    made = run_shadows(pipeline, count, out=out, workers=workers, progress=progress)
    wanted = min(1.0, max(0.01, (1 + 1e-9) / (len(pipeline.images) // 2)))
    tried = 5 * (len(made.scores) - 1)
    return {
        (name, attack): one
        for name in made.scores
        for attack, one in leave_one_out(made, name=name, fpr=wanted, also_tried=tried, progress=False).items()
    }


def _cells(found: Found) -> list[str]:
    auc = f"{found.auc.value:.3f} ({found.auc.low:.3f} to {found.auc.high:.3f})"
    rates = [f"{100 * r.value:.1f} % ({100 * r.low:.1f} to {100 * r.high:.1f})" for r in (found.tpr, found.fpr)]
    return [auc, *rates]


def _folder(name: str) -> str:
    return re.sub(r"\W+", "_", name)
