# SPDX-License-Identifier: Apache-2.0
"""Describe this folder, for its README, and the installed vLLM, for maintainers.

::

    python -m vllm_h2o.patches                             the README, printed
    python -m vllm_h2o.patches --write                     the README, written
    VLLM_PLUGINS= python -m vllm_h2o.patches --digests     each symbol with its installed digest
    python -m vllm_h2o.patches --follow 0.34.0             what that vLLM changes of them

``VLLM_PLUGINS=`` keeps the plugin itself, which refuses a vLLM that it does not know, out of it.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from vllm_h2o import patches
from vllm_h2o.errors import KVPolicyError
from vllm_h2o.patches import _follow
from vllm_h2o.patches._digest import ABSENT
from vllm_h2o.patches._patch import SUPPORTED_VLLM, WANTED, Symbol
from vllm_h2o.patches._sources import fetch

README = Path(__file__).with_name("README.md")
LABELS = ("Symbol", "Why no seam", "What changes", "Upstream", "Drop when")
"""Lines of the docstring of every patch, in this order."""
_APPLIED = {
    "always": patches.ALWAYS,
    "with a policy": patches.WITH_POLICY,
    "with a policy or contextual sparsity, in its front end": patches.METRICS,
    "with a policy, in its front end": patches.FRONT_END,
    "with `continuation` or a KV connector": patches.ENGINE,
}
_COLUMNS = ("What changes", "Why no seam", "Upstream", "Drop when")


class Liberty(NamedTuple):
    """A change to vLLM without a patch, in one place that a comment marks.

    Args:
        name: what stands in that line of code.
        file: below the package.
        what: is done.
        why: there is no other way.
        drop_when: it is no longer needed.

    """

    name: str
    file: str
    what: str
    why: str
    drop_when: str


LIBERTIES = (
    Liberty(
        "package.__class__",
        "plugin.py",
        "the module `vllm.engine` has another class until its submodule `arg_utils` is there, then "
        "its own again",
        "`LLM(kv_policy=...)` makes its engine arguments before vLLM loads general plugins",
        "vLLM loads plugins before it defines its engine arguments",
    ),
    Liberty(
        "need_mamba_block_aligned_split",
        "scheduler/scheduler.py",
        "the switch is on with prefix caching, a second pass or drafts, and once a request has "
        "been preempted; the method that it leads to ends a prompt's chunk where scores or memory "
        "want it to end, and drafts where a sequence has no room for more",
        "the only place in `schedule()` where the size of a chunk can be changed",
        "vLLM lets a scheduler choose the size of chunks",
    ),
    Liberty(
        "self.connector",
        "scheduler/raw_prompts.py",
        "the scheduler's ExampleConnector is replaced by one that stores and loads whole pages of "
        "prompts alone",
        "vLLM makes connectors by name, before there is a policy's block manager",
        "a scheduler chooses how many tokens of a prompt a connector stores and loads",
    ),
    Liberty(
        "defer_block_free",
        "scheduler/raw_prompts.py",
        "off with ExampleConnector: blocks of a request that ends are free at once",
        "vLLM takes it that loads may precede the steps before them; this one's are part of a step",
        "a connector says that its loads are part of a step",
    ),
    Liberty(
        "requires_kv_delivery",
        "scheduler/raw_prompts.py",
        "off with ExampleConnector: a preempted request keeps the token that is being sampled",
        "vLLM takes it that a connector which stores is waited for",
        "a connector that is made for a scheduler says so itself",
    ),
    Liberty(
        "request.prompt_token_ids",
        "scheduler/handoff.py",
        "tokens that another server has sampled become the end of a request's prompt, before the "
        "request is queued",
        "a new request has no tokens of an answer, and a worker is sent none",
        "a request may arrive with the beginning of its answer",
    ),
    Liberty(
        "disable_chunked_mm_input",
        "scheduler/chunks.py",
        "off for one call, where a chunk that begins at an image must end within it",
        "with it on, that chunk is put off for ever",
        "vLLM lets a scheduler choose the size of chunks",
    ),
    Liberty(
        "_record_new_block_ids",
        "scheduler/scheduler.py",
        "next to sliding windows, pages that these take are reported, and cleared before a step",
        "vLLM's own condition looks at dtypes alone: it takes scores for keys and values",
        "`KVCacheConfig.needs_kv_cache_zeroing` asks the specs",
    ),
    Liberty(
        "other.cache_blocks",
        "scheduler/scheduler.py",
        "next to sliding windows, their managers publish pages no further than the policy's",
        "past what was evicted their layers, too, compute what nobody else would",
        "a manager of vLLM's asks how far a request's pages may be published",
    ),
    Liberty(
        "hash_block_size",
        "scheduler/turns.py",
        "with `continuation` and no prefix caching, the pool hashes blocks of the policy's size",
        "beside states vLLM would hash blocks of the longest sequence, so no entry had a hash",
        "vLLM hashes no blocks that nobody looks up",
    ),
    Liberty(
        "_init_kv_zero_meta",
        "worker/worker.py",
        "next to sliding windows, what clears pages on a GPU is made",
        "the same condition",
        "`KVCacheConfig.needs_kv_cache_zeroing` asks the specs",
    ),
    Liberty(
        "own.sub_",
        "worker/renumbering.py",
        "where positions roll, each request's offset is taken off the model runner's positions "
        "when attention metadata is built, and added again after the forward pass",
        "what a token's position is to the model is its index to everything else",
        "vLLM lets a worker set positions",
    ),
    Liberty(
        "batch.generators",
        "worker/seeds.py",
        "on a CPU, while a step is sampled, the generators of requests whose token is thrown away "
        "are out of the batch",
        "V1 moves them back afterwards, and a CPU's cannot be moved back: the engine would end",
        "vLLM samples no token within a prompt, or takes it back on a CPU",
    ),
    Liberty(
        "residency_plan",
        "scheduler/scheduler.py",
        "an attribute is added to vLLM's `SchedulerOutput`",
        "the plan must reach every worker with its schedule; the class has no field for more",
        "`SchedulerOutput` carries data of plugins",
    ),
    Liberty(
        "running_lora_adapters",
        "scheduler/scheduler.py",
        "the policy's statistics ride in this field of `SchedulerStats`, and are taken out in the "
        "front end before anybody reads it",
        "a mapping of integers that is sent anyway and empty without readers; others have a format",
        "`SchedulerStats` carries data of plugins",
    ),
)
"""Each has a comment at its place in the code, which a test finds."""

_TEXT = f"""# Patches of vLLM

<!-- Written from the docstrings by `python -m vllm_h2o.patches --write`; a test compares. -->

One file wraps one function of vLLM, where vLLM has no registry or option for what is needed, and
calls the original exactly once. Before the first is applied, all are verified: it is {WANTED},
the function's syntax tree has the digest that is known of that version, nobody else has wrapped it.
Otherwise the plugin refuses to start and says which function differs, and where.

{{patches}}

*Always* means wherever the plugin is loaded: without a policy these pass everything through.
*With a policy* means from the start of a worker that runs one, in its process; *in its front end*,
where an engine with a policy is configured; *with `continuation` or a KV connector*, from the start
of a scheduler.

## Liberties

Not patches either: things done to vLLM's objects for want of a seam. A comment marks each in the
code.

{{liberties}}

## Relied upon

Not patched, but overridden or counted on, and verified in the same way when a policy is asked for:

{{relied_upon}}

## A new vLLM

1. `python -m vllm_h2o.patches --follow VERSION` fetches that version's sources, once, and prints
   what differs from the installed ones: both digests and the difference, function by function. Run
   by `.venv-033/bin/python`, it starts from 0.33.
2. Read each change, then the wrapper or override that stands on it, and only then enter the digest,
   next to those before it: `{{{{"0.32": ..., "0.33": ...}}}}`, `ABSENT` where there is no
   such function any more. What is installed decides which one is compared.
3. Name the version in `SUPPORTED_VLLM`, in pyproject.toml, in docs/compatibility.md.
4. `make test-033` runs the tests on a later version's Python over the installed extension
   ([tools/overlay.py](../tools/overlay.py)); on a machine with that vLLM, `make gpu-check`.

`VLLM_PLUGINS= python -m vllm_h2o.patches --digests` prints the digests of what is installed.
"""


def modules() -> list[ModuleType]:
    """The modules that hold a patch, in the order in which the patches are applied."""
    names = [info.name for info in pkgutil.iter_modules(patches.__path__)]
    found = [importlib.import_module(f"{patches.__name__}.{n}") for n in names if n[0] != "_"]
    order = [*patches.ALWAYS, *patches.WITH_POLICY, *patches.FRONT_END, *patches.ENGINE]
    return sorted(found, key=lambda module: order.index(module.PATCH))


def labelled(docstring: str) -> dict[str, str]:
    """The labelled lines of a patch's docstring, continuation lines joined."""
    pattern = rf"^({'|'.join(LABELS)}): (.+(?:\n +.+)*)"
    lines = re.findall(pattern, docstring, flags=re.MULTILINE)
    return {label: " ".join(text.split()) for label, text in lines}


def readme() -> str:
    """The README, from the docstrings."""
    heads = ("file", "applied", *(label.lower() for label in _COLUMNS))
    rows = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for module in modules():
        name = module.__name__.rpartition(".")[2]
        said = labelled(module.__doc__ or "")
        when = next(said for said, group in _APPLIED.items() if module.PATCH in group)
        cells = [f"[`{name}`]({name}.py)", when, *(said[label].rstrip(".") for label in _COLUMNS)]
        rows.append(f"| {' | '.join(cells)} |".replace("``", "`"))
    relied_upon = []
    for symbol in patches.RELIED_UPON:
        absent = [minor for minor in SUPPORTED_VLLM if symbol.known_in(minor) == ABSENT]
        relied_upon.append(f"- `{symbol.path}`" + "".join(f" (not in {m})" for m in absent))
    liberties = ["| place | what | why | drop when |", "| --- | --- | --- | --- |"]
    for name, file, *rest in LIBERTIES:
        liberties.append(f"| {' | '.join([f'`{name}` in [{file}](../vllm_h2o/{file})', *rest])} |")
    return _TEXT.format(
        patches="\n".join(rows),
        liberties="\n".join(liberties),
        relied_upon="\n".join(relied_upon),
    )


def symbols() -> list[Symbol]:
    """All that is patched, then all that is relied upon."""
    return [*(module.PATCH.symbol for module in modules()), *patches.RELIED_UPON]


def digests() -> str:
    """One line a symbol: the digest of what is installed, whether it is known, and the path."""
    lines = []
    for symbol in symbols():
        found = symbol.found_digest()
        digest = symbol.digest or symbol.known_in(SUPPORTED_VLLM[-1])  # of a version not known yet
        known = "as known" if found == digest else "CHANGED "
        lines.append(f"{found:12} {known} {symbol.path}")
    return "\n".join(lines) + "\n"


def follow(version: str) -> str:
    """Show the changes to them in a version of vLLM.

    Raises:
        UnsupportedError: when its sources cannot be had.

    """
    sources = _follow.archived(fetch(version))
    return _follow.report(symbols(), _follow.installed, sources, version)


def main() -> int:
    """Do what the command line asks; 2 and a message in four parts for what cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m vllm_h2o.patches", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {README.name}")
    parser.add_argument("--digests", action="store_true", help="print what is installed")
    parser.add_argument("--follow", metavar="VERSION", help="print what another vLLM has changed")
    arguments = parser.parse_args()
    try:
        if arguments.write:
            README.write_text(readme(), encoding="utf-8")
        elif arguments.follow:
            print(follow(arguments.follow), end="")
        else:
            print(digests() if arguments.digests else readme(), end="")
    except KVPolicyError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
