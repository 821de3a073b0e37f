"""Changes the code of modules, one place at a time, and says which tests notice.

    python -m pytest --collect-only -q --covering 150 > build/selected.txt   # what make test runs
    python build_tools/mutants.py --seed 1 --selected build/selected.txt jax_attn/masks.py \\
      -- tests/plan/test_mask_helpers.py

A mutant has one comparison, operator, constant, condition or statement changed, inside a function.
Tests of the files that are given run in a fork of this process, in which the function has the
changed code; so Python and JAX start once. First those of --selected run, then the others, until
one fails. A mutant is killed if a test fails, or takes ten times the processor time.

Only tests that call the function run: a first run without a change finds them. Those that start
processes of their own do not see the change; with --devices, checks on CPU devices run in the fork.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import gc
import importlib
import json
import os
import random
import resource
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], ast.AST]]]:
    """Yields what can be changed in a node: a description, and a function that changes a copy."""

    def set_to(**fields: object) -> Callable[[ast.AST], ast.AST]:
        def change(copied: ast.AST) -> ast.AST:
            for name, value in fields.items():
                setattr(copied, name, value)
            return copied

        return change

    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            other = _COMPARISONS[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", set_to(ops=[other()])
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            other = _OPERATORS[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", set_to(op=other())
        case ast.AugAssign(op=op) if type(op) in _OPERATORS:
            other = _OPERATORS[type(op)]
            yield f"{type(op).__name__}= -> {other.__name__}=", set_to(op=other())
        case ast.BoolOp(op=op):
            other = ast.Or if isinstance(op, ast.And) else ast.And
            yield f"{type(op).__name__} -> {other.__name__}", set_to(op=other())
        case ast.UnaryOp(op=ast.Not()):
            yield "without not", lambda copied: copied.operand
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", set_to(value=not value)
        case ast.Constant(value=int(value)):
            yield f"{value} -> {value + 1}", set_to(value=value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            yield f"{name} -> {_NAMES[name]}", set_to(func=ast.Name(_NAMES[name], ast.Load()))
        case ast.Expr(value=ast.Call()):
            yield "without the call", lambda copied: ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returns None", set_to(value=ast.Constant(None))
        case ast.If() | ast.IfExp():
            if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
                test = ast.UnaryOp(ast.Not(), node.test)
                yield "if not", set_to(test=test)
        case ast.Break():
            yield "continue", lambda copied: ast.Continue()


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that are worth a change: no annotation, message or docstring."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.AnnAssign, ast.arg)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.Raise, ast.JoinedStr)):
                yield child


class Mutant:
    def __init__(self, path: Path, function: str, line: int, what: str, number: int) -> None:
        self.path, self.function, self.line, self.what = path, function, line, what
        self._number = number  # of the place and change, in the order of _places

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.function}: {self.what}"

    def code(self) -> types.CodeType:
        tree = ast.parse(self.path.read_text())
        for number, (_, node, _, change) in enumerate(_places(tree)):
            if number == self._number:
                changed = change(copy.deepcopy(node))
                ast.copy_location(changed, node)
                tree = _Replace(node, changed).visit(tree)
                return _code_of(ast.fix_missing_locations(tree), self.path, self.function)
        raise AssertionError(self)


class _Replace(ast.NodeTransformer):
    def __init__(self, node: ast.AST, other: ast.AST) -> None:
        self.node, self.other = node, other

    def visit(self, node: ast.AST) -> ast.AST:
        return self.other if node is self.node else self.generic_visit(node)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _places(tree: ast.AST) -> Iterator[tuple[str, ast.AST, str, Callable[[ast.AST], ast.AST]]]:
    def walk(name: str, node: ast.AST) -> Iterator:
        for what, change in _changes(node):
            yield name, node, what, change
        for child in _children(node):
            yield from walk(name, child)

    for name, function in _functions(tree):
        for child in _children(function):
            yield from walk(name, child)


def mutants_of(path: Path) -> list[Mutant]:
    return [
        Mutant(path, name, node.lineno, what, number)
        for number, (name, node, what, _) in enumerate(_places(ast.parse(path.read_text())))
    ]


def _code_of(tree: ast.AST, path: Path, function: str) -> types.CodeType:
    codes = [compile(tree, str(path), "exec")]
    while codes:
        code = codes.pop()
        if code.co_qualname == function:
            return code
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    raise AssertionError(function)


def _live_functions(path: Path) -> dict[str, list[types.FunctionType]]:
    gc.unfreeze()
    found: dict[str, list[types.FunctionType]] = collections.defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and each.__code__.co_filename == str(path):
            found[each.__code__.co_qualname].append(each)
    return found


class _Runner:
    """Runs tests in forks, instead of pytest's own loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.selected = set(options.selected.read_text().split()) if options.selected else set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        conftest = session.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
        for path in self.options.modules:
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if self.options.devices:
            _stay_in_process(self.options.devices)
        items = [item for item in session.items if conftest.is_run_by_default(item)]
        # those of make test first; both parts in the order of files, for the sake of fixtures
        items.sort(key=lambda item: item.nodeid not in self.selected)
        if importlib.import_module("jax._src.xla_bridge").backends_are_initialized():
            raise pytest.UsageError("a file starts JAX's backend on import: forks would hang")
        hits, seconds = self._find_hits(session, items)
        counts: collections.Counter[str] = collections.Counter()
        for path in self.options.modules:
            mutants = mutants_of(path)
            random.Random(f"{self.options.seed} {path.name}").shuffle(mutants)
            for mutant in mutants[: self.options.count]:
                name = f"{path} {mutant.function}"
                concerned = [item for item in items if name in hits[item.nodeid]]
                if not concerned:
                    counts["uncalled"] += 1
                    print(f"uncalled  {mutant}", flush=True)
                    continue
                verdict, test = self._try(session, concerned, mutant, seconds)
                counts[verdict] += 1
                print(f"{verdict:9} {mutant} ({len(concerned)} tests) {test}", flush=True)
        print(dict(counts), flush=True)
        return True

    def _fork(self, body: Callable[[], object]) -> object:
        """Returns what `body` returns in a child, or None if the child died."""
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                signal.signal(signal.SIGXCPU, signal.SIG_DFL)
                os.write(write, json.dumps(body()).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            text = file.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else None

    def _find_hits(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> tuple[dict[str, set[str]], dict[str, float]]:
        """Runs all tests as they are. Returns the functions that each calls, and its seconds."""
        hits: set[str] = set()

        def body() -> object:
            for path in self.options.modules:
                tree = ast.parse(path.read_text())
                for name, function in _functions(tree):
                    note = ast.parse(f"__hits__.add({f'{path} {name}'!r})").body[0]
                    at = 1 if ast.get_docstring(function) is not None else 0
                    function.body.insert(at, note)
                ast.fix_missing_locations(tree)
                for name, functions in _live_functions(path).items():
                    for function in functions:
                        if "<locals>" not in name and "<lambda>" not in name:
                            function.__globals__["__hits__"] = hits
                            _set_code(function, _code_of(tree, path, name))
            result = []
            for item, after in zip(items, [*items[1:], None], strict=True):
                begin, failed = _seconds(), session.testsfailed
                hits.clear()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if session.testsfailed > failed:
                    print(f"fails without a change: {item.nodeid}", flush=True)
                    continue
                result.append((item.nodeid, sorted(hits), _seconds() - begin))
            return result

        result = self._fork(body)
        assert result is not None
        found = collections.defaultdict(set, {name: set(hit) for name, hit, _ in result})
        if self.options.whole_files:  # traced code is not called again
            by_file = collections.defaultdict(set)
            for name, hit in found.items():
                by_file[name.partition("::")[0]] |= hit
            found = collections.defaultdict(
                set, {name: by_file[name.partition("::")[0]] for name in found}
            )
        seconds = {name: cost for name, _, cost in result}
        print(f"{len(result)} tests pass, in {sum(seconds.values()):.0f} s of processor time")
        return found, seconds

    def _try(
        self,
        session: pytest.Session,
        items: list[pytest.Item],
        mutant: Mutant,
        seconds: dict[str, float],
    ) -> tuple[str, str]:
        def body() -> object:
            code = mutant.code()
            functions = _live_functions(mutant.path)[mutant.function]
            if not [function for function in functions if _set_code(function, code)]:
                return "not live", ""
            for item, after in zip(items, [*items[1:], None], strict=True):
                limit = int(_seconds() + 10 * seconds[item.nodeid] + 5) + 1
                resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if session.testsfailed:
                    verdict = "selected" if item.nodeid in self.selected else "rest"
                    return verdict, item.nodeid
            return "SURVIVED", ""

        return tuple(self._fork(body) or ("time", ""))


def _stay_in_process(num_devices: int) -> None:
    """Makes run_on_cpus run a program here, on some of that many CPU devices."""
    jax = importlib.import_module("jax")
    jax.config.update("jax_num_cpu_devices", num_devices)

    def run(num: int, program: str, timeout: int = 0) -> None:
        if num > num_devices:
            pytest.skip(f"needs {num} devices")
        exec(program, {})

    tests = ROOT / "tests"
    sys.path += [str(each) for each in (*tests.iterdir(), ROOT / "benchmarks") if each.is_dir()]
    for module in list(sys.modules.values()):
        if hasattr(module, "run_on_cpus"):
            module.run_on_cpus = run


def _seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _set_code(function: types.FunctionType, code: types.CodeType) -> bool:
    """Returns False for code without the function's `super()`, which Python refuses."""
    fits = code.co_freevars == function.__code__.co_freevars
    if fits:
        function.__code__ = code
    return fits


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20, help="mutants of each module")
    parser.add_argument("--selected", type=Path, help="ids of the tests that run first")
    parser.add_argument("--whole-files", action="store_true", help="all tests of a file that calls")
    parser.add_argument("--devices", type=int, help="CPU devices, for checks of meshes")
    parser.add_argument("modules", type=lambda name: (ROOT / name).resolve(), nargs="+")
    parser.add_argument("tests", nargs=argparse.REMAINDER, help="after --: what pytest is given")
    given = sys.argv[1:]
    at = given.index("--")
    options = parser.parse_args(given[:at])
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--capture=no"]
    return pytest.main([*arguments, "-rN", "--tb=no", *given[at + 1 :]], [_Runner(options)])


if __name__ == "__main__":
    sys.exit(main())
