# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without work that it does again in each call of a kernel's function."""

from __future__ import annotations

from functools import cache
from typing import Any

from triton import language as tl
from triton.runtime import interpreter

_patch, _type = interpreter._patch_lang, interpreter._get_np_dtype
_type_of_scalar = cache(_type)


@cache
def _languages(function: Any) -> list[Any]:
    """The modules of the language that a function names."""
    return [each for each in (tl, tl.core) if each in function.__globals__.values()]


def _patch_once(function: Any) -> Any:
    """What the language's modules have is replaced when a kernel starts, not in each call, too."""
    if all(not tl.core.is_builtin(each.load) for each in _languages(function)):
        return interpreter._LangPatchScope()
    return _patch(function)


def _type_once(of: Any) -> Any:
    """NumPy's type, for which Triton fills a table in each call; pointers have no hash."""
    return _type(of) if isinstance(of.scalar, tl.pointer_type) else _type_of_scalar(of.scalar)


def quicken() -> None:
    """Make the interpreter quicker for good."""
    interpreter._patch_lang, interpreter._get_np_dtype = _patch_once, _type_once
