# SPDX-License-Identifier: Apache-2.0
"""Every patch and every symbol that is relied upon, on the installed vLLM."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.house_rules import package
from vllm_h2o import patches
from vllm_h2o.errors import PatchError
from vllm_h2o.patches import __main__ as described
from vllm_h2o.patches import _patch
from vllm_h2o.patches._digest import ABSENT
from vllm_h2o.patches._patch import SUPPORTED_VLLM, Patch, Symbol

MODULES = described.modules()
NAMES = [module.__name__.rpartition(".")[2] for module in MODULES]
each_module = pytest.mark.parametrize("module", MODULES, ids=NAMES)
each_relied_upon = pytest.mark.parametrize(
    "symbol", patches.RELIED_UPON, ids=[symbol.path for symbol in patches.RELIED_UPON]
)


@pytest.fixture
def patch(module: ModuleType) -> Iterator[Patch]:
    """The module's patch, reverted; whether it was applied is restored after the test."""
    patch: Patch = module.PATCH
    was_applied = patch.is_applied
    patch.revert()
    yield patch
    patch.apply() if was_applied else patch.revert()


def raw(symbol: Symbol) -> Any:
    """What stands at the symbol now."""
    owner: Any = __import__(symbol.module, fromlist=["x"])
    for name in symbol.names[:-1]:
        owner = getattr(owner, name)
    return inspect.getattr_static(owner, symbol.names[-1])


@each_module
def test_applies_and_reverts(module: ModuleType, patch: Patch) -> None:
    """The installed function is the known one, is wrapped once, and comes back as it was."""
    patch.verify()
    stock = raw(patch.symbol)
    patch.apply()
    wrapped = raw(patch.symbol)
    assert wrapped is not stock and type(wrapped) is type(stock)
    patch.verify()
    patch.apply()
    assert raw(patch.symbol) is wrapped
    patch.revert()
    assert raw(patch.symbol) is stock


@each_module
def test_refuses_another_body(module: ModuleType) -> None:
    """The digest is compared, not merely kept."""
    symbol: Symbol = module.PATCH.symbol
    with pytest.raises(PatchError, match=f"Its digest is {symbol.digest}, not 0+, at /.*:[0-9]+"):
        Patch(Symbol(symbol.path, "0" * 12), module.PATCH.wrap).verify()


class Counter:
    """Stands for the original: remembers how it was called."""

    def __init__(self, result: Callable[..., Any]) -> None:
        self.result = result
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.result(*args, **kwargs)


def engine_args(**options: Any) -> SimpleNamespace:
    """The part of EngineArgs that the patches touch."""
    return SimpleNamespace(additional_config={}, **options)


CUSTOM, OTHER = AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN
CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]]] = {
    # name -> (arguments, keywords, the keywords that the original gets)
    "engine_args__init": [
        ((engine_args(), "m"), {"seed": 1}, {"seed": 1}),
        ((engine_args(), "m"), {"seed": 1, "kv_policy": "h2o"}, {"seed": 1}),
        ((engine_args(),), {"kv_policy": "h2o", "kv_policy_config": {"budget": 9}}, {}),
    ],
    "engine_args__add_cli_args": [((ArgumentParser(),), {}, {})],
    "engine_args__from_cli_args": [
        ((SimpleNamespace, SimpleNamespace(model="m")), {}, {}),
        ((SimpleNamespace, SimpleNamespace(kv_policy="h2o", kv_policy_config=None)), {}, {}),
    ],
    "engine_args__create_engine_config": [
        ((engine_args(),), {"headless": True}, {"headless": True}),
        ((engine_args(), "context"), {}, {}),
    ],
    "cpu_platform__get_attn_backend_cls": [
        ((object, OTHER, "selector"), {"num_heads": 4}, {"num_heads": 4}),
        ((object, CUSTOM, "selector"), {}, {}),
        ((object, None, "selector"), {}, {}),
    ],
}
CALLS["stat_logger_manager__init"] = [
    ((SimpleNamespace(), engine_args(), [0, 1]), {"client_count": 2}, {"client_count": 2}),
]
CALLS["mpclient__apply_ready_response"] = [
    ((SimpleNamespace(vllm_config=engine_args()), b"payload"), {}, {}),
]
CALLS["inproc_client__init"] = [
    ((SimpleNamespace(), engine_args(), object), {"log_stats": True}, {"log_stats": True}),
]
CALLS["engine_core__collective_rpc"] = [
    ((SimpleNamespace(), "reload_weights", None, ("path",)), {}, {}),
    (
        (SimpleNamespace(scheduler=None), "sleep"),
        {"kwargs": {"level": 1}},
        {"kwargs": {"level": 1}},
    ),
]
CALLS["engine_core__add_lora"] = [((SimpleNamespace(), "adapter"), {}, {})]


class InputProcessor:
    """What the patch reads of vLLM's."""

    vllm_config, mm_encoder_cache_size = None, 0
    renderer = SimpleNamespace(mm_processor_cache=None)


CALLS["input_processor__process_inputs"] = [
    ((InputProcessor(), "id", "prompt"), {"priority": 1}, {"priority": 1}),
]
CALLS["async_engine_args__init"] = CALLS["engine_args__init"]
RESULTS: dict[str, Callable[..., Any]] = {
    "engine_args__init": lambda *_, **__: None,
    "async_engine_args__init": lambda *_, **__: None,
    "engine_args__add_cli_args": lambda parser: parser,
    "engine_args__from_cli_args": lambda cls, args: engine_args(),
    "input_processor__process_inputs": lambda *_, **__: SimpleNamespace(
        sampling_params=None, mm_features=None
    ),
}


@each_module
def test_calls_the_original_exactly_once(module: ModuleType) -> None:
    """With its own arguments and without ours, whether a policy is asked for or not."""
    name = module.__name__.rpartition(".")[2]
    for args, keywords, passed_on in CALLS[name]:
        original = Counter(RESULTS.get(name, lambda *_, **__: "stock"))
        module.PATCH.wrap(original)(*args, **keywords)
        assert original.calls == [(args, passed_on)]


@each_module
def test_has_one_call_and_no_logic(module: ModuleType) -> None:
    """The source calls the original in one place, and neither loops, branches nor catches."""
    tree = ast.parse(inspect.getsource(module))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    shared = module.wrap.__module__ != module.__name__
    assert sum(ast.unparse(call.func) == "original" for call in calls) == (0 if shared else 1)
    forbidden = ast.For | ast.While | ast.Try | ast.If | ast.With
    assert not [node for node in ast.walk(tree) if isinstance(node, forbidden)]


def test_cpu_platform_honours_the_custom_backend_alone() -> None:
    """Any other selection, and none, gets what the platform says."""
    wrap = patches.cpu_platform__get_attn_backend_cls.wrap(lambda *_, **__: "stock")
    assert wrap(object, OTHER) == wrap(object, None) == "stock"
    assert wrap(object, CUSTOM) == CUSTOM.get_path()


@each_module
def test_patch_docstring_has_summary_and_five_lines(module: ModuleType) -> None:
    """A summary and five labelled lines in order; the first names the symbol that is patched."""
    docstring = module.__doc__ or ""
    labels = re.findall(r"^(\w[\w ]+): ", docstring, flags=re.MULTILINE)
    assert labels == list(described.LABELS)
    said = described.labelled(docstring)
    assert all(text.endswith(".") for label, text in said.items() if label != "Symbol")
    assert said["Symbol"] == module.PATCH.symbol.path


@each_module
def test_file_is_named_after_the_symbol(module: ModuleType) -> None:
    """``EngineArgs.from_cli_args`` is in ``engine_args__from_cli_args.py``."""
    owner, function = module.PATCH.symbol.names
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", owner).lower()
    assert module.__name__.rpartition(".")[2] == f"{snake}__{function.strip('_')}"


def test_every_file_is_in_use() -> None:
    """No patch lies about unused, and none is applied twice."""
    used = [*patches.ALWAYS, *patches.WITH_POLICY, *patches.FRONT_END, *patches.ENGINE]
    assert [module.PATCH for module in MODULES] == used
    assert len({patch.symbol.path for patch in used}) == len(used)


@pytest.mark.parametrize(
    "symbol", described.symbols(), ids=[symbol.path for symbol in described.symbols()]
)
def test_each_version_has_its_digest(symbol: Symbol) -> None:
    """One for all, or one for each that is supported, no two alike."""
    known = [symbol.known_in(minor) for minor in SUPPORTED_VLLM]
    assert all(re.fullmatch(rf"[0-9a-f]{{12}}|{ABSENT}", digest) for digest in known)
    if not isinstance(symbol.known, str):
        assert list(symbol.known) == list(SUPPORTED_VLLM)
        assert len(set(known)) == len(known)


@each_relied_upon
def test_relied_upon_holds(symbol: Symbol) -> None:
    """What is overridden or counted on is what is installed."""
    symbol.verify()


@each_relied_upon
def test_relied_upon_is_compared(symbol: Symbol) -> None:
    """Another body is refused, by name."""
    with pytest.raises(PatchError, match=re.escape(symbol.path)):
        Symbol(symbol.path, "0" * 12).verify()


def test_both_model_runners_are_relied_upon() -> None:
    """Where V1 and Model Runner V2 run a step and make attention metadata, both are verified."""
    paths = {symbol.path.removeprefix("vllm.v1.worker.") for symbol in patches.RELIED_UPON}
    assert paths >= {
        "gpu_worker:Worker.execute_model",
        "gpu_model_runner:GPUModelRunner._build_attention_metadata",
        "gpu.model_runner:GPUModelRunner.execute_model",
        "gpu.model_runner:GPUModelRunner.gather_batch_req_state",
        "gpu.attn_utils:build_attn_metadata",
    }


def test_readme_is_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README is what the command writes."""
    committed = described.README.read_text()
    monkeypatch.setattr(described, "README", tmp_path / "README.md")
    monkeypatch.setattr("sys.argv", ["patches", "--write"])
    described.main()
    written = described.README.read_text()
    assert committed == written, "run: python -m vllm_h2o.patches --write"
    assert all(f"[`{name}`]({name}.py)" in written for name in NAMES)
    assert all(f"`{symbol.path}`" in written for symbol in patches.RELIED_UPON)


def test_liberties_are_listed() -> None:
    """Each comment that begins so stands at the place of one liberty, and the README has all."""
    found = []
    for module in package():
        file, lines = module.path.removeprefix("vllm_h2o/"), module.text.splitlines()
        for number, line in enumerate(lines):
            if "A liberty:" in line:
                place = "\n".join(lines[number : number + 2])
                here = [x for x in described.LIBERTIES if x.file == file and x.name in place]
                assert len(here) == 1, f"{file}:{number + 1} is not listed"
                found += here
    assert sorted(found) == sorted(described.LIBERTIES)
    written = described.README.read_text()
    assert all(
        f"`{liberty.name}` in [{liberty.file}](../vllm_h2o/{liberty.file})" in written
        for liberty in found
    )


def test_digests_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A maintainer sees every symbol, and which of them changed or is gone."""
    relied_upon = (Symbol("vllm.engine.arg_utils:EngineArgs.gone", "0" * 12), *patches.RELIED_UPON)
    monkeypatch.setattr(patches, "RELIED_UPON", relied_upon)
    monkeypatch.setattr("sys.argv", ["patches", "--digests"])
    described.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(MODULES) + len(relied_upon)
    gone = [line for line in lines if "as known" not in line]
    assert [line.split() for line in gone] == [["absent", "CHANGED", relied_upon[0].path]]


def test_digests_of_a_version_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared with those of the newest that is."""
    monkeypatch.setattr(_patch, "version", lambda _: "0.99.0")
    changed = [line.split()[2] for line in described.digests().splitlines() if "CHANGED" in line]
    newest = [s for s in described.symbols() if s.found_digest() != s.known_in(SUPPORTED_VLLM[-1])]
    assert changed == [symbol.path for symbol in newest]


@pytest.mark.parametrize("name", ["EngineArgs", "AsyncEngineArgs"])
def test_engine_args_keep_their_signature(name: str) -> None:
    """Tools that filter arguments by signature see vLLM's own, and those of the plugin."""
    engine_args = getattr(importlib.import_module("vllm.engine.arg_utils"), name)
    names = list(inspect.signature(engine_args).parameters)
    assert names == [f.name for f in dataclasses.fields(engine_args)] + [
        "kv_policy",
        "kv_policy_config",
        "contextual_sparsity",
        "contextual_sparsity_config",
    ]
