# SPDX-License-Identifier: Apache-2.0
"""P10: conversations of several turns, at random times, in a pool for a third of their histories.

Stock vLLM with its prefix cache, h2o without continuation and h2o with it, in turn, in pools of
equal bytes. In this process, so that each token is timed as the engine hands it out. With --tiers
the pool holds a third of what h2o keeps of them, and the rest goes to host memory, or to files.

Usage::

    python -m benchmarks.throughput.chat [--quick] [--tiers] [--rounds 1] [--conversations 32]
        [--turns 8] [--budget 256] [--dtype float32] [--sides stock] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; or it wants nearly all memory

from vllm import LLM, SamplingParams  # noqa: E402 (reads it)

from benchmarks.quality.forced import in_process  # noqa: E402
from benchmarks.record import append_rows, machine_name  # noqa: E402
from benchmarks.throughput.models import MODELS, folder_of  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"
SIDES = ("stock", "h2o", "h2o continued")
CONTINUES: Mapping[str, bool | int | str] = {
    "h2o": False,
    "h2o continued": True,
    "h2o continued, host memory": 1,
    "h2o continued, files": "{folder}:1",
}
"""By side, the policy's ``continuation``."""
TIERS = tuple(CONTINUES)
PAGE = 32
"""Slots: the least that vLLM's own attention takes on a CPU."""
EXTRA_BYTES = 8
"""Bytes of the score and the position of a slot, per KV head."""


@dataclass(frozen=True)
class Load:
    """The lengths of conversations.

    Args:
        conversations: how many.
        turns: of each.
        system: tokens that all begin with.
        asked: tokens of a question.
        answered: tokens of an answer.
        pause: seconds from an answer to the next question, on average.
        budget: slots of a sequence, with a policy.
        vocabulary: of the model.
        share: of all that is said for which the pool has slots; it has them for the longest prompt.

    """

    conversations: int = 32
    turns: int = 8
    system: int = 300
    asked: int = 120
    answered: int = 120
    pause: float = 2.0
    budget: int = 256
    vocabulary: int = 49152
    share: float = 1 / 3

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.system + self.turns * (self.asked + self.answered)

    def num_pages(self, side: str, bytes_per_slot: int) -> int:
        """A pool for a share of all histories, without scores; and the null page."""
        own = self.longest - self.system
        slots = int((self.conversations * own + self.system) * self.share)
        room = max(slots, self.longest + self.budget + PAGE) * bytes_per_slot
        each = PAGE * (bytes_per_slot + (0 if side == "stock" else EXTRA_BYTES))
        return 1 + room // each


QUICK = Load(3, 3, system=20, asked=12, answered=8, pause=0.01, budget=32, vocabulary=256)
MANY = Load(15, 8, asked=60, answered=24, share=0)
"""For --tiers: the pool has slots for some five budgets."""


@dataclass
class Talk:
    """One conversation.

    Args:
        text: all that was said.
        due: when its next question comes.
        turn: which one that is.

    """

    text: list[int]
    due: float
    turn: int = 0


@dataclass
class Heard:
    """The outcome of a run.

    Args:
        first: by turn, seconds to the first token.
        asked: by turn, tokens of prompts.
        found: by turn, those that were not computed again.
        seconds: from the first question to the last answer.

    """

    first: dict[int, list[float]] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0


def talk(llm: LLM, load: Load, seed: int = 0) -> Heard:
    """All conversations, from start to end, on an engine."""
    draw, heard, engine = random.Random(seed), Heard(), llm.llm_engine

    def said(num: int) -> list[int]:
        return [draw.randrange(load.vocabulary) for _ in range(num)]

    system, began = said(load.system), time.monotonic()
    waiting = [
        Talk(list(system), began + draw.uniform(0, load.pause * 2))
        for _ in range(load.conversations)
    ]
    running: dict[str, tuple[Talk, float]] = {}
    while waiting or running:
        now = time.monotonic()
        for one in [one for one in waiting if one.due <= now]:
            waiting.remove(one)
            one.text += said(load.asked)
            request_id = f"{len(heard.asked)}-{id(one)}-{one.turn}"
            running[request_id] = (one, one.due)
            params = SamplingParams(
                max_tokens=load.answered, temperature=0, ignore_eos=True, detokenize=False
            )
            engine.add_request(request_id, {"prompt_token_ids": list(one.text)}, params)
            heard.asked[one.turn] = heard.asked.get(one.turn, 0) + len(one.text)
        if not running:
            time.sleep(max(min(one.due for one in waiting) - time.monotonic(), 0))
            continue
        for output in engine.step():
            one, since = running[output.request_id]
            now, answer = time.monotonic(), output.outputs[0].token_ids
            if since:
                heard.first.setdefault(one.turn, []).append(now - since)
                found = output.num_cached_tokens or 0
                heard.found[one.turn] = heard.found.get(one.turn, 0) + found
                running[output.request_id] = (one, 0.0)
            if output.finished:
                del running[output.request_id]
                one.text += answer
                one.turn, one.due = one.turn + 1, now + draw.expovariate(1 / load.pause)
                if one.turn < load.turns:
                    waiting.append(one)
    heard.seconds = time.monotonic() - began
    return heard


def run(side: str, load: Load, model: Path, bytes_per_slot: int, dtype: str, folder: str) -> Heard:
    """One engine from start to end; ``folder`` is empty, and takes files."""
    own: dict[str, Any] = {"enable_prefix_caching": True}
    if side != "stock":
        place = CONTINUES[side]
        place = place.format(folder=folder) if isinstance(place, str) else place
        options = {"budget": load.budget, "continuation": place}
        own = {"kv_policy": "h2o", "kv_policy_config": options}
    arguments = {
        "model": str(model),
        "dtype": dtype,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "block_size": PAGE,
        "max_model_len": load.longest + PAGE,
        "max_num_seqs": load.conversations,
        "num_gpu_blocks_override": load.num_pages(side, bytes_per_slot),
    }
    with in_process(**arguments, **own) as llm:
        return talk(llm, load)


def rows_of(side: str, load: Load, heard: Heard, pages: int) -> list[dict[str, Any]]:
    """One for each turn."""
    answered = load.conversations * load.turns * load.answered
    later = sum(n for turn, n in heard.asked.items() if turn)
    hits = sum(n for turn, n in heard.found.items() if turn)
    said_before = later - (load.turns - 1) * load.conversations * load.asked
    rows = []
    for turn, seconds in sorted(heard.first.items()):
        cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
        rows.append(
            {
                "side": side,
                "turn": turn + 1,
                "ttft_p50_s": round(cuts[49], 4),
                "ttft_p99_s": round(cuts[98], 4),
                "found": round(heard.found[turn] / heard.asked[turn], 4),
                "found_after_turn_1": round(hits / max(later, 1), 4),
                "found_of_said_before": round(hits / max(said_before, 1), 4),
                "tokens_per_s": round(answered / heard.seconds, 2),
                "pool_pages": pages,
                **{name: getattr(load, name) for name in ("conversations", "turns", "budget")},
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Compare the first and the last turn."""
    lines = [
        "| side | turn | TTFT p50, p99 | found | tokens/s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {r['side']} | {r['turn']} | {r['ttft_p50_s']:.2f} s, {r['ttft_p99_s']:.2f} s "
        f"| {r['found']:.0%} | {r['tokens_per_s']:.1f} |"
        for r in rows
        if r["turn"] in (1, r["turns"])
    ]
    return "\n".join(lines)


def main() -> None:
    """Run all sides, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few words, for its functioning")
    parser.add_argument("--tiers", action="store_true", help="more than the pool keeps")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side (1)")
    parser.add_argument("--conversations", type=int)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--sides", nargs="+", choices=("stock", *TIERS))
    parser.add_argument("--budget", type=int, help="slots of a sequence (256)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--model", type=Path, help="another one's folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    args = parser.parse_args()
    name = "smollm2" if args.dtype == "bfloat16" else f"smollm2-{args.dtype}"
    given = {name: getattr(args, name) for name in ("conversations", "turns", "budget")}
    load = replace(MANY if args.tiers else Load(), **{n: v for n, v in given.items() if v})
    load = replace(QUICK, share=load.share) if args.quick else load
    model = args.model or folder_of(name)[0]
    args.out.mkdir(parents=True, exist_ok=True)
    what = "tiers" if args.tiers else "chat"
    csv = args.out / f"{what}-{'quick' if args.quick else 'cpu'}.csv"
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for side in args.sides or (TIERS if args.tiers else SIDES):
            size = MODELS[name].bytes_per_slot
            with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                heard = run(side, load, model, size, args.dtype, folder)
            about = {"round": number, "machine": machine_name(), "dtype": args.dtype}
            own = rows_of(side, load, heard, load.num_pages(side, size))
            rows += [{**row, **about} for row in own]
            append_rows(csv, [{**row, **about} for row in own])
    print(table(rows))


if __name__ == "__main__":
    main()
