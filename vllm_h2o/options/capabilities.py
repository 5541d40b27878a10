# SPDX-License-Identifier: Apache-2.0
"""Parts of a configuration and of an engine: what each needs, and what each breaks.

Two parts conflict when one needs what the other breaks. A new feature is one row of
:data:`OPTION_PARTS` or :data:`ENGINE_PARTS`; refusals and their messages follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from vllm_h2o.options.options import Options
from vllm_h2o.options.remedies import (
    SPECULATIVE,
    Given,
    Remedy,
    advice,
    another_dtype,
    leave_out,
    other_model,
)
from vllm_h2o.options.traits import (
    float8,
    images,
    skips_rotation,
    slides,
    spans_nodes,
    stages,
)
from vllm_h2o.policy import Split


class Property(Enum):
    """A property that parts need or break, as in "X needs every query of the prompt"."""

    EVERY_QUERY = "every query of the prompt"
    PRIVATE_PAGES = "prompt pages that no other request reads"
    SHORT_PROMPT = "a prompt that is evicted from after each chunk"
    PLACE = "survivors that stay in place after the prompt"
    ONE_VICTIM = "evictions that overwrite one token each"
    ONE_TOKEN = "slots that hold one token each"
    WRITTEN_ONCE = "keys that are written once"
    ORIGINAL_POSITIONS = "tokens that keep their positions"
    ROTARY = "rotary embeddings in every layer"
    ONE_GROUP = "full attention in every layer"
    OWN_KEYS = "keys of every layer in the policy's pages"
    NO_STATES = "layers that keep tokens"
    WHOLE_STATES = "states of every token that is computed"
    ONE_STAGE = "one pipeline stage"
    FINAL = "tokens that are final when they are stored"
    FRACTION = "a budget that is a fraction"
    ONE_BUDGET = "one budget for all turns"
    ONE_NODE = "workers whose files the scheduler sees"
    CUT = "requests that are cut to their budgets"
    BASE_WEIGHTS = "the weights of the base model"
    TEXT = "text with one position per token"
    TOKEN_IDS = "token ids as input"
    WHOLE_PROMPTS = "requests that begin with whole prompts"


@dataclass(frozen=True)
class Setup:
    """A configuration and, once it is known, the engine that it is for.

    Args:
        options: the options of the policy.
        split: which KV heads share slots.
        merge: cosine above which evicted tokens are merged; 0: none is.
        engine: vLLM's VllmConfig; None: not known yet.
        given: the arguments of vLLM that the user gave.

    """

    options: Options
    split: Split = "none"
    merge: float = 0.0
    engine: Any = None
    given: Given = frozenset()

    @property
    def model(self) -> Any:
        """vLLM's ModelConfig of the engine."""
        return self.engine.model_config


@dataclass(frozen=True)
class Part:
    """One part of a configuration or of an engine.

    Args:
        name: the part as the user knows it, formatted with the options as ``o``.
        on: whether a setup has it.
        off: how to do without it, as "use ..." or "leave ... out", by the arguments that led to it.
        needs: properties that it needs.
        breaks: properties that it breaks, each with how: "X stores drafts".

    """

    name: str
    on: Callable[[Setup], bool]
    off: Remedy
    needs: tuple[Property, ...] = ()
    breaks: Mapping[Property, str] = field(default_factory=dict)


class Conflict(NamedTuple):
    """The four parts of an error: one part needs what another breaks."""

    asked: str
    found: str
    why: str
    remedy: str


P = Property

OPTION_PARTS: tuple[Part, ...] = (
    Part(
        "{o.ranking_name}",
        lambda s: any(term.queries != "window" for term in s.options.ranking.terms),
        "use --kv-policy h2o2 without a score",
        needs=(P.EVERY_QUERY,),
    ),
    Part(
        "{o.ranking_name}",
        lambda s: any(term.sees_later for term in s.options.ranking.terms),
        "use --kv-policy h2o or snapkv",
        needs=(P.ORIGINAL_POSITIONS,),
    ),
    Part(
        "{o.ranking_name}",
        lambda s: s.options.ranking.term("reread") is not None,
        "use score=combined",
        needs=(P.ONE_GROUP, P.ONE_STAGE, P.FINAL, P.BASE_WEIGHTS, P.TEXT, P.TOKEN_IDS),
    ),
    Part(
        "eviction=chunk",
        lambda s: s.options.eviction == "chunk",
        "use eviction=prompt_end",
        needs=(P.PRIVATE_PAGES,),
        breaks={P.PLACE: "moves survivors after each chunk"},
    ),
    Part(
        "eviction={o.eviction}",
        lambda s: s.options.eviction != "chunk",
        "use eviction=chunk",
        breaks={P.SHORT_PROMPT: "keeps a prompt whole until its end"},
    ),
    Part(
        "eviction=pressure",
        lambda s: s.options.eviction == "pressure",
        "use eviction=prompt_end",
        needs=(P.PRIVATE_PAGES, P.FINAL),
        breaks={
            P.PLACE: "moves survivors when the pool runs short",
            P.CUT: "keeps every token until the pool runs short",
        },
    ),
    Part(
        "evict_every={o.evict_every}",
        lambda s: not s.options.schedule.overwrites,
        "use evict_every=1",
        breaks={
            P.PLACE: "moves survivors during decode",
            P.ONE_VICTIM: "evicts several tokens at a time",
        },
    ),
    Part(
        "split={s.split}",
        lambda s: s.split != "none",
        "use split=none",
        needs=(P.PLACE,),
    ),
    Part(
        "split=layers",
        lambda s: s.split == "layers",
        "use split=heads",
        needs=(P.ONE_GROUP, P.ONE_STAGE, P.PRIVATE_PAGES),
    ),
    Part(
        "merge={s.merge}",
        lambda s: s.merge > 0,
        "leave merge out",
        needs=(P.ONE_VICTIM,),
        breaks={
            P.ONE_TOKEN: "stores several tokens in one slot",
            P.WRITTEN_ONCE: "rewrites the key that takes a token in",
        },
    ),
    Part(
        "positions={o.positions}",
        lambda s: s.options.rolls,
        "use positions=original",
        needs=(P.SHORT_PROMPT, P.ROTARY, P.OWN_KEYS, P.ONE_TOKEN, P.FINAL, P.TEXT),
        breaks={
            P.ORIGINAL_POSITIONS: "renumbers the tokens of a request",
            P.WRITTEN_ONCE: "rewrites the keys of renumbered tokens",
        },
    ),
    Part(
        "continuation=true",
        lambda s: s.options.continues,
        "leave continuation out",
        needs=(
            *(P.CUT, P.ONE_BUDGET, P.ONE_TOKEN, P.ORIGINAL_POSITIONS),
            *(P.OWN_KEYS, P.WHOLE_STATES, P.FINAL),
        ),
        breaks={P.WHOLE_PROMPTS: "begins requests with what is left of earlier ones"},
    ),
    Part(
        "continuation={o.continuation}",
        lambda s: s.options.continuation_folder is not None,
        "use continuation=true",
        needs=(P.ONE_NODE,),
    ),
    Part(
        "budget_basis={o.budget_basis}",
        lambda s: s.options.budget_basis != "max_model_len",
        "leave budget_basis out",
        needs=(P.FRACTION,),
        breaks={P.ONE_BUDGET: "gives each turn a budget of its own"},
    ),
    Part(
        "budget={o.budget}",
        lambda s: isinstance(s.options.budget, int),
        "give a budget in (0, 1]",
        breaks={P.FRACTION: "is a number of tokens"},
    ),
)
"""Parts that the options of a policy switch on."""

ENGINE_PARTS: tuple[Part, ...] = (
    Part(
        "prefix caching",
        lambda s: bool(s.engine.cache_config.enable_prefix_caching),
        "leave --enable-prefix-caching out",
        needs=(P.NO_STATES,),
        breaks={
            P.EVERY_QUERY: "does not compute the queries of a cached prefix",
            P.PRIVATE_PAGES: "shares prompt pages between requests",
        },
    ),
    Part(
        "a KV connector",
        lambda s: s.engine.kv_transfer_config is not None,
        leave_out("kv_transfer_config", otherwise="choose another model"),
        needs=(
            *(P.WHOLE_PROMPTS, P.ONE_GROUP, P.FINAL),
            *(P.BASE_WEIGHTS, P.TEXT, P.TOKEN_IDS),
        ),
    ),
    Part(
        "speculative decoding",
        lambda s: s.engine.speculative_config is not None,
        leave_out(*SPECULATIVE, otherwise="choose a checkpoint that is no speculator"),
        needs=(P.ONE_GROUP, P.ONE_STAGE, P.TEXT),
        breaks={P.FINAL: "stores drafts that may be rejected"},
    ),
    Part(
        "a sliding-window model",
        lambda s: slides(s.engine),
        other_model(otherwise="choose another model"),
        breaks=dict.fromkeys(
            (P.ONE_GROUP, P.OWN_KEYS), "keeps pages of its own for layers that slide"
        ),
    ),
    Part(
        "a hybrid (state-space) model",
        lambda s: bool(s.model.is_hybrid),
        other_model(otherwise="choose another model"),
        breaks=dict.fromkeys(
            (P.ONE_GROUP, P.NO_STATES), "keeps one state for all tokens in some layers"
        ),
    ),
    Part(
        "ReplaySSM",
        lambda s: bool(s.engine.cache_config.use_replayssm),
        "leave --use-replayssm out",
        breaks={P.WHOLE_STATES: "keeps states of some tokens ago, and replays those after them"},
    ),
    Part(
        "pipeline parallelism",
        lambda s: stages(s.engine) > 1,
        "leave --pipeline-parallel-size out",
        breaks={P.ONE_STAGE: "divides the layers among several"},
    ),
    Part(
        "an engine that may span nodes",
        lambda s: spans_nodes(s.engine),
        "run all workers on one node, without Ray or an external launcher",
        breaks={P.ONE_NODE: "has workers that write files elsewhere"},
    ),
    Part(
        "LoRA",
        lambda s: s.engine.lora_config is not None,
        "leave --enable-lora out",
        breaks={P.BASE_WEIGHTS: "changes weights from request to request"},
    ),
    Part(
        "an image or M-RoPE model",
        lambda s: images(s.engine),
        other_model(otherwise="choose another model"),
        breaks={P.TEXT: "takes images, or several positions per token"},
    ),
    Part(
        "prompt embeddings",
        lambda s: bool(s.engine.model_config.enable_prompt_embeds),
        "leave --enable-prompt-embeds out",
        breaks={P.TOKEN_IDS: "replace token ids by vectors"},
    ),
    Part(
        "an fp8 KV cache",
        lambda s: float8(s.engine),
        another_dtype("auto"),
        needs=(P.WRITTEN_ONCE,),
    ),
    Part(
        "a model that skips rotary embeddings",
        lambda s: skips_rotation(s.engine),
        other_model(otherwise="choose another model"),
        breaks={P.ROTARY: "leaves keys of some layers unrotated"},
    ),
)
"""Parts that vLLM's own options and the model switch on."""


def parts_on(setup: Setup) -> Iterator[Part]:
    """Yield the parts that a setup has."""
    parts = OPTION_PARTS if setup.engine is None else OPTION_PARTS + ENGINE_PARTS
    return (part for part in parts if part.on(setup))


def find_conflict(setup: Setup) -> Conflict | None:
    """Return the first two parts of a setup of which one needs what the other breaks."""
    parts = list(parts_on(setup))
    for needing in parts:
        for wanted in needing.needs:
            for breaking in parts:
                if wanted in breaking.breaks:
                    return describe(setup, needing, breaking, wanted)
    return None


def obstacle(setup: Setup, wanted: Setup) -> str | None:
    """Return the name of the first part of a setup that conflicts with one of another setup alone.

    Args:
        setup: the setup without a default.
        wanted: the setup with it.

    """
    own = list(parts_on(setup))
    added = [part for part in parts_on(wanted) if part not in own]
    names = (
        _name(part, setup)
        for part in own
        if any({*part.breaks} & {*new.needs} or {*new.breaks} & {*part.needs} for new in added)
    )
    return next(names, None)


def describe(setup: Setup, needing: Part, breaking: Part, wanted: Property) -> Conflict:
    """Say why two parts conflict, and what to do.

    Args:
        setup: the setup that has both.
        needing: the part that needs a property.
        breaking: the part that breaks it.
        wanted: the property.

    """
    need, break_ = _name(needing, setup), _name(breaking, setup)
    return Conflict(
        f"{need} with {break_}",
        f"{need} needs {wanted.value}",
        f"{break_} {breaking.breaks[wanted]}",
        f"{advice(breaking.off, setup.given)}, or {advice(needing.off, setup.given)}",
    )


def _name(part: Part, setup: Setup) -> str:
    return part.name.format(o=setup.options, s=setup)
