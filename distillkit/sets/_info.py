"""Rule for the `info` of a set that is made from other sets: guarantees compose or go, and marks are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distillkit.normalization import Normalization

GUARANTEE = (
    "epsilon", "delta", "relation", "accountant", "valid_if", "budget", "reason", "nominal_epsilon", "remarks",
    "assumed_public",
)  # fmt: skip
"""Entries of `info` that state a guarantee. `distillkit.privacy.Guarantee.info` returns them."""

_MARKS = ("publishes", "derived")
_REPEATED = "repeated images"
_SUMS = "epsilon and delta are sums over joined sets; a ledger that paid for all of them states less"

Info = Mapping[str, Any]


def combined_info(infos: Sequence[Info], unknown: str = "") -> dict[str, Any]:
    """Return the `info` of a set that is made from the sets with the given `info`.

    - The guarantee holds if every set has one: epsilon and delta are added (basic composition), which also holds if the
      sets were made from the same records. Otherwise `epsilon` is None, and `reason` states why.
    - `publishes` and `derived` list the entries of all sets, separated by "; ".
    - Other entries are kept if they are the same in all sets. If they are not, `provenance` lists the `info` of each.

    Args:
        infos: `info` of each set, at least one.
        unknown: description of further content whose origin is unknown, such as "the images were replaced". It ends a
            guarantee.

    Source: basic composition of Dwork and Roth, "The algorithmic foundations of differential privacy" (2014), theorem
    3.16.
    """
    distinct = _distinct(infos)
    first, *others = distinct
    made = {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}
    made = {k: v for k, v in made.items() if k not in GUARANTEE}
    if others:
        made["provenance"] = _distinct(entry for info in distinct for entry in _provenance(info))
    return made | inherited_info(infos, unknown)


def derived_info(facts: Info, sources: Sequence[Info], method: str, unknown: str = "") -> dict[str, Any]:
    """Return the `info` of a set whose images a method selected or computed from other sets.

    The entry `derived` names the method. Such images depend on several records, so private methods refuse them as
    records. The guarantee and the marks of the sources are kept as in `combined_info`.

    Args:
        facts: description of the new set. It replaces the description of the sources.
        sources: `info` of each source, at least one.
        method: name of the method.
        unknown: as in `combined_info`.
    """
    own = {name: value for name, value in facts.items() if name not in GUARANTEE}
    return own | inherited_info([*sources], unknown) | _marks([*sources, facts, {"derived": method}])


def repeated_info(info: Info) -> dict[str, Any]:
    """Return the `info` of a set in which an image occurs more than once, so that its record counts several times."""
    return {**info, **_marks([info, {"derived": _REPEATED}])}


def inherited_info(infos: Sequence[Info], unknown: str = "") -> dict[str, Any]:
    """Return only the guarantee and the marks of `combined_info`, for a set that describes itself in other entries."""
    return _marks(infos) | _guarantee(infos, unknown)


def replaced_info(data: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `info` of a copy of a set with replaced parts. Parts that may depend on other data end a guarantee."""
    parts = ("images", "stored", "labels")
    new = [name for name in parts if name in changes and changes[name] is not getattr(data, name, None)]
    columns = changes.get("columns")
    columns = columns if isinstance(columns, Mapping) else {}  # the constructor refuses other types
    new += [f"the column {name!r}" for name in columns if columns[name] is not data.columns.get(name)]
    space = changes.get("normalization")
    if isinstance(space, Normalization) and space.measured and space != data.normalization:
        new.append("a measured normalization")
    return combined_info([data.info], f"{', '.join(new)} of unknown origin" if new else "")


def _distinct(values: Iterable[Info]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for value in values:
        if dict(value) not in found:
            found.append(dict(value))
    return found


def _provenance(info: Info) -> list[dict[str, Any]]:
    """Return the entries of `provenance` with what was added to the joined set later, or `info` itself."""
    later = {k: v for k, v in info.items() if k not in ("provenance", *GUARANTEE, *_MARKS)}
    entries = info.get("provenance")
    return [{**entry, **later} for entry in entries] if isinstance(entries, list) else [dict(info)]


def _marks(infos: Sequence[Info]) -> dict[str, str]:
    found = {name: [str(info[name]) for info in infos if info.get(name)] for name in _MARKS}
    return {name: "; ".join(dict.fromkeys("; ".join(texts).split("; "))) for name, texts in found.items() if texts}


def _guarantee(infos: Sequence[Info], unknown: str) -> dict[str, Any]:
    """Compose the guarantees. If no set states one, nothing is returned."""
    stated = [info for info in infos if "epsilon" in info]
    if not stated:
        return {}
    if len(infos) == 1 and not unknown:
        return {name: infos[0][name] for name in GUARANTEE if name in infos[0]}
    remarks = list(dict.fromkeys(str(remark) for info in stated for remark in info.get("remarks", [])))
    reasons = [str(info.get("reason") or "no reason is recorded") for info in stated if not _holds(info)]
    if len(stated) < len(infos):
        reasons.append("some of the joined images have no guarantee")
    reasons += [unknown] if unknown else []
    charged = [info for info in stated if _holds(info) and (info["epsilon"] > 0 or info.get("relation"))]
    if len({(info.get("relation"), "delta" in info) for info in charged}) > 1:
        reasons.append("the joined sets have guarantees of different relations")
    if reasons:
        held = ", ".join(dict.fromkeys(f"{info['epsilon']:.4g}" for info in stated if _holds(info)))
        reason = "; ".join(dict.fromkeys(reasons)) + (f" (before: epsilon {held})" if held else "")
        return {"epsilon": None, "reason": reason} | ({"remarks": remarks} if remarks else {})
    made: dict[str, Any] = {"epsilon": sum(info["epsilon"] for info in stated)}
    like = charged[0] if charged else stated[0]
    if all("delta" in info for info in charged or stated):
        made["delta"] = sum(info.get("delta", 0.0) for info in stated)
    made |= {name: like[name] for name in ("relation", "valid_if") if name in like}
    made |= {"accountant": "basic composition", "remarks": [*remarks, *({_SUMS} - set(remarks))]}
    if all("budget" in info for info in stated):
        made["budget"] = sum(info["budget"] for info in stated)
    assumed: dict[str, list[str]] = {}
    for info in stated:
        for entry, facts in info.get("assumed_public", {}).items():
            assumed[entry] = list(dict.fromkeys([*assumed.get(entry, []), *facts]))
    return made | ({"assumed_public": assumed} if assumed else {})


def _holds(info: Info) -> bool:
    epsilon = info["epsilon"]
    return isinstance(epsilon, int | float) and not isinstance(epsilon, bool)
