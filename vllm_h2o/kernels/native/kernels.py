"""The C++ kernels, for the processor that this process runs on.

One source is compiled for several instruction sets, a library each beside this file; the best one
that the processor can run is opened, once. The libraries know neither Python nor torch: tensors
are handed over as addresses.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from vllm_h2o.kernels.batch import (
    SECOND_PASS_WEIGHT,
    DecodeBatch,
    PromptChunk,
    Scoring,
    StepTensors,
)
from vllm_h2o.kernels.cache import LayerCache

FOLDER = Path(__file__).parent
VARIANTS: dict[str, frozenset[str]] = {
    "amx": frozenset({"avx512_bf16", "amx_bf16", "amx_tile"}),
    "bf16": frozenset({"avx512_bf16"}),
    "v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "v3": frozenset({"avx2", "bmi2", "f16c", "fma", "movbe"}),
    "portable": frozenset(),
}
"""Best first: what a processor must have for each, beyond what those after it ask for."""

HEAD_MULTIPLE = 16
"""What head sizes are whole multiples of."""
LARGEST_HEAD = 1024
LAYOUT = 3
"""Counts the changes of the structs below; the libraries say which they were built with."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PAGE = struct.Struct("@qq4i")
_BATCH = struct.Struct("@5qi4x")
_TOKENS = struct.Struct("@9qiif4x")
_SCORING = struct.Struct("@4i")
_CHUNK = struct.Struct("@6q")
_PACKED = struct.Struct("@6q")
_RUNTIME = ("GOMP_parallel", "GOMP_barrier")
_RUNTIME_QUERIES = ("omp_get_max_threads", "omp_get_thread_num", "omp_get_num_threads")


class NativeUnavailableError(Exception):
    """There is no library that could be opened.

    Args:
        asked: for what.
        found: what is there.
        why: that does not do.
        remedy: what to do.

    """

    def __init__(self, asked: str, found: str, why: str, remedy: str) -> None:
        super().__init__(f"asked for {asked}; found {found}: {why}. {remedy}.")
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
            f"the native CPU kernels, variant {variant!r}",
            f"{', '.join(available()) or 'none'} in {FOLDER}",
            "this processor cannot run it"
            if variant not in runnable()
            else "it has not been built",
            "Choose one that is there, or reinstall vllm-h2o from its source",
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
        "the native CPU kernels",
        f"no library in {FOLDER}",
        "there was no C++ compiler when vllm-h2o was installed, or it failed",
        "Install g++ (GCC 12 or later) or clang++ and reinstall vllm-h2o from its source, "
        "or choose the torch kernels",
    )


@cache
def _open(variant: str) -> ctypes.CDLL:
    """Open the library and hand it the OpenMP runtime that torch uses."""
    path = library_path(variant)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(
            "the native CPU kernels",
            str(path),
            str(error),
            "Reinstall vllm-h2o from its source on this machine, or choose the torch kernels",
        ) from error
    if not hasattr(library, "h2o_layout") or library.h2o_layout() != LAYOUT:
        raise NativeUnavailableError(
            f"the native CPU kernels, variant {variant!r}",
            f"{path}, built from other sources than this module",
            "it would read what it is handed wrongly",
            "Run `make native`, or reinstall vllm-h2o from its source",
        )
    for name in ("h2o_decode", "h2o_prefill", "h2o_replay", "h2o_pack_survivors"):
        library[name].restype = None
    library.h2o_prepare.restype = ctypes.c_int
    if not library.h2o_prepare():
        raise NativeUnavailableError(
            f"the native CPU kernels, variant {variant!r}",
            "a system that does not let this process use AMX",
            "its tiles are state that a process has to ask for",
            "Choose the variant 'bf16'",
        )
    runtime = _openmp()
    if runtime is not None:
        library.h2o_use_runtime(struct.pack("@5q", *runtime))
    return library


def _openmp() -> list[int] | None:
    """Addresses of the OpenMP runtime's functions, as torch's own library finds them.

    A runtime that was preloaded comes before the one that torch brings along, for torch as for us,
    so threads, their number and their binding are those of the process. Without a runtime that
    speaks GCC's dialect there is None, and the kernels run on one thread.
    """
    names = (*_RUNTIME, *_RUNTIME_QUERIES)
    torch_folder = Path(torch.__file__).parent / "lib"
    suffix = ".dylib" if platform.system() == "Darwin" else ".so"
    for place in (None, str(torch_folder / f"libtorch_cpu{suffix}")):
        try:
            handle = ctypes.CDLL(place)
            found = [ctypes.cast(handle[name], ctypes.c_void_p).value for name in names]
        except (OSError, AttributeError):
            continue
        return [address for address in found if address is not None]
    return None


def _cache_bytes(cache: LayerCache) -> bytes:
    """The page as the kernels take it.

    Raises:
        ValueError: when the views are not those of :meth:`LayerCache.of`, or are nothing that the
            kernels compute.

    """
    key = cache.key
    _, block_size, head_size = key.shape
    row, column, inner = key.stride()
    size = key.itemsize
    base, part = key.data_ptr(), block_size * head_size * size
    views = (cache.value.data_ptr(), cache.score.data_ptr(), cache.position.data_ptr())
    expected = (base + part, base + 2 * part, base + 2 * part + 4 * block_size)
    if views != expected or (column, inner) != (head_size, 1) or row * size % 4:
        raise ValueError(
            f"the views are not of pages of {block_size} slots: strides {key.stride()}"
        )
    if head_size % HEAD_MULTIPLE:
        raise ValueError(f"a head size of {head_size} is not a multiple of 16")
    if head_size > LARGEST_HEAD:
        raise ValueError(f"a head size of {head_size} is more than {LARGEST_HEAD}")
    if key.dtype not in _TYPES:
        raise ValueError(f"the cache holds {key.dtype}, not one of {list(_TYPES)}")
    heads = cache.num_kv_heads
    return _PAGE.pack(base, row * size, heads, block_size, head_size, _TYPES[key.dtype])


def _tensors_bytes(cache: LayerCache, tensors: StepTensors) -> bytes:
    """A step's tensors as the kernels take them.

    Raises:
        ValueError: when a head is not contiguous, or a type is not the cache's.

    """
    dtype, head_size = cache.key.dtype, cache.key.shape[2]
    strides = []
    query, key, value, out = tensors.query, tensors.key, tensors.value, tensors.out
    initial = tensors.initial_score
    for tensor in (query, key, value, out):
        token, head, inner = tensor.stride()
        if (head, inner) != (head_size, 1):
            raise ValueError(f"heads of {head_size} are not side by side: {tensor.stride()}")
        if tensor.dtype != dtype and (tensor is not out or tensor.dtype != torch.float32):
            raise ValueError(f"{tensor.dtype} beside a cache of {dtype}")
        strides.append(token)
    if initial is not None and not (initial.is_contiguous() and initial.dtype == torch.float32):
        raise ValueError(f"initial scores are {initial.dtype} with strides {initial.stride()}")
    return _TOKENS.pack(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        initial.data_ptr() if initial is not None else 0,
        *strides,
        query.shape[1],
        _TYPES[out.dtype],
        tensors.scale,
    )


def _chunk_bytes(chunk: PromptChunk) -> bytes:
    where = (chunk.tokens.start, chunk.num_tokens, chunk.resident_start, chunk.logical_start)
    return _CHUNK.pack(_table(chunk.block_table).data_ptr(), *where, chunk.first_scoring_query)


def _scoring_bytes(scoring: Scoring) -> bytes:
    if scoring.power not in (0, 1, 2):
        raise ValueError(f"scores are sums of powers 0, 1 or 2, not {scoring.power}")
    ranked = (scoring.by_page, scoring.by_age)
    return _SCORING.pack(scoring.power, scoring.skip_recent, *ranked)


def _table(table: torch.Tensor) -> torch.Tensor:
    """The table, checked: int32, entries of a row side by side."""
    if table.dtype != torch.int32 or table.stride(-1) != 1:
        raise ValueError(f"a block table of {table.dtype} with strides {table.stride()}")
    return table


class NativeKernels:
    """The C++ kernels; see :class:`vllm_h2o.kernels.interface.Kernels`.

    Head sizes are multiples of 16. What is stored has the cache's dtype; ``out`` has that or
    float32. Threads are those of torch, as many as torch would use.

    Args:
        variant: which one it is.
        library: opened.

    """

    copies_kv = False

    def __init__(self, variant: str, library: ctypes.CDLL) -> None:
        self.variant = variant
        self._decode = library.h2o_decode
        self._prefill = library.h2o_prefill
        self._replay = library.h2o_replay
        self._pack = library.h2o_pack_survivors

    def decode(
        self,
        cache: LayerCache,
        batch: DecodeBatch,
        victims: torch.Tensor,
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """Store one new token of each request, attend and score, select the next victims."""
        table, orders = _table(batch.block_table), batch.fields
        if orders.dtype != torch.int64:
            raise ValueError(f"orders of {orders.dtype}")
        if victims.dtype != torch.int32 or not victims.is_contiguous():
            raise ValueError(f"victims of {victims.dtype} with strides {victims.stride()}")
        described = _BATCH.pack(
            table.data_ptr(),
            orders.data_ptr(),
            table.stride(0),
            *orders.stride(),
            orders.shape[1],
        )
        self._decode(
            _cache_bytes(cache),
            described,
            _tensors_bytes(cache, tensors),
            _scoring_bytes(scoring),
            ctypes.c_void_p(victims.data_ptr()),
        )

    def prefill(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """Store chunks of prompts behind the slots in use, attend causally and score."""
        self._prefill(
            _cache_bytes(cache),
            b"".join(_chunk_bytes(chunk) for chunk in chunks),
            len(chunks),
            _tensors_bytes(cache, tensors),
            _scoring_bytes(scoring),
        )

    def score_second_pass(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        rotated_query: torch.Tensor,
        scale: float,
        scoring: Scoring,
    ) -> None:
        """Score the chunks' tokens by their queries, asked again from behind them."""
        self._replay(
            _cache_bytes(cache),
            b"".join(_chunk_bytes(chunk) for chunk in chunks),
            len(chunks),
            _tensors_bytes(
                cache,
                StepTensors(
                    rotated_query, rotated_query, rotated_query, rotated_query, None, scale
                ),
            ),
            _scoring_bytes(scoring),
            ctypes.c_float(SECOND_PASS_WEIGHT),
        )

    def pack_survivors(
        self, caches: Sequence[LayerCache], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Move the ``keep`` survivors of each KV head into slots [0, keep), in order of position.

        Slots of a prompt are in order of position already: chunks are stored one behind another.
        """
        described = b"".join(
            _PACKED.pack(
                _table(chunk.block_table).data_ptr(),
                chunk.attended_len,
                chunk.num_survivors,
                chunk.recent_start,
                chunk.num_sinks,
                chunk.logical_end,
            )
            for chunk in chunks
        )
        self._pack(
            b"".join(_cache_bytes(cache) for cache in caches),
            len(caches),
            described,
            len(chunks),
            _scoring_bytes(scoring),
        )
