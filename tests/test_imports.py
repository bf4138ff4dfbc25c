"""The import direction of docs/design.md, read from the syntax trees; and what may be imported from outside.

`model, errors ← indexer, reason, report ← outside, targets, propose ← engine ← cli`, and apart from it `candidate`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dsabisect

PACKAGE = Path(dsabisect.__file__).resolve().parent
LEVELS = (
    ("model", "errors"),
    ("indexer", "reason", "report"),
    ("outside", "targets", "propose", "demo", "terminal"),
    ("engine", "evaluate", "session", "conclude", "relevance", "flaky", "marking"),
    ("stories", "calibrate", "pytest_plugin", "proposing"),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
CORE = ("model", "errors", "indexer", "reason", "report")  # no I/O, no clock, no environment, no global randomness
OUTSIDE_WORLD = frozenset(
    ("os", "subprocess", "time", "random", "secrets", "socket", "shutil", "tempfile", "threading", "multiprocessing",
     "signal", "platform", "uuid", "glob")
)  # fmt: skip
GLOBAL_RANDOM = frozenset(("random", "manual_seed", "seed", "rand", "randn", "randint", "randperm"))
HEAVY = frozenset(("torch", "numpy", "git", "click", "triton", "safetensors"))


@dataclass(frozen=True)
class Import:
    module: str  # the importing module, "dsabisect.outside.gitrepo"
    name: str  # what is imported; for `from x import y` it is "x.y"
    line: int
    typing_only: bool
    at_top: bool  # runs when the module is imported

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


def module_name(file: Path, package: Path = PACKAGE) -> str:
    parts = (package.name, *file.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, is_package: bool = False) -> list[Import]:
    """All imports of a module, also those inside functions, absolute names."""
    found: list[Import] = []

    def visit(node: ast.AST, typing_only: bool, at_top: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(module, alias.name, node.lineno, typing_only, at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if is_package else module.split(".")[:-1]
                up = here[: len(here) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            found.extend(Import(module, f"{base}.{a.name}", node.lineno, typing_only, at_top) for a in node.names)
        guarded = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only or guarded, at_top and not inside)

    visit(ast.parse(source), False, True)
    return found


def files() -> list[Path]:
    """Our modules; what the demonstration's history is made of is not ours to import."""
    material = PACKAGE / "demo" / "files"
    found = (p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts and material not in p.parents)
    return sorted(found)


def all_imports() -> list[Import]:
    return [i for file in files() for i in imports_of(file.read_text(), module_name(file), file.name == "__init__.py")]


def room(module: str) -> str:
    """The room of one of our modules: "dsabisect.outside.gitrepo" → "outside"; "" for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def own(name: str) -> bool:
    return name.split(".")[0] == "dsabisect"


def wrong_direction(found: Import) -> str | None:
    """Why this import goes against the arrows; None when it does not."""
    if not own(found.name):
        return None
    here, there = room(found.module), room(found.name)
    if here == "candidate":
        return None if there == "candidate" else f"{found}: the candidate's side imports nothing else of ours"
    if there == "candidate":
        return f"{found}: nothing imports the candidate's side; it runs in another process"
    if there not in LEVEL:  # dsabisect.__version__
        return None if here in LEVEL else f"{found}: the package itself imports nothing"
    if here not in LEVEL:
        return f"{found}: {here or 'the package'} has no place in the import direction"
    if LEVEL[there] > LEVEL[here] or (LEVEL[there] == LEVEL[here] == 1 and here != there):
        return f"{found}: against the import direction"
    return None


def test_imports_follow_the_arrows() -> None:
    faults = [fault for fault in map(wrong_direction, all_imports()) if fault]
    assert not faults, "\n".join(faults)


def test_every_module_has_a_place() -> None:
    rooms = {room(module_name(file)) for file in files()} - {"", "candidate"}
    assert rooms <= set(LEVEL), f"no place in the import direction: {sorted(rooms - set(LEVEL))}"


def test_modules_do_not_import_in_a_circle() -> None:
    known = {module_name(file) for file in files()}
    edges: dict[str, set[str]] = {name: set() for name in known}
    for found in all_imports():
        target = found.name if found.name in known else found.name.rpartition(".")[0]
        if found.at_top and not found.typing_only and target in known and target != found.module:
            edges[found.module].add(target)
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(edges[module]):
                walk(target, (*trail, module))
            done.add(module)

    for module in sorted(known):
        walk(module, ())


def test_only_gitrepo_imports_git() -> None:
    importers = {i.module for i in all_imports() if i.name.split(".")[0] in ("git", "gitdb")}
    assert importers == {"dsabisect.outside.gitrepo"}


def test_only_the_command_line_imports_click() -> None:
    importers = {i.module for i in all_imports() if i.name.split(".")[0] == "click"}
    assert all(room(module) == "cli" for module in importers), importers


def test_model_and_errors_need_the_standard_library_alone() -> None:
    foreign = [
        str(i)
        for i in all_imports()
        if room(i.module) in ("model", "errors")
        and not own(i.name)
        and i.name.split(".")[0] not in (*sys.stdlib_module_names, "__future__")
    ]
    assert not foreign, "\n".join(foreign)


def test_core_modules_have_no_outside_world() -> None:
    faults = [
        str(found)
        for found in all_imports()
        if room(found.module) in CORE and found.name.split(".")[0] in OUTSIDE_WORLD
    ]
    for file in files():
        if room(module_name(file)) in CORE:
            faults += [f"{module_name(file)}:{line} {what}" for line, what in impure_calls(file.read_text())]
    assert not faults, "\n".join(faults)


def impure_calls(source: str) -> Iterator[tuple[int, str]]:
    """Calls of open(), print(), input(), now(), and of numpy's or torch's global random numbers."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in ("open", "print", "input") or name.endswith(("datetime.now", "date.today", "time.time")):
            yield node.lineno, f"calls {name}()"
        head, _, rest = name.partition(".")
        if head in ("np", "numpy", "torch") and set(rest.split(".")) & GLOBAL_RANDOM:
            yield node.lineno, f"calls {name}()"


def test_targets_import_no_torch() -> None:
    """Neither themselves nor through what they import of ours."""
    modules = [module_name(f) for f in files() if room(module_name(f)) == "targets"]
    code = f"import sys, {', '.join(modules)}; print(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout.split()
    faults = [str(i) for i in all_imports() if room(i.module) == "targets" and i.name.split(".")[0] == "torch"]
    assert not faults, "\n".join(faults)


def test_the_package_itself_is_light() -> None:
    """The candidate's interpreter imports it, before anything of ours may load torch or git."""
    code = f"import sys, dsabisect, dsabisect.candidate; print(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


# ---- negative controls: the rules above notice what they forbid --------------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dsabisect.model", "from dsabisect.indexer import oracle"),
        ("dsabisect.indexer.oracle", "import dsabisect.outside.store"),
        ("dsabisect.indexer.oracle", "from ..outside import store"),
        ("dsabisect.reason.judge", "from dsabisect.report import build"),
        ("dsabisect.outside.store", "def f():\n    from dsabisect import engine"),
        ("dsabisect.targets.demo", "from dsabisect import cli"),
        ("dsabisect.candidate.worker", "from dsabisect.indexer import generate"),
        ("dsabisect.candidate.probes.demo", "from ...errors import HarnessFault"),
        ("dsabisect.engine", "from dsabisect.candidate import worker"),
        ("dsabisect.newroom", "from dsabisect import model"),
    ],
)
def test_a_wrong_import_is_noticed(module: str, source: str) -> None:
    assert [fault for fault in map(wrong_direction, imports_of(source, module)) if fault]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dsabisect.engine", "import dsabisect\nfrom dsabisect import evaluate\nfrom dsabisect.outside import store"),
        ("dsabisect.candidate.probes.demo", "from . import Ran\nfrom dsabisect.candidate import worker"),
        ("dsabisect.reason.judge", "from ..model import Verdict\nimport os"),
    ],
)
def test_a_right_import_is_let_through(module: str, source: str) -> None:
    assert not [fault for fault in map(wrong_direction, imports_of(source, module)) if fault]


def test_impure_calls_are_noticed() -> None:
    source = "open('x')\ntorch.randn(3)\nnp.random.default_rng()\ndatetime.now()\ntorch.zeros(3)\nreopen()\n"
    assert [line for line, _ in impure_calls(source)] == [1, 2, 3, 4]
