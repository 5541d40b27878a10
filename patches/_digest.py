# SPDX-License-Identifier: Apache-2.0
"""Definitions in a source file, and digests of them: of a file that is installed, or of any other.

Nothing is imported: a module that is not patched yet stays unloaded, and another version's sources
are read like the installed ones.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

ABSENT = "absent"
"""Stands for the digest where there is no definition."""


def digest_in(module: ast.Module, names: Sequence[str]) -> str:
    """The digest of what ``names`` lead to, or :data:`ABSENT`.

    Args:
        module: the syntax tree of a file.
        names: the class, if any, and the function. Of an ``__init__`` that a dataclass generates,
            the digest is of its parameters' names.

    """
    node = definition(module, names)
    if node is None:
        return ABSENT
    if isinstance(node, ast.ClassDef):
        return _hash(" ".join(["self", *dict.fromkeys(_fields(module, node))]))
    return digest(node)


def definition(module: ast.AST, names: Sequence[str]) -> ast.stmt | None:
    """The object that ``names`` lead to; the class alone when it generates the function."""
    found: Any = module
    for name in names:
        inner = [
            node
            for node in ast.iter_child_nodes(found)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
        ]
        if not inner:
            generated = name == "__init__" and isinstance(found, ast.ClassDef)
            return found if generated else None
        found = inner[-1]
    return found  # type: ignore[no-any-return]


def digest(node: ast.AST) -> str:
    """12 hex digits of a definition: neither comments nor layout count.

    Of the syntax tree, because the tokens of an f-string differ between Python 3.11 and 3.12.
    Fields that are empty are left out: newer versions of Python have more of them.
    """
    return _hash(_shape(node))


def _fields(module: ast.Module, owner: ast.ClassDef) -> Iterator[str]:
    """A dataclass's fields, those of its bases in the same file first."""
    for base in owner.bases:
        parent = definition(module, [ast.unparse(base)])
        if isinstance(parent, ast.ClassDef):
            yield from _fields(module, parent)
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _shape(node: object) -> str:
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({','.join(f'{n}={_shape(value)}' for n, value in fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_shape, node))}]"
    return repr(node)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
