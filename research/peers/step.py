# SPDX-License-Identifier: Apache-2.0
"""Where the processor time of a decode step goes: ``python -m research.peers.step --csv FILE``.

One process runs everything, so parts can be timed from within it; a part that contains another is
given without it. Steps in which every sequence gets one token count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import Tokenizer
from vllm import LLM, SamplingParams

from benchmarks.quality.forced import in_process
from benchmarks.quality.texts import TEXTS, windows
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from benchmarks.throughput.runs import ENVIRONMENT, ON_CPU
from research.peers.job import BLOCK_SIZE

PARTS = (
    "frontend",
    "scheduler",
    "other of the worker",
    "inputs",
    "attention metadata",
    "other of the model",
    "attention: Python",
    "attention: kernel",
    "logits",
    "sampling",
)
"""The parts of a step, from the outermost in; their sum is the step."""


class Clock:
    """Processor seconds inside functions of one thread, less those in functions that these call.

    ``spent`` is by part, since it was last cleared. What others do on the core does not count.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inner: list[float] = []

    def timed(self, part: str, function: Any) -> Any:
        """The function, its time counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.thread_time() - start
                self.spent[part] = self.spent.get(part, 0.0) + whole - self._inner.pop()
                if self._inner:
                    self._inner[-1] += whole

        return call


def targets(llm: LLM) -> Iterator[tuple[str, Any, str]]:
    """(part, object, method) of what is timed, in an engine that runs in this process."""
    core = llm.llm_engine.engine_core.engine_core
    yield "frontend", llm.llm_engine, "step"
    yield "scheduler", core, "step_fn"
    worker = core.model_executor.driver_worker.worker
    for method in ("execute_model", "sample_tokens"):
        yield "other of the worker", worker, method
    runner = worker.model_runner
    for method in ("_update_states", "_prepare_inputs"):
        yield "inputs", runner, method
    yield "attention metadata", runner, "_build_attention_metadata"
    yield "other of the model", runner, "_model_forward"
    yield "logits", runner.model, "compute_logits"
    for method in ("_sample", "_bookkeeping_sync"):
        yield "sampling", runner, method
    layers = runner.compilation_config.static_forward_context.values()
    for layer in layers:
        yield "attention: Python", layer.impl, "forward"


@contextmanager
def timing(llm: LLM) -> Iterator[Clock]:
    """A clock on all parts, until the context ends."""
    clock = Clock()
    with ExitStack() as undo:
        for part, owner, name in targets(llm):
            function = clock.timed(part, getattr(owner, name))
            undo.enter_context(mock.patch.object(owner, name, function))
        for owner, name in _kernels():
            function = clock.timed("attention: kernel", getattr(owner, name))
            undo.enter_context(mock.patch.object(owner, name, function))
        yield clock


def _kernels() -> Iterator[tuple[Any, str]]:
    from vllm import _custom_ops

    from vllm_h2o.kernels.native.kernels import NativeKernels

    yield NativeKernels, "decode"
    yield _custom_ops, "cpu_attention_with_kv_cache"
    yield _custom_ops, "cpu_attn_reshape_and_cache"


def measure(
    policy: str | None, budget: int, prompts: Sequence[Sequence[int]], output_len: int
) -> Mapping[str, float]:
    """Median milliseconds of each part of a step.

    Args:
        policy: of the engine; None: stock vLLM.
        budget: in tokens.
        prompts: token ids; all are answered at once.
        output_len: tokens generated for each.

    """
    options: dict[str, Any] = {}
    length = max(map(len, prompts)) + output_len
    if policy:
        options = {"kv_policy": policy, "kv_policy_config": {"budget": budget}}
    engine = in_process(
        model=str(model_dir("float32")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=length,
        max_num_seqs=len(prompts),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=1 + len(prompts) * -(-length // BLOCK_SIZE),
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    steps: list[Mapping[str, float]] = []
    with engine as llm, timing(llm) as clock:
        for i, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
        while llm.llm_engine.has_unfinished_requests():
            clock.spent = {}
            outputs = llm.llm_engine.step()
            said = [len(output.outputs[0].token_ids) for output in outputs]
            if len(said) == len(prompts) and min(said) > 2:
                steps.append(clock.spent)
    return {part: 1000 * statistics.median(s.get(part, 0.0) for s in steps) for part in PARTS}


def main() -> None:
    """The policy, then stock vLLM; a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--budget", type=int, default=96, help="tokens of a sequence (96)")
    parser.add_argument(
        "--lengths", nargs=2, type=int, default=(256, 48), metavar="TOKENS",
        help="of each prompt, and generated for it (256 48)",
    )  # fmt: skip
    args = parser.parse_args()
    os.environ.update({**ENVIRONMENT, **ON_CPU, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    tokenizer = Tokenizer.from_file(str(model_dir("float32") / "tokenizer.json"))
    each = -(-args.sequences // len(TEXTS))
    found = [windows(tokenizer, text, each, args.lengths[0]).tolist() for text in TEXTS]
    prompts = [ids for part in found for ids in part][: args.sequences]
    for policy in ("h2o", None):
        parts = measure(policy, args.budget, prompts, args.lengths[1])
        row = {
            "machine": machine_name(),
            "vllm": version("vllm"),
            "model": f"{MODEL}, float32",
            "side": policy or "stock vLLM",
            "sequences": args.sequences,
            "input_len": args.lengths[0],
            "output_len": args.lengths[1],
            "budget": args.budget if policy else "",
            "step_ms": round(sum(parts.values()), 2),
            **{part: round(ms, 2) for part, ms in parts.items()},
        }
        print(row, flush=True)
        if args.csv:
            append_rows(args.csv, [row])


if __name__ == "__main__":
    main()
