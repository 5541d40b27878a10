# SPDX-License-Identifier: Apache-2.0
"""Files that a host of repositories and pre-commit read: they name what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from tests.draws import draws
from tests.house_rules import ROOT

yaml = pytest.importorskip("yaml")
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def project() -> dict[str, Any]:
    """The table of this name in pyproject.toml."""
    tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def jobs() -> dict[str, Any]:
    """The jobs of the workflow, by name."""
    text = (ROOT / ".github/workflows/tests.yml").read_text()
    return dict(yaml.safe_load(text)["jobs"])


def commands(job: dict[str, Any]) -> list[str]:
    """The command lines that a job runs."""
    return [step["run"] for step in job["steps"] if "run" in step]


def test_workflow_with_vllm_runs_make_targets() -> None:
    """Lint and tests run as a contributor runs them."""
    makefile = (ROOT / "Makefile").read_text()
    ran = commands(jobs()["with-vllm"])
    assert ran == ["make lint", "make test", "make test-all"]
    for command in ran:
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)


def test_workflow_without_vllm_covers_each_declared_python() -> None:
    """The matrix is the list of classifiers, and starts at the oldest Python."""
    names = [name for name in project()["classifiers"] if "Python :: 3." in name]
    versions = jobs()["without-vllm"]["strategy"]["matrix"]["python"]
    assert versions == [name.rpartition(" ")[2] for name in names]
    assert project()["requires-python"] == f">={versions[0]}"


def test_workflow_without_vllm_names_tests_that_exist() -> None:
    """A renamed test file would be an error there alone."""
    paths = re.findall(r"tests/\S+", commands(jobs()["without-vllm"])[-1])
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_second_tier_of_one_run_leaves_out_what_is_not_random() -> None:
    """Modules that draw examples, or import what does, stay; so do slow tests."""
    known = {"tests.test_wire": True, "tests.scheduler.test_chunks": True, "tests.test_cli": False}
    assert {module: draws(module) for module in known} == known
    chosen = ["tests/test_wire.py", "tests/test_errors.py", "tests/kernels/triton/test_compile.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "--after-test", *chosen], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == {chosen[0], chosen[2]}


def test_pre_commit_runs_what_lint_runs() -> None:
    """The hooks are the commands of ``make lint``; their versions are those of .venv."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = [hook for repo in yaml.safe_load(text)["repos"] for hook in repo["hooks"]]
    entries = [hook["entry"] for hook in hooks]
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    linted = re.findall(r"^\t@\$\(BIN\)/(.+)$", recipe, re.MULTILINE)
    assert len(entries) == len(linted)
    for entry, command in zip(entries, linted, strict=True):
        assert command.startswith(entry.removeprefix(".venv/bin/"))
    pinned = {name.partition("==")[0] for name in project()["optional-dependencies"]["dev"]}
    programs = {entry.split("/")[2].split()[0] for entry in entries} - {"python"}
    assert programs <= pinned


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_form_asks_for_the_start_line_and_the_plan(form: Any) -> None:
    """Both are required; without them a report cannot be judged."""
    body = yaml.safe_load(form.read_text())["body"]
    required = {field["id"] for field in body if field["validations"]["required"]}
    assert {"start", "plan"} <= required
    assert "vllm-h2o plan" in form.read_text()
