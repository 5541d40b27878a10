"""What is built to be installed: complete, and usable wherever a process happens to start."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house_rules import ROOT

LEFT_OUT = {".venv", ".git", "build", "dist", "benchmarks", "tests", "__pycache__"}
# No compiler: the C++ kernels are optional, and every installation of this checkout compiles them.
ENVIRONMENT = {**os.environ, "CC": "false", "CXX": "false"}
PROBE = """
import inspect
from vllm.engine.arg_utils import EngineArgs
import vllm_h2o
from vllm_h2o.patches import ALWAYS
assert all(patch.is_applied for patch in ALWAYS)
assert "kv_policy" in inspect.signature(EngineArgs.__init__).parameters
print(vllm_h2o.__file__)
"""


def shipped() -> Iterator[Path]:
    """Files of the package that an installation needs, below the root of the repository."""
    for file in (ROOT / "vllm_h2o").rglob("*"):
        if file.suffix in {".py", ".cpp", ".h", ".html"}:
            yield file.relative_to(ROOT)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and with the wheel that is built of it."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in LEFT_OUT and not entry.name.endswith(".egg-info"):
            copy = ["cp", "-R", str(entry), str(source)]
            subprocess.run(copy, check=True)
    for library in source.rglob("*.so"):
        library.unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")]
    done = subprocess.run(
        [*command, str(source)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "dist"


def test_nothing_is_left_out(built: Path) -> None:
    """Every module, every source of the kernels, the trace's page: in both."""
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    needed = {str(file) for file in shipped()}
    assert needed <= in_sdist
    assert needed <= in_wheel
    assert "setup.py" in in_sdist


def test_it_is_used_without_the_checkout_and_from_its_root(built: Path) -> None:
    """Elsewhere the wheel's package runs; at the root the folder hides it, and runs as well."""
    (wheel,) = built.glob("*.whl")
    site = built.parent / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(site)]
    subprocess.run([*install, "--quiet", str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    places = {ROOT: ROOT, built.parent: site}
    processes = {
        place: subprocess.Popen(
            [sys.executable, "-c", PROBE],
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    }
    for place, process in processes.items():
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        assert Path(printed.split()[-1]) == places[place] / "vllm_h2o" / "__init__.py"
