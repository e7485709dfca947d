"""Scores of records under shadow models, and the inputs of an attack on one of these models."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attacks.membership._inputs import finite_scores
from distillkit._utils import check
from distillkit._utils.display import short_repr


@dataclass(frozen=True, eq=False)
class Target:
    """Inputs of an attack with R shadow models on a target model.

    The target's training records are what the attack must find out, so they are not among the inputs.

    Attributes:
        scores: scores of the N candidate records under the target, float64 [N] or [N, d].
        inside: whether each shadow model was trained on each record, bool [R, N].
        shadows: scores of the records under the shadow models, [R, N] or [R, N, d].
        population_scores: scores under the target of Z population records, on which no model was trained, [Z]; None if
            there is no population.
        population_shadows: scores of these population records under the shadow models, [R, Z]; None if there is no
            population.
        labels: classes of the records, int64 [N]; None if unknown.
    """

    scores: Tensor
    inside: Tensor
    shadows: Tensor
    population_scores: Tensor | None
    population_shadows: Tensor | None
    labels: Tensor | None

    __repr__ = short_repr


@dataclass(frozen=True, eq=False)
class ShadowScores:
    """Scores of N records under S shadow models, each of which was trained on some of the records.

    `run_shadows` returns these scores. You can also construct them from your own models. The training records of the
    models (rows of `inside`) must be drawn independently of each other, or in complementary pairs.

    Args:
        inside: whether each model was trained on each record, bool [S, N].
        scores: scores of the records under each model, by scorer name: [S, N], or [S, N, d] if the scorer returns d
            scores for each record; higher for members.
        population: scores of Z records on which no model was trained, [S, Z] or [S, Z, d], by scorer name.
        labels: classes of the records, int [N]; only some attacks need them.

    Attributes:
        inside, scores, population, labels: arguments of the constructor; scores are converted to float64.

    Raises:
        TypeError, ValueError: the shapes of the tensors do not fit each other, or a score is not finite.
    """

    inside: Tensor
    scores: Mapping[str, Tensor]
    population: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        check.bool_tensor(self.inside, "inside", "[S, N]")
        if self.inside.ndim != 2 or 0 in self.inside.shape:
            raise ValueError(f"inside must be [S, N], neither empty, got {list(self.inside.shape)}")
        check.mapping(self.scores, "scores")
        check.mapping(self.population, "population")
        if not self.scores:
            raise ValueError("scores must hold at least one scorer's, got none")
        unknown = sorted(set(self.population) - set(self.scores))
        if unknown:
            raise ValueError(f"population must have scorers of scores, {sorted(self.scores)}, got {unknown}")
        checked: dict[str, dict[str, Tensor]] = {"scores": {}, "population": {}}
        for kind, given in (("scores", self.scores), ("population", self.population)):
            for name, values in given.items():
                values = finite_scores(values, f"{kind}[{name!r}]")
                count = self.inside.shape if kind == "scores" else self.inside.shape[:1]
                if values.ndim not in (2, 3) or values.shape[: len(count)] != count or 0 in values.shape:
                    raise ValueError(f"{kind}[{name!r}] must be {list(count)} or more, got {list(values.shape)}")
                checked[kind][name] = values
            object.__setattr__(self, kind, checked[kind])
        if self.labels is not None:
            object.__setattr__(self, "labels", check.class_labels(self.labels, self.inside.shape[1], None))

    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.inside)

    def without(self, number: int) -> ShadowScores:
        """Return the scores of all shadow models except the one with index `number` and its complement.

        The complement is the model that was trained on exactly those records on which model `number` was not trained.

        Raises:
            TypeError, ValueError: there is no model `number`; no other model is left; or the number of remaining models
                that were trained on a record would reveal whether model `number` was trained on it.
        """
        number = check.positive_int(number, "number", least=0, most=len(self) - 1)
        own = self.inside[number]
        rest = ~((self.inside == own).all(1) | (self.inside == ~own).all(1))
        if not bool(rest.any()):
            raise ValueError(
                f"inside must have shadows besides {number} and its complement, got {len(self)} in total; run more"
            )
        times = self.inside[rest].sum(0)
        with_, without = times[own].tolist(), times[~own].tolist()
        if len(set(with_)) == len(set(without)) == 1 and with_[0] != without[0]:
            raise ValueError(
                f"inside must not be balanced except by pairs of complements: the other shadows have a record of "
                f"shadow {number} {with_[0]} times and another one {without[0]} times, which reveals them; draw the "
                "halves independently, or use attacks.membership.halves"
            )
        return self.only(rest)

    def only(self, kept: Tensor) -> ShadowScores:
        """Return the scores of some of the shadow models.

        Args:
            kept: whether to keep each model, bool [S].
        """
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != (len(self),) or not kept.any():
            got = f"{kept.dtype} {list(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
            raise ValueError(f"kept must be a bool tensor [{len(self)}] that keeps at least one model, got {got}")
        found = copy(self)  # already validated
        object.__setattr__(found, "inside", self.inside[kept])
        object.__setattr__(found, "scores", {n: s[kept] for n, s in self.scores.items()})
        object.__setattr__(found, "population", {n: s[kept] for n, s in self.population.items()})
        return found

    def target(self, number: int, scorer: str) -> Target:
        """Return the inputs of an attack on one of the shadow models.

        The attack compares the scores of this model with those of all other models except its complement, the model
        trained on exactly the other records.

        Args:
            number: index of the shadow model to attack.
            scorer: name of the scorer whose scores the attack uses.

        Raises:
            TypeError, ValueError: there is no such shadow model or scorer, or the other models cannot be used for the
                attack (see `without`).
        """
        check.one_of(scorer, "scorer", tuple(self.scores))
        rest = self.without(number)
        z, z_rest = self.population.get(scorer), rest.population.get(scorer)
        return Target(
            self.scores[scorer][number], rest.inside, rest.scores[scorer], None if z is None else z[number], z_rest,
            self.labels,
        )  # fmt: skip
