"""Every kernel compiles to machine code for GPUs from Turing to Hopper. Needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.house_rules import ROOT

SHARED_MEMORY = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes that a program may have, by compute capability."""

SCRIPT = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_h2o.kernels.triton import decode, merge, pack, prefill, scoring_pass, share
from vllm_h2o.kernels.triton.sizes import (
    MAX_KV_SPLITS, PAGE_LANES, SELECT_TILE, STORE_TILE, padded_group, precision, prompt_tiles,
    tile_of)

CAPABILITY, LIMIT = int(sys.argv[1]), int(sys.argv[2])
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
         E4M3: "*fp8e4nv", E5M2: "*fp8e5"}
TOKENS = {"key_ptr", "value_ptr", "query_ptr", "out_ptr"}
CACHE = {"key_pages", "value_pages", "key_type", "kept_key", "kept_value"}
FLOAT = {"initial_score_ptr", "score_pages", "logits_ptr", "partial_out_ptr", "partial_max_sum_ptr",
         "lse_ptr", "kept_score", "mass_pages", "nearest_ptr"}
INT = {"position_pages", "block_table_ptr", "victims_ptr", "survivors_ptr", "first_rows_ptr",
       "kept_position"}
FACTORS = ("scale", "out_scale", "key_factor", "value_factor", "weight", "merge")
ALIGNED = {"query_stride", "key_stride", "value_stride", "out_stride", "page_stride", "word_stride"}

def build(kernel, dtypes, fields, **constants):
    dtype, stored = dtypes
    warps, stages = constants.pop("num_warps", 4), constants.pop("num_stages", 3)
    def kind(name):
        if name in constants: return "constexpr"
        if name == "field_stride": return "constexpr"
        if name in TOKENS: return NAMES[dtype]
        if name in CACHE: return NAMES[stored]
        if name in FLOAT: return "*fp32"
        if name in INT: return "*i32"
        if name.endswith("_bases"): return "*i64"
        if name == "fields_ptr": return fields
        return "fp32" if name in FACTORS else "i32"
    signature = {name: kind(name) for name in kernel.arg_names}
    # Fields lie request by request: their stride is the constant 1 in every real launch.
    strides = {"field_stride": 1} if "field_stride" in kernel.arg_names else {}
    # What a launch finds of its arguments: without it nothing is loaded ahead.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
               if signature[name][0] == "*" or name in ALIGNED}
    source = ASTSource(kernel, signature, constants | strides, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    assert made.asm["cubin"] and made.metadata.shared <= LIMIT, (
        kernel, dtypes, constants, made.metadata.shared)

# On each device its own, the widest among them: all on all takes minutes.
HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
SHAPES = {
    75: [(HALF, HALF, 64, 16, 3), (SINGLE, SINGLE, 256, 32, 8)],
    80: [(HALF, HALF, 128, 128, 1), (SINGLE, SINGLE, 96, 32, 8)],
    89: [(HALF, HALF, 128, 16, 8), (HALF, HALF, 256, 16, 1), (HALF, E5M2, 64, 16, 1),
         (BRAIN, E4M3, 128, 16, 8)],
    90: [(BRAIN, BRAIN, 80, 16, 1), (BRAIN, BRAIN, 128, 16, 7), (BRAIN, BRAIN, 256, 16, 8),
         (SINGLE, SINGLE, 256, 32, 8), (BRAIN, E4M3, 256, 16, 8), (BRAIN, E5M2, 64, 128, 1)],
}
for dtype, stored, head, block, group in SHAPES[CAPABILITY]:
    shape = dict(N=block, D=head, D_PAD=triton.next_power_of_2(head))
    tile = tile_of(shape["D_PAD"], dtype.itemsize)
    grouped = dict(G=group, G_PAD=padded_group(group), TILE=tile)
    exact = dict(PRECISION=precision(dtype))
    paged, dtypes = head == 64, (dtype, stored)
    wide = dtype == stored  # victims merge
    if wide:
        build(merge.nearest_key, dtypes, "*i64", **shape, TILE=tile, CAN_SPLIT=not paged)
    build(decode.store_token, dtypes, "*i64", **shape, TILE=tile, MAX_KV_SPLITS=MAX_KV_SPLITS,
          HAS_INITIAL_SCORE=paged, CAN_SPLIT=not paged, MERGES=wide and not paged)
    build(decode.attend_split, dtypes, "*i64", **shape, **grouped, **exact, HAS_FREE_SLOTS=paged,
          KEEPS_LOGITS=not paged, CAN_SPLIT=not paged, MERGES=wide and not paged)
    build(decode.merge_and_score, dtypes, "*i64", **shape, **grouped, N_PAD=block,
          PAGES=PAGE_LANES // block, MAX_KV_SPLITS=MAX_KV_SPLITS, POWER=2 if paged else 1,
          BY_PAGE=paged, BY_AGE=not paged, BY_MAXIMUM=paged, CAN_SPLIT=not paged)
    build(prefill.store_chunk, dtypes, "*i32", **shape, TILE=STORE_TILE, HAS_INITIAL_SCORE=paged,
          MERGES=wide and not paged)
    by_query, by_key = prompt_tiles(shape["D_PAD"], dtype.itemsize, CAPABILITY)
    dots = dict(**shape, G=group, **exact)
    build(prefill.attend, dtypes, "*i32", **dots, **by_query)
    build(prefill.column_scores, dtypes, "*i32", **dots, **by_key, POWER=1, SKIPS=paged,
          BY_MAXIMUM=paged)
    build(scoring_pass.log_sum_exp, dtypes, "*i32", **dots, **by_query, ROTATED=not paged)
    build(scoring_pass.weighted_scores, dtypes, "*i32", **dots, **by_key, POWER=2,
          ROTATED=not paged, BY_MAXIMUM=group > 1, REACH=8 if paged else 0)
    build(pack.select_survivors, dtypes, "*i32", N=block, TILE=SELECT_TILE, BY_PAGE=paged,
          BY_AGE=not paged, REACH=8 if paged else 0, CAN_SPLIT=not paged, num_warps=8)
    build(pack.pack_survivors, dtypes, "*i32", **shape, TILE=STORE_TILE, ALIGNED=16)
    build(share.share_rows, dtypes, "*i32", N=block, TILE=SELECT_TILE, H_PAD=16,
          BY_AGE=not paged, REACH=8 if paged else 0, num_warps=8)
    for stores in (False, True):
        build(share.move_shared, dtypes, "*i32", **shape, TILE=STORE_TILE, STORES=stores)
print("compiled")
"""


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles(capability: int) -> None:
    """All shapes and types, within the shared memory that a program may have."""
    # Compiled kernels and interpreted ones do not go together in one process.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, str(capability), str(SHARED_MEMORY[capability])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr[-3000:]
