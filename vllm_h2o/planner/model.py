# SPDX-License-Identifier: Apache-2.0
"""Read a model's cache, longest sequence and size from its config."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.capabilities import Setup
from vllm_h2o.options.options import Options
from vllm_h2o.options.refusal import refuse
from vllm_h2o.options.refusals import MODEL_REFUSALS, ONE_GROUP
from vllm_h2o.options.remedies import ANOTHER_MODEL
from vllm_h2o.options.traits import FLOAT8, STATE_SPACE, page_size
from vllm_h2o.pages import num_pages
from vllm_h2o.scheduler.footprint import CacheShape, Pool

ELEMENT_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, **dict.fromkeys(FLOAT8, 1)}
"""Bytes of an element, by the name of its type."""

_GENERATES = ("ForCausalLM", "LMHeadModel", "ChatModel", "ForConditionalGeneration")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
_BOTH_DIRECTIONS = {"bagel", "gemma3", "molmo2", "moondream3", "paligemma"}
_STATE_SPACE_KEYS = {"layers_block_type", "hybrid_override_pattern", "attn_layer_period"}


@dataclass(frozen=True)
class Model:
    """A model by its config.

    Args:
        config: transformers' config.
        dtype: name of the dtype in which it runs.
        text_only: whether it is told to take text alone.

    """

    config: Any
    dtype: str
    text_only: bool = False

    @property
    def text(self) -> Any:
        """The config of the language model."""
        return self.config.get_text_config()

    @property
    def num_heads(self) -> int:
        """Query heads of a layer; 0 where there is no attention."""
        return _first(self.text, ("num_attention_heads",)) or 0

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        # Falcon's and StarCoder's word for one KV head; Falcon's later models override it.
        newer = _first(self.text, ("new_decoder_architecture",))
        if _first(self.text, ("multi_query",)) and not newer:
            return 1
        return _first(self.text, _KV_HEADS) or self.num_heads

    @property
    def head_size(self) -> int:
        """Elements of K of one head."""
        return _first(self.text, ("head_dim",)) or self.text.hidden_size // self.num_heads

    @property
    def max_len(self) -> int | None:
        """Longest sequence that the config knows, if it says."""
        return _first(self.text, _LENGTHS)

    @property
    def kinds(self) -> list[str]:
        """Kind of each layer, in the config's words; may be empty where all have attention."""
        return list(_first(self.text, ("layer_types", "layers_block_type")) or ())

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers keep states."""
        kinds = set(self.kinds)
        states = {key for key in self.text.to_dict() if key.startswith(("mamba_", "ssm_"))}
        full = bool(kinds) and kinds <= {"attention", "full_attention"}
        named = _STATE_SPACE_KEYS & self.text.to_dict().keys()
        return not full and bool(states or kinds & STATE_SPACE or named)

    @property
    def num_layers(self) -> int:
        """Layers that keep K and V."""
        if self.is_hybrid:
            with_attention = {"attention", "full_attention", "sliding_attention", "hybrid"}
            return sum(kind in with_attention for kind in self.kinds)
        return int(self.text.num_hidden_layers)

    @property
    def num_states(self) -> int:
        """Layers that keep states."""
        return sum(kind in STATE_SPACE for kind in self.kinds) if self.is_hybrid else 0

    @property
    def num_sliding(self) -> int:
        """Layers with a sliding window."""
        kinds = self.kinds if _first(self.text, ("sliding_window",)) else []
        return kinds.count("sliding_attention")

    @property
    def window(self) -> int:
        """Tokens that such a layer attends to; Cohere does not count a token itself."""
        own = self.text.model_type.startswith("cohere")
        return int(_first(self.text, ("sliding_window",)) or 0) + own

    @property
    def num_group_layers(self) -> int:
        """Layers of a group of vLLM's: of one kind, and of one size where possible."""
        kinds = [num for num in self._layers_of_a_kind if num]
        few, many = min(kinds, default=1), max(kinds, default=1)
        return many if many < 1.5 * few else few

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return sum(num_pages(layers, self.num_group_layers) for layers in self._layers_of_a_kind)

    @property
    def _layers_of_a_kind(self) -> tuple[int, int, int]:
        """Layers with full attention, with sliding windows, with states."""
        return self.num_layers - self.num_sliding, self.num_sliding, self.num_states

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens of the window of each group of layers with a sliding window."""
        return (self.window,) * num_pages(self.num_sliding, self.num_group_layers)

    @property
    def num_state_groups(self) -> int:
        """Groups of layers with states."""
        return num_pages(self.num_states, self.num_group_layers)

    def state_bytes(self) -> int:
        """Count the bytes of a state of one layer, as vLLM's class of the model says."""
        if not self.num_states:
            return 0
        import torch
        from vllm.model_executor.models import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP
        from vllm.utils.torch_utils import get_dtype_size

        cache = SimpleNamespace(
            mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", use_replayssm=False
        )
        (name,) = self.config.architectures
        own = MODELS_CONFIG_MAP.get(name)
        if hasattr(own, "update_mamba_ssm_cache_dtype"):  # some read it from the config
            own.update_mamba_ssm_cache_dtype(cache_config=cache, hf_config=self.text)
        engine: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                hf_config=self.config, hf_text_config=self.text, dtype=getattr(torch, self.dtype)
            ),
            cache_config=cache,
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            speculative_config=None,
            num_speculative_tokens=0,
        )
        model: Any = ModelRegistry.models[name].load_model_cls()
        shapes = model.get_mamba_state_shape_from_config(engine)
        dtypes = model.get_mamba_state_dtype_from_config(engine)
        return sum(
            prod(shape) * get_dtype_size(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        )

    def cache(self, kv_dtype: str) -> CacheShape:
        """Return the cache of a token, in elements of ``kv_dtype`` ("auto": the model's dtype)."""
        element_size = ELEMENT_SIZES[self.dtype if kv_dtype == "auto" else kv_dtype]
        layers, states = self.num_group_layers, (self.num_state_groups, self.state_bytes())
        heads = (self.num_kv_heads, self.head_size)
        return CacheShape(layers, *heads, element_size, self.windows, *states)

    def parameter_bytes(self) -> int:
        """Count the bytes of its parameters, without allocating them.

        Raises:
            UnsupportedError: when transformers does not know the architecture, or the weights are
                quantised.

        """
        import torch
        from transformers import AutoModelForCausalLM

        if _first(self.config, ("quantization_config",)):
            raise _uncounted("the weights are quantised", "their size is not in the config")
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = AutoModelForCausalLM.from_config(self.text)
        except ValueError as error:
            raise _uncounted(
                str(error).splitlines()[0], "transformers counts the parameters"
            ) from error
        return sum(p.numel() for p in model.parameters()) * ELEMENT_SIZES[self.dtype]

    def refuse(self) -> None:
        """Refuse the model if every policy refuses it.

        Raises:
            UnsupportedError: like the engine, as far as the config tells.

        """
        engine = SimpleNamespace(model_config=self._as_vllm_sees_it())
        asked = f"a kv-policy for {_name(self.config)}"
        refuse(MODEL_REFUSALS, Setup(Options(), engine=engine), asked, "the model has or is")
        if (full := self.num_layers - self.num_sliding) > self.num_group_layers:
            raise UnsupportedError(
                asked,
                f"its {full} layers with full attention form several groups next to "
                f"{self.num_sliding} with sliding windows and {self.num_states} with states",
                ONE_GROUP,
                ANOTHER_MODEL,
            )

    def _as_vllm_sees_it(self) -> SimpleNamespace:
        """Return the fields of vLLM's ModelConfig that :data:`MODEL_REFUSALS` read."""
        text, names = self.text, self.config.architectures or ()
        multimodal = text is not self.config and not self.config.is_encoder_decoder
        return SimpleNamespace(
            hf_config=self.config,
            hf_text_config=text,
            runner_type="generate" if any(n.endswith(_GENERATES) for n in names) else "pooling",
            is_encoder_decoder=bool(self.config.is_encoder_decoder),
            use_mla=_first(text, ("kv_lora_rank",)) is not None,
            is_attention_free=not self.num_heads,
            is_hybrid=self.is_hybrid,
            is_multimodal_model=multimodal,
            multimodal_config=SimpleNamespace(
                language_model_only=self.text_only, enable_mm_embeds=False
            ),
            is_mm_prefix_lm=self.config.model_type in _BOTH_DIRECTIONS,
            is_diffusion=_first(self.config, ("canvas_length",)) is not None,
            get_sliding_window=lambda: _first(text, ("sliding_window",)),
        )


def load(name: str, dtype: str = "auto", text_only: bool = False) -> Model:
    """Read a model's config.

    Args:
        name: a folder, or a model's name on its hub.
        dtype: name of the dtype in which it runs; "auto" is vLLM's choice.
        text_only: whether it is told to take text alone.

    Raises:
        UnsupportedError: when there is no config to read.

    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        said = str(error).strip().splitlines()[0]
        raise UnsupportedError(
            f"the model {name!r}",
            said if Path(name).is_dir() else f"no folder has that name, and the hub said: {said}",
            "the plan needs the model's config",
            "give a folder with a config.json, or the name of a model that transformers knows",
        ) from error
    return Model(config, _running_dtype(config) if dtype == "auto" else dtype, text_only)


def other_pages(vllm_config: Any, num_tokens: int) -> int:
    """Return the most pages of a request in layers of other kinds.

    Args:
        vllm_config: the engine's VllmConfig.
        num_tokens: tokens of the complete request.

    """
    model = Model(vllm_config.model_config.hf_config, "auto")
    pool = Pool(0, page_size(vllm_config))
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    on_their_way = vllm_config.max_concurrent_batches * chunk
    windows = pool.pages_of_windows_in_prompts(model.windows, num_tokens, on_their_way)
    return windows + model.num_state_groups


def _running_dtype(config: Any) -> str:
    """Return vLLM's choice: the dtype of the weights, or bfloat16 for float32."""
    written = _first(config, ("dtype",)) or _first(config.get_text_config(), ("dtype",))
    name = str(written).removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "bfloat16"


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """Return the first of these attributes that a config has; configs translate names."""
    values = (getattr(config, name) for name in names if hasattr(config, name))
    return next((value for value in values if value is not None), None)


def _name(config: Any) -> str:
    return ", ".join(config.architectures or ()) or config.model_type


def _uncounted(found: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        "a plan by --gpu-memory",
        found,
        why,
        "give the memory for the cache itself: --kv-memory 4GiB",
    )
