# SPDX-License-Identifier: Apache-2.0
"""The lint of language finds each kind of fault, and leaves names, tables and code alone."""

from __future__ import annotations

import pytest

from tools.language import (
    EXCEPTIONS,
    check_docstrings,
    check_help,
    check_numbers,
    check_subject,
    main,
    subjects,
)


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ('"""Of so many slots, pages."""', 1),
        ('"""Those that stay."""', 1),
        ('"""That of a request."""', 1),
        ('"""What a step asks."""', 1),
        ('X = 1\n"""Of a page."""', 1),
        ('def f():\n    """What it gives."""', 1),
        ('"""Often read. What follows is fine."""', 0),
        ('"""That is a sentence."""', 0),
        ('f = lambda: "Of a string"\ny = "Those" if f else "What"', 0),
    ],
)
def test_docstrings_by_opening_are_found(source: str, faults: int) -> None:
    """Docstrings of modules, functions and attributes are read; other strings are not."""
    assert len(list(check_docstrings("a.py", source))) == faults


@pytest.mark.parametrize(("words", "faults"), [(20, 0), (21, 1)])
def test_help_above_twenty_words_is_found(words: int, faults: int) -> None:
    """Option help is read once."""
    assert len(list(check_help("budget", "word " * words))) == faults


@pytest.mark.parametrize(
    ("page", "faults"),
    [
        ("One is 1, two are 2.", 0),
        ("One is 1, two are 2, three are 3.", 1),
        ("One is 1, two are 2. Three are 3 and 4.", 0),
        ("1. first 1\n2. second 2 of 3\n3. third", 0),
        ("- one 1, 2\n  and 3.\n- two 1, 2.", 1),
        ("It is 1,024 and 0.5.", 0),
        ("On vLLM 0.32 or 0.33, Python 3.10 to 3.12, 1 of 2.", 0),
        ("Use `--a 1 --b 2 --c 3` and [1](x1.md#2-3).", 0),
        ("| 1 | 2 | 3 |\n| --- | --- | --- |", 0),
        ("```\n1 2 3\n```\nAnd 1.", 0),
        ("*Captions: n = 8, 2 cores, 1,024 tokens.*", 0),
        ("**Bold** is 1, 2 and 3.", 1),
    ],
)
def test_sentences_with_many_numbers_are_found(page: str, faults: int) -> None:
    """Prose has two numbers a sentence; tables, code, links, versions and captions have more."""
    assert len(list(check_numbers("a.md", page))) == faults


@pytest.mark.parametrize(
    ("subject", "faults"),
    [
        ("kernels: pack whole pages", 0),
        ("docs, tools: rewrite the pages for users", 0),
        ("What a second reading costs", 1),
        ("kernels: " + "x" * 64, 1),
    ],
)
def test_subjects_without_area_are_found(subject: str, faults: int) -> None:
    """A subject is ``area: imperative`` within 72 characters."""
    assert len(list(check_subject("abc", subject))) == faults


def test_repository_has_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """The lint passes, with a short list of exceptions."""
    assert main() == 0, capsys.readouterr().out
    assert len(EXCEPTIONS) <= 10


def test_subjects_with_other_abbreviations_name_the_same_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clone abbreviates hashes by how many objects it has; exceptions hold in every clone."""
    expected = list(subjects())
    for key, value in {"COUNT": "1", "KEY_0": "core.abbrev", "VALUE_0": "12"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{key}", value)
    assert list(subjects()) == expected
