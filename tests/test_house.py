"""The house rules, kept."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

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
    broad_excepts,
    defaulted_getattr,
    docstrings,
    environment,
    kernel_doors,
    names,
    package,
    patch_doors,
    plain_doors,
    side_doors,
    sizes,
    untyped,
)

TESTED_ELSEWHERE = {
    "vllm_h2o/kernels/batch.py": ("tests/worker/test_metadata.py", "what fills it"),
    "vllm_h2o/kernels/torch/decode.py": (
        "tests/kernels/torch/test_kernels.py",
        "one test holds the three",
    ),
    "vllm_h2o/kernels/torch/prefill.py": (
        "tests/kernels/torch/test_kernels.py",
        "one test holds the three",
    ),
    "vllm_h2o/kernels/torch/kernels.py": (
        "tests/kernels/torch/test_kernels.py",
        "one test holds the three",
    ),
    "vllm_h2o/kernels/interface.py": (
        "tests/kernels/torch/test_kernels.py",
        "what keeps to it is tested",
    ),
    "vllm_h2o/kernels/torch/random.py": ("tests/kernels/torch/test_prefill.py", "random_scores"),
    "vllm_h2o/kernels/triton/chunks.py": ("tests/kernels/test_agree.py", "all stages read them"),
    "vllm_h2o/kernels/triton/decode.py": ("tests/kernels/test_agree.py", "test_decode"),
    "vllm_h2o/kernels/triton/pack.py": ("tests/kernels/test_agree.py", "test_pack"),
    "vllm_h2o/kernels/triton/prefill.py": ("tests/kernels/test_agree.py", "test_prefill"),
    "vllm_h2o/kernels/triton/second_pass.py": ("tests/kernels/test_agree.py", "test_second_pass"),
    "vllm_h2o/kernels/triton/sizes.py": ("tests/kernels/triton/test_compile.py", "they compile"),
    "vllm_h2o/kernels/triton/tiles.py": ("tests/kernels/test_agree.py", "all stages load them"),
    "vllm_h2o/planner/show.py": ("tests/test_cli.py", "as it is printed"),
    "vllm_h2o/scheduler/footprint.py": ("tests/planner/test_capacity.py", "against engines"),
    "vllm_h2o/worker/recorder.py": ("tests/trace/test_record.py", "needs an engine"),
    "vllm_h2o/scheduler/spec.py": (
        "tests/scheduler/test_manager.py",
        "its pages are counted there",
    ),
    "vllm_h2o/worker/attention.py": ("tests/e2e/test_retained.py", "needs an engine"),
    "vllm_h2o/patches/_patch.py": ("tests/patches/test_patch.py", "a name without its underscore"),
    "vllm_h2o/patches/__main__.py": ("tests/patches/test_each.py", "it describes each patch"),
}
"""Module with logic -> (where it is tested, why there). Every patch is tested in test_each.py."""

# Written so that they do not match themselves: this file is tracked, too.
FOREIGN = {
    "the host of a registry": r"pypi[.]org|pythonhosted[.]org|npmjs[.](org|com)|crates[.]io"
    r"|download[.]pytorch[.]org|proxy[.]golang[.]org",
    "a path of one machine": r"(?<![\w./-])/[w]ork(?![\w-])",
    "how the text was written": r"\b[A][I]\b|\b[Cc]laude\b|\b[Aa]nthropic\b|\b[Cc]hat-?[Gg][P]T\b"
    r"|\b(?i:[s]ub-?)?(?i:[a]gents?|[a]gentic)\b"
    r"|\b(?i:this|another|earlier|previous|next|coding)[ ]session\b",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
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
    (patch_doors, "vllm_h2o/hooks.py", "from vllm_h2o.patches import ALWAYS"),
    (patch_doors, "vllm_h2o/patches/a__b.py", "from vllm_h2o import config"),
    (sizes, "vllm_h2o/hooks.py", "\n" * (FILE_LINES + 1)),
    (sizes, "vllm_h2o/patches/a__b.py", "\n" * (PATCH_LINES + 1)),
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
]


@pytest.mark.parametrize(("rule", "path", "source"), BREACHES)
def test_rule_notices(rule: Rule, path: str, source: str) -> None:
    """Each rule finds exactly one fault in a module that breaks it once."""
    assert len(list(rule(Module(path, source)))) == 1


def test_every_rule_is_tested() -> None:
    """No rule passes merely because it never finds anything."""
    assert {breach[0] for breach in BREACHES} == set(RULES)
    assert BANNED_PARTS


@cache
def _beside() -> list[Module]:
    files = [
        file for part in ("tests", "demo", "benchmarks") for file in (ROOT / part).rglob("*.py")
    ]
    return [Module(str(file.relative_to(ROOT)), file.read_text()) for file in files]


@pytest.mark.parametrize("rule", [sizes, untyped, names, broad_excepts])
def test_rule_beside_the_package(rule: Rule) -> None:
    """Tests, demo and benchmarks keep the rules that are about reading, not about layers."""
    broken = [f"{module.path}: {what}" for module in _beside() for what in rule(module)]
    assert not broken, "\n".join(broken)


def test_median_file() -> None:
    """Half of the files are short."""
    assert statistics.median(len(m.text.splitlines()) for m in package()) <= MEDIAN_LINES


def test_light_imports() -> None:
    """Modules that know neither torch nor vLLM do not load them in a roundabout way either."""
    light = "vllm_h2o.plugin, vllm_h2o.options.config, vllm_h2o.hooks, vllm_h2o.scheduler.ledger"
    code = f"import sys, {light}; print(*sorted({{'torch', 'vllm'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def _expected_test(module: Module) -> Path | None:
    """Where the module is tested; None when there is nothing in it to test."""
    if not any(module.functions()):
        return None
    if module.path in TESTED_ELSEWHERE:
        return Path(TESTED_ELSEWHERE[module.path][0])
    if module.is_patch:
        return Path("tests/patches/test_each.py")
    inner = Path(module.path).relative_to("vllm_h2o")
    return Path("tests") / inner.with_name(f"test_{inner.name}")


@pytest.mark.parametrize("module", package(), ids=lambda module: module.path)
def test_tests_mirror_the_package(module: Module) -> None:
    """Each module with logic has a test of its name, or one that is named here with the reason."""
    test = _expected_test(module)
    assert test is None or (ROOT / test).is_file(), f"{module.path} has no {test}"


def test_exceptions_are_needed() -> None:
    """No exception outlives its module, or the test that would make it superfluous."""
    paths = {module.path for module in package()}
    assert TESTED_ELSEWHERE.keys() <= paths
    for path in TESTED_ELSEWHERE:
        inner = Path(path).relative_to(Path(path).parts[0])
        assert not (ROOT / "tests" / inner.with_name(f"test_{inner.name}")).exists()


def _tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def _text(path: Path) -> str:
    """What a file says; of a picture what it says of itself, for its pixels may spell anything."""
    if path.suffix == ".png":
        with Image.open(path) as picture:
            return str(picture.info)
    return path.read_text(errors="replace")


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_words(what: str) -> None:
    """No tracked file says where it was written or fetched from."""
    pattern = re.compile(FOREIGN[what])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _tracked()
        for number, line in enumerate(_text(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("what", "line", "expected"),
    [
        ("the host of a registry", "see https://" + "pypi" + ".org/p", True),
        ("a path of one machine", "cd /" + "work/main", True),
        ("a path of one machine", "vllm_h2o/worker/step.py and /worker", False),
        ("how the text was written", "written by an ag" + "ent", True),
        ("how the text was written", "an A" + "I wrote it", True),
        ("how the text was written", "requests.Session, OpenAI, _update_request_as_session", False),
    ],
)
def test_foreign_words_are_noticed(what: str, line: str, expected: bool) -> None:
    """The patterns find what they are for, and spare what only looks like it."""
    assert bool(re.search(FOREIGN[what], line)) is expected
