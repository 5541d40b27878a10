# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of a budget in the engine: ``python -m benchmarks.quality``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from vllm import LLM

from benchmarks.quality.forced import endless, force, forced_engine
from benchmarks.quality.plans import (
    BLOCK_SIZE,
    FACTS,
    LONG,
    PLANS,
    POLICIES,
    QUICK,
    VARIANTS,
    Plan,
    slots,
)
from benchmarks.quality.tables import print_table, record, row
from benchmarks.quality.tasks import Task
from benchmarks.quality.writing import Writing, first_4_grams
from benchmarks.smollm2 import MODEL, model_dir

Tensors = tuple[torch.Tensor, torch.Tensor]
"""[W, S] nats, and [W, S] whether each token was the first choice; see a task's ``figures``."""


@dataclass
class Bench:
    """Plans, run with one engine for each policy; requests of all budgets share it.

    Args:
        plans: by name.
        dtype: of weights.
        progress: show bars.
        variants: policies and their options, by the name in tables.
        cache_dtype: of the cache; "auto": that of the weights.
        folder: of a model as transformers save it, its tokenizer.json too; None: SmolLM2's.
        block_size: slots of a page; budgets are whole pages.

    """

    plans: Mapping[str, Plan]
    dtype: str
    progress: bool = True
    variants: Mapping[str, tuple[str, dict[str, Any]]] = field(default_factory=lambda: VARIANTS)
    cache_dtype: str = "auto"
    folder: Path | None = None
    block_size: int = BLOCK_SIZE
    model: Path = field(init=False)
    tasks: dict[str, Task] = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.folder or model_dir(self.dtype)
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        made = {name: plan.make(tokenizer) for name, plan in self.plans.items()}
        self.tasks = {name: begin(task, tokenizer) for name, task in made.items()}

    def judged(self, llm: LLM, name: str, budgets: Sequence[int | None]) -> list[Tensors]:
        """Judge the tails of a task with each budget; None: the engine's."""
        task = self.tasks[name]
        if isinstance(task, Writing):
            return self.written(llm, task, budgets)
        texts = list(zip(task.context.tolist(), task.tail.tolist(), strict=True))
        each = [budget for budget in budgets for _ in texts]
        judged = force(llm, texts * len(budgets), each, self.progress)
        parts = [judged[i : i + len(texts)] for i in range(0, len(judged), len(texts))]
        return [
            (torch.tensor([j.nll for j in part]), torch.tensor([j.first for j in part]))
            for part in parts
        ]

    def written(self, llm: LLM, task: Writing, budgets: Sequence[int | None]) -> list[Tensors]:
        """Have all texts written with each budget, in one batch."""
        prompts = task.context.tolist()
        params = [
            endless(
                task.tail.shape[1],
                budget,
                temperature=task.temperature,
                seed=number if task.temperature else None,
            )
            for budget in budgets
            for number in range(len(prompts))
        ]
        texts = [{"prompt_token_ids": prompt} for prompt in prompts * len(budgets)]
        outputs = llm.generate(texts, params, use_tqdm=self.progress)
        new = torch.tensor([first_4_grams(output.outputs[0].token_ids) for output in outputs])
        parts = new.chunk(len(budgets))
        return [(torch.zeros(part.shape, dtype=torch.float32), part) for part in parts]

    def engine(self, policy: str, options: dict[str, Any]) -> Any:
        """An engine that is long enough for every task."""
        longest = max(t.context.shape[1] + t.tail.shape[1] for t in self.tasks.values())
        args = {"kv_cache_dtype": self.cache_dtype, "block_size": self.block_size}
        return forced_engine(str(self.model), policy, options, longest, self.dtype, **args)

    def rows(self, policies: Sequence[str] = tuple(POLICIES)) -> Iterator[dict[str, Any]]:
        """One for each task, policy and budget; the full cache first."""
        by = f"engine, vLLM {version('vllm')}, {self.dtype}"
        by += "" if self.cache_dtype == "auto" else f", a cache of {self.cache_dtype}"
        model = self.folder.name if self.folder else MODEL
        full: dict[str, Tensors] = {}
        with self.engine("full", {}) as llm:
            for name, task in self.tasks.items():
                (full[name],) = self.judged(llm, name, [None])
                for view in task.views:
                    own = view.figures(*full[name], 0)
                    yield row(by, view, "full", 1.0, task.length, own, own, model)
        for label in policies:
            asked = {name: plan for name, plan in self.plans.items() if label in plan.policies}
            if not asked:
                continue
            policy, options = self.variants[label]
            with self.engine(policy, options) as llm:
                for name, plan in asked.items():
                    task = self.tasks[name]
                    budgets = [slots(share, task.length, self.block_size) for share in plan.shares]
                    found = self.judged(llm, name, budgets)
                    for share, budget, tensors in zip(plan.shares, budgets, found, strict=True):
                        for view in task.views:
                            ours, theirs = (view.figures(*x, budget) for x in (tensors, full[name]))
                            yield row(by, view, label, share, budget, ours, theirs, model)


def begin(task: Task, tokenizer: Tokenizer) -> Task:
    """Put the tokens with which a model's texts begin in the place of a context's first ones."""
    first = tokenizer.encode("").ids
    context = task.context.clone()
    context[:, : len(first)] = torch.tensor(first, dtype=context.dtype)
    return replace(task, context=context)


def plans(args: argparse.Namespace) -> dict[str, Plan]:
    """Return the plans of the command line; what it names or defines runs in every plan."""
    if args.quick:
        return {"quick": QUICK}
    dev = {**FACTS, **LONG}
    every = {**PLANS, **dev}
    names = [f"{name}-dev" if args.dev and f"{name}-dev" in dev else name for name in args.only]
    found = {name: every[name] for name in names}
    named = (*(name for name, _, _ in args.variant), *(args.policies or ()))
    return {
        name: replace(plan, shares=args.shares or plan.shares, policies=(*plan.policies, *named))
        for name, plan in found.items()
    }


def main() -> None:
    """Measure, print the table and append to the CSV."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short texts, one budget")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--only", nargs="+", default=list(PLANS), choices=[*PLANS, *FACTS, *LONG])
    parser.add_argument("--dev", action="store_true", help="facts and traces of development")
    parser.add_argument("--shares", nargs="+", type=float, help="budgets, instead of the plans'")
    parser.add_argument("--policies", nargs="*", help=f"of {', '.join(VARIANTS)}, and variants")
    parser.add_argument(
        "--variant",
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "POLICY", "OPTIONS"),
        help="another one, its options as JSON",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--model", type=Path, help="another model's folder, with a tokenizer.json")
    parser.add_argument("--cache-dtype", default="auto", choices=("auto", "fp8", "fp8_e5m2"))
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, help="slots of a page")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    variants = dict(VARIANTS)
    variants |= {name: (policy, json.loads(text)) for name, policy, text in args.variant}
    chosen = list(variants) if args.policies is None else args.policies
    unknown = set(chosen) - set(variants)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(variants)}")
    options = {"variants": variants, "cache_dtype": args.cache_dtype, "folder": args.model}
    options["block_size"] = args.block_size
    bench = Bench(plans(args), args.dtype, **options)
    print_table([record(found, args.csv) for found in bench.rows(chosen)])


if __name__ == "__main__":
    main()
