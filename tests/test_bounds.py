"""Options of one name have equal bounds everywhere; differences are listed with their reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKS = ("real_number", "positive_int")
OFF = "0 turns the add-on, or this part of the work, off; where that would send or claim something else, 0 is refused"
LAYERS = "what the architecture needs"
OTHER = "another quantity that its paper calls so"
DIFFERENT = {
    "alpha": OTHER,  # of a Dirichlet draw; FedGen's weight
    "batch": "FedGen's diversity term compares the embeddings of a batch, so it needs two",
    "classes": "indices of classes; or how many a virtual set has, which must tell apart at least two",
    "count": "events are composed from any number, and none is no release; to release, plan or cut crops takes one",
    "cutout": "a side in pixels; or a share of the image's side",
    "delta": "an attack may test pure differential privacy, delta 0; no accountant of ours can say anything there",
    "depth": LAYERS,
    "epochs": OFF,
    "eps": "added to a product of norms, where 0 leaves a cosine as it is; or to a variance, so that none is zero",
    "epsilon": "delta has a value at epsilon 0; noise for epsilon 0 would be infinite. FedExP's is another quantity",
    "gamma": OTHER,  # FedReg's share; RMIA's threshold of a ratio
    "ipc": OFF,
    "iterations": OFF,
    "keep": "the type has the lower bound; the number of images, the upper one, is known later",
    "least_steps": "the type has the lower bound; `steps`, the upper one, is another option",
    "num_classes": "a task or a set may have one class, an empty set none; noise and networks tell apart at least two",
    "participation": "a number of clients, or a share of them",
    "rate": "a share of rounds, and composing or drawing with rate 0, are no release; one that is charged takes more",
    "rho": OTHER,  # FedSAM's step, 0 is none; FedDM's radius of the ball
    "round": "a release may be charged before round 1, as round 0; clients answer from round 1",
    "scale": "how far DSA scales an image; or the factor of a unit in which numbers are shown",
    "sigma": "0 is a run without noise and without a guarantee; epsilon as a function of sigma has no value there",
    "size": "pixels or records; a generator's layers begin at 4x4; a plan also takes an expected number of records",
    "std": "what divides is positive; noise may be none",
    "steps": OFF,
    "threshold": "of an entropy; or how many shares give a secret back, where a sum over one client would be that one",
    "width": LAYERS,
}  # fmt: skip
"""Options that have several bounds, and why that is right."""


def constants(node: ast.expr) -> list[str]:
    """Return the strings that a loop over this literal visits."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "items":
        node = node.func.value
    found = node.keys if isinstance(node, ast.Dict) else node.elts if isinstance(node, ast.Tuple | ast.List) else []
    return [n.value for n in found if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def number(node: ast.expr) -> str:
    """Return a bound as text: numbers in one notation, anything else unchanged."""
    return f"{node.value:g}" if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else "..."


def interval(call: ast.Call) -> str:
    """Return the values that a call of `check` accepts."""
    whole = ast.unparse(call.func).endswith("positive_int")
    said = {k.arg: number(k.value) for k in call.keywords}
    said |= {name: number(value) for name, value in zip(("least", "most"), call.args[2:])} if whole else {}
    low = f"[{said['least']}" if "least" in said else f"({said['above']}" if "above" in said else "[1" if whole else "("
    high = f"{said['most']}]" if "most" in said else f"{said['below']})" if "below" in said else ")"
    return f"{low}, {high}{' whole' if whole else ''}"


@cache
def types() -> dict[str, str]:
    """Intervals of the option types in `distillkit/_utils/options.py`, by name."""
    bounds = {}
    for node in ast.parse((ROOT / "distillkit/_utils/options.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            check = node.value.slice.elts[-1]  # type: ignore[attr-defined]
            if isinstance(check, ast.Call):
                bounds[node.targets[0].id] = interval(ast.Call(check.args[0], [], check.keywords))  # type: ignore[attr-defined]
            elif ast.unparse(check).split(".")[-1] in CHECKS:
                bounds[node.targets[0].id] = interval(ast.Call(check, [], []))  # type: ignore[attr-defined]
    return bounds


def checks(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Return (option, interval, line) of every check and of every field whose type has a range.

    For options named by a loop, the loop's literal is used.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found = [types()[n.id] for n in ast.walk(node.annotation) if isinstance(n, ast.Name) and n.id in types()]
            yield from ((node.target.id, bounds, node.lineno) for bounds in found)
    loops: list[tuple[ast.AST, str, list[str]]] = []
    for node in ast.walk(tree):
        for loop in [node] if isinstance(node, ast.For) else getattr(node, "generators", []):
            names = [n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)]
            loops += [(node, name, constants(loop.iter)) for name in names[:1]]
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) and len(node.args) > 1 else None
        if getattr(called, "attr", getattr(called, "id", None)) not in CHECKS:
            continue
        name = node.args[1]
        if isinstance(name, ast.Constant):
            yield name.value, interval(node), node.lineno
        elif isinstance(name, ast.Name):
            for loop, target, options in loops:
                if target == name.id and any(inner is node for inner in ast.walk(loop)):
                    yield from ((option, interval(node), node.lineno) for option in options)


@cache
def found() -> dict[str, dict[str, list[str]]]:
    """Return option -> interval -> locations."""
    everywhere: dict[str, dict[str, list[str]]] = {}
    for package in ("distillkit", "fl", "attacks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for option, bounds, line in checks(ast.parse(path.read_text(encoding="utf-8"))):
                where = f"{path.relative_to(ROOT)}:{line}"
                everywhere.setdefault(option, {}).setdefault(bounds, []).append(where)
    return everywhere


def test_option_has_the_same_bounds_everywhere() -> None:
    several = {option: bounds for option, bounds in found().items() if len(bounds) > 1}
    assert {option: bounds for option, bounds in several.items() if option not in DIFFERENT} == {}


def test_list_of_reasons_has_no_unused_line() -> None:
    assert set(DIFFERENT) == {option for option, bounds in found().items() if len(bounds) > 1}


def test_training_and_optimizer_options_agree() -> None:
    """The options that nearly every part has."""
    options = found()
    for option in ("momentum", "server_momentum"):
        assert set(options[option]) == {"[0, 1)"}, options[option]
    assert len(options["momentum"]["[0, 1)"]) >= 11
    assert set(options["lr"]) == {"[0, )"}  # 0 keeps a network as it was drawn; all others are `check.learning_rate`
    assert [where.split(":")[0] for where in options["lr"]["[0, )"]] == ["distillkit/condense/_inner_training.py"]
    assert set(options["weight_decay"]) == set(options["server_weight_decay"]) == {"[0, )"}
    assert "temperature" not in options  # all are `check.temperature`
    assert set(options["batch_real"]) == set(options["server_batch"]) == {"[1, ) whole"}


def test_bounds_are_read_from_the_code() -> None:
    code = """
class Options:
    s: Decay | None = None
    t: tuple[PositiveInt, int] = (1, 2)
check.real_number(x, "a", least=0, most=1.0)
check.real_number(x, "a", least=0.0, most=1)
check.real_number(x, "b", above=0.0)
check.positive_int(x, "n")
positive_int(x, "m", 2, 5)
for name in ("p", "q"):
    check.positive_int(getattr(self, name), name, least=0)
for name, value in {"r": r}.items():
    check.real_number(value, name, below=limit)
"""
    assert [(option, bounds) for option, bounds, _ in checks(ast.parse(code))] == [
        ("s", "[0, 1)"), ("t", "[1, ) whole"), ("a", "[0, 1]"), ("a", "[0, 1]"), ("b", "(0, )"),
        ("n", "[1, ) whole"), ("m", "[2, 5] whole"), ("p", "[0, ) whole"), ("q", "[0, ) whole"), ("r", "(, ...)"),
    ]  # fmt: skip
