"""Which quantised caches go with a policy, and which stop before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from tests.options.refusal import FLOAT8_REFUSED
from tests.tiny_models import engine_config, folder
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.hooks import check_config
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.traits import FLOAT8

OTHERWISE, SKIPPING, MERGED, ROLLING, OLD = FLOAT8_REFUSED
MODEL = "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("what", "settings", "options", "remedy"),
    [
        (
            OTHERWISE,
            {"kv_cache_dtype": "int8_per_token_head"},
            {},
            "use --kv-cache-dtype fp8, fp8_e5m2 or auto",
        ),
        (OTHERWISE, {"kv_cache_dtype": "fp8_per_token_head"}, {}, "use --kv-cache-dtype fp8"),
        (OTHERWISE, {"kv_cache_dtype": "nvfp4"}, {}, "use --kv-cache-dtype fp8"),
        (
            SKIPPING,
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
            {},
            "leave --kv-cache-dtype-skip-layers out",
        ),
        (MERGED, {"kv_cache_dtype": "fp8_e5m2"}, {"merge": 0.9}, "leave merge out, or use"),
        (
            ROLLING,
            {"kv_cache_dtype": "fp8", "block_size": 16, "max_num_batched_tokens": 128},
            {"positions": "rolling", "prefill": "chunked", "budget": 64},
            "use --kv-policy-config.positions original",
        ),
    ],
)
def test_refused(
    tmp_path: Path, what: str, settings: dict[str, Any], options: dict[str, Any], remedy: str
) -> None:
    """VLLM itself takes the engine; with a policy it stops in create_engine_config."""
    model = folder(tmp_path, MODEL)
    engine_config(model, **settings)
    with pytest.raises(UnsupportedError) as caught:
        engine_config(model, **settings, kv_policy="h2o", kv_policy_config=options)
    assert caught.value.found == f"the engine has {what}"
    assert caught.value.remedy.startswith(remedy)


def test_of_a_checkpoint(tmp_path: Path) -> None:
    """Its own word counts where nobody asks for another type, though vLLM takes it later."""
    model = Path(folder(tmp_path, MODEL))
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
    (model / "config.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {"kv_policy": "h2o", "kv_policy_config": {"merge": 0.9}}
    with pytest.raises(UnsupportedError) as caught:
        engine_config(str(model), **asked)
    assert caught.value.found == f"the engine has {MERGED}"
    engine_config(str(model), **asked, kv_cache_dtype="bfloat16")


@pytest.mark.parametrize("cache_dtype", FLOAT8)
def test_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dtype: str) -> None:
    """Either type: on a CPU, and on a GPU that has such numbers."""
    config = engine_config(folder(tmp_path, MODEL), kv_cache_dtype=cache_dtype, kv_policy="h2o")
    policy = KVPolicyConfig.of(config)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    for capability in (86, 89):
        monkeypatch.setattr(
            type(current_platform),
            "has_device_capability",
            classmethod(lambda _, wanted, own=capability: own >= wanted),
        )
        if capability < 89:
            with pytest.raises(UnsupportedError, match=OLD):
                check_config(config, policy)
        else:
            assert check_config(config, policy) is config
