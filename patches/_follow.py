# SPDX-License-Identifier: Apache-2.0
"""Differences between another vLLM and this one in the functions that this package relies on."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable, Sequence
from difflib import unified_diff
from pathlib import Path

from vllm_h2o.patches._digest import ABSENT, definition, digest_in
from vllm_h2o.patches._patch import Symbol, installed_version

Sources = Callable[[Symbol], str]
"""The text of the file in which a symbol is defined; empty where there is no such file."""


def installed(symbol: Symbol) -> str:
    """The text of the installed file."""
    return symbol.file().read_text(encoding="utf-8")


def archived(archive: Path) -> Sources:
    """The texts of an archive of vLLM's sources (``_sources.fetch``)."""

    def read(symbol: Symbol) -> str:
        path = symbol.module.replace(".", "/")
        with zipfile.ZipFile(archive) as files:
            for name in (f"{path}.py", f"{path}/__init__.py"):
                if name in files.namelist():
                    return files.read(name).decode()
        return ""

    return read


def report(symbols: Sequence[Symbol], old: Sources, new: Sources, version: str) -> str:
    """Each symbol that differs, with both digests and the difference; the others by number.

    Args:
        symbols: what is patched or relied upon.
        old: the sources that are known.
        new: those to follow.
        version: what the new ones are called.

    """
    said, same = [], 0
    for symbol in symbols:
        before, after = old(symbol), new(symbol)
        digests = [digest_in(ast.parse(text), symbol.names) for text in (before, after)]
        if digests[0] == digests[1]:
            same += 1
            continue
        lines = unified_diff(
            _lines(before, symbol),
            _lines(after, symbol),
            f"vLLM {installed_version()}",
            f"vLLM {version}",
            lineterm="",
        )
        said.append("\n".join([f"{digests[0]} -> {digests[1]} {symbol.path}", *lines]))
    said.append(f"{len(said)} of {len(symbols)} changed, {same} are as they were")
    return "\n\n".join(said) + "\n"


def _lines(text: str, symbol: Symbol) -> list[str]:
    """The lines of a definition, decorators included; of a generated one, its class's fields."""
    tree = ast.parse(text)
    if digest_in(tree, symbol.names) == ABSENT:
        return []
    node = definition(tree, symbol.names)
    if isinstance(node, ast.ClassDef):
        return [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return text.splitlines()[first - 1 : node.end_lineno]
