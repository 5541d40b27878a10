# SPDX-License-Identifier: Apache-2.0
"""Which library of the C++ kernels is opened, for the processor that this process runs on.

One source is compiled for several instruction sets, a library each in this folder; the best one
that the processor can run is opened, once. The libraries know neither Python nor torch.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch

from vllm_h2o.kernels.native import layout
from vllm_h2o.kernels.native.kernels import NativeKernels

FOLDER = Path(__file__).parent
VARIANTS: dict[str, frozenset[str]] = {
    "amx": frozenset({"avx512_bf16", "amx_bf16", "amx_tile"}),
    "bf16": frozenset({"avx512_bf16"}),
    "v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "v3": frozenset({"avx2", "bmi2", "f16c", "fma", "movbe"}),
    "portable": frozenset(),
}
"""Best first: features of a processor that each needs, besides those of the ones after it."""

_RUNTIME = (
    "GOMP_parallel",
    "GOMP_barrier",
    "omp_get_max_threads",
    "omp_get_thread_num",
    "omp_get_num_threads",
)
"""Names that GCC has for the functions of ``layout.H2oRuntime``."""


class NativeUnavailableError(Exception):
    """No library of the C++ kernels can be opened: "ASKED is not available: FOUND. WHY. REMEDY."

    Args:
        asked: the kernels that the caller asked for, as a noun in the singular.
        found: a clause: the fact that the loader found.
        why: a clause: the reason why that does not do.
        remedy: an imperative clause: what to do instead.

    """

    def __init__(self, asked: str, found: str, why: str, remedy: str) -> None:
        last = (f"{clause[0].upper()}{clause[1:]}." for clause in (why, remedy))
        super().__init__(" ".join((f"{asked} is not available: {found}.", *last)))
        self.asked, self.found, self.why, self.remedy = asked, found, why, remedy


def library_path(variant: str) -> Path:
    """Where the build puts a variant's library."""
    return FOLDER / f"h2o_{variant}.so"


@cache
def processor_flags() -> frozenset[str]:
    """Names of the processor's features, as Linux spells them; empty where it is not known."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, []))


def runnable() -> list[str]:
    """Variants that this processor can run, best first, whether they have been built or not."""
    names = list(VARIANTS)
    able: list[str] = []
    for name in reversed(names):
        if not VARIANTS[name] <= processor_flags():
            break
        able.insert(0, name)
    return able


def available() -> list[str]:
    """Variants that :func:`load` can open here, best first."""
    return [name for name in runnable() if library_path(name).is_file()]


def load(variant: str | None = None) -> NativeKernels:
    """The kernels of one variant, or the best that there is.

    Args:
        variant: one of ``VARIANTS``; None takes the first of :func:`available` that opens.

    Raises:
        NativeUnavailableError: when nothing fits.

    """
    if variant is None:
        return _first()
    if variant not in available():
        raise NativeUnavailableError(
            f"variant {variant!r} of the C++ kernels",
            f"{FOLDER} has {', '.join(available()) or 'none that this processor can run'}",
            "this processor cannot run it"
            if variant not in runnable()
            else "it has not been built",
            "choose a variant that is there, or reinstall vllm-h2o from its source",
        )
    return NativeKernels(variant, _open(variant))


def _first() -> NativeKernels:
    """The first variant that opens: a system may forbid what its processor could do."""
    refused: NativeUnavailableError | None = None
    for variant in available():
        try:
            return NativeKernels(variant, _open(variant))
        except NativeUnavailableError as error:
            refused = refused or error
    raise refused or NativeUnavailableError(
        "kernels='native'",
        f"there is no library in {FOLDER}",
        "there was no C++ compiler when vllm-h2o was installed, or it failed",
        "install g++ (GCC 12 or later) or clang++ and reinstall vllm-h2o from its source, "
        "or choose kernels=torch",
    )


@cache
def _open(variant: str) -> ctypes.CDLL:
    """Open the library and hand it the OpenMP runtime that torch uses."""
    path = library_path(variant)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(
            "kernels='native'",
            f"{path} does not open",
            f"the system says: {error}",
            "reinstall vllm-h2o from its source on this machine, or choose kernels=torch",
        ) from error
    different = layout.mismatch(library)
    if different is not None:
        raise NativeUnavailableError(
            f"variant {variant!r} of the C++ kernels",
            f"{path} was built from other sources than this module",
            f"it would read its arguments wrongly: {different} is not the same there",
            "run `make native`, or reinstall vllm-h2o from its source",
        )
    library.h2o_prepare.restype = ctypes.c_int
    if not library.h2o_prepare():
        raise NativeUnavailableError(
            f"variant {variant!r} of the C++ kernels",
            "the system does not let this process use AMX",
            "a process has to ask for AMX's tiles before it uses them",
            "choose the variant 'bf16'",
        )
    runtime = _openmp()
    if runtime is not None:
        library.h2o_use_runtime(layout.RUNTIME.pack(*runtime))
    return library


def _openmp() -> list[int] | None:
    """Addresses of the OpenMP runtime's functions, as torch's own library finds them.

    A preloaded runtime comes before the one that torch brings along, for torch as for us, so
    threads, their number and their binding are those of the process. None where no runtime has
    GCC's functions; the kernels then run on one thread.
    """
    torch_folder = Path(torch.__file__).parent / "lib"
    suffix = ".dylib" if platform.system() == "Darwin" else ".so"
    for place in (None, str(torch_folder / f"libtorch_cpu{suffix}")):
        try:
            handle = ctypes.CDLL(place)
            found = [ctypes.cast(handle[name], ctypes.c_void_p).value for name in _RUNTIME]
        except (OSError, AttributeError):
            continue
        return [address for address in found if address is not None]
    return None
