# SPDX-License-Identifier: Apache-2.0
"""``vllm-h2o``: plan capacity, trace evictions, check chat templates, count unused neurons."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_h2o.arguments import check_folder, memory_bytes, positive, read_text
from vllm_h2o.errors import ConfigError, KVPolicyError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.parsing import number
from vllm_h2o.options.traits import FLOAT8
from vllm_h2o.policy import policies
from vllm_h2o.sparsity.config import RECALL

_DTYPES = ("float32", "bfloat16", "float16")
_BUDGETS = ("0.05", "0.1", "0.2", "0.5")
_PURPOSE = """\
vllm-h2o lets vLLM keep only the tokens of each sequence that receive attention, so that more
sequences fit into the same memory. Switch it on where you start vLLM:

    vllm serve MODEL --kv-policy h2o2

The commands below help to choose the options. None of them starts a server.
"""
_PLAN = """\
Count the sequences that fit into a memory, with stock vLLM and with each budget. A budget is the
number of tokens that a sequence keeps. The plan reads the model's config alone: it loads no weights
and starts no engine.

    vllm-h2o plan MODEL --gpu-memory 24GiB
    vllm-h2o plan MODEL --gpu-memory 24GiB --kv-policy h2o2 --budget 512 0.1 --max-model-len 8192

--kv-memory is the memory for the cache, as vLLM's --kv-cache-memory-bytes; the engine will log the
same numbers. --gpu-memory is a device's memory: the cache gets the fraction that vLLM may use, less
the model's parameters. It is an upper bound, because the config does not tell what activations and
CUDA graphs take.
"""
_TRACE = """\
Run one prompt with a policy and write one HTML page, which needs no network. The page shows the
scores, and shades each token by how many layers and KV heads keep it, step by step. Tokens that fit
into the budget have no scores. The model runs in an engine of its own, which logs like vLLM.

    vllm-h2o trace MODEL --prompt-file story.txt --budget 128 --out trace.html
"""
_TEMPLATE = """\
Check whether a model's chat template reproduces the tokens of the last turn in the next turn's
prompt. Only then does --kv-policy-config.continuation true continue from the last turn's cache. The
check reads the tokenizer alone. It tries plain and edited answers, thoughts and tool calls, and
says at which token (counted from 0) each kind of answer breaks.

With tool_choice required or a tool's name, some of vLLM's --tool-call-parser let the model generate
bare JSON, others its own format. With the latter see "a tool call".
"""
_SPARSITY = """\
Run an OPT with ReLU on a text: the neurons it uses, what --contextual-sparsity saves and costs.

    vllm-h2o sparsity MODEL --text story.txt
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 1 for a plan in which no engine starts, and for a template with which
        plain answers do not continue; 2, with a message, for an error, or without a command.

    """
    parser = argparse.ArgumentParser(
        prog="vllm-h2o",
        description=_PURPOSE,
        epilog="`vllm-h2o COMMAND --help` explains a command and its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _add_plan(commands)
    _add_trace(commands)
    _add_check_template(commands)
    _add_sparsity(commands)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return int(arguments.run(arguments))
    except KVPolicyError as error:
        print(error, file=sys.stderr)
        return 2


def _command(commands: Any, name: str, help_: str, description: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_plan(commands: Any) -> None:
    parser = _command(commands, "plan", "count the sequences that fit into a memory", _PLAN)
    parser.add_argument("model", metavar="MODEL", help="a folder with a config.json, or a name")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument(
        "--gpu-memory",
        type=memory_bytes,
        metavar="24GiB",
        help="memory of a device; 24GiB by default",
    )
    memory.add_argument(
        "--kv-memory", type=memory_bytes, metavar="4GiB", help="memory for the cache"
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="FRACTION",
        help="fraction of --gpu-memory that vLLM may use; 0.9 by default",
    )
    parser.add_argument(
        "--budget",
        nargs="+",
        metavar="B",
        help="budgets to compare: tokens (512) or fractions (0.2); --kv-policy-config's, or "
        "0.05 0.1 0.2 0.5 by default",
    )
    parser.add_argument(
        "--prompt-len",
        type=positive,
        metavar="N",
        help="tokens of the longest prompt; --max-model-len by default",
    )
    parser.add_argument(
        "--language-model-only",
        action="store_true",
        help="count a model that also sees images as one for text",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="tokens of a chunk, read with eviction=chunk or sliding windows; 2048 by default",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", *_DTYPES, *FLOAT8),
        default="auto",
        help="dtype of the cache; auto: the model's",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write the bars as a picture, .png or .svg"
    )
    _add_common(parser)
    parser.set_defaults(run=_plan)


def _add_trace(commands: Any) -> None:
    parser = _command(commands, "trace", "show which tokens of a text are kept, as a page", _TRACE)
    parser.add_argument("model", metavar="MODEL", help="a folder or a name, as for vLLM")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the prompt, as UTF-8")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the page to write: trace.html"
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="tokens to generate; 128 by default",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 (greedy) by default",
    )
    parser.add_argument(
        "--budget",
        metavar="B",
        help="tokens (64), or a fraction of --max-model-len (0.2, the default)",
    )
    parser.add_argument(
        "--every",
        type=positive,
        metavar="K",
        help="record the prompt's end and each K-th token; 60 times by default",
    )
    _add_common(parser)
    parser.set_defaults(run=_trace)


def _add_common(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(policies())
    parser.add_argument(
        "--kv-policy", default="h2o", metavar="NAME", help=f"one of {names}; h2o by default"
    )
    parser.add_argument(
        "--kv-policy-config",
        default="{}",
        metavar="JSON",
        help="options of the policy, e.g. '{\"num_sink_tokens\": 4}'",
    )
    parser.add_argument(
        "--max-model-len",
        type=positive,
        metavar="N",
        help="longest sequence; plan: the model's own by default; trace: just enough",
    )
    parser.add_argument(
        "--block-size", type=positive, default=16, metavar="N", help="tokens a page; 16 by default"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *_DTYPES),
        default="auto",
        help="dtype in which the model runs; auto: vLLM's choice",
    )


def _default_budgets(config: KVPolicyConfig, longest: int) -> Sequence[str | None]:
    """Return the options' own budget, or those to compare: the ones below ``max_budget``."""
    if not config.policy.evicts or config.budget != KVPolicyConfig.budget:
        return (None,)
    cap = config.max_budget
    if cap is None or isinstance(cap, str):
        return _BUDGETS
    share = cap if isinstance(cap, float) else cap / longest
    return [budget for budget in _BUDGETS if float(budget) <= share] or (str(cap),)


def _plan(arguments: argparse.Namespace) -> int:
    from vllm_h2o.planner import capacity, model, show

    check_folder("--plot", arguments.plot)
    loaded = model.load(arguments.model, arguments.dtype, arguments.language_model_only)
    loaded.refuse()
    longest = arguments.max_model_len or loaded.max_len
    if longest is None:
        raise ConfigError(
            "a plan without --max-model-len",
            "the model's config names no longest sequence",
            "the plan counts the pages of one",
            "give --max-model-len",
        )
    prompt_len = min(arguments.prompt_len or longest, longest)
    chunk = arguments.max_num_batched_tokens
    work = capacity.Workload(longest, prompt_len, arguments.block_size, chunk)
    budgets = arguments.budget or _default_budgets(_config(arguments, None), longest)
    configs = [_config(arguments, budget) for budget in budgets]
    if arguments.kv_dtype in FLOAT8:  # where an engine merges none by default
        configs = [
            replace(config, merge=0.0) if config.merge is None and config.merges else config
            for config in configs
        ]
    shape = loaded.cache(arguments.kv_dtype)
    memory, meaning = _cache_memory(arguments, loaded)
    rows = capacity.plan(shape, memory, work, configs)
    token_bytes = shape.stock_slot_bytes * loaded.num_layers // shape.num_layers
    cached = f"{show.memory_text(token_bytes)} of K and V a token"
    heads = f"{loaded.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_size}"
    if shape.windows:
        heads += f", {loaded.num_sliding} of them with a sliding window of {loaded.window} tokens"
    if shape.num_states:
        state = show.memory_text(shape.state_bytes)
        heads += f", next to {loaded.num_states} layers with a state of {state} each"
    name = Path(arguments.model).name
    print(f"{name}: {heads}, {loaded.dtype}; {cached}")
    print(f"memory for the cache: {show.memory_text(memory)}{meaning}")
    stock, *_, own = (row.pool.block_size for row in rows)
    sizes = f"{own}" if own == stock else f"{own} (stock vLLM: {stock})"
    print(f"sequences of {longest} tokens, pages of {sizes}\n")
    print(show.table(rows), show.bars(rows, shutil.get_terminal_size().columns), sep="\n\n")
    print(f"\n{show.notes(rows, work)}")
    if arguments.plot:
        title = f"{name}: sequences of {longest} tokens in "
        show.save_plot(rows, title + f"{show.memory_text(memory)} of cache", arguments.plot)
        print(f"written: {arguments.plot}")
    return 0 if any(row.starts for row in rows) else 1


def _cache_memory(arguments: argparse.Namespace, loaded: Any) -> tuple[int, str]:
    """Return the bytes for the cache, and their meaning."""
    from vllm_h2o.planner.show import memory_text

    if arguments.kv_memory:
        return arguments.kv_memory, ""
    device = arguments.gpu_memory or 24 * 1024**3
    fraction, parameters = arguments.gpu_memory_utilization, loaded.parameter_bytes()
    memory = int(device * fraction) - parameters
    if memory <= 0:
        raise ConfigError(
            f"--gpu-memory {memory_text(device)} with --gpu-memory-utilization {fraction:g}",
            f"the model's parameters take {memory_text(parameters)}",
            "nothing is left for the cache",
            "give more memory, or a smaller --dtype",
        )
    return memory, (
        f" ({fraction:g} of {memory_text(device)}, less {memory_text(parameters)} of parameters; "
        "activations not counted)"
    )


def _trace(arguments: argparse.Namespace) -> int:
    from vllm_h2o.trace import record

    check_folder("--out", arguments.out)
    text = arguments.prompt
    if text is None:
        text = read_text(arguments.prompt_file, "--prompt-file")
    trace = record.run(
        arguments.model,
        text,
        _config(arguments, arguments.budget),
        max_tokens=arguments.max_tokens,
        every=arguments.every,
        temperature=arguments.temperature,
        max_model_len=arguments.max_model_len,
        block_size=arguments.block_size,
        dtype=arguments.dtype,
    )
    from vllm_h2o.trace.page import render

    page = render(trace)
    arguments.out.write_text(page, encoding="utf-8")
    print(
        f"written: {arguments.out}, {len(page) / 2**20:.1f} MiB: {len(trace.frames)} steps of "
        f"{len(trace.layers)} layers x {trace.num_kv_heads} KV heads; open it in a browser"
    )
    return 0


def _add_check_template(commands: Any) -> None:
    parser = _command(
        commands, "check-template", "check whether the next turn continues", _TEMPLATE
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a tokenizer, or a name")
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="chat template in place of the model's"
    )
    parser.set_defaults(run=_check_template)


def _check_template(arguments: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    from vllm_h2o.template import findings

    path = arguments.chat_template
    template = None if path is None else read_text(path, "--chat-template")
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        found = findings(tokenizer, template)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the chat template of {arguments.model}",
            str(error),
            "it builds prompts from messages",
            "name a chat model, or give --chat-template",
        ) from error
    for each in found:
        print("\n".join(each.lines()))
    return int(not found[0].continues)


def _add_sparsity(commands: Any) -> None:
    parser = _command(commands, "sparsity", "count the neurons that a text uses", _SPARSITY)
    parser.add_argument("model", metavar="MODEL", help="a folder or a name of an OPT")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="text, as UTF-8")
    parser.add_argument("--recall", type=float, default=RECALL, help=f"{RECALL} by default")
    parser.set_defaults(run=_sparsity)


def _sparsity(arguments: argparse.Namespace) -> int:
    from vllm_h2o.sparsity import report

    return report.run(arguments.model, read_text(arguments.text, "--text"), arguments.recall)


def _config(arguments: argparse.Namespace, budget: str | None) -> KVPolicyConfig:
    """Return the policy of the options, with this budget."""
    options = KVPolicyConfig.from_options(arguments.kv_policy, arguments.kv_policy_config)
    own: dict[str, Any] = {} if budget is None else {"budget": number(budget)}
    return replace(options, **own)


if __name__ == "__main__":
    sys.exit(main())
