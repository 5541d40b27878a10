# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/performance.md and docs/sparsity.md about what runs at once; see figures.py."""

from __future__ import annotations

from statistics import median

from tools.figures import Row, figure, find, markdown, median_of, one


def pressure() -> str:
    """Return speed and cost of the two schedules, by the sequences that a pool holds whole."""
    table = []
    for pool in ("4", "8", "16", "32"):
        profile = f"P7-{pool}"
        speed: dict[str, Row] = {}
        for row in reversed(find("pressure-cpu.csv", profile=profile, torch_compile="0")):
            speed[row["side"]] = row  # the first run has all sides
        cells = [pool]
        for side in ("stock vLLM", "h2o, prompt_end", "h2o, pressure"):
            cells.append(figure(speed[side]["output_tokens_per_s"], 1) if side in speed else "")
        for side in ("h2o, prompt_end", "h2o, pressure"):
            found = find("pressure-quality.csv", profile=profile, side=side)
            cells.append(figure(found[-1]["above_full"], 3) if found else "")
        cells.append(f"{int(speed['stock vLLM']['preemptions'])}")
        table.append(cells)
    head = ("pool for", "stock vLLM", "`prompt_end`", "`pressure`")
    return markdown(
        (*head, "cost of `prompt_end`", "cost of `pressure`", "stock's preemptions"), table
    )


def chats() -> str:
    """Return throughput and times to the first token of conversations."""
    sides = {"stock": "stock vLLM, prefix cache", "h2o": "`h2o`", "h2o continued": "`continuation`"}
    table = []
    for chats in ("16", "32"):
        for side, shown in sides.items():
            found = find("chat-cpu.csv", conversations=chats, side=side)
            if not found:
                continue
            by_turn = {row["turn"]: row for row in found}
            cells = [figure(by_turn["1"]["tokens_per_s"], 1)]
            for turn in ("1", "8"):
                for column in ("ttft_p50_s", "ttft_p99_s"):
                    cells.append(f"{figure(by_turn[turn][column], 1)} s")
            table.append([chats, shown, *cells])
    times = [f"TTFT, turn {turn}, {p}" for turn in (1, 8) for p in ("p50", "p99")]
    return markdown(("chats", "side", "tokens/s", *times), table)


def tiers() -> str:
    """Return what conversations take whose entries are in the pool, host memory or files."""
    file = "tiers-cpu.csv"
    places = {
        "h2o": "`h2o`, computed again",
        "h2o continued": "in the pool, `true`",
        "h2o continued, host memory": "and in host memory, `1`",
        "h2o continued, files": "and in files, `/PATH:1`",
    }
    table = []
    for side, shown in places.items():
        last = find(file, side=side, turn="8")
        share = f"{100 * median_of(last, 'found_of_said_before'):.0f} %"
        times = (f"{median_of(last, f'ttft_{p}_s'):.2f} s" for p in ("p50", "p99"))
        table.append([shown, share, figure(median_of(last, "tokens_per_s"), 1), *times])
    head = ("entries", "found of what was said", "tokens/s")
    return markdown((*head, "TTFT, turn 8, p50", "TTFT, turn 8, p99"), table)


def travel() -> str:
    """Return what travels between two servers, and how soon the second one has a token."""
    file = "travel-cpu.csv"
    table = []
    for length in dict.fromkeys(row["length"] for row in find(file)):
        stock, ours = (find(file, side=side, length=length) for side in ("stock vLLM", "h2o"))
        sizes = (f"{median_of(side, 'bytes') / 2**20:.1f} MiB" for side in (stock, ours))
        times = (f"{median_of(side, 'seconds'):.2f} s" for side in (stock, ours))
        table.append([f"{int(length):,}", *sizes, figure(ours[-1]["share"], 2), *times])
    head = ("prompt", "all K and V", "what travels", "share", "token, computed again")
    return markdown((*head, "token, from the file"), table)


def sparse_steps() -> str:
    """Return stock vLLM's step over that of each side, by the number of sequences."""
    file = "sparsity-cpu.csv"
    every = find(file)
    counts = list(dict.fromkeys(row["sequences"] for row in every))
    table = []
    for side in ("exact", "predicted", "h2o", "h2o, exact", "h2o, predicted"):
        cells = []
        for count in counts:
            each = sorted(
                float(one(file, side="stock", sequences=count, pair=row["pair"])["step_ms"])
                / float(row["step_ms"])
                for row in find(file, side=side, sequences=count)
            )
            low, middle, high = (figure(x, 2) for x in (each[0], median(each), each[-1]))
            cells.append(f"{middle} ({low} to {high})")
        table.append([", ".join(f"`{name}`" for name in side.split(", ")), *cells])
    return markdown(("stock's step / the side's", *(f"{n} at once" for n in counts)), table)


def sparse_devices() -> str:
    """Return the predicted milliseconds of one layer's MLP, by device, tokens and mode."""
    file, modes = "gpu-predicted.csv", ("dense", "exact", "predicted")
    table = []
    for device in dict.fromkeys(row["device"] for row in find(file, figure="mlp_dense_ms")):
        for tokens in ("1", "8"):
            where = {"device": device, "batch": tokens}
            found = (one(file, **where, figure=f"mlp_{mode}_ms")["predicted"] for mode in modes)
            table.append([device, tokens, *(figure(float(value), 3) for value in found)])
    return markdown(("device", "tokens", "every row read", "`exact`", "`predicted`"), table)


def document() -> str:
    """Return what questions about one document take, and how many are answered."""
    sides = {
        "stock vLLM": "stock vLLM",
        "stock vLLM, prefix caching": "stock vLLM, prefix caching",
        "h2o2, score=reconstruction": "`h2o2`, `score=reconstruction`, `continuation`",
        "h2o2, score=reconstruction, from files": "the same, of an engine that starts later",
    }
    table = []
    for side, shown in sides.items():
        profile = "P12 restart" if side.endswith("files") else "P12"
        known = {"profile": profile, "side": side, "length": "3000", "questions": "12"}
        rows = find("document-cpu.csv", **known)
        times = (f"{figure(median_of(rows, name), 1)} s" for name in ("read_s", "seconds"))
        found = f"{rows[-1]['found']} of {rows[-1]['questions']}"
        kept = rows[-1]["budget"] if side.startswith("h2o2") else rows[-1]["length"]
        table.append([shown, f"{int(kept):,}", found, *times])
    head = ("side", "tokens kept of it", "questions answered", "reading it", "all")
    return markdown(head, table)
