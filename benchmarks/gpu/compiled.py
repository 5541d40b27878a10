"""What the compiler makes of the kernels, for a device that need not be there.

Usage::

    python -m benchmarks.gpu.compiled CAPABILITY

prints a line of JSON a kernel. Not in a process that interprets kernels: neither finds the other's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource

from vllm_h2o.kernels.triton import decode, merge, pack, prefill, scoring_pass, share
from vllm_h2o.kernels.triton.sizes import (
    MAX_KV_SPLITS,
    PAGE_LANES,
    SELECT_TILE,
    STORE_TILE,
    decode_tile,
    few_registers,
    padded_group,
    precision,
    prompt_tiles,
)

HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""Of a launch; the rest of what it is given by name are constants."""
NAMES = {HALF: "*fp16", BRAIN: "*bf16", SINGLE: "*fp32"}
CACHE = {
    "key_ptr", "value_ptr", "query_ptr", "out_ptr", "key_pages", "value_pages", "key_type",
    "kept_key", "kept_value",
}  # fmt: skip
FLOAT = {
    "initial_score_ptr", "score_pages", "logits_ptr", "partial_out_ptr", "partial_max_sum_ptr",
    "lse_ptr", "kept_score", "mass_pages", "nearest_ptr",
}  # fmt: skip
INT = {
    "position_pages", "block_table_ptr", "victims_ptr", "survivors_ptr", "first_rows_ptr",
    "kept_position",
}  # fmt: skip
ALIGNED = {
    "query_stride", "key_stride", "value_stride", "out_stride", "page_stride", "word_stride",
}  # fmt: skip
SHAPES = {
    75: [(HALF, 64, 16, 3), (SINGLE, 256, 32, 8)],
    80: [(HALF, 128, 128, 1), (SINGLE, 96, 32, 8)],
    89: [(HALF, 128, 16, 8), (HALF, 256, 16, 1)],
    90: [(BRAIN, 80, 16, 1), (BRAIN, 128, 16, 7), (BRAIN, 256, 16, 8), (SINGLE, 256, 32, 8)],
}
"""(dtype, head size, slots of a page, query heads of a KV head), by compute capability: on each
device its own, the widest among them. All on all takes minutes."""
SERVED = [(HALF, 128, 16, 1), (BRAIN, 128, 16, 4)]
"""Of the models that :mod:`benchmarks.gpu.roofline` speaks of."""


@dataclass(frozen=True)
class Made:
    """One kernel.

    Args:
        kernel: its name.
        dtype: of K and V.
        head_size: D.
        group: query heads of a KV head.
        registers: of a thread.
        spilled: bytes of a thread's registers that lie in memory.
        shared: bytes of a program.
        warps: of a program.
        loads_ahead: copies to shared memory that nobody waits for yet.
        products: instructions of the matrix units.

    """

    kernel: str
    dtype: str
    head_size: int
    group: int
    registers: int
    spilled: int
    shared: int
    warps: int
    loads_ahead: int
    products: int


Shape = tuple[torch.dtype, int, int, int]
Launch = tuple[Any, str, dict[str, Any]]
"""A kernel, the type of its fields, and its constants."""


def launches(shape: Shape, capability: int) -> Iterator[Launch]:
    """Every kernel, as it is launched for a shape; its options alternate between shapes."""
    dtype, head, block, group = shape
    sizes = {"N": block, "D": head, "D_PAD": triton.next_power_of_2(head)}
    tile = decode_tile(sizes["D_PAD"], dtype.itemsize, group)
    exact = {"PRECISION": precision(dtype)}
    paged = head == 64
    split = {"CAN_SPLIT": not paged}
    by_query, by_key = prompt_tiles(sizes["D_PAD"], dtype.itemsize, capability)
    dots = {**sizes, "G": group, **exact}
    reach = {"REACH": 8 if paged else 0}
    yield merge.nearest_key, "*i64", {**sizes, **split, "TILE": tile}
    yield from decode_launches(shape, paged)
    yield prefill.store_chunk, "*i32", {
        **sizes, "TILE": STORE_TILE, "HAS_INITIAL_SCORE": paged, "MERGES": not paged,
    }  # fmt: skip
    yield prefill.attend, "*i32", dots | by_query
    yield column_scores(shape, capability, paged)
    yield scoring_pass.log_sum_exp, "*i32", {**dots, **by_query, "ROTATED": not paged}
    yield scoring_pass.weighted_scores, "*i32", {
        **dots, **by_key, **reach, "POWER": 2, "ROTATED": not paged, "BY_MAXIMUM": group > 1,
    }  # fmt: skip
    ranked = {"N": block, "TILE": SELECT_TILE, "BY_AGE": not paged, **reach, "num_warps": 8}
    yield pack.select_survivors, "*i32", {**ranked, **split, "BY_PAGE": paged}
    yield pack.pack_survivors, "*i32", {**sizes, "TILE": STORE_TILE, "ALIGNED": 16}
    yield share.share_rows, "*i32", {**ranked, "H_PAD": 16}
    for stores in (False, True):
        yield share.move_shared, "*i32", {**sizes, "TILE": STORE_TILE, "STORES": stores}


def decode_launches(shape: Shape, paged: bool, merges: bool | None = None) -> Iterator[Launch]:
    """Those of a decode step."""
    dtype, head, block, group = shape
    sizes = {"N": block, "D": head, "D_PAD": triton.next_power_of_2(head)}
    tile = decode_tile(sizes["D_PAD"], dtype.itemsize, group)
    grouped = {"G": group, "G_PAD": padded_group(group), "TILE": tile}
    merges = not paged if merges is None else merges
    options = {"CAN_SPLIT": not paged}
    yield decode.store_token, "*i64", {
        **sizes, **options, "TILE": tile, "MAX_KV_SPLITS": MAX_KV_SPLITS,
        "HAS_INITIAL_SCORE": paged, "MERGES": merges,
    }  # fmt: skip
    yield decode.attend_split, "*i64", {
        **sizes, **grouped, **options, "PRECISION": precision(dtype), "HAS_FREE_SLOTS": paged,
        "KEEPS_LOGITS": not paged, "MERGES": merges,
        **few_registers(sizes["D_PAD"], dtype.itemsize),
    }  # fmt: skip
    yield decode.merge_and_score, "*i64", {
        **sizes, **grouped, **options, "N_PAD": block, "PAGES": PAGE_LANES // block,
        "MAX_KV_SPLITS": MAX_KV_SPLITS, "POWER": 2 if paged else 1, "BY_PAGE": paged,
        "BY_AGE": not paged, "BY_MAXIMUM": paged,
    }  # fmt: skip


def column_scores(shape: Shape, capability: int, paged: bool) -> Launch:
    """That of a prompt's scores."""
    dtype, head, block, group = shape
    sizes = {"N": block, "D": head, "D_PAD": triton.next_power_of_2(head)}
    _, by_key = prompt_tiles(sizes["D_PAD"], dtype.itemsize, capability)
    return prefill.column_scores, "*i32", {
        **sizes, "G": group, "PRECISION": precision(dtype), **by_key, "POWER": 1, "SKIPS": paged,
        "BY_MAXIMUM": paged,
    }  # fmt: skip


def served_launches(shape: Shape, capability: int) -> Iterator[Launch]:
    """Those of ``h2o`` that a server runs most."""
    yield from decode_launches(shape, paged=False, merges=False)
    yield column_scores(shape, capability, paged=False)


def build(launch: Launch, shape: Shape, capability: int) -> Made:
    """Compile one."""
    (kernel, fields, constants), dtype = launch, shape[0]
    options = {"num_warps": 4, "num_stages": 3}
    options |= {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name not in OPTIONS}
    signature = {name: _kind(name, dtype, fields, constants) for name in kernel.arg_names}
    # Fields lie request by request: their stride is the constant 1 in every real launch.
    strides = {"field_stride": 1} if "field_stride" in kernel.arg_names else {}
    # What a launch finds of its arguments: without it nothing is loaded ahead.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" or name in ALIGNED
    }
    source = ASTSource(kernel, signature, constants | strides, aligned)
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options=options)
    registers, spilled = _resources(made.asm["cubin"])
    text = made.asm["ptx"]
    return Made(
        kernel.__name__,
        NAMES[dtype],
        shape[1],
        shape[3],
        registers,
        spilled,
        made.metadata.shared,
        options["num_warps"],
        len(re.findall(r"^\s*cp\.async\.c[ag]", text, re.MULTILINE)),
        len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)", text)),
    )


def _kind(name: str, dtype: torch.dtype, fields: str, constants: dict[str, Any]) -> str:
    """Of an argument."""
    if name in constants or name == "field_stride":
        return "constexpr"
    if name in CACHE:
        return NAMES[dtype]
    known = ((name in FLOAT, "*fp32"), (name in INT, "*i32"), (name == "fields_ptr", fields))
    if kind := next((kind for is_it, kind in known if is_it), None):
        return kind
    if name.endswith("_bases"):
        return "*i64"
    return "fp32" if name in ("scale", "weight", "merge") else "i32"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of them that do not fit."""
    tool = Path(compiler.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) .*?LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def main() -> None:
    """Compile all for a capability."""
    capability = int(sys.argv[1])
    for shape in SHAPES.get(capability, ()):
        for launch in launches(shape, capability):
            print(json.dumps(asdict(build(launch, shape, capability))), flush=True)
    for shape in SERVED if capability >= 80 else ():
        for launch in served_launches(shape, capability):
            print(json.dumps({**asdict(build(launch, shape, capability)), "served": True}))


if __name__ == "__main__":
    main()
