"""Plant random mistakes in modules, one at a time, and report those that no test notices.

    python -m tests.mutants distillkit/scores.py --count 20 --seed 0

Mistakes are changes of the syntax tree: a comparison or a constant off by one, a `not` or a keyword dropped, operators
or two arguments swapped, a loop cut short, a statement left out. The same arguments draw the same mistakes. They are
planted in a copy of the repository. A module's tests are the files that name it, its mirror or its names most often.
With `--log FILE`, results are appended to a file, and an interrupted run continues.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("distillkit", "fl", "attacks", "tests", "examples", "docs", "pyproject.toml", "README.md")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "mean": "sum", "sum": "mean", "amin": "amax"}


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the wrong variants of an expression itself, not of its parts."""
    made = copy.deepcopy(node)
    match made:
        case ast.Compare(ops=[first, *rest]) if type(first) in SWAPS:
            made.ops = [SWAPS[type(first)](), *rest]  # type: ignore[list-item]
            yield made
        case ast.BinOp() | ast.BoolOp() if type(made.op) in SWAPS:
            made.op = SWAPS[type(made.op)]()  # type: ignore[assignment]
            yield made
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield made.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=float(value)):
            yield ast.Constant(value * 2 if value else 1.0)
        case ast.IfExp():
            made.body, made.orelse = made.orelse, made.body
            yield made
        case ast.Call():
            for k in range(len(made.args) - 1):
                swapped, same = copy.deepcopy(made), copy.deepcopy(made)
                swapped.args[k : k + 2] = swapped.args[k : k + 2][::-1]
                same.args[k + 1] = same.args[k]
                yield from (swapped, same)
            for k in range(len(made.keywords)):
                yield ast.Call(made.func, made.args, made.keywords[:k] + made.keywords[k + 1 :])
            name = made.func.attr if isinstance(made.func, ast.Attribute) else getattr(made.func, "id", "")
            if other := NAMES.get(name):
                setattr(made.func, "attr" if isinstance(made.func, ast.Attribute) else "id", other)
                yield made


def _statements(node: ast.stmt) -> Iterator[str]:
    """Yield the wrong variants of a statement."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"
        case ast.If(orelse=[]) if not any(isinstance(part, ast.Raise) for part in node.body):
            yield "pass"
        case ast.For() | ast.While():
            made = copy.deepcopy(node)
            made.body.append(ast.Break())
            yield ast.unparse(made)
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.Name(id=first), *_])):
            yield f"{name} = {first}"


def mutants(source: str) -> list[str]:
    """Return every wrong variant of a module's source that compiles, in the order of the source."""
    tree, raw, found = ast.parse(source), source.encode(), list[str]()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]  # a node, and whether it stands in a function
    while pending:
        node, inside = pending.pop()
        skipped = isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom | ast.arg)
        if skipped or (isinstance(node, ast.Assign | ast.If) and re.match("__all__|if TYPE_CH", ast.unparse(node))):
            continue
        parts = [child for child in ast.iter_child_nodes(node) if child is not getattr(node, "annotation", None)]
        parts = [child for child in parts if child is not getattr(node, "returns", None)]
        inside |= isinstance(node, ast.FunctionDef | ast.Lambda)
        pending += [(child, inside) for child in reversed(parts)]
        variants = [f"({ast.unparse(made)})" for made in _expressions(node)] if isinstance(node, ast.expr) else []
        if isinstance(node, ast.stmt) and inside:
            variants = list(_statements(node))
        for variant in variants:
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            text = variant.replace("\n", "\n" + " " * node.col_offset)  # type: ignore[attr-defined]
            planted = (raw[:start] + text.encode() + raw[end:]).decode()
            try:
                compile(planted, "planted", "exec")
            except (SyntaxError, ValueError):
                continue
            found.append(planted)
    return found


def tests_of(module: str, most: int) -> list[str]:
    """Return the test files that name a module, its public names, its importers or its mirror most often."""
    path, dotted = ROOT / module, module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    defined = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if hasattr(n, "name")]
    names = [dotted, *(name for node in defined if not (name := str(getattr(node, "name", ""))).startswith("_"))]
    words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    importers = [p for p in path.parent.rglob("*.py") if f"from {dotted} import" in p.read_text(encoding="utf-8")]
    stems = {p.stem.strip("_"): 1 if p == path else 1 / len(importers) for p in (*importers, path)}
    ranks: dict[str, float] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name, text = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        rank = len(words.findall(text)) * 100 / (20 + len(text.splitlines()))
        rank += sum(20 * weight for stem, weight in stems.items() if stem != "init" and stem in file.stem)
        rank += 4 * (path.parent.name in file.stem)
        if rank and "flower_real" not in name:
            ranks[name] = rank + 5 * name.startswith(f"tests/{'/'.join(module.split('/')[:-1])}/")
    return sorted(ranks, key=lambda name: -ranks[name])[:most]


def outcome(folder: Path, tests: list[str], seconds: float) -> str:
    """Run tests in a copy of the repository until the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return "caught (time)"
    return "survived" if done.returncode == 0 else "caught"


def main(arguments: list[str] | None = None) -> int:
    """Plant and test; the status is 1 if a mistake survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help="paths of modules, from the root of the repository")
    parser.add_argument("--count", type=int, default=20, help="mistakes in each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=8, help="largest number of test files of a module")
    parser.add_argument("--log", type=Path, help="results, one JSON object a line; they are not computed again")
    o = parser.parse_args(arguments)
    lines = o.log.read_text(encoding="utf-8").splitlines() if o.log and o.log.exists() else []
    known = {row["key"]: row["result"] for row in map(json.loads, lines)}
    survived = planted = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in (part for part in COPIED if (ROOT / part).exists()):
            ignored = shutil.ignore_patterns("__pycache__")
            tree = (ROOT / part).is_dir()
            shutil.copytree(ROOT / part, folder / part, ignore=ignored) if tree else shutil.copy(ROOT / part, folder)
        for module in o.modules:
            source = (ROOT / module).read_text(encoding="utf-8")
            found, tests = mutants(source), tests_of(module, o.files)
            chosen = random.Random(f"{o.seed} {module}").sample(range(len(found)), min(o.count, len(found)))
            print(f"{module}: {len(chosen)} of {len(found)} mistakes; {' '.join(tests)}", flush=True)
            begun = time.monotonic()
            if outcome(folder, tests, 1800) != "survived":
                raise SystemExit("these tests fail without a mistake")
            limit = 60 + 4 * (time.monotonic() - begun)
            for wrong in (found[n] for n in chosen):
                key = hashlib.sha256((wrong + " ".join(tests)).encode()).hexdigest()[:16]
                if key not in known:
                    (folder / module).write_text(wrong, encoding="utf-8")
                    known[key] = outcome(folder, tests, limit)
                    (folder / module).write_text(source, encoding="utf-8")
                    if o.log:
                        with o.log.open("a", encoding="utf-8") as file:
                            print(json.dumps({"key": key, "module": module, "result": known[key]}), file=file)
                difference = difflib.unified_diff(source.splitlines(), wrong.splitlines(), n=0, lineterm="")
                shown = [line for line in difference if not line.startswith(("---", "+++"))]
                print(known[key], *(shown if known[key] == "survived" else shown[:1]), sep="\n  ", flush=True)
                survived, planted = survived + (known[key] == "survived"), planted + 1
    print(f"{planted - survived} of {planted} mistakes caught")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
