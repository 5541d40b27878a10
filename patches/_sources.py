# SPDX-License-Identifier: Apache-2.0
"""The Python sources of any vLLM, fetched once: to follow its releases, and to test on them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_h2o.errors import UnsupportedError

CACHE = Path("~/.cache/vllm-h2o").expanduser()
_COMPILED = (".so", ".h", ".hpp", ".cuh", ".inl", ".cu", ".cpp", ".js", ".css", ".jpg")
_BINARIES = ("vllm-rs",)


def fetch(version: str, cache: Path = CACHE) -> Path:
    """The Python part of a vLLM wheel: an archive of some 50 MB.

    Args:
        version: of vLLM, in full: ``0.33.0``.
        cache: where it is kept; the wheel itself, of some 340 MB, is not.

    Raises:
        UnsupportedError: when it is not there and pip does not get it.

    """
    target = cache / f"vllm-{version}-python.zip"
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        wheel = _download(version, Path(folder))
        partial = Path(folder) / target.name
        with (
            zipfile.ZipFile(wheel) as whole,
            zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as kept,
        ):
            for member in whole.infolist():
                name = Path(member.filename)
                if name.suffix not in _COMPILED and name.name not in _BINARIES:
                    kept.writestr(member, whole.read(member))
        partial.replace(target)  # whole, or not there
    return target


def _download(version: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    what = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), f"vllm=={version}"]
    done = subprocess.run([*pip, *what], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("vllm-*.whl"))
    if done.returncode or not wheels:
        raise UnsupportedError(
            f"the sources of vLLM {version}",
            (done.stderr.strip().splitlines() or ["pip left no wheel"])[-1],
            "they are read from the wheel of that version, which pip fetches",
            "look whether there is such a version, and whether pip reaches its index",
        )
    return wheels[0]
