# SPDX-License-Identifier: Apache-2.0
"""The mechanism: what is verified, and that apply and revert leave nothing behind."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_h2o.errors import PatchError
from vllm_h2o.patches import _patch
from vllm_h2o.patches._digest import ABSENT, digest
from vllm_h2o.patches._patch import Patch, Symbol, verify_all, verify_version

SOURCE = '''
"""A module of a host."""

def plain(a, b=1):
    """Add."""
    if a:
        b = b + 1
    return f"{a} and {b!r}"


class Host:
    def method(self, a):
        return ("method", a)

    @staticmethod
    def static(a):
        return ("static", a)

    @classmethod
    def for_class(cls, a):
        return (cls.__name__, a)
'''
NAMES = ("plain", "Host.method", "Host.static", "Host.for_class")


@dataclass
class Foreign:
    """A module that belongs to somebody else, in a file."""

    path: Path
    name: str

    def module(self) -> Any:
        """The module, imported."""
        return importlib.import_module(self.name)

    def symbol(self, name: str) -> Symbol:
        """A symbol with the digest of what is there now."""
        return Symbol(f"{self.name}:{name}", Symbol(f"{self.name}:{name}", "").found_digest())

    def rewrite(self, old: str, new: str) -> None:
        """Alter the file, as another release would."""
        assert old in self.path.read_text()
        self.path.write_text(self.path.read_text().replace(old, new))


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Foreign]:
    """The module, importable until the test is over."""
    name = "foreign_host_of_test_patch"
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield Foreign(path, name)
    sys.modules.pop(name, None)


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that shows."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ["wrapped", original(*args, **kwargs)]

    return wrapper


@pytest.mark.parametrize("name", NAMES)
def test_verify_accepts_what_is_known(foreign: Foreign, name: str) -> None:
    """An unaltered symbol passes, and verifying it does not import its module."""
    foreign.symbol(name).verify()
    assert foreign.name not in sys.modules


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b = b + 1", "b = b + 2"),
        ("def plain(a, b=1)", "def plain(a, b=2)"),
        ("def plain(a, b=1)", "def plain(a, b=1, c=None)"),
        ("def plain(a, b=1)", "def plain(a, *, b=1)"),
        ("def plain(a, b=1)", "def plain(a, c=1)"),
        ("def plain(a, b=1)", "@print\ndef plain(a, b=1)"),
        ('    return f"{a} and', '        return f"{a} and'),
        ("{b!r}", "{b!s}"),
    ],
    ids=["body", "default", "parameter", "keyword", "name", "decorator", "indent", "f-string"],
)
def test_verify_refuses_an_altered_source(foreign: Foreign, old: str, new: str) -> None:
    """Whatever could change the behaviour changes the digest, a moved indent included."""
    symbol = foreign.symbol("plain")
    foreign.rewrite(old, new)
    with pytest.raises(PatchError, match=r"Its digest is \w{12}, not \w{12}"):
        symbol.verify()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b = b + 1", "b = b + 1  # one more"),
        ("b = b + 1", "# one more\n\n        b  =  b+1"),
        ("b = b + 1", "b = (\n            b + 1\n        )"),
        ("    if a:\n        b = b + 1", "    if a:\n          b = b + 1"),
        ("def plain(a, b=1)", "def plain(\n    a,\n    b=1,\n)"),
        ("class Host:", "def unrelated(): ...\n\n\nclass Host:"),
    ],
    ids=["comment", "lines", "parentheses", "indent width", "trailing comma", "neighbour"],
)
def test_layout_does_not_count(foreign: Foreign, old: str, new: str) -> None:
    """Comments, layout and the rest of the file leave the digest as it is."""
    symbol = foreign.symbol("plain")
    foreign.rewrite(old, new)
    symbol.verify()


def test_digest_is_the_same_in_every_python() -> None:
    """A value that Python 3.10 to 3.13 agree on; f-strings are what tokens would differ in."""
    assert digest(ast.parse(SOURCE)) == "f78bafedbd82"


def test_message_says_all(foreign: Foreign) -> None:
    """Symbol, version, both digests, file and line, remedy."""
    known = foreign.symbol("Host.static")
    foreign.rewrite('("static", a)', '("static", a, a)')
    with pytest.raises(PatchError) as caught:
        known.verify()
    found = foreign.symbol("Host.static").digest
    for part in (
        f"kv-policy: vllm-h2o on {foreign.name}:Host.static is not supported: ",
        f"vLLM {_patch.installed_version()}. ",
        f"Its digest is {found}, not {known.digest}, at {foreign.path}:16. ",
        "Install the vLLM 0.32 or 0.33 that this release was written against, or a ",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("{}:absent", "It is not defined in "),
        ("{}:Host.absent", "It is not defined in "),
        ("{}:Absent.method", "It is not defined in "),
        ("{}.absent:plain", "Its module is not there"),
        ("absent_package.module:plain", "Its module is not there"),
    ],
)
def test_missing_symbol_is_refused(foreign: Foreign, path: str, why: str) -> None:
    """What is not there any more is refused, not stumbled over."""
    with pytest.raises(PatchError, match=why):
        Symbol(path.format(foreign.name), "0" * 12).verify()


def test_generated_init_is_compared_by_parameters(foreign: Foreign) -> None:
    """Of a dataclass, whose source nobody wrote, the parameters are compared."""
    fields = "@__import__('dataclasses').dataclass\nclass Data:\n    a: int = 0\n    b: int = 1\n"
    foreign.path.write_text(fields)
    symbol = foreign.symbol("Data.__init__")
    patch = Patch(symbol, around)
    patch.verify()
    patch.apply()
    patch.verify()  # the wrapper's parameters are not taken for the dataclass's
    patch.revert()
    foreign.rewrite("b: int", "c: int")
    importlib.reload(foreign.module())
    with pytest.raises(PatchError, match="Its digest is"):
        symbol.verify()


@pytest.mark.parametrize("name", NAMES)
def test_apply_and_revert(foreign: Foreign, name: str) -> None:
    """The wrapper works for every kind of function, and the identical object comes back."""
    patch = Patch(foreign.symbol(name), around)
    owner: Any = foreign.module()
    if "." in name:
        owner = owner.Host
    attribute = name.rpartition(".")[2]
    before = vars(owner)[attribute]
    original = getattr(before, "__func__", before)
    target = owner() if attribute == "method" else owner

    def call() -> Any:
        return getattr(target, attribute)(1)

    plain = call()
    assert not patch.is_applied
    patch.apply()
    assert patch.is_applied
    assert call() == ["wrapped", plain]
    assert type(vars(owner)[attribute]) is type(before)
    assert getattr(owner, attribute).__qualname__ == original.__qualname__
    patch.verify()
    patch.revert()
    assert not patch.is_applied
    assert vars(owner)[attribute] is before
    assert call() == plain
    patch.revert()
    assert call() == plain


def test_apply_is_idempotent(foreign: Foreign) -> None:
    """A second apply wraps nothing, however often the plugin is registered."""
    patch = Patch(foreign.symbol("plain"), around)
    patch.apply()
    once = foreign.module().plain
    patch.verify()
    patch.apply()
    assert foreign.module().plain is once
    assert once(1) == ["wrapped", "1 and 2"]


def test_refuses_what_somebody_else_has_replaced(foreign: Foreign) -> None:
    """A wrapper from another file is noticed, with and without functools.wraps."""
    patch = Patch(foreign.symbol("plain"), around)
    module = foreign.module()
    original = module.plain
    for replacement in (
        around(original),
        functools.wraps(original)(around(original)),
        functools.partial(original, b=3),
    ):
        module.plain = replacement
        with pytest.raises(PatchError, match="Something else has replaced it"):
            patch.verify()
    module.plain = original
    patch.verify()


def test_refuses_what_somebody_else_has_put_around_the_patch(foreign: Foreign) -> None:
    """The next registration notices a wrapper around the plugin's own, even if it copies marks."""
    patch = Patch(foreign.symbol("plain"), around)
    patch.apply()
    module = foreign.module()
    ours = module.plain
    for replacement in (around(ours), functools.wraps(ours)(around(ours))):
        module.plain = replacement
        with pytest.raises(PatchError, match="Something else has replaced it"):
            patch.verify()


def test_unknown_version_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another vLLM is refused by its version, before any symbol is looked at."""
    for installed in ("0.31.2", "0.34.0", "0.3.2", "1.0.32.0", "0.330.1"):
        monkeypatch.setattr(_patch, "version", lambda _, installed=installed: installed)
        with pytest.raises(PatchError) as caught:
            verify_all([])
        assert f": version {installed}. " in str(caught.value)
        assert "Install vLLM 0.32 or 0.33, or uninstall vllm-h2o" in str(caught.value)
    for installed in ("0.32.7+cpu", "0.33.0"):
        monkeypatch.setattr(_patch, "version", lambda _, installed=installed: installed)
        verify_version()


def test_digests_of_each_version(foreign: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed version's digest is compared, and no other's: a known one may be the wrong."""
    found = foreign.symbol("plain").digest
    other = "0" * 12
    for installed, right in (("0.32.0", True), ("0.33.1+cpu", False)):
        monkeypatch.setattr(_patch, "version", lambda _, installed=installed: installed)
        symbol = Symbol(f"{foreign.name}:plain", {"0.32": found, "0.33": other})
        assert symbol.digest == (found if right else other)
        if right:
            symbol.verify()
            continue
        with pytest.raises(PatchError, match=f"Its digest is {found}, not {other}"):
            symbol.verify()


def test_what_a_version_does_not_have(foreign: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known to be absent, it must be; where it is known, it must be there."""
    for installed, has_it in (("0.32.0", True), ("0.33.0", False)):
        monkeypatch.setattr(_patch, "version", lambda _, installed=installed: installed)
        for name, there in (("Host.static", True), ("Host.gone", False)):
            found = foreign.symbol("Host.static").digest
            symbol = Symbol(f"{foreign.name}:{name}", {"0.32": found, "0.33": ABSENT})
            if has_it == there:
                symbol.verify()
                continue
            said = "It is not defined in" if has_it else f"Its digest is {found}, not absent"
            with pytest.raises(PatchError, match=said):
                symbol.verify()


def test_missing_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no vLLM is installed under either name, the message says so."""

    def absent(name: str) -> str:
        raise _patch.PackageNotFoundError(name)

    monkeypatch.setattr(_patch, "version", absent)
    with pytest.raises(PatchError, match="version none"):
        verify_version()


def test_nothing_is_applied_when_one_fails(foreign: Foreign) -> None:
    """All are verified first, so that a refusal leaves the host as it was."""
    good = Patch(foreign.symbol("plain"), around)
    bad = Patch(Symbol(f"{foreign.name}:Host.method", "0" * 12), around)
    with pytest.raises(PatchError, match=r"Host\.method"):
        verify_all([good, bad])
    assert not good.is_applied
    assert foreign.module().plain(1) == "1 and 2"
