# SPDX-License-Identifier: Apache-2.0
"""Measure how a text's cost changes with its length: ``python -m research.streams``.

All State of the Union addresses, one after the other, are one prompt. The engine takes it in by
chunks, with positions that roll, and each token is judged by what is resident when its chunk is
computed.

Two centuries of English do not cost the same. So a part far into the text is compared with the same
part in a request that begins shortly before it (``--fresh``) and keeps its original positions.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer
from vllm import LLM, SamplingParams

from benchmarks.quality.forced import BLOCK_SIZE, STOCK_BLOCK_SIZE, in_process
from benchmarks.quality.texts import documents
from benchmarks.record import append_rows, machine_name
from benchmarks.smollm2 import MODEL, model_dir
from vllm_h2o.worker import metadata

DECADES = tuple(f"union_{year}s" for year in range(1790, 2030, 10))
ORIGINAL = {"positions": "original"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "streaming": ("streaming", {}),
    "h2o": ("h2o", {}),
    "h2o mean": ("h2o", {"score": "mean_squares"}),
    "local": ("local", {}),
    "streaming, original positions": ("streaming", ORIGINAL),
    "h2o, original positions": ("h2o", ORIGINAL),
}
"""A policy and its options, by the name in tables. ``full`` is stock vLLM, which reads no further
than the model's own longest sequence; neither do original positions."""


@dataclass(frozen=True)
class Progress:
    """One step of the engine.

    Args:
        start: tokens computed before it.
        nll: nats of each token that follows one of the step's.
        first: whether each of these is the model's own first choice.
        position: position of the step's last token, as the model sees it.
        resident: tokens in the cache after the step.
        renumbered: number of renumberings of the request so far.
        seconds: duration of the step.
        renumber_seconds: duration of its renumberings.

    """

    start: int
    nll: torch.Tensor
    first: torch.Tensor
    position: int
    resident: int
    renumbered: int
    seconds: float
    renumber_seconds: float


def engine(
    model: Path | str,
    name: str,
    length: int,
    cache: int,
    chunk: int,
    limit: int | None,
    **more: Any,
) -> Any:
    """An engine that takes in one text.

    Args:
        model: folder.
        name: of :data:`VARIANTS`.
        length: tokens of the text.
        cache: slots.
        chunk: tokens of a step.
        limit: positions; None: the model's own.
        more: arguments of vLLM's.

    """
    policy, options = VARIANTS[name]
    settings: dict[str, Any] = {"block_size": STOCK_BLOCK_SIZE}
    if policy != "full":
        rolling = {"positions": limit or "rolling", "eviction": "chunk"}
        settings |= {
            "block_size": BLOCK_SIZE,
            "kv_policy": policy,
            "kv_policy_config": {"budget": cache, **rolling, **options},
        }
    return in_process(
        model=str(model),
        enforce_eager=True,
        max_model_len=length + 1,
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **settings,
        **more,
    )


@contextmanager
def timed_renumberings() -> Iterator[list[float]]:
    """Collect the seconds of each renumbering of this process while the context lasts."""
    renumber, seconds = metadata.renumber, list[float]()

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        renumber(*args)
        seconds.append(time.perf_counter() - start)

    with mock.patch.object(metadata, "renumber", timed):
        yield seconds


def read(llm: LLM, tokens: Sequence[int]) -> Iterator[Progress]:
    """Have an engine of this process take a text in, step by step.

    Args:
        llm: of :func:`engine`.
        tokens: of the text.

    """
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, detokenize=False,
        prompt_logprobs=0, flat_logprobs=True,
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    ledger = getattr(core.scheduler, "ledger", None)
    llm.llm_engine.add_request("text", {"prompt_token_ids": list(tokens)}, params)
    done, resident, offset, renumbered, judged = 0, 0, 0, 0, None
    while llm.llm_engine.has_unfinished_requests():
        with timed_renumberings() as times:
            start = time.perf_counter()
            llm.llm_engine.step()
            seconds = time.perf_counter() - start
        # Before the last step vLLM hands nothing out; it fills this as it goes.
        for request in runner.requests.values():
            judged = request.in_progress_prompt_logprobs_cpu or judged
        before, states = done, list(ledger.states.values()) if ledger else []
        done = min(before + runner.max_num_tokens, len(tokens))
        if ledger is None:
            resident = done
        elif states:  # none when the last step is through
            resident = states[0].resident_len
        if states and states[0].offset != offset:
            offset, renumbered = states[0].offset, renumbered + 1
        assert judged is not None
        own = slice(before, min(done, len(tokens) - 1))
        nll, first = -judged.logprobs[own, 0], judged.selected_token_ranks[own] == 1
        position = done - 1 - offset
        yield Progress(before, nll, first, position, resident, renumbered, seconds, sum(times))


def text(tokenizer: Tokenizer, length: int) -> list[int]:
    """The first tokens of all addresses, in their order."""
    tokens: list[int] = []
    for decade in DECADES:
        for address in documents(decade):
            tokens += tokenizer.encode(address + "\n\n", add_special_tokens=False).ids
            if len(tokens) >= length:
                return tokens[:length]
    raise ValueError(f"all addresses are {len(tokens)} tokens, not {length}")


def rows(
    llm: LLM, tokens: Sequence[int], bin_size: int, origin: int = 0
) -> Iterator[dict[str, Any]]:
    """Figures of each part of a text, as soon as it is read.

    Args:
        llm: of :func:`engine`.
        tokens: of the text.
        bin_size: tokens of a part.
        origin: where in the text the request begins.

    """
    nll: list[torch.Tensor] = []
    seconds, renumbering, begin = 0.0, 0.0, origin
    end_of_text = len(tokens) - 1
    for step in read(llm, tokens[origin:]):
        if not len(step.nll):
            continue
        nll.append(step.nll)
        seconds += step.seconds
        renumbering += step.renumber_seconds
        end = origin + step.start + len(step.nll)
        if end - begin < bin_size and end < end_of_text:
            continue
        part = torch.cat(nll)
        yield {
            "read_from": origin,
            "start": begin,
            "end": end,
            "nll": round(float(part.mean()), 4),
            "tokens_per_s": round(len(part) / seconds, 1),
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "resident": step.resident,
            "renumbered": step.renumbered,
            "renumber_ms": round(1000 * renumbering, 1),
        }
        nll, seconds, renumbering, begin = [], 0.0, 0.0, end


def fresh_rows(
    llm: LLM, tokens: Sequence[int], bin_size: int, starts: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Figures of single parts, each read by a request that begins a part earlier, to warm up.

    Args:
        llm: of :func:`engine`.
        tokens: of the text.
        bin_size: tokens of a part.
        starts: where parts begin.

    """
    for start in starts:
        end = min(start + bin_size + 1, len(tokens))
        _, row = rows(llm, tokens[:end], bin_size, max(start - bin_size, 0))
        yield row


def run(arguments: argparse.Namespace, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """The rows of some policies; each is also printed, and appended to the CSV."""
    model = model_dir(arguments.dtype)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for name in names:
        length, limit = arguments.tokens, arguments.limit
        settings: dict[str, Any] = {}
        if name == "full" or VARIANTS[name][1] == ORIGINAL:
            length, limit = min(length, arguments.trained - 1), None
            # Told another number of positions, vLLM rotates by them as the model never saw it.
            settings["hf_overrides"] = {"max_position_embeddings": arguments.trained}
        shape = (arguments.cache, arguments.chunk, limit)
        with engine(model, name, length, *shape, dtype=arguments.dtype, **settings) as llm:
            tokens = text(tokenizer, length)
            whole_text = rows(llm, tokens, arguments.bin) if arguments.text else ()
            fresh = fresh_rows(llm, tokens, arguments.bin, arguments.fresh)
            for row in chain(whole_text, fresh):
                whole = {
                    "machine": machine_name(),
                    "by": f"engine, vLLM {version('vllm')}, {arguments.dtype}",
                    "model": MODEL,
                    "policy": name,
                    "cache": arguments.cache if name != "full" else length,
                    "chunk": arguments.chunk,
                    "position_limit": limit or arguments.trained,
                    "tokens": length,
                    **row,
                }
                print(*(f"{key}={value}" for key, value in list(whole.items())[3:]), flush=True)
                if arguments.csv:
                    append_rows(arguments.csv, [whole])
                yield whole


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--policies", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--cache", type=int, default=1024, help="slots")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--limit", type=int, help="positions; by default the model's own")
    parser.add_argument("--bin", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--trained",
        type=int,
        default=8192,
        help="positions that vLLM takes the model to know, where they do not roll",
    )
    parser.add_argument(
        "--fresh",
        type=int,
        nargs="+",
        default=(),
        help="afterwards: the parts that begin here, each by a request of its own",
    )
    parser.add_argument(
        "--no-text", action="store_false", dest="text", help="those parts alone, and not all"
    )
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--quick", action="store_true", help="1,024 tokens of streaming")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        small: dict[str, Any] = {
            "tokens": 1024,
            "cache": 128,
            "chunk": 128,
            "limit": 384,
            "bin": 256,
        }
        small["fresh"] = [768]
        vars(arguments).update(small, policies=["streaming", "streaming, original positions"])
    return arguments


def main() -> None:
    """Run what is asked for."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arguments = parse()
    for _ in run(arguments, arguments.policies):
        pass


if __name__ == "__main__":
    main()
