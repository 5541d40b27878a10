# SPDX-License-Identifier: Apache-2.0
"""The commands: help, tables, pictures, and refusals without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.chat_templates import TRIMS
from tests.house_rules import ROOT
from vllm_h2o.arguments import memory_bytes
from vllm_h2o.cli import main
from vllm_h2o.template import KINDS

MEMORY = ("--kv-memory", "64MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a config alone."""
    folder = tmp_path_factory.mktemp("models") / "small-llama"
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return str(folder)


def table(printed: str) -> dict[str, list[str]]:
    """Return the table's rows by their labels."""
    head, _, rest = printed.partition("and a prompt\n")
    assert head.splitlines()[-1].split()[:3] == ["tokens", "pages", "memory"]
    lines = rest.partition("\n\n")[0].splitlines()
    cells = [line.replace("  ", "\t").split("\t") for line in lines]
    return {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in cells}


def test_plan_shows_table_and_bars(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """64 MiB of tokens with 256 bytes of K and V, and 32 of scores and positions."""
    assert main(["plan", model, *MEMORY, "--budget", "512", "0.5", "--prompt-len", "1024"]) == 0
    printed = capsys.readouterr().out
    assert "small-llama: 2 layers, 2 KV heads of 16, bfloat16; 256 B of K and V a token" in printed
    assert "memory for the cache: 64.0 MiB\n" in printed
    assert table(printed) == {
        "stock vLLM": ["2048", "128", "512.0 KiB", "127", "1.00", "127"],
        "h2o 512 tokens": ["512", "32", "144.0 KiB", "455", "3.58", "454"],
        "h2o 50 %": ["1024", "64", "288.0 KiB", "227", "1.79", "227"],
    }
    bars = [line.count("█") for line in printed.splitlines() if "█" in line]
    assert bars[1] > bars[2] > bars[0] > 0
    assert "stock vLLM will log a maximum concurrency of 128.00x" in printed


def test_plan_of_a_device_subtracts_parameters(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM uses a fraction of the memory."""
    assert main(["plan", model, "--gpu-memory", "1GiB", "--gpu-memory-utilization", "0.5"]) == 0
    printed = capsys.readouterr().out
    config = transformers.AutoConfig.from_pretrained(model)
    parameters = 2 * sum(
        p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters()
    )
    assert f"(0.5 of 1.0 GiB, less {parameters / 1024:.1f} KiB of parameters" in printed
    assert list(table(printed)) == ["stock vLLM", *(f"h2o {n} %" for n in (5, 10, 20, 50))]


def test_plan_says_what_does_not_start(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM needs room for one longest sequence; eviction=chunk needs less."""
    assert main(["plan", model, "--kv-memory", "256KiB", "--kv-policy", "full"]) == 1
    printed = capsys.readouterr().out
    assert table(printed)["stock vLLM"][3:] == ["0", "-", "0"]
    assert "full does not start: vLLM needs 128 pages for one longest sequence" in printed
    chunked = ["--kv-policy-config", '{"eviction": "chunk"}', "--max-num-batched-tokens", "64"]
    assert main(["plan", model, "--kv-memory", "256KiB", "--budget", "64", *chunked]) == 0


def test_plan_with_a_budget_in_the_options_lists_it(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy that was asked for, not those that are compared by default."""
    asked = ["--kv-policy", "snapkv", "--kv-policy-config", '{"budget": 256}']
    assert main(["plan", model, *MEMORY, *asked]) == 0
    assert list(table(capsys.readouterr().out)) == ["stock vLLM", "snapkv 256 tokens"]


def test_plan_takes_full_budgets(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By word and by fraction."""
    assert main(["plan", model, *MEMORY, "--budget", "full", "1.0"]) == 0
    assert list(table(capsys.readouterr().out)) == ["stock vLLM", "h2o full", "h2o 100 %"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plan_writes_a_plot(model: str, ending: str, tmp_path: Path) -> None:
    """In either format."""
    path = tmp_path / f"plan.{ending}"
    assert main(["plan", model, *MEMORY, "--plot", str(path)]) == 0
    picture = path.read_bytes()
    assert picture.startswith({"png": b"\x89PNG", "svg": b"<?xml"}[ending])
    assert len(picture) > 5000


REFUSED: list[tuple[list[str], str]] = [
    (["--budget", "1"], "budget=1 is not supported"),
    (["--kv-policy", "h3o"], "Did you mean 'h2o'?"),
    (["--kv-policy-config", "{"], "not JSON"),
    (["--plot", "plan.txt"], "Use a name that ends in .png or .svg"),
    (["--plot", "nowhere/plan.svg"], "there is no folder nowhere"),
    (["--plot", "."], "it is a folder."),
    (["--budget", "512", "--kv-policy-config", '{"max_budget": 128}'], "max_budget=128 is 128"),
    (["--kv-policy-config", '{"min_budget": 4096}'], "Every sequence would be kept whole"),
]


@pytest.mark.parametrize(("options", "expected"), REFUSED)
def test_plan_refusal_has_status_2(
    model: str,
    options: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2, and the message on the error stream."""
    monkeypatch.chdir(tmp_path)
    assert main(["plan", model, *MEMORY, *options]) == 2
    printed, error = capsys.readouterr()
    assert not printed or "plan.txt" in options
    assert error.startswith("kv-policy: ")
    assert " is not supported: " in error and expected in error


def test_plan_refuses_a_model_larger_than_the_memory(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parameters fill it."""
    assert main(["plan", model, "--gpu-memory", "64KiB"]) == 2
    assert "Nothing is left for the cache" in capsys.readouterr().err


def test_refused_model_stops_plan_and_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before an engine starts."""
    config = transformers.MistralConfig(architectures=["MistralForCausalLM"], sliding_window=16)
    config.save_pretrained(tmp_path)
    trace = ["trace", str(tmp_path), "--prompt", "a", "--out", str(tmp_path / "t.html")]
    for command in (["plan", str(tmp_path), *MEMORY], trace):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert (
            "a kv-policy for MistralForCausalLM is not supported: the model has or is a sliding"
            in error
        )
    assert not (tmp_path / "t.html").exists()


def test_missing_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's, and that of the output."""
    missing = str(tmp_path / "missing")
    assert main(["plan", missing, *MEMORY]) == 2
    assert f"the model {missing!r} is not supported: no folder" in capsys.readouterr().err
    assert main(["trace", missing, "--prompt", "a", "--out", f"{missing}/t.html"]) == 2
    assert f"--out {missing}/t.html is not supported: there is no folder" in capsys.readouterr().err


def test_missing_prompt_file_is_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2."""
    missing = str(tmp_path / "none.txt")
    assert main(["trace", model, "--prompt-file", missing, "--out", "t.html"]) == 2
    assert "none.txt" in capsys.readouterr().err


MISUSED: list[tuple[list[str], str]] = [
    (["--kv-memory", "much"], "'much' is not an amount of memory; give e.g. 24GiB"),
    (["--kv-memory", "0"], "'0' is not an amount of memory"),
    (["--kv-memory", "24"], "24 is 24 bytes; give a unit: 24GiB"),
    (["--block-size", "0"], "'0' is not a whole number above 0"),
    (["--kv-memory", "1GiB", "--gpu-memory", "1GiB"], "not allowed with"),
    (["--kv-dtype", "int4"], "invalid choice: 'int4'"),
]


@pytest.mark.parametrize(("options", "expected"), MISUSED)
def test_argparse_refusal_has_status_2(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 2 as well."""
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "model", *options])
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1KiB", 1024),
        ("2 MiB", 2 << 20),
        ("1.5G", 1_500_000_000),
        ("24GB", 24 * 10**9),
        ("7777777", 7777777),
    ],
)
def test_memory_reads_units(text: str, expected: int) -> None:
    """Of 1024 and of 1000; a large number is bytes."""
    assert memory_bytes(text) == expected


def test_main_without_a_command_prints_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain words, how it is switched on, and each command."""
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "more\nsequences fit into the same memory" in said
    assert "vllm serve MODEL --kv-policy h2o2" in said
    assert all(f"    {command}" in said for command in ("plan", "trace", "check-template"))


@pytest.mark.parametrize("command", ["plan", "trace"])
def test_help_explains_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of both commands."""
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--budget" in printed
    assert "--kv-policy-config" in printed


@pytest.mark.engine
def test_vllm_serve_with_a_refusal_ends_without_a_traceback(model: str) -> None:
    """The refusal is the last line."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--kv-policy", "h3o"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kv-policy: ") and "Did you mean 'h2o'?" in last


@pytest.mark.parametrize(("program", "plain"), [("vllm", True), ("script.py", False)])
def test_refusal_has_a_traceback_outside_of_the_vllm_command(program: str, plain: bool) -> None:
    """A script's own line is in the traceback, and other errors keep theirs everywhere."""
    for error in ("ConfigError('a', 'b', 'c', 'd')", "ZeroDivisionError()"):
        code = (
            f"import sys; sys.argv = [{program!r}]; from vllm_h2o.errors import *; end_plainly(); "
            f"raise {error}"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert ("Traceback" not in done.stderr) == (plain and "Config" in error)


def test_entry_point_names_main() -> None:
    """The console script calls it."""
    tomllib: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["vllm-h2o"].partition(":")
    assert vars(import_module(module))[name] is main


@pytest.mark.slow
def test_plan_imports_no_vllm(model: str) -> None:
    """Importing it takes seconds."""
    code = (
        "import sys; from vllm_h2o.cli import main; "
        f"assert main(['plan', {model!r}, '--gpu-memory', '1GiB']) == 0; "
        "print('vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_check_template_finds_changed_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model's own template, one that trims answers, and none."""
    from benchmarks.smollm2 import model_dir

    model = str(model_dir("float32", progress=False))
    assert main(["check-template", model]) == 0
    printed = capsys.readouterr().out
    assert all(f"{kind.what}: " in printed for kind in KINDS)
    assert "a tool call of compact JSON: starts anew, at token 24 of 60\n" in printed
    own = tmp_path / "template"
    own.write_text(TRIMS)
    assert main(["check-template", model, "--chat-template", str(own)]) == 0
    printed = capsys.readouterr().out
    assert "a plain answer: continues\n" in printed
    assert "an answer that ends with blanks: starts anew, at token 27 of 28\n" in printed
    assert "  generated ' \\n\\n'\n  template  '<|im_end|>" in printed
    own.write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    assert main(["check-template", model, "--chat-template", str(own)]) == 1
    own.write_text("{{ raise_exception('no chats') }}")
    assert main(["check-template", model, "--chat-template", str(own)]) == 1
    assert "a plain answer: refused by the template: no chats" in capsys.readouterr().out
    assert main(["check-template", str(tmp_path)]) == 2
    assert "Name a chat model, or give --chat-template" in capsys.readouterr().err
