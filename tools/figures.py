# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/quality.md and docs/performance.md, made from the CSVs in benchmarks/results.

A row of a CSV is one measurement. Of rows that agree in everything that a table asks for, the last
one counts: files are appended to.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from statistics import fmean, median

from benchmarks.throughput.profiles import GPU

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
Row = dict[str, str]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns after the first are aligned right where they hold figures."""
    align = ["---" if i == 0 or not _figures(rows, i) else "---:" for i in range(len(head))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, align, *rows))


def _figures(rows: Sequence[Sequence[str]], column: int) -> bool:
    cells = [row[column].strip("*+-") for row in rows]
    return any(cells) and all(not cell or cell[0].isdigit() for cell in cells)


@cache
def _all(file: str) -> list[Row]:
    with (RESULTS / file).open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def find(file: str, **wanted: str) -> list[Row]:
    """Return the rows of a CSV whose columns have these values; ``by`` names its end alone."""
    by = wanted.pop("by", "")
    found = [row for row in _all(file) if all(row[key] == value for key, value in wanted.items())]
    return [row for row in found if row.get("by", "").endswith(by)]


def one(file: str, **wanted: str) -> Row:
    """Return the last such row.

    Raises:
        LookupError: when there is none.

    """
    found = find(file, **wanted)
    if not found:
        raise LookupError(f"{file} has no row with {wanted}")
    return found[-1]


def figure(value: str | float, digits: int) -> str:
    """Return a number of a CSV with some decimals; a half is rounded away from 0."""
    return f"{Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def median_of(rows: Sequence[Row], column: str) -> float:
    """Return the median of a column."""
    return median(float(row[column]) for row in rows)


ENGINE = "float32"
SHARES = {"0.05": "5 %: 48", "0.1": "10 %: 96", "0.2": "20 %: 208", "0.3": "30 %: 304"}
"""Fraction of 1,024 tokens -> the same, with the tokens that it is in pages of 16."""


def prose() -> str:
    """Return what going on with a text costs, by policy and budget."""
    policies = {
        "h2o2": "`h2o2`",
        "h2o2 window": "`h2o2` with prefix caching",
        "h2o2 reconstruction": "`h2o2`, `score=reconstruction`",
        "h2o mean_squares merge": "`h2o`, `score=mean_squares`, `merge=0.8`",
        "h2o": "`h2o`",
        "streaming": "`streaming`",
        "local": "`local`",
    }
    shares = {"0.05": "5 %: 48", "0.1": "10 %: 96", "0.2": "20 %: 208", "0.4": "40 %: 416"}
    asked = {"task": "prose", "length": "1024", "forced": "768", "by": ENGINE}
    table = []
    for policy, shown in policies.items():
        found = [one("quality.csv", **asked, policy=policy, share=share) for share in shares]
        costs = [(figure(row["above_full"], 3), figure(row["std"], 3)) for row in found]
        table.append([shown, *(" ± ".join(cost) for cost in costs)])
    return markdown(("policy", *(f"{share} tokens" for share in shares.values())), table)


def second_model() -> str:
    """Return what a budget costs with the other pretrained model: pass keys found, and prose."""
    file, shares = "quality_gemma.csv", ("0.1", "0.2")
    table = []
    for policy, shown in (("h2o2", "`h2o2`"), ("h2o", "`h2o`")):
        cells = []
        for task, column, digits in (("passkey", "mean", 2), ("prose", "above_full", 3)):
            for share in shares:
                found = one(file, task=task, policy=policy, share=share)
                cells.append(figure(found[column], digits))
        table.append([shown, *cells])
    full = [figure(one(file, task="passkey", policy="full")["mean"], 2)] * len(shares)
    table.insert(0, ["full cache", *full, *([figure("0", 3)] * len(shares))])
    names = ("pass keys", "prose")
    return markdown(
        ("policy", *(f"{name}, {float(s) * 100:.0f} %" for name in names for s in shares)), table
    )


FACTS = {
    "asked_now": {
        "h2o2": "`h2o2`",
        "h2o2 window": "`h2o2` with prefix caching",
        "snapkv": "`snapkv`",
        "h2o2 reconstruction": "`h2o2`, `score=reconstruction`",
        "streaming": "`streaming`",
        "h2o": "`h2o`",
    },
    "asked_later": {
        "h2o2 reconstruction": "`h2o2`, `score=reconstruction`",
        "h2o2": "`h2o2`",
        "streaming": "`streaming`",
        "h2o": "`h2o`",
    },
}
"""Task -> policies, as the CSV calls them and as users do."""


def facts(task: str) -> str:
    """Return recall by policy and budget, with the full cache's first."""
    asked = {"task": task, "length": "1024", "by": ENGINE}
    full = one("quality_facts.csv", **asked, policy="full")
    table = [["full cache", *([figure(full["mean"], 2)] * 3)]]
    for policy, shown in FACTS[task].items():
        table.append([shown, *_recall("quality_facts.csv", asked, policy)])
    return markdown(("policy", *(f"{SHARES[s]} tokens" for s in ("0.1", "0.2", "0.3"))), table)


def _recall(file: str, asked: Row, policy: str) -> list[str]:
    cells = []
    for share in ("0.1", "0.2", "0.3"):
        found = find(file, **asked, policy=policy, share=share)
        cells.append(figure(found[-1]["mean"], 2) if found else "")
    return cells


TURNS = {"1": "first", "2-4": "2 to 4", "5-7": "5 to 7", "8-10": "8 to 10", "1-10": "all"}
"""Questions in turn, as ranges and in words."""


def in_turn() -> str:
    """Return how many facts are found that are asked for in turn, by policy and turn."""
    reread = "`h2o2`, `score=reconstruction`"
    sides = (
        ("full", "1.0", "full cache"),
        ("h2o2 reconstruction", "0.2", f"{reread}, 20 %"),
        ("h2o2 reconstruction", "0.1", f"{reread}, 10 %"),
        ("h2o2", "0.2", "`h2o2`, 20 %"),
    )
    table = []
    for policy, share, shown in sides:
        asked = {"source": "confirmation", "policy": policy, "share": share}
        cells = []
        for turns in TURNS:
            first, _, last = turns.partition("-")
            each = range(int(first), int(last or first) + 1)
            found = [float(one("quality_turns.csv", **asked, turn=str(t))["found"]) for t in each]
            cells.append(figure(fmean(found), 2))
        table.append([shown, *cells])
    return markdown(("policy", *TURNS.values()), table)


LONG = "quality_long.csv"
LONG_POLICIES = ("h2o2", "h2o", "streaming")


def lookups() -> str:
    """Return how many look-ups in forced traces find their value, by distance."""
    asked = [(policy, share) for policy in LONG_POLICIES for share in ("0.125", "0.25")]
    table = []
    for kind in ("variables", "edits"):
        for view in ("", ", near", ", far"):
            full = find(LONG, task=kind + view, policy="full")
            cells = [kind + (view or ", all"), figure(full[-1]["mean"], 2) if full else ""]
            for policy, share in asked:
                rows = find(LONG, task=kind + view, policy=policy, share=share)
                cells.append(figure(rows[-1]["mean"], 2) if rows else "")
            if full:
                table.append(cells)
    heads = [f"`{policy}`, {'1/8' if share == '0.125' else '1/4'}" for policy, share in asked]
    return markdown(("look-ups", "full cache", *heads), table)


def written() -> str:
    """Return how many 4-grams are different in text that is written freely, by policy."""
    table = []
    for policy in ("full", *LONG_POLICIES):
        shares = ("1.0",) * 2 if policy == "full" else ("0.125", "0.25")
        rows = [find(LONG, task="written at 0.7", policy=policy, share=share) for share in shares]
        if all(rows):
            shown = "full cache" if policy == "full" else f"`{policy}`"
            table.append([shown, *(figure(row[-1]["mean"], 2) for row in rows)])
    return markdown(("policy", "1/8: 192 tokens", "1/4: 384 tokens"), table)


PRESSES = ("KVzip", "Ada-KV, SnapKV", "SnapKV", "StreamingLLM", "KeyDiff", "ObservedAttention")


def presses() -> str:
    """Return recall of kvpress's methods and of these policies, asked now and asked later."""
    table = []
    ours = {"h2o2": "`h2o2`", "h2o2 reconstruction": "`h2o2`, `score=reconstruction`"}
    sides = [(shown, "quality_facts.csv", policy) for policy, shown in ours.items()]
    sides += [(f"kvpress {press}", "quality_presses.csv", press) for press in PRESSES]
    for shown, file, policy in sides:
        by = ENGINE if file == "quality_facts.csv" else ""
        cells = []
        for task in ("asked_now", "asked_later"):
            asked = {"task": task, "length": "1024", "by": by}
            cells += _recall(file, asked, policy)
        table.append([shown, *(cell or "-" for cell in cells)])
    heads = [f"{when}, {s}" for when in ("now", "later") for s in ("10 %", "20 %", "30 %")]
    return markdown(("method", *heads), table)


def float8() -> str:
    """Return nats per token with 16-bit and fp8 caches."""
    table = []
    sides = (("every token kept", "full", "1.0"), ("`h2o`, 20 %: 208 tokens", "h2o", "0.2"))
    for shown, policy, share in sides:
        asked = {"policy": policy, "share": share, "task": "prose", "length": "1024"}
        wide = one("quality.csv", **asked, forced="768", by="bfloat16")
        narrow = one("quality_fp8.csv", **asked)
        table.append([shown, *(figure(row["mean"], 4) for row in (wide, narrow))])
    return markdown(("", "16 bits", "fp8"), table)


def dialogues() -> str:
    """Return what continuing from an evicted cache costs, by turn."""
    table = []
    for turn in "123456":
        asked = {"turn": turn, "budget": "256"}
        first = one("dialogues.csv", **asked, policy="h2o2")
        cells = [f"{turn}, {figure(first['prompt_tokens'], 0)}", figure(first["full"], 2)]
        for policy in ("h2o2", "h2o"):
            row = one("dialogues.csv", **asked, policy=policy)
            cells += [figure(row[column], 2) for column in ("recomputed", "continued")]
        table.append(cells)
    sides = ("`h2o2`, recomputed", "`h2o2`, continued", "`h2o`, recomputed", "`h2o`, continued")
    return markdown(("turn, tokens of its prompt", "full cache", *sides), table)


PROFILES = (
    ("P1", "32 requests, 512 + 1,024 tokens, memory for 4", "0.2"),
    ("P2", "the same, stock vLLM with memory for all", "0.2"),
    ("P4", "16 requests, 512 + 512 tokens, memory for all, nothing evicted", "1.0"),
    ("P4-tracked", "the same, everything scored", "992"),
    ("P6-100", "1 request, 512 + 512 tokens, nothing evicted", "1.0"),
    ("P6-20", "the same, budget 20 %", "0.2"),
    ("P3-4k", "one step of 8 requests of 4,096 tokens, budget 20 %", "0.2"),
    ("P3-8k", "one step of 8 requests of 8,000 tokens, budget 20 %", "0.2"),
)
"""Profile of throughput-cpu.csv, in words, and the budget of its policy."""


def profiles() -> str:
    """Return throughput and steps of h2o and of stock vLLM; medians of several pairs.

    A profile's figures are from the machine that ran it last.
    """
    table = []
    for profile, shown, budget in PROFILES:
        rows = find("throughput-cpu.csv", profile=profile)
        machine = rows[-1]["machine"]
        rows = [row for row in rows if row["machine"] == machine]
        sides = [
            [_speed(row) for row in rows if (row["side"], row["budget"]) == asked]
            for asked in (("h2o", budget), ("stock vLLM", ""))
        ]
        ratio = median(ours / stock for ours, stock in zip(*sides, strict=True))
        medians = [median(side) for side in sides]
        if profile.startswith("P3"):
            digits, unit, medians = 1, "ms", [1000 / speed for speed in medians]
        else:
            digits, unit = 0 if medians[1] > 100 else 1, "tokens/s"
        cells = [f"{figure(value, digits)} {unit}" for value in medians]
        processor, _, _ = machine.partition(", ")
        pairs = str(len(sides[0]))
        shown_by = processor.replace("(R)", "").replace(" Processor", "")
        table.append([shown, f"**{figure(ratio, 2)}**", *cells, pairs, shown_by])
    head = ("workload", "speed-up", "h2o", "stock vLLM", "pairs", "processor")
    return markdown(head, table)


def _speed(row: Row) -> float:
    """Return what is more when a side is faster: steps or tokens per second."""
    if row["profile"].startswith("P3"):
        return 1000 / float(row["step_ms"])
    return float(row["output_tokens_per_s"])


def predicted() -> str:
    """Return the speed-ups that are predicted of GPUs; no device has measured any yet."""
    devices, file = ("H200", "H100", "A100-80GB", "L4"), "gpu-predicted-profiles.csv"
    table = []
    for profile in GPU:
        asked = {"profile": profile.id, "figure": "ratio"}
        found = [find(file, **asked, device=device) for device in devices]
        ratios = [figure(rows[-1]["predicted"], 2) if rows else "" for rows in found]
        table.append([profile.what, *ratios, ""])
    return markdown(("workload", *devices, "measured"), table)


def prompts() -> str:
    """Return how long prompts take with each policy, on the machine that ran all of them."""
    table = []
    names = ("stock vLLM", "h2o", "h2o2", "h2o2, reconstruction")
    for side in names:
        found = find("throughput-cpu.csv", profile="H-prompts", side=side)
        seconds = [float(row["seconds"]) for row in found if row["machine"].startswith("AMD")]
        name, _, own = side.partition(", ")
        shown = side if name == "stock vLLM" else f"`{name}`"
        if own:
            shown += f", `{own if '=' in own else 'score=' + own}`"
        table.append([shown, figure(median(seconds), 1)])
    return markdown(("side", "seconds"), table)
