# SPDX-License-Identifier: Apache-2.0
"""Which answers each format of chat templates gives back, and at which token it breaks the others.

Special tokens are SmolLM2's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.smollm2 import model_dir
from tests import chat_templates
from vllm_h2o.template import KINDS, Finding, findings

PLAIN, LINES, SPACE, BLANKS = (kind.what for kind in KINDS[:4])
WITHIN, BACK, GONE, TOOLS = (kind.what for kind in KINDS[4:8])
ASIS, COMPACT, SPACED, SEVERAL = (kind.what for kind in KINDS[8:12])
THOUGHT_CALL, NAMED, REQUIRED, EDITED = (kind.what for kind in KINDS[12:])
NEVER = {GONE, NAMED, REQUIRED, EDITED}
CALLS = {ASIS, COMPACT, SPACED, SEVERAL, THOUGHT_CALL}
BREAKS: Mapping[str, set[str]] = {
    "OWN": {BACK, *CALLS},
    "TRIMS": {SPACE, BLANKS, WITHIN, BACK, *CALLS},
    "CALLS": {BACK, COMPACT, THOUGHT_CALL},
    "COMPACT": {BACK, COMPACT, SPACED, SEVERAL, THOUGHT_CALL},
    "TAGS": {BACK, COMPACT, THOUGHT_CALL},
    "IDS": {BACK, COMPACT, SPACED, SEVERAL, THOUGHT_CALL},
    "MOVES": {BACK, TOOLS, *CALLS},
    "SINGLE": {BACK, COMPACT, SEVERAL, THOUGHT_CALL},
    "THINKS": {COMPACT},
    "OPENS": {PLAIN, LINES, SPACE, BLANKS, WITHIN, BACK, TOOLS, *CALLS},
    "NO_SYSTEM": {BACK, COMPACT, THOUGHT_CALL},
}
"""What each template does not give back, besides what none does."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """SmolLM2's."""
    return AutoTokenizer.from_pretrained(str(model_dir("float32", progress=False)))


def found(tokenizer: Any, name: str) -> dict[str, Finding]:
    """The findings of a template, by kind; OWN is the tokenizer's own."""
    template = None if name == "OWN" else getattr(chat_templates, name)
    return {each.what: each for each in findings(tokenizer, template)}


@pytest.mark.parametrize("name", BREAKS)
def test_findings_name_the_kinds_that_break(name: str, tokenizer: Any) -> None:
    """Kinds that a template gives back continue, and no other."""
    broken = {what for what, each in found(tokenizer, name).items() if not each.continues}
    assert broken == NEVER | BREAKS[name]


def test_findings_name_the_token_at_which_a_kind_breaks(tokenizer: Any) -> None:
    """The text before it is the same, and differs after it."""
    by_kind = found(tokenizer, "CALLS")
    plain, compact, spaced = by_kind[EDITED], by_kind[COMPACT], by_kind[SPACED]
    assert plain.lines()[0] == f"{EDITED}: starts anew, at token 30 of 32"
    assert (plain.expected, plain.found[:5]) == (" dusk.", " dawn")
    assert compact.expected.startswith('":"read_log","') and compact.num_tokens < spaced.num_tokens
    assert compact.found.startswith('": "read_log", "')
    head = by_kind[TOOLS].num_tokens - len(tokenizer.encode("The old keeper did, at dusk."))
    assert by_kind[NAMED].num_begun == by_kind[REQUIRED].num_begun == head < compact.num_begun
    ids = found(tokenizer, "IDS")
    assert ids[SPACED].expected == "}}]" and ids[SPACED].found.startswith('}, "id": "call')
    assert found(tokenizer, "MOVES")[TOOLS].num_begun == 10


def test_findings_of_a_template_that_refuses_say_so(tokenizer: Any) -> None:
    """Its own words; a system message is left out where it is refused."""
    refused = found(tokenizer, "SINGLE")[SEVERAL]
    assert refused.lines() == [f"{SEVERAL}: refused by the template: one call!"]
    joins = chat_templates.CALLS.replace("function.arguments | tojson", "function.arguments + ''")
    (first, *_) = [f for f in findings(tokenizer, joins) if f.refused]
    assert first.what == ASIS and "dict" in first.refused
    assert (
        found(tokenizer, "NO_SYSTEM")[PLAIN].num_tokens
        < found(tokenizer, "CALLS")[PLAIN].num_tokens
    )
