# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels: one library for each instruction set. All else is in pyproject.toml.

The libraries are opened with ctypes and need neither Python's headers nor an OpenMP runtime. They
are optional: where there is no compiler, or an old one, the package installs without them, and says
at start what is missing.

The patches are required: without the link to their folder there is nothing to build.
"""

from __future__ import annotations

import copy
import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("vllm_h2o/kernels/native")
COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
# GCC 12 warns about its own intrinsics' headers, and about vectors that never leave a library.
COMMON += [
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
]
AVX512 = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
X86 = {
    "v3": ["-march=x86-64-v3"],
    "v4": AVX512,
    "bf16": [*AVX512, "-mavx512bf16"],
    "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}


class BuildLibraries(build_ext):
    """Builds each library in a folder of its own: they have their sources in common."""

    def finalize_options(self) -> None:
        """Compile as many at once as there are processors."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        """Compile and link one library."""
        alone = copy.copy(self)
        alone.build_temp = str(Path(self.build_temp) / ext.name)
        super(BuildLibraries, alone).build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        """A name without Python's version, which the libraries do not depend on."""
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """What the sources export: they define no Python module."""
        return ext.export_symbols


def library(variant: str, flags: list[str]) -> Extension:
    """The library of one variant."""
    return Extension(
        ".".join([*FOLDER.parts, f"h2o_{variant}"]),
        sources=sorted(str(path) for path in FOLDER.glob("*.cpp")),
        depends=sorted(str(path) for path in FOLDER.glob("*.h")),
        extra_compile_args=[*COMMON, *flags],
        language="c++",
        optional=True,
    )


if not Path("vllm_h2o/patches/__init__.py").is_file():
    sys.exit(
        "error: vllm_h2o/patches is not a link to the folder patches: this checkout was made "
        "without symbolic links.\n"
        "       Run `git config core.symlinks true`, then `git checkout -- vllm_h2o/patches`."
    )

variants = {"portable": [], **(X86 if platform.machine() in ("x86_64", "AMD64") else {})}
setup(
    ext_modules=[library(variant, flags) for variant, flags in variants.items()],
    cmdclass={"build_ext": BuildLibraries},
)
