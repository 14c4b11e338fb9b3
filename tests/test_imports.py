"""Who may import whom, read from the source; and that light modules stay light, by importing them.

The packages: visor ← data, rewards ← rollout ← sft, grpo. Inside visor:
types ← {models, retrieval} ← env ← {taec, taprag} ← systems. visor/cli.py may reach every package, inside
functions only.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "visor": set(),
    "data": {"visor"},
    "rewards": {"visor"},
    "rollout": {"visor", "data", "rewards"},
    "sft": {"visor", "data", "rewards", "rollout"},
    "grpo": {"visor", "data", "rewards", "rollout"},
}
# Rooms of one layer do not import each other. Modules that no layer names (config, types) are the ground.
LAYERS = [{"types", "config"}, {"models", "retrieval"}, {"env"}, {"taec", "taprag"}, {"systems"}, {"cli"}]

HEAVY = ["torch", "transformers", "trl", "peft", "accelerate", "vllm", "deepspeed", "colpali_engine"]
# Modules whose import may load a heavy library; in these rooms only the ones in LIGHT_IN may not.
HEAVY_ROOMS = ("visor.models", "sft", "grpo")
LIGHT_IN = {"visor.models.base", "visor.models.smart_resize", "visor.models.scripted", "visor.models.openai"}
HEAVY_MODULES = {
    "visor.retrieval.dense",
    *(
        f"visor.retrieval.{name}"
        for name in (
            "late_interaction",
            "maxsim",
            "maxsim_scan",
            "maxsim_kernels",
            "coarse",
            "pooling",
            "colqwen",
            "qdrant",
        )
    ),
}


@dataclass(frozen=True)
class Import:
    target: str
    """Dotted name; for `from a import b` it is `a.b`."""
    line: int
    in_function: bool
    for_typing: bool
    """Under `if TYPE_CHECKING:`, never run."""


def imports_of(source: str) -> list[Import]:
    """Every import statement of a module's source. Relative imports are refused: the project has none."""
    found: list[Import] = []

    def visit(node: ast.AST, in_function: bool, for_typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, in_function, for_typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import with its full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.extend(Import(name, node.lineno, in_function, for_typing) for name in names)
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, in_function, for_typing or typing_only)

    visit(ast.parse(source), False, False)
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    return {module_name(path): path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py")}


def layer(room: str) -> int:
    return next((index for index, rooms in enumerate(LAYERS) if room in rooms), 0)


def may_import_room(room: str, target: str) -> bool:
    """Inside visor: downwards, within the room, and within the ground layer. "" is visor itself."""
    if not room or not target or room == target:
        return True
    return layer(target) < layer(room) or layer(target) == layer(room) == 0


def violations(module: str, source: str) -> list[str]:
    """Broken rules of one module, in words."""
    package, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    problems = []
    for found in imports_of(source):
        target, _, target_rest = found.target.partition(".")
        target_room = target_rest.partition(".")[0]
        where = f"{module} line {found.line} imports {found.target}"
        if target in MAY_IMPORT and target != package and target not in MAY_IMPORT[package]:
            if module != "visor.cli":
                problems.append(
                    f"{where}: {package} may import {sorted(MAY_IMPORT[package]) or 'no sibling'}"
                )
            elif not found.in_function:
                problems.append(f"{where}: visor/cli.py reaches its siblings inside functions only")
        elif target == package == "visor" and not may_import_room(room, target_room):
            problems.append(f"{where}: inside visor, {room} stands below or beside {target_room}")
    return problems


def test_every_module_keeps_the_rules():
    problems = [p for module, path in modules().items() for p in violations(module, path.read_text("utf-8"))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("module", "source", "broken"),
    [
        ("visor.env.episode", "import rollout.engine", True),
        ("visor.env.episode", "def f():\n    from data.corpus import Corpus", True),
        ("visor.env.episode", "from visor.taec.policy import TaecPolicy", True),
        ("visor.env.episode", "from visor import taec", True),
        ("visor.env.episode", "from visor.models.base import Request\nfrom visor.types import Page", False),
        ("visor.models.base", "from visor.retrieval.base import rank", True),
        ("visor.taec.policy", "import visor.taprag", True),
        ("visor.taec.policy", "from visor.taec.text import tokens\nfrom visor.env.policy import X", False),
        ("visor.types", "from visor.models.base import Request", True),
        ("visor.systems.visor", "from visor.taec.policy import make_evidence_policy", False),
        ("visor.systems.visor", "from visor.cli import main", True),
        ("visor.cli", "import rollout", True),
        ("visor.cli", "def f():\n    import rollout", False),
        ("data.corpus", "import rewards", True),
        ("rollout.engine", "import rewards, data, visor", False),
        ("rollout.engine", "if TYPE_CHECKING:\n    import grpo", True),
        ("sft.train", "from grpo.loss import loss", True),
        ("grpo.train", "from sft import train", True),
    ],
)
def test_the_rules_themselves(module, source, broken):
    assert bool(violations(module, source)) is broken


def import_time_edges() -> dict[str, set[str]]:
    """For each module, the project modules its import loads (parents of a dotted name aside)."""
    known = modules()
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        targets = set()
        for found in imports_of(path.read_text("utf-8")):
            if not (found.in_function or found.for_typing):
                parent = found.target.rpartition(".")[0]
                targets |= {name for name in (found.target, parent) if name in known}
        edges[module] = targets - {module}
    return edges


def cycles(edges: dict[str, set[str]]) -> Iterator[str]:
    """Circles among modules, each as text."""
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]) -> Iterator[str]:
        state[module] = "open"
        for target in sorted(edges.get(module, ())):
            if state.get(target) == "open":
                yield " → ".join([*path[path.index(target) :], target])
            elif target not in state:
                yield from visit(target, (*path, target))
        state[module] = "done"

    for module in sorted(edges):
        if module not in state:
            yield from visit(module, (module,))


def test_no_circles():
    assert list(cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == ["b → c → b"]
    found = list(cycles(import_time_edges()))
    assert not found, "\n".join(found)


def is_light(module: str) -> bool:
    if module in LIGHT_IN or module in ("visor.models", "sft", "grpo"):
        return True
    heavy_room = any(module.startswith(room + ".") for room in HEAVY_ROOMS)
    return not heavy_room and module not in HEAVY_MODULES and not module.endswith("__main__")


PROBE = """
import importlib, sys
for module in sys.argv[2:]:
    importlib.import_module(module)
    loaded = sorted(set(sys.argv[1].split(",")) & set(sys.modules))
    if loaded:
        sys.exit(f"importing {module} loads {', '.join(loaded)}")
"""


def probe(modules_in_order: list[str], heavy: list[str]) -> subprocess.CompletedProcess:
    """Import the modules one by one in a fresh interpreter; fails naming the first that loads a heavy one."""
    command = [sys.executable, "-c", PROBE, ",".join(heavy), *modules_in_order]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_light_modules_load_no_heavy_library():
    done = probe(sorted(filter(is_light, modules())), HEAVY)
    assert done.returncode == 0, done.stderr


def test_the_probe_sees_a_heavy_import():
    done = probe(["visor", "visor.types"], ["pydantic"])
    assert done.returncode == 1
    assert "importing visor.types loads pydantic" in done.stderr
