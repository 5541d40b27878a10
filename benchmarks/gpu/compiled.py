# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels for a device that need not be there, and say what they take.

Usage::

    python -m benchmarks.gpu.compiled CAPABILITY [--csv FILE]

prints a line of JSON a kernel; the CSV gets a row for each name, the most that any shape takes. Not
in a process that interprets kernels: neither finds the other's.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource

from benchmarks.gpu import mlp
from benchmarks.record import append_rows
from vllm_h2o.kernels.rope import Rope
from vllm_h2o.kernels.triton import decode, merge, neurons, pack, prefill, score, share
from vllm_h2o.kernels.triton.sizes import (
    MAX_KV_SPLITS,
    SELECT_TILE,
    SPLIT_SLOTS,
    STORE_TILE,
    decode_tile,
    few_registers,
    kv_shape,
    merge_registers,
    padded_group,
    page_parts,
    precision,
    prompt_tiles,
)
from vllm_h2o.policy import Term
from vllm_h2o.policy.h2o2 import H2O2
from vllm_h2o.policy.snapkv import SNAPKV

HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""Options of a launch; its other keywords are constants."""
NAMES = {HALF: "*fp16", BRAIN: "*bf16", SINGLE: "*fp32", E4M3: "*fp8e4nv", E5M2: "*fp8e5"}
TOKENS = {"key_ptr", "value_ptr", "query_ptr", "out_ptr", "x_ptr", "rows_ptr", "bias_ptr"}
CACHE = {"key_pages", "value_pages", "key_type", "kept_key", "kept_value"}
FLOAT = {
    "score_pages", "logits_ptr", "partial_out_ptr", "partial_max_sum_ptr",
    "lse_ptr", "lowest_ptr", "kept_score", "old_scores", "mass_pages", "nearest_ptr", "sink_ptr",
    "without_pages", "kept_without", "cuts_ptr", "rope_ptr",
}  # fmt: skip
INT = {
    "position_pages", "block_table_ptr", "victims_ptr", "survivors_ptr", "first_rows_ptr",
    "kept_position", "new_table_ptr", "newest_ptr", "arrived_ptr", "reached_ptr", "counts_ptr",
    "used_ptr", "keeps_ptr",
}  # fmt: skip
OWN = {"codes_ptr": "*u8", "scales_ptr": "*bf16", "total_ptr": "*i64"}
"""Types that do not follow from a shape."""
FACTORS = {"scale", "out_scale", "key_factor", "value_factor", "merge"}
ALIGNED = {
    "query_stride", "key_stride", "value_stride", "out_stride", "page_stride", "word_stride",
    "x_stride", "width",
}  # fmt: skip


class Shape(NamedTuple):
    """One layer.

    Args:
        dtype: of queries, and of K and V as they come.
        head: elements of K of one head.
        block: slots of a page.
        group: query heads of a KV head.
        float8: of K and V as they are stored; None: as they come.
        has_sinks: of attention, as gpt-oss has them.

    """

    dtype: torch.dtype
    head: int
    block: int
    group: int
    float8: torch.dtype | None = None
    has_sinks: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of every kernel that touches K and V."""
        return kv_shape(self.block, self.head)

    @property
    def paged(self) -> bool:
        """Which of two sets of options it is compiled with."""
        return self.head == 64

    @property
    def rope(self) -> Rope:
        """Rotates its queries: all of a head in halves, or half of it in pairs."""
        size = self.head // (1 + self.paged)
        return Rope(torch.empty(1, size, dtype=torch.float32), is_neox=not self.paged)

    @property
    def merges(self) -> bool:
        """Whether victims go to the nearest key."""
        return not self.paged and self.float8 is None


SHAPES = {
    75: [Shape(HALF, 64, 16, 3, has_sinks=True), Shape(SINGLE, 256, 32, 8)],
    80: [Shape(HALF, 128, 128, 1, has_sinks=True), Shape(SINGLE, 96, 32, 8)],
    89: [
        Shape(HALF, 128, 16, 8), Shape(HALF, 256, 16, 1), Shape(HALF, 64, 16, 1, E5M2),
        Shape(BRAIN, 128, 16, 8, E4M3, has_sinks=True),
    ],
    90: [
        Shape(BRAIN, 80, 16, 1), Shape(BRAIN, 128, 16, 7, has_sinks=True), Shape(BRAIN, 256, 16, 8),
        Shape(SINGLE, 256, 32, 8), Shape(BRAIN, 256, 16, 8, E4M3), Shape(BRAIN, 64, 128, 1, E5M2),
    ],
    100: [Shape(BRAIN, 128, 16, 8, has_sinks=True)],
    120: [Shape(BRAIN, 128, 16, 8, has_sinks=True)],
}  # fmt: skip
"""By compute capability, each its own, the widest among them: all on all takes minutes."""
TAKEN = ("registers", "spilled", "shared")
"""Columns of the CSV: see :class:`Made`."""
MLP_TOKENS = (1, 8, 32)
"""Steps whose MLP reads used rows alone: one sequence, what is skipped by default, and the most."""
ALL = Term("all")
"""The term that every query of a prompt adds to."""
SERVED = [Shape(HALF, 128, 16, 1), Shape(BRAIN, 128, 16, 4)]
"""Layers of the models that :mod:`benchmarks.gpu.roofline` predicts."""


@dataclass(frozen=True)
class Made:
    """One kernel.

    Args:
        kernel: its name.
        dtype: of K and V as they come.
        stored: of K and V in the pages.
        head_size: D.
        group: query heads of a KV head.
        reach: of the term that is added; 0: none, or of no term.
        registers: of a thread.
        spilled: bytes of a thread's registers that lie in memory.
        shared: bytes of a program.
        warps: of a program.
        loads_ahead: copies to shared memory that are not waited for yet.
        products: instructions of the matrix units.

    """

    kernel: str
    dtype: str
    stored: str
    head_size: int
    group: int
    reach: int
    registers: int
    spilled: int
    shared: int
    warps: int
    loads_ahead: int
    products: int


Launch = tuple[Any, str, dict[str, Any]]
"""A kernel, the type of its fields, and its constants."""


def launches(shape: Shape, capability: int) -> Iterator[Launch]:
    """Every kernel, as it is launched for a shape; its options alternate between shapes."""
    sizes, paged, block = shape.sizes, shape.paged, shape.block
    split = {"CAN_SPLIT": not paged}
    yield from decode_launches(shape, shape.merges)
    yield prefill.store_chunk, "*i32", {
        **sizes, "TILE": STORE_TILE, "MERGES": shape.merges,
    }  # fmt: skip
    yield attend(shape, capability, None)
    yield column_scores(shape, capability, ALL)
    for term in H2O2.ranking.passes:
        yield attend(shape, capability, term)
        yield column_scores(shape, capability, term, by_age=True)
        if term.queries == "rotated":
            yield attend(shape, capability, term, shape.rope)
    (window,) = SNAPKV.ranking.passes
    yield column_scores(shape, capability, window, apart=True)
    apart = {"APART": shape.group > 1}
    ranked = {"N": block, "TILE": SELECT_TILE, "BY_AGE": not paged, "num_warps": 8}
    yield pack.select_survivors, "*i32", {**ranked, **split, **apart, "BY_PAGE": paged}
    moved = {**sizes, **apart, "KEEPS": not paged, "TILE": STORE_TILE}
    yield pack.pack_survivors, "*i32", {**moved, "ALIGNED": 16}
    yield share.count_best, "*i32", {**ranked, **apart}
    yield share.share_rows, "*i32", {"N": block, "H_PAD": 16}
    for stores in (False, True):
        yield share.move_shared, "*i32", {**moved, "STORES": stores}
    for tokens in MLP_TOKENS if shape.float8 is None else ():
        yield from mlp_launches(shape.dtype, tokens)


def mlp_launches(dtype: torch.dtype, tokens: int) -> Iterator[Launch]:
    """The kernels of a ReLU model's MLP, for a step of so many tokens."""
    for name, constants in neurons.constants(tokens, dtype).items():
        kernel = vars(neurons)[name]
        biased = {"HAS_BIAS": True} if "HAS_BIAS" in kernel.arg_names else {}
        yield kernel, "*i32", constants | biased


def decode_launches(shape: Shape, merges: bool) -> Iterator[Launch]:
    """The kernels of a decode step."""
    sizes, paged, size = shape.sizes, shape.paged, shape.dtype.itemsize
    tile = decode_tile(sizes["D_PAD"], size, shape.group)
    grouped = {"G": shape.group, "G_PAD": padded_group(shape.group), "TILE": tile}
    split = {
        "CAN_SPLIT": not paged, "MAX_KV_SPLITS": MAX_KV_SPLITS, "SPLIT_SLOTS": SPLIT_SLOTS,
    }  # fmt: skip
    if merges:
        yield merge.nearest_key, "*i64", {**sizes, **split, "TILE": tile}
        yield merge.take_victim_in, "*i64", {
            **sizes, **split, "TILE": tile, "POWER": 2, "BY_AGE": not paged,
        }  # fmt: skip
    yield decode.attend_split, "*i64", {
        **sizes, **grouped, **split, **few_registers(sizes["D_PAD"], size),
        "MERGES": merges, "PRECISION": precision(shape.dtype), "KEEPS_LOGITS": not paged,
    }  # fmt: skip
    yield score.merge_and_score, "*i64", {
        **sizes, **grouped, **split, **page_parts(shape.block),
        **merge_registers(sizes["D_PAD"], size, shape.group),
        "POWER": 2 if paged else 1, "BY_AGE": not paged, "HAS_SINKS": shape.has_sinks,
    }  # fmt: skip


def attend(shape: Shape, capability: int, term: Term | None, rope: Rope | None = None) -> Launch:
    """Attention of a prompt, or the log-sum-exp that a term's queries have, rotated or not."""
    by_query, _ = prompt_tiles(shape.sizes["D_PAD"], shape.dtype.itemsize, capability)
    return prefill.attend, "*i32", {
        **_products(shape), **by_query, **prefill.asked(term), "ATTENDS": term is None,
        **prefill.rotation(rope),
        "HAS_SINKS": shape.has_sinks,
    }  # fmt: skip


def column_scores(
    shape: Shape, capability: int, term: Term, by_age: bool = False, apart: bool = False
) -> Launch:
    """A term's addition to scores, in the pages or apart."""
    _, by_key = prompt_tiles(shape.sizes["D_PAD"], shape.dtype.itemsize, capability)
    return prefill.column_scores, "*i32", {
        **_products(shape), **by_key, **prefill.asked(term), "MAX": term.reduce == "max",
        "POWER": term.power, "REACH": term.reach, "SKIP": term.skip, "WEIGHT": term.weight,
        "BY_AGE": by_age, "APART": apart, "KEEPS": bool(term.lifetime),
    }  # fmt: skip


def _products(shape: Shape) -> dict[str, Any]:
    """Constants of a kernel of prompts."""
    return {**shape.sizes, "G": shape.group, "PRECISION": precision(shape.dtype)}


def served_launches(shape: Shape, capability: int) -> Iterator[Launch]:
    """The kernels of ``h2o`` that a server runs most, and those of a ReLU model's MLP."""
    yield from decode_launches(shape, merges=False)
    yield column_scores(shape, capability, ALL)
    if shape.dtype == BRAIN:
        yield from mlp_launches(shape.dtype, max(mlp.TOKENS))


def build(launch: Launch, shape: Shape, capability: int) -> Made:
    """Compile one."""
    kernel, fields, constants = launch
    options = {"num_warps": 4, "num_stages": 3}
    options |= {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name not in OPTIONS}
    signature = {name: _kind(name, shape, fields, constants) for name in kernel.arg_names}
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
        NAMES[shape.dtype],
        NAMES[shape.float8 or shape.dtype],
        shape.head,
        shape.group,
        constants.get("REACH", 0),
        registers,
        spilled,
        made.metadata.shared,
        options["num_warps"],
        len(re.findall(r"^\s*cp\.async\.c[ag]", text, re.MULTILINE)),
        len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)", text)),
    )


def _kind(name: str, shape: Shape, fields: str, constants: dict[str, Any]) -> str:
    """The type of an argument."""
    kinds = (
        (name in constants or name == "field_stride", "constexpr"),
        (name in OWN, OWN.get(name, "")),
        (name in TOKENS, NAMES[shape.dtype]),
        (name in CACHE, NAMES[shape.float8 or shape.dtype]),
        (name in FLOAT, "*fp32"),
        (name in INT, "*i32"),
        (name.endswith("_bases"), "*i64"),
        (name == "fields_ptr", fields),
        (name in FACTORS, "fp32"),
    )
    return next((kind for is_it, kind in kinds if is_it), "i32")


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of them that do not fit."""
    tool = Path(compiler.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) ", text)  # LOCAL is 0, whatever spills
    assert found is not None, text
    return int(found[1]), int(found[2])


def name_of(kernel: Mapping[str, Any]) -> str:
    """Name of a kernel; ``column_scores`` of a term with reach compares all pairs of a tile."""
    return "reached_scores" if kernel["reach"] else str(kernel["kernel"])


def summary(capability: int, made: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The most that any shape takes, a row for each name."""
    most: dict[str, dict[str, int]] = {}
    for kernel in made:
        row = most.setdefault(name_of(kernel), dict.fromkeys(TAKEN, 0))
        row |= {field: max(row[field], kernel[field]) for field in TAKEN}
    where = {"triton": triton.__version__, "capability": capability}
    return [{**where, "kernel": name, **most[name]} for name in sorted(most)]


def main() -> None:
    """Compile all for a capability."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("capability", type=int, choices=SHAPES, help="90 for 9.0")
    parser.add_argument("--csv", type=Path, help="append what each kernel takes to this file")
    args = parser.parse_args()
    capability, made = args.capability, list[dict[str, Any]]()
    served = SERVED if capability >= 80 else ()
    for shape in SHAPES[capability]:
        for launch in launches(shape, capability):
            made.append(asdict(build(launch, shape, capability)))
            print(json.dumps(made[-1]), flush=True)
    for shape in served:
        for launch in served_launches(shape, capability):
            made.append({**asdict(build(launch, shape, capability)), "served": True})
            print(json.dumps(made[-1]), flush=True)
    if args.csv:
        append_rows(args.csv, summary(capability, made))


if __name__ == "__main__":
    main()
