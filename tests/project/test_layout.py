"""The folders of jax_attn and their imports: arrows point down only."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers.paths import ROOT

PACKAGE = ROOT / "jax_attn"

# Each row is a folder, or a module at the top of jax_attn, and the rows above it that it imports.
# "jax_attn" is jax_attn/__init__.py, the public names of attention. "models" and "serve" are the
# modules at the top of these folders.
TABLE = """
_core
_environment
_variant            _core
_spec               _core _environment _variant
masks               _spec _variant
reference           _spec _variant
_xla                _core _environment _spec _variant masks
_plan               _core _environment _spec _xla masks
_ops                _core _environment _plan _spec _variant _xla
_dense              _ops _plan _spec _variant _xla
parallel            _core _dense _ops _plan _spec _xla
mla
head_tables         _ops _plan _spec
retention
jax_attn            _dense _ops _plan _spec _variant _xla head_tables masks mla parallel reference \
                    retention
compat              _dense _ops _plan _spec
inspect             _plan
tune                _core _spec jax_attn

models/_products    _core _spec _xla
models/_config      _core models/_products
models/_families    models/_config
models/_weights     models/_config models/_products
models/_loading     models/_config models/_families models/_weights
models/_layers      jax_attn mla models/_config models/_products models/_weights parallel
models/_embedding   jax_attn models/_config models/_families models/_layers models/_loading \
                    models/_products models/_weights
models/_vision      jax_attn models/_config models/_families models/_weights
models              models/_config models/_embedding models/_families models/_layers \
                    models/_loading models/_vision models/_weights

serve/_scheduling
serve/_text         models/_weights
serve/_chat         serve/_text
serve/_grammar      models/_weights serve/_text
serve/_engine       jax_attn models models/_embedding models/_layers parallel serve/_grammar \
                    serve/_scheduling serve/_text
serve/_openai       models models/_weights serve/_chat serve/_grammar serve/_scheduling \
                    serve/_text
serve/_anthropic    serve/_openai serve/_scheduling
serve/_ollama       serve/_chat serve/_openai serve/_scheduling
serve/_ipc          serve/_engine serve/_scheduling
serve/_http         models serve/_anthropic serve/_engine serve/_ipc serve/_ollama \
                    serve/_openai serve/_scheduling serve/_text
serve               _environment models serve/_engine serve/_http serve/_ipc serve/_openai \
                    serve/_scheduling
llm                 models models/_layers serve serve/_engine serve/_grammar serve/_openai \
                    serve/_scheduling
integrations        llm models models/_layers
"""


def allowed() -> dict[str, set[str]]:
    rows = [line.split() for line in TABLE.replace("\\\n", "").splitlines() if line]
    return {name: set(imports) for name, *imports in rows}


def modules() -> dict[str, Path]:
    """Dotted names, and "jax_attn._core", which is compiled."""
    names = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        names[name.removesuffix(".__init__")] = file
    return names | {"jax_attn._core": PACKAGE / "_core.so"}


def row_of(module: str, file: Path) -> str:
    parts = module.split(".")
    if len(parts) > 2 and file.name != "__init__.py":
        parts = parts[:-1]
    return "/".join(parts[1:]) or "jax_attn"


def imported(file: Path, known: dict[str, Path]) -> list[tuple[str, int]]:
    """Modules of the package that a file imports anywhere in it, and on which line.

    Not under `if TYPE_CHECKING`, which never runs: jax_attn has the names of jax_attn.llm there.
    """
    found = []
    for node in running(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: expected an absolute import"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.append((inner if inner in known else module, node.lineno))
    return [(name, line) for name, line in found if name in known]


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, without those under `if TYPE_CHECKING`."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from running(child)


def arrows() -> dict[tuple[str, str], str]:
    """(row, imported row) -> where."""
    known, found = modules(), {}
    for module, file in known.items():
        if file.suffix != ".py":
            continue
        for name, line in imported(file, known):
            arrow = row_of(module, file), row_of(name, known[name])
            if arrow[0] != arrow[1]:
                found[arrow] = f"{file.relative_to(ROOT)}:{line}"
    return found


def test_rows_import_rows_above_only():
    above = set()
    for name, imports in allowed().items():
        assert imports <= above, f"{name}: below it in the table: {sorted(imports - above)}"
        above.add(name)


def test_modules_import_what_the_table_says():
    table = {(name, each) for name, imports in allowed().items() for each in imports}
    found = arrows()
    unknown = [
        f"{where}: {a} imports {b}" for (a, b), where in found.items() if (a, b) not in table
    ]
    assert not unknown, "\n".join(unknown)
    unused = sorted(table - set(found))
    assert not unused, f"no module needs these arrows any more: {unused}"


def test_every_folder_has_a_row():
    rows = {row_of(module, file) for module, file in modules().items()}
    assert rows == set(allowed())


def layers() -> dict[str, int]:
    """The layer of each row that the picture of docs/development.md has, counted from the top.

    A line is a layer, or several with "->" between them.
    """
    text = (ROOT / "docs/development.md").read_text(encoding="utf-8")
    picture = re.search(r"is below it in this picture:\n\n```\n(.*?)```", text, re.DOTALL)[1]
    found, layer, package = {}, 0, ""
    for line in picture.splitlines():
        for part in re.split(r" {2,}", line.strip())[0].split(" -> "):
            layer += 1
            names = re.findall(r"\w+", part.replace("jax_attn.", "").replace("csrc", ""))
            if not line.startswith(" "):
                package = f"{names[0]}/" if names[0] in ("models", "serve") else ""
            else:
                names = [package + name for name in names]
            found |= dict.fromkeys(names, layer)
    return found


def test_the_picture_has_every_folder_in_the_order_of_the_table():
    layer, table = layers(), allowed()
    assert set(layer) <= set(table), "names of no row"
    folders = {name for name in table if (PACKAGE / name / "__init__.py").exists()}
    assert not folders - set(layer), "folders that the picture does not have"
    up = [(a, b) for a in layer for b in table[a] & set(layer) if layer[b] <= layer[a]]
    assert not up, "imports of the same layer or of one above"


def test_the_server_describes_its_folders():
    """The two tables of jax_attn/serve/__init__.py: imports of each folder, and all modules."""
    serve = PACKAGE / "serve"
    text = ast.get_docstring(ast.parse((serve / "__init__.py").read_text(encoding="utf-8")))
    described = {}
    for name, imports in re.findall(r"^\| `(_\w+)` \| .* \|(?: `(.*)`)? \|$", text, re.MULTILINE):
        described.setdefault(name, {f"serve/{each}" for each in imports.split()})
    table = {name.removeprefix("serve/"): imports for name, imports in allowed().items()}
    for name in (path.name for path in serve.iterdir() if (path / "__init__.py").exists()):
        assert described[name] == {each for each in table[name] if each.startswith("serve/")}
    named = set(re.findall(r"`(\w+)`", text))
    modules = {path.stem for path in serve.rglob("*.py")} - {"__init__"}
    assert not modules - named, "modules that the table does not name"
    folders = {path.name for path in serve.iterdir()}
    assert not named - modules - folders, "names of no module"
