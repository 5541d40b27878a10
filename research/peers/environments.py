# SPDX-License-Identifier: Apache-2.0
"""An environment for each peer, made once in the user's cache from the package registry.

``python -m research.peers.environments kvpress`` prints its interpreter.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.smollm2 import MODEL, default_cache, model_dir


@dataclass(frozen=True)
class Environment:
    """An environment that ``pip`` installs.

    Args:
        name: of its folder.
        requirements: at the versions that are compared.
        dropped: what these bring along and does not load here.

    """

    name: str
    requirements: tuple[str, ...]
    dropped: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where it is."""
        return default_cache() / "peers" / self.name

    def python(self) -> Path:
        """Its interpreter; made first where it is missing or was made from other versions."""
        stamp, wanted = self.folder / "requirements.txt", "\n".join(self.requirements)
        python = self.folder / "bin" / "python"
        if stamp.exists() and stamp.read_text() == wanted:
            return python
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", *self.requirements], check=True)
        if self.dropped:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.dropped], check=True)
        stamp.write_text(wanted)
        return python


TORCH = "torch==2.13.0"
OPENVINO = Environment(
    "openvino",
    (TORCH, "openvino==2026.4.1", "openvino-genai==2026.4.1", "optimum-intel==2.2.0"),
    ("torchvision",),
)
KVPRESS = Environment(
    "kvpress",
    (TORCH, "kvpress==0.5.5", "transformers==4.57.1", "tokenizers==0.22.1", "datasets==4.4.1"),
)
"""Has transformers, too; for ``research.presses``."""
ENVIRONMENTS = {environment.name: environment for environment in (OPENVINO, KVPRESS)}


def openvino_folder() -> Path:
    """The model as OpenVINO wants it, in float32; exported once, without a network."""
    folder = default_cache() / "peers" / f"{MODEL}-openvino"
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        export = OPENVINO.python().with_name("optimum-cli")
        command = [str(export), "export", "openvino", "--model", str(model_dir("float32"))]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp32", str(partial)]
        subprocess.run(command, check=True)
        partial.rename(folder)
    return folder


if __name__ == "__main__":
    print(ENVIRONMENTS[sys.argv[1]].python())
