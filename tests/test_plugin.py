# SPDX-License-Identifier: Apache-2.0
"""The entry points, in processes that start afresh, as a user's do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.tiny_models import folder
from vllm_h2o import patches, plugin
from vllm_h2o.errors import PatchError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.patches import Patch, _patch
from vllm_h2o.patches._with_policy import activate_front_end
from vllm_h2o.paths import BACKEND

CUSTOM = AttentionBackendEnum.CUSTOM
ALWAYS = {patch.symbol.path for patch in patches.ALWAYS}
PATHS = sorted(
    ALWAYS
    | {patch.symbol.path for patch in (*patches.WITH_POLICY, *patches.FRONT_END)}
    | {symbol.path for symbol in patches.RELIED_UPON}
)

PROBE = """
import importlib, inspect, json, sys

def stands_at(path):
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = inspect.getattr_static(found, name)
    return getattr(found, "__func__", found)

def homes(paths):
    found = {path: stands_at(path) for path in paths}
    return {path: function.__code__.co_filename for path, function in found.items()}

def is_wrapped(path):
    return bool([name for name in vars(stands_at(path)) if "h2o" in name])

def report(**said):
    import vllm.v1.attention.backends.registry as registry
    custom = registry.AttentionBackendEnum.CUSTOM
    said["backend"] = custom.get_path() if custom.is_overridden() else None
    said["engine_package"] = type(sys.modules["vllm.engine"]).__name__
    said["plugin"] = sorted(name for name in sys.modules if name.startswith("vllm_h2o"))
    print("REPORT", json.dumps(said))
"""
WITH_PLUGIN = """
from vllm import {first}
from vllm import EngineArgs
args = EngineArgs(model={model!r}, kv_policy="h2o", kv_policy_config={{"budget": 64}})
wrapped = [path for path in {paths!r} if is_wrapped(path)]
before = stands_at({paths!r}[0])
from vllm.plugins import load_general_plugins
load_general_plugins()
sys.modules["vllm_h2o.plugin"].register()
report(
    policy=args.additional_config["kv_policy"]["budget"],
    wrapped=wrapped,
    homes=homes({paths!r}),
    once=stands_at({paths!r}[0]) is before,
)
"""
WITHOUT_PLUGIN = """
from vllm import LLM, EngineArgs
from vllm.plugins import load_general_plugins
load_general_plugins()
try:
    EngineArgs(model={model!r}, kv_policy="h2o")
    refusal = None
except TypeError as error:
    refusal = str(error)
report(
    refusal=refusal,
    wrapped=[path for path in {paths!r} if is_wrapped(path)],
    homes=homes({paths!r}),
)
"""
ANOTHER_VLLM = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.34.0+cpu" if name == "vllm" else version(name)
try:
    from vllm import LLM
    said = None
except ValueError as error:
    said = str(error)
report(said=said, wrapped=[path for path in {paths!r} if is_wrapped(path)])
"""


def fresh(script: str, **settings: str) -> dict[str, Any]:
    """What a script reports from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE + script],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    return report


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama: engine arguments look for their model."""
    return folder(tmp_path_factory.mktemp("models"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def stock(model: str) -> dict[str, Any]:
    """The report of a process in which the plugin is switched off."""
    return fresh(WITHOUT_PLUGIN.format(model=model, paths=PATHS), VLLM_PLUGINS="")


@pytest.mark.engine
def test_plugin_switched_off_changes_nothing(stock: dict[str, Any]) -> None:
    """With ``VLLM_PLUGINS=`` nothing of vLLM's is wrapped, and nothing of ours is loaded."""
    assert "unexpected keyword argument 'kv_policy'" in stock["refusal"]
    assert stock["wrapped"] == []
    assert (stock["backend"], stock["engine_package"], stock["plugin"]) == (None, "module", [])


@pytest.mark.engine
@pytest.mark.parametrize("first", ["LLM", "EngineArgs"])
def test_plugin_adds_flags_and_patches(model: str, stock: dict[str, Any], first: str) -> None:
    """``kv_policy`` is taken whatever is imported first; but for the flags, vLLM is as without."""
    said = fresh(WITH_PLUGIN.format(first=first, model=model, paths=PATHS))
    assert said["policy"] == 64
    assert set(said["wrapped"]) == ALWAYS
    differing = {path for path in PATHS if said["homes"][path] != stock["homes"][path]}
    assert differing == ALWAYS
    assert said["once"]
    assert (said["backend"], said["engine_package"]) == (BACKEND, "module")
    heavy = ("vllm_h2o.worker", "vllm_h2o.kernels", "vllm_h2o.scheduler")
    assert not [name for name in said["plugin"] if name.startswith(heavy)]


@pytest.mark.engine
def test_plugin_on_another_vllm_is_refused() -> None:
    """A vLLM of another version stops while it is imported, with the remedy, unchanged."""
    said = fresh(ANOTHER_VLLM.format(paths=sorted(ALWAYS)))
    assert said["said"] == (
        "kv-policy: vllm-h2o with this vLLM is not supported: version 0.34.0+cpu. The plugin "
        "was written against vLLM 0.32 or 0.33 and patches functions of it. "
        "Install vLLM 0.32 or 0.33, or uninstall vllm-h2o."
    )
    assert (said["wrapped"], said["backend"]) == ([], None)


@pytest.mark.engine
def test_serve_help_shows_the_flags_in_a_group() -> None:
    """``vllm serve`` shows the flags under a title of their own."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", "--help=KVPolicyConfig"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    start = done.stdout.index("KVPolicyConfig:")
    shown = " ".join(done.stdout[start:].split())
    assert "--kv-policy NAME Eviction policy. Off by default." in shown
    assert "- h2o: heavy hitters by accumulated attention" in shown
    assert "--kv-policy-config JSON Options of the policy as JSON" in shown
    assert "--max-model-len" not in shown


@pytest.fixture
def custom_backend() -> Any:
    """The registry's entry, put back after the test."""
    before = CUSTOM.get_path() if CUSTOM.is_overridden() else None
    yield CUSTOM
    CUSTOM.clear_override()
    if before:
        register_backend(CUSTOM, before)


def test_register_with_another_attention_plugin_is_refused(
    custom_backend: AttentionBackendEnum,
) -> None:
    """vLLM has one custom backend; whoever came first keeps it, and nothing is patched then."""
    register_backend(custom_backend, "other_plugin.Backend")
    for patch in patches.ALWAYS:
        patch.revert()
    try:
        with pytest.raises(PatchError) as caught:
            plugin.register()
        assert str(caught.value) == (
            "kv-policy: vllm-h2o next to another attention plugin is not supported: "
            "other_plugin.Backend is registered as the custom backend. "
            "vLLM has one place for a custom backend. "
            "Uninstall one of the two, or name the wanted one in VLLM_PLUGINS."
        )
        assert not any(patch.is_applied for patch in patches.ALWAYS)
        assert custom_backend.get_path() == "other_plugin.Backend"
    finally:
        for patch in patches.ALWAYS:
            patch.apply()


def test_register_changes_nothing_when_it_fails(
    custom_backend: AttentionBackendEnum, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the registry nor a symbol is touched on a vLLM that is not known."""
    custom_backend.clear_override()
    for patch in patches.ALWAYS:
        patch.revert()
    try:
        with monkeypatch.context() as unknown:
            unknown.setattr(_patch, "version", lambda _: "0.34.0")
            with pytest.raises(PatchError):
                plugin.register()
        assert not custom_backend.is_overridden()
        assert not any(patch.is_applied for patch in patches.ALWAYS)
    finally:
        plugin.register()
    assert all(patch.is_applied for patch in patches.ALWAYS)


@pytest.mark.parametrize(
    ("activate", "group"),
    [
        (plugin.activate, patches.WITH_POLICY),
        (partial(activate_front_end, KVPolicyConfig()), patches.FRONT_END),
    ],
    ids=["worker", "front end"],
)
def test_activate_applies_patches_of_workers(
    activate: Callable[[], object], group: tuple[Patch, ...]
) -> None:
    """Where a policy runs, the rest of the patches are applied, once."""
    were_applied = [patch for patch in group if patch.is_applied]
    for patch in group:
        patch.revert()
    try:
        activate()
        assert all(patch.is_applied for patch in group)
        activate()
        for patch in group:
            patch.revert()
        assert not any(patch.is_applied for patch in group)
    finally:
        for patch in group:
            patch.apply() if patch in were_applied else patch.revert()


def test_plugin_is_no_platform() -> None:
    """vLLM's question which platform this is is answered with none, however often it is put."""
    entry_point: Callable[[], object] = plugin.before_engine_args
    assert entry_point() is None
    assert type(sys.modules["vllm.engine"]) is ModuleType
