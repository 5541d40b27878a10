# SPDX-License-Identifier: Apache-2.0
"""P10 in small: three engines that talk, and what is told of them."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.throughput import chat
from tests.e2e.harness import tiny_llama


@pytest.mark.engine
@pytest.mark.slow
def test_chat_with_continuation_finds_all_but_the_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With continuation at most all but the last answer's end and the question is there."""
    model = tiny_llama(tmp_path / "model", 4, 2)
    command = ["chat", "--quick", f"--model={model}", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", command)
    chat.main()
    rows = list(csv.DictReader((tmp_path / "chat-quick.csv").read_text().splitlines()))
    assert [(r["side"], r["turn"]) for r in rows] == [
        (s, str(t)) for s in chat.SIDES for t in (1, 2, 3)
    ]
    found = {(r["side"], int(r["turn"])): float(r["found"]) for r in rows}
    load = chat.QUICK
    for turn in (1, 2):
        asked = load.system + load.asked + turn * (load.asked + load.answered)
        continued = (asked - load.asked - 1) / asked
        # The pool is small: what one left, another may have taken.
        assert 0 < found["h2o continued", turn + 1] < continued + 1e-4
        assert found["h2o", turn + 1] == 0
    assert all(float(r["ttft_p99_s"]) >= float(r["ttft_p50_s"]) > 0 for r in rows)
    assert capsys.readouterr().out.count("| h2o continued |") == 2


@pytest.mark.engine
@pytest.mark.slow
def test_chats_go_on_from_where_memory_has_left_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory finds all, files as much as is written in time, and the pool less."""
    model = tiny_llama(tmp_path / "model", 4, 2)
    command = ["chat", "--quick", "--tiers", f"--model={model}", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(chat, "QUICK", replace(chat.QUICK, conversations=9))
    chat.main()
    rows = list(csv.DictReader((tmp_path / "tiers-quick.csv").read_text().splitlines()))
    found = {row["side"]: float(row["found_of_said_before"]) for row in rows}
    assert tuple(found) == chat.TIERS
    nothing, pool, memory, files = found.values()
    assert nothing == 0 and pool < memory and pool < files <= memory


def test_chat_pools_have_equal_bytes() -> None:
    """A pool holds a third of all tokens, where the system prompt counts once."""
    load = chat.Load()
    stock, ours = (load.num_pages(side, 512) for side in ("stock", "h2o"))
    assert stock == 1 + (32 * 8 * 240 + 300) // 3 // 32
    assert 0 <= stock * 512 - ours * 520 < 520 * 2
