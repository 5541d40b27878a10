# SPDX-License-Identifier: Apache-2.0
"""A policy of another package, found by its entry point, in real engines and in each kernel set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.e2e.gpu_runner.job import SETTINGS, Job
from tests.e2e.gpu_runner.process import OtherProcess
from tests.e2e.harness import CHARACTERS, tiny_llama
from tests.e2e.oracle import follow
from tests.house_rules import ROOT
from vllm_h2o.policy import policies, shelf

PACKAGE = ROOT / "examples" / "own_policy"
LENGTHS = (5, 33, 90, 150)
"""Prompts shorter and longer than a budget of 32 tokens."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's package, as pip installs it."""
    folder = tmp_path_factory.mktemp("own")
    source = shutil.copytree(PACKAGE, folder / "source")  # pip builds in the source tree
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(folder / "site"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "site"


@pytest.fixture
def on_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process and new ones find the package; the shelf has not been read yet."""
    monkeypatch.syspath_prepend(str(installed))
    path = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setattr(shelf, "_SHELF", dict(shelf._SHELF))
    shelf._load_entry_points.cache_clear()
    yield
    shelf._load_entry_points.cache_clear()


def test_policies_installed_package_is_found(on_path: None) -> None:
    """The entry point names the policy; without the package there is none of that name."""
    (entry,) = entry_points(group=shelf.GROUP, name="theirs")
    assert entry.load() is policies()["theirs"]


def test_policies_without_the_package_lack_it() -> None:
    """Nothing of it is left behind."""
    assert "theirs" not in policies()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_own_policy_on_cpu_kernels_keeps_what_the_reference_keeps(
    kernels: str, on_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer and KV head, every step."""
    prompts = [CHARACTERS[n : n + n] for n in LENGTHS]
    options = {"budget": 32, "observation_window": 12, "kernels": kernels}
    settings = {"block_size": 16, "max_num_batched_tokens": 64}
    follow(monkeypatch, tiny_llama(tmp_path, 6, 2), "theirs", options, prompts, **settings)


def test_own_policy_on_triton_keeps_what_the_reference_keeps(on_path: None, tmp_path: Path) -> None:
    """The kernels for GPUs, in Triton's interpreter, under the model runner for GPUs."""
    options = {"budget": 16, "observation_window": 8}
    prompts = [CHARACTERS[n : n + n] for n in (40, 5, 17, 33)]
    job = Job(tiny_llama(tmp_path, 4, 2), "theirs", options, prompts, settings=SETTINGS)
    job.triton = job.follow = True
    other = OtherProcess()
    try:
        outcome = other.run(job)
    finally:
        other.end()
    assert outcome.compared > 0 and outcome.victims > 0
    assert outcome.ties <= max(outcome.victims / 1000, 1)
    assert outcome.max_error < 1e-4
