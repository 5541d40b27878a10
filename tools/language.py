# SPDX-License-Identifier: Apache-2.0
"""Check the language of code, options, documentation and commits: ``python -m tools.language``.

Prints a line for each fault and exits with 1 if there is one. ``make lint`` runs it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from vllm_h2o.options.options import Options

ROOT = Path(__file__).parents[1]
PACKAGES = ("vllm_h2o", "patches", "benchmarks", "demo")
PAGES = ("README.md", "docs/*.md")
BASE = "b65e0c860b2f15fe5145a98b3c33a166fb8a760a"
"""Subjects of later commits are checked."""
HELP_WORDS, NUMBERS, SUBJECT = 20, 2, 72
EXCEPTIONS: tuple[str, ...] = (
    "commit ee33f10: its subject has 74",
    "commit 5aead37: its subject has 74",
)
"""Beginnings of faults that are accepted, at most ten."""

OPENING = re.compile(r"(Of|Those|That of|What)\b")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
VERSIONS = re.compile(
    r"\b(vLLM|Python|torch|CUDA|arXiv|kvpress|OpenVINO GenAI|Model Runner)\s+"
    r"V?[\d.]+((,| and| or| to)?\s+[\d.]+)*"
)
"""Versions of software, which are names."""
NUMBER = re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[])")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring, those of attributes included."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)  # of a lambda or a condition it is no list
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(ast.Constant(str(text))):
                    yield statement.lineno, text.strip()


def check_docstrings(path: str, source: str) -> Iterator[str]:
    """Yield docstrings that open with a word that hides what they are about."""
    for line, text in docstrings(source):
        if match := OPENING.match(text):
            yield f"{path}:{line}: a docstring opens with {match.group()!r}"


def check_help(name: str, meaning: str) -> Iterator[str]:
    """Yield an option whose help is too long to be read once."""
    if (words := len(meaning.split())) > HELP_WORDS:
        yield f"option {name}: its help has {words} words, at most {HELP_WORDS}"


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each paragraph and list item of a page.

    Code, tables, headings and captions are left out. A caption is a paragraph in italics.
    """
    text = FENCE.sub(lambda match: "\n" * match.group().count("\n"), page)
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        ends = not line.strip() or line.startswith(("|", "#", "<!--", "!["))
        if ends or re.match(r"\s*(?:[-*]|\d+\.)\s", line):
            if lines and not re.match(r"\*[^*\s]", lines[0]):
                yield start, " ".join(lines)
            lines = []
        if not ends:
            start = start if lines else number
            lines.append(re.sub(r"^(?:[-*]|\d+\.)\s+", "", line.strip()))


def check_numbers(path: str, page: str) -> Iterator[str]:
    """Yield sentences with more than two numbers, which belong into a table."""
    for line, paragraph in paragraphs(page):
        prose = re.sub(r"`[^`]*`", "CODE", paragraph)
        prose = re.sub(r"\]\([^)]*\)", "]", prose)
        for sentence in SENTENCE.split(prose):
            found = NUMBER.findall(VERSIONS.sub("VERSION", sentence))
            if len(found) > NUMBERS:
                yield f"{path}:{line}: a sentence has {len(found)} numbers: {sentence[:60]!r}"


def check_subject(commit: str, subject: str) -> Iterator[str]:
    """Yield what is wrong with the subject of a commit: ``area: imperative``."""
    if len(subject) > SUBJECT:
        yield f"commit {commit}: its subject has {len(subject)} characters, at most {SUBJECT}"
    if not re.match(r"[\w/., -]+: \S", subject):
        yield f"commit {commit}: its subject does not begin with 'area: '"


def subjects() -> Iterator[tuple[str, str]]:
    """Yield commits since the fixed one, and their subjects; none without its history."""
    asked = ["git", "log", "--no-merges", "--format=%H %s", f"{BASE}..HEAD"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        commit, _, subject = line.partition(" ")
        yield commit[:7], subject  # %h grows with the number of objects


def faults() -> Iterator[str]:
    """Yield every fault of the repository."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield from check_docstrings(str(file.relative_to(ROOT)), file.read_text("utf-8"))
    for field in fields(Options):
        yield from check_help(field.name, field.metadata["meaning"])
    for pattern in PAGES:
        for file in sorted(ROOT.glob(pattern)):
            yield from check_numbers(str(file.relative_to(ROOT)), file.read_text("utf-8"))
    for commit, subject in subjects():
        yield from check_subject(commit, subject)


def main() -> int:
    """Print the faults. Returns the exit status."""
    found = [fault for fault in faults() if not fault.startswith(EXCEPTIONS)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
