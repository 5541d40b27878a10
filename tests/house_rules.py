# SPDX-License-Identifier: Apache-2.0
"""The house rules as functions: each takes one module and yields what is wrong with it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTION_LINES, KERNEL_LINES, FILE_LINES, MEDIAN_LINES, PATCH_LINES = 60, 120, 400, 120, 60
BANNED_PARTS = {"phase", "v2", "new", "misc", "utils", "experimental"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file.

    Args:
        path: below the root of the repository.
        text: its source.

    """

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree, parsed once for all rules."""
        return ast.parse(self.text)

    @property
    def is_patch(self) -> bool:
        """Whether the file patches a symbol, and is not the machinery around the patches."""
        return self.path.startswith("patches/") and not Path(self.path).name.startswith("_")

    @property
    def dotted(self) -> str:
        """The name by which it is imported: ``vllm_h2o/patches`` is a link to ``patches``."""
        name = self.path.removesuffix(".py").replace("/", ".")
        return f"vllm_h2o.{name}" if below(name, "patches") else name

    def imports(self) -> set[str]:
        """Dotted names of everything imported anywhere in the file."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}: relative import"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        return names

    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


@cache
def package() -> list[Module]:
    """All modules of the package, the patches among them; the link to these is not followed."""
    files = [*(ROOT / "vllm_h2o").rglob("*.py"), *(ROOT / "patches").rglob("*.py")]
    names = sorted(str(file.relative_to(ROOT)) for file in files)
    return [Module(name, (ROOT / name).read_text()) for name in names]


def below(name: str, *parents: str) -> bool:
    """Whether a dotted name is one of ``parents`` or inside one."""
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def plain_doors(module: Module) -> Iterator[str]:
    """Policy, config, wire, errors and ledger know neither vLLM nor torch."""
    plain = (
        "options/config.py",
        "options/checks.py",
        "options/parsing.py",
        "wire.py",
        "errors.py",
        "scheduler/ledger.py",
        "scheduler/pressure.py",
        "scheduler/state.py",
        "policy/",
    )
    if module.path.startswith(tuple(f"vllm_h2o/{start}" for start in plain)):
        yield from (name for name in module.imports() if below(name, "vllm", "torch"))


def kernel_doors(module: Module) -> Iterator[str]:
    """Kernels import torch, triton, policies, the count of pages and each other."""
    if module.path.startswith("vllm_h2o/kernels/"):
        for name in module.imports():
            standard = name.partition(".")[0] in sys.stdlib_module_names
            if not standard and not below(
                name, "torch", "triton", "vllm_h2o.kernels", "vllm_h2o.pages", "vllm_h2o.policy"
            ):
                yield name


def side_doors(module: Module) -> Iterator[str]:
    """Scheduler and worker meet in ``wire``, and in the spec, a wire object of vLLM's own."""
    for name in module.imports():
        if module.path.startswith("vllm_h2o/scheduler/") and below(
            name, "vllm_h2o.worker", "vllm_h2o.kernels"
        ):
            yield name
        in_backend = module.path == "vllm_h2o/worker/backend.py"
        if module.path.startswith("vllm_h2o/worker/") and below(name, "vllm_h2o.scheduler"):
            yield from () if in_backend and below(name, "vllm_h2o.scheduler.spec") else (name,)


def stage_doors(module: Module) -> Iterator[str]:
    """The worker asks kernels for stages of their interface; only its selector knows the sets."""
    sets = tuple(f"vllm_h2o.kernels.{name}" for name in ("torch", "native", "triton"))
    if module.path.startswith("vllm_h2o/worker/") and not module.path.endswith("/selector.py"):
        yield from (name for name in module.imports() if below(name, *sets))


def patch_doors(module: Module) -> Iterator[str]:
    """Only the plugin imports patches; patches import what they call, errors and each other.

    Nothing but worker and scheduler, which vLLM imports by their names, imports the plugin.
    """
    for name in module.imports():
        named = ("vllm_h2o/worker/worker.py", "vllm_h2o/scheduler/scheduler.py")
        if below(name, "vllm_h2o.plugin") and module.path not in named:
            yield name
        if module.path.startswith("patches/"):
            allowed = tuple(
                f"vllm_h2o.{n}"
                for n in ("errors", "hooks", "options", "patches", "planner", "sparsity")
            )
            if below(name, "vllm_h2o") and not below(name, *allowed):
                yield name
        elif module.path != "vllm_h2o/plugin.py" and below(name, "vllm_h2o.patches"):
            yield name


def second_copies(module: Module) -> Iterator[str]:
    """The patches are ``vllm_h2o.patches``: as ``patches`` they would be there a second time."""
    yield from (name for name in module.imports() if below(name, "patches"))


def is_kernel(function: Function) -> bool:
    """Whether Triton compiles the function."""
    return any("triton.jit" in ast.unparse(node) for node in function.decorator_list)


def sizes(module: Module) -> Iterator[str]:
    """Files and functions that are too long."""
    lines = len(module.text.splitlines())
    limit = PATCH_LINES if module.is_patch else FILE_LINES
    if lines > limit:
        yield f"{lines} lines, at most {limit}"
    for function in module.functions():
        lines = (function.end_lineno or 0) - function.lineno + 1
        limit = KERNEL_LINES if is_kernel(function) else FUNCTION_LINES
        if lines > limit:
            yield f"{function.name} has {lines} lines, at most {limit}"


def untyped(module: Module) -> Iterator[str]:
    """Parameters and results without a type; Triton's own kernels take pointers and have none."""
    for function in module.functions():
        if is_kernel(function):
            continue
        a = function.args
        parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        for parameter in parameters:
            bound = parameter is not None and parameter.arg in ("self", "cls")
            if parameter is not None and parameter.annotation is None and not bound:
                yield f"{function.name}({parameter.arg})"
        if function.returns is None:
            yield f"{function.name}() ->"


def docstrings(module: Module) -> Iterator[str]:
    """Public modules, classes, functions and methods that do not say what they are."""
    if ast.get_docstring(module.tree) is None:
        yield "the module"
    scopes: list[tuple[str, list[ast.stmt]]] = [("", module.tree.body)]
    while scopes:
        prefix, body = scopes.pop()
        for node in body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None:
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}{node.name}.", node.body))


def names(module: Module) -> Iterator[str]:
    """Parts of a module's path that say nothing."""
    parts = Path(module.path).with_suffix("").parts
    yield from (part for part in parts if BANNED_PARTS & set(part.split("_")))


def broad_excepts(module: Module) -> Iterator[str]:
    """Handlers that would swallow a bug."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = {"Exception"} if node.type is None else words(node.type)
            if caught & {"Exception", "BaseException"}:
                yield f"line {node.lineno}"


def words(node: ast.AST) -> set[str]:
    """All names in an expression."""
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def environment(module: Module) -> Iterator[str]:
    """Settings that are not options."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            yield f"line {node.lineno}: {ast.unparse(node)}"
    yield from (name for name in module.imports() if below(name, "os.environ", "os.getenv"))


def defaulted_getattr(module: Module) -> Iterator[str]:
    """``getattr`` with a default hides that vLLM has renamed an attribute."""
    if module.path == "patches/_patch.py":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and len(node.args) == 3 and "getattr" in words(node.func):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def implicit_types(module: Module) -> Iterator[str]:
    """While vLLM loads a model, torch's default type is the model's: a tensor names its own."""
    makers = {"zeros", "ones", "empty", "rand", "randn"}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        made = node.func.attr in makers and ast.unparse(node.func.value) == "torch"
        if made and not {"dtype", None} & {keyword.arg for keyword in node.keywords}:
            yield f"line {node.lineno}: {ast.unparse(node)}"


Rule = Callable[[Module], Iterator[str]]
RULES: tuple[Rule, ...] = (
    plain_doors,
    kernel_doors,
    side_doors,
    stage_doors,
    patch_doors,
    second_copies,
    sizes,
    untyped,
    docstrings,
    names,
    broad_excepts,
    environment,
    defaulted_getattr,
    implicit_types,
)
