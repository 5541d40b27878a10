# SPDX-License-Identifier: Apache-2.0
"""What a maintainer reads when there is a new vLLM, and where its sources come from."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools.overlay import create
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.patches import __main__ as described
from vllm_h2o.patches import _follow, _sources
from vllm_h2o.patches._patch import Symbol

METADATA = "vllm-9.9.9.dist-info/METADATA"


def text_of(symbol: Symbol) -> str:
    """The installed file of a symbol."""
    return symbol.file().read_text()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, and a pip that brings a vLLM in which one function differs and one is gone."""
    symbols = described.symbols()
    files = {f"{s.module.replace('.', '/')}.py": text_of(s) for s in symbols}
    manager = "vllm/v1/core/single_type_kv_cache_manager.py"
    files[manager] = files[manager].replace("def free(", "def liberate(", 1)
    arguments = "vllm/engine/arg_utils.py"
    changed = files[arguments].replace("class EngineArgs:", "class EngineArgs:\n    one: int = 1")
    assert changed != files[arguments]
    files[arguments] = changed

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "--target" in command:
            return subprocess.CompletedProcess(command, 0, "", "")
        if "vllm==9.9.9" not in command:
            return subprocess.CompletedProcess(command, 1, "", "long\nERROR: no such version")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "vllm-9.9.9-py3-none-any.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)
            wheel.writestr("vllm/_C.abi3.so", b"\0" * 1000)
            wheel.writestr(METADATA, "Metadata-Version: 2.4\nName: vllm\nVersion: 9.9.9\n\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(_sources.subprocess, "run", pip)
    return tmp_path / "cache"


def test_fetched_once_without_what_a_compiler_made(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel does not stay, and the second time nothing is fetched."""
    archive = _sources.fetch("9.9.9", cache)
    with zipfile.ZipFile(archive) as kept:
        assert "vllm/_C.abi3.so" not in kept.namelist()
        assert "vllm/engine/arg_utils.py" in kept.namelist()
    assert list(cache.iterdir()) == [archive]
    monkeypatch.undo()
    assert _sources.fetch("9.9.9", cache) == archive


def test_what_cannot_be_fetched(cache: Path) -> None:
    """pip's last word, in four parts, and nothing is left behind."""
    with pytest.raises(UnsupportedError) as caught:
        _sources.fetch("9.9.8", cache)
    assert str(caught.value).startswith(
        "kv-policy: the sources of vLLM 9.9.8 is not supported: ERROR: no such version. "
    )
    assert list(cache.iterdir()) == []


def test_report_names_symbols_that_differ(cache: Path) -> None:
    """Each symbol that differs with both digests and its difference; the rest as a number."""
    symbols = described.symbols()
    new = _follow.archived(_sources.fetch("9.9.9", cache))
    said = _follow.report(symbols, _follow.installed, new, "9.9.9")
    heads = [line.split() for line in said.splitlines() if " -> " in line and ":" in line]
    heads = [head for head in heads if len(head) == 4 and len(head[0]) == 12]
    assert [(path, after == "absent") for _, _, after, path in heads] == [
        ("vllm.engine.arg_utils:EngineArgs.__init__", False),
        ("vllm.engine.arg_utils:AsyncEngineArgs.__init__", False),
        ("vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.free", True),
    ]
    known = {symbol.path: symbol.digest for symbol in symbols}
    assert all(before == known[path] for before, *_, path in heads)
    assert "\n+one: int = 1\n" in said
    assert "\n-    def free(self, request_id: str)" in said
    assert said.endswith(f"3 of {len(symbols)} changed, {len(symbols) - 3} are as they were\n")


@pytest.mark.slow
def test_follow_command_prints_the_report(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--follow`` prints it, or why it cannot."""
    monkeypatch.setattr(described, "fetch", lambda version: _sources.fetch(version, cache))
    for version, status in (("9.9.9", 0), ("9.9.8", 2)):
        monkeypatch.setattr("sys.argv", ["patches", "--follow", version])
        assert described.main() == status
    printed, error = capsys.readouterr()
    assert "3 of" in printed
    assert "the sources of vLLM 9.9.8" in error


def test_overlay_is_a_cpu_environment_of_the_new_version(cache: Path, tmp_path: Path) -> None:
    """An environment of the new Python with the installed extension, that says that it is a CPU's.

    That such an environment runs the tests is what ``make test-033`` shows.
    """
    folder = tmp_path / "environment"
    archive = _sources.fetch("9.9.9", cache)
    create("9.9.9", folder, archive)
    create("9.9.9", folder, archive)  # again, over what is there
    (site,) = folder.glob("lib/python*/site-packages")
    libraries = [path for path in site.joinpath("vllm").rglob("*.so") if path.is_symlink()]
    assert libraries and all(path.resolve().is_file() for path in libraries)
    assert (site / "vllm-9.9.9+cpu.dist-info/METADATA").read_text().endswith("9.9.9+cpu\n\n")
    assert "one: int = 1" in (site / "vllm/engine/arg_utils.py").read_text()
    code = "import importlib.metadata as m, pytest; print(m.version('vllm'))"
    done = subprocess.Popen([folder / "bin/python", "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.communicate()[0] == "9.9.9+cpu\n"
