"""Scores of shadow models, and the view of one shadow as the target of an attack that uses all other shadows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field

from torch import Tensor

from attacks.membership._inputs import finite_scores
from distillkit._utils import check
from distillkit._utils.display import short_repr

__all__ = ["ShadowScores", "Target"]


@dataclass(frozen=True, eq=False)
class Target:
    """Input of an attack with shadow models: the target's scores, and the other shadows' scores with their membership.

    The target's own membership is not included.

    Attributes:
        scores: the target's scores, float64 [N] or [N, d].
        inside: whether each other shadow was trained on each record, bool [R, N].
        shadows: scores of the other shadows [R, N] or [R, N, d].
        z_scores, z_shadows: scores of the population under the target, [Z], and under the other shadows, [R, Z]; None
            without a population.
        labels: classes of the records, int64 [N]; None if unknown.
    """

    scores: Tensor
    inside: Tensor
    shadows: Tensor
    z_scores: Tensor | None
    z_shadows: Tensor | None
    labels: Tensor | None

    __repr__ = short_repr


@dataclass(frozen=True, eq=False)
class ShadowScores:
    """Scores of all records under many runs of one pipeline, each on some of the records; see `run_shadows`.

    You can also construct it from your own scores. Rows of `inside` must be drawn independently of each other, or be
    pairs of complements.

    Args:
        inside: whether each run used each record, bool [S, N].
        scores: scores by scorer name, [S, N] or [S, N, d], higher for members.
        population: scores of records that no run used, [S, Z] or [S, Z, d], by scorer name.
        labels: classes of the records, int [N], if an attack needs them.

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
        """Return the shadows that are independent of shadow `number`: all except itself and its complement.

        Raises:
            TypeError, ValueError: there is no such shadow; or the number of other shadows trained on a record reveals
                whether this shadow was trained on it, so that no attack would be meaningful.
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
        """Return some of the shadows.

        Args:
            kept: whether to keep each shadow, bool [S].
        """
        found = copy(self)  # already validated
        object.__setattr__(found, "inside", self.inside[kept])
        object.__setattr__(found, "scores", {n: s[kept] for n, s in self.scores.items()})
        object.__setattr__(found, "population", {n: s[kept] for n, s in self.population.items()})
        return found

    def target(self, number: int, scorer: str) -> Target:
        """Return shadow `number` as the target of an attack that uses the shadows of `without(number)`.

        Args:
            number: index of the shadow.
            scorer: name of the scorer.

        Raises:
            TypeError, ValueError: there is no such shadow or scorer, or no other shadow is left.
        """
        check.one_of(scorer, "scorer", tuple(self.scores))
        rest = self.without(number)
        z, z_rest = self.population.get(scorer), rest.population.get(scorer)
        return Target(
            self.scores[scorer][number], rest.inside, rest.scores[scorer], None if z is None else z[number], z_rest,
            self.labels,
        )  # fmt: skip

    def targets(self, scorer: str) -> Iterator[tuple[Target, Tensor]]:
        """Yield every shadow as a target, with its true membership, bool [N], for evaluating the attack.

        Args:
            scorer: name of the scorer.
        """
        for number in range(len(self)):
            yield self.target(number, scorer), self.inside[number]
