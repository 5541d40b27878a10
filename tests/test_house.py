# SPDX-License-Identifier: Apache-2.0
"""The house rules, kept."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from functools import cache

import pytest

from tests.house_rules import (
    BANNED_PARTS,
    FILE_LINES,
    FUNCTION_LINES,
    MEDIAN_LINES,
    PATCH_LINES,
    ROOT,
    RULES,
    Module,
    Rule,
    below,
    broad_excepts,
    defaulted_getattr,
    docstrings,
    environment,
    implicit_types,
    kernel_doors,
    names,
    package,
    patch_doors,
    plain_doors,
    second_copies,
    side_doors,
    sizes,
    stage_doors,
    untyped,
)

IMPORTED_BY_NO_TEST = {
    "vllm_h2o.kernels.torch.merge": "tests/kernels/test_agree.py calls its caller",
    "vllm_h2o.kernels.triton.tiles": "every kernel of a prompt loads its tiles with it",
    "vllm_h2o.options.checks": "tests/options/test_config.py meets each of its refusals",
    "vllm_h2o.planner.show": "tests/test_cli.py reads what it prints",
    "vllm_h2o.policy.base": "every policy is one of its class; tests/policy builds others",
    "vllm_h2o.scheduler.entry": "tests/scheduler/test_conversations.py finds and loses them",
    "vllm_h2o.scheduler.integrity": "tests/scheduler/harness.py runs it after every step",
    "vllm_h2o.scheduler.stats": "tests/scheduler/test_stats.py asks the scheduler",
    "vllm_h2o.scheduler.turns": "tests/scheduler/test_tenants.py plays its requests",
    "vllm_h2o.worker.prompts": "tests/worker/test_metadata.py builds its chunks",
    "vllm_h2o.worker.worker": "every engine runs it; tests/e2e/test_windows.py has pages cleared",
    "vllm_h2o.pages": "every count of pages goes through it",
}
"""Module with logic -> what tests it nevertheless. Every patch is tested in test_each.py."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_each_rule(rule: Rule) -> None:
    """No module of the package breaks the rule."""
    broken = [f"{module.path}: {what}" for module in package() for what in rule(module)]
    assert not broken, "\n".join([rule.__doc__ or "", *broken])


LONG_FUNCTION = "def f() -> None:\n" + "    pass\n" * FUNCTION_LINES
BREACHES = [
    (plain_doors, "vllm_h2o/policy/base.py", "import torch"),
    (
        plain_doors,
        "vllm_h2o/scheduler/ledger.py",
        "def f():\n    from vllm import LLM",
    ),
    (kernel_doors, "vllm_h2o/kernels/cache.py", "from vllm_h2o.wire import RequestPlan"),
    (kernel_doors, "vllm_h2o/kernels/cache.py", "import numpy"),
    (side_doors, "vllm_h2o/scheduler/spec.py", "from vllm_h2o.worker import step"),
    (side_doors, "vllm_h2o/worker/step.py", "from vllm_h2o.scheduler.spec import HeavyHitterSpec"),
    (side_doors, "vllm_h2o/worker/backend.py", "from vllm_h2o.scheduler import ledger"),
    (stage_doors, "vllm_h2o/worker/step.py", "from vllm_h2o.kernels.torch import pack"),
    (patch_doors, "vllm_h2o/hooks.py", "from vllm_h2o.patches import ALWAYS"),
    (patch_doors, "vllm_h2o/hooks.py", "from vllm_h2o.plugin import activate"),
    (patch_doors, "patches/a__b.py", "from vllm_h2o import config"),
    (second_copies, "patches/a__b.py", "from patches._patch import Patch"),
    (second_copies, "tests/test_a.py", "import patches"),
    (sizes, "vllm_h2o/hooks.py", "\n" * (FILE_LINES + 1)),
    (sizes, "patches/a__b.py", "\n" * (PATCH_LINES + 1)),
    (sizes, "vllm_h2o/hooks.py", LONG_FUNCTION),
    (untyped, "vllm_h2o/hooks.py", "def f(a) -> None: ..."),
    (untyped, "vllm_h2o/hooks.py", "def f(*a) -> None: ..."),
    (untyped, "vllm_h2o/hooks.py", "class A:\n    def f(self): ..."),
    (docstrings, "vllm_h2o/hooks.py", "a = 1"),
    (docstrings, "vllm_h2o/hooks.py", '"""M."""\nclass A:\n    """A."""\n    def f(self): ...'),
    (names, "vllm_h2o/new_hooks.py", ""),
    (names, "vllm_h2o/utils/hooks.py", ""),
    (broad_excepts, "vllm_h2o/hooks.py", "try: ...\nexcept: ..."),
    (broad_excepts, "vllm_h2o/hooks.py", "try: ...\nexcept (ValueError, Exception): ..."),
    (environment, "vllm_h2o/hooks.py", "import os\nos.environ['A']"),
    (environment, "vllm_h2o/hooks.py", "from os import getenv"),
    (defaulted_getattr, "vllm_h2o/hooks.py", "getattr(a, 'b', None)"),
    (implicit_types, "vllm_h2o/hooks.py", "torch.zeros(3)"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BREACHES)
def test_each_rule_finds_its_fault(rule: Rule, path: str, source: str) -> None:
    """Each rule finds exactly one fault in a module that breaks it once."""
    assert len(list(rule(Module(path, source)))) == 1


def test_every_rule_is_tested() -> None:
    """No rule passes merely because it never finds anything."""
    assert {breach[0] for breach in BREACHES} == set(RULES)
    assert BANNED_PARTS


@cache
def _beside() -> list[Module]:
    files = [
        file
        for part in ("tests", "demo", "benchmarks", "research", "tools", "examples")
        for file in (ROOT / part).rglob("*.py")
    ]
    return [Module(str(file.relative_to(ROOT)), file.read_text()) for file in files]


@pytest.mark.parametrize("rule", [second_copies, sizes, untyped, names, broad_excepts])
def test_rule_beside_the_package(rule: Rule) -> None:
    """Other folders keep the rules that are about reading, not about layers."""
    broken = [f"{module.path}: {what}" for module in _beside() for what in rule(module)]
    assert not broken, "\n".join(broken)


def test_half_of_the_files_are_short() -> None:
    """Half of the files are short."""
    assert statistics.median(len(m.text.splitlines()) for m in package()) <= MEDIAN_LINES


def test_light_modules_load_neither_torch_nor_vllm() -> None:
    """Modules that know neither torch nor vLLM do not load them in a roundabout way either."""
    light = "vllm_h2o.plugin, vllm_h2o.options.config, vllm_h2o.hooks, vllm_h2o.scheduler.ledger"
    code = f"import sys, {light}; print(*sorted({{'torch', 'vllm'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@cache
def _imported_by_tests() -> frozenset[str]:
    tests = [module for module in _beside() if module.path.startswith("tests/")]
    return frozenset(name for module in tests for name in module.imports())


def _is_tested(module: Module) -> bool:
    """Whether a test imports the module, or what it defines."""
    if module.is_patch or not any(module.functions()):
        return True
    return any(below(name, module.dotted) for name in _imported_by_tests())


def test_every_module_is_tested() -> None:
    """Each module with logic is imported by a test, or named here with what tests it."""
    untested = {module.dotted for module in package() if not _is_tested(module)}
    assert untested == IMPORTED_BY_NO_TEST.keys()


def test_helpers_live_in_helpers() -> None:
    """No test file is imported by another: what several use has a module of its own."""
    tests = [module for module in _beside() if module.path.startswith("tests/")]
    borrowed = [
        f"{module.path}: {name}"
        for module in tests
        for name in module.imports()
        if re.match(r"tests\.(\w+\.)*test_", name)
    ]
    assert not borrowed, "\n".join(borrowed)
