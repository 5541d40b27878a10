# SPDX-License-Identifier: Apache-2.0
"""Models that see images, in a process of their own: there, torchvision can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.house_rules import ROOT


@pytest.mark.skipif(
    not (ROOT / ".venv/vision/torchvision").exists() and find_spec("torchvision") is None,
    reason="no torchvision; `make venv` fetches it",
)
def test_models_that_see_images(tmp_path: Path) -> None:
    """All tests of images.py."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.vision"]
    command += [f"--basetemp={tmp_path / 'own'}", "tests/e2e/images.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
