# SPDX-License-Identifier: Apache-2.0
"""A second environment for the tests: another vLLM's Python over the extension that is installed.

::

    .venv/bin/python -m tools.overlay 0.33.0 .venv-033

vLLM's CPU build ends at 0.32.0, and the wheels of later versions are for CUDA. But their Python
runs on a CPU, too, with the older version's compiled extension, as long as no operation that they
call is new or changed. So the environment takes everything from the one that is running, but for
``vllm``: that is the other version's Python, with links to the installed extension. What it proves
is what Python does: schedulers, managers, model runners, servers. It says nothing of CUDA.

Drop when: there is a CPU build of that version.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

from vllm_h2o.errors import KVPolicyError, UnsupportedError
from vllm_h2o.patches._sources import fetch

ADDED = ("orjson",)
"""What a later version imports that the installed one does not need."""

_SCRIPT = """\
#!{python}
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":  # engines are started by processes that import this file
    sys.exit(main())
"""


def create(version: str, folder: Path, sources: Path) -> None:
    """Make the environment; one that is there is made anew.

    Args:
        version: of vLLM, in full.
        folder: where it goes.
        sources: the archive of that version's (``_sources.fetch``).

    Raises:
        UnsupportedError: when pip does not get the packages that it needs besides.

    """
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    python = folder.resolve() / "bin/python"
    below = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    site = folder / below
    with zipfile.ZipFile(sources) as archive:
        archive.extractall(site)
    installed = find_spec("vllm")
    assert installed is not None and installed.origin is not None
    for library in Path(installed.origin).parent.rglob("*.so"):
        link = site / "vllm" / library.relative_to(Path(installed.origin).parent)
        link.symlink_to(library)
    _rename(site, version)
    base = sysconfig.get_path("purelib")
    (site / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    _add(site)
    script = python.with_name("vllm")
    script.write_text(_SCRIPT.format(python=python))
    script.chmod(0o755)


def _rename(site: Path, version: str) -> None:
    """Give the distribution a name by which vLLM knows that it runs on a CPU."""
    (info,) = site.glob("vllm-*.dist-info")
    metadata = info / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(
        text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1), encoding="utf-8"
    )
    info.rename(site / f"vllm-{version}+cpu.dist-info")


def _add(site: Path) -> None:
    pip = ["pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(site)]
    command = [sys.executable, "-m", *pip, *ADDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(
            f"an environment with {', '.join(ADDED)}",
            (done.stderr.strip().splitlines() or ["pip failed"])[-1],
            "the later vLLM imports it, and the installed one does not need it",
            "look whether pip reaches its index",
        )


def main() -> int:
    """Make it; 2 and a message in four parts where that cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m tools.overlay", description=__doc__)
    parser.add_argument("version", help="of vLLM, in full")
    parser.add_argument("folder", type=Path, help="of the environment")
    arguments = parser.parse_args()
    try:
        create(arguments.version, arguments.folder, fetch(arguments.version))
    except KVPolicyError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments.folder} is ready: vLLM {arguments.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
