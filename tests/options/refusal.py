"""How a configuration is refused."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig


def refusal(*args: Any, **options: Any) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        KVPolicyConfig.from_options(*args) if args else KVPolicyConfig(**options)
    return str(caught.value)


FLOAT8_REFUSED = (
    "a KV cache quantised to anything but fp8 with one scale for each layer's K and V",
    "an fp8 KV cache that some layers leave out",
    "an fp8 KV cache, and merge",
    "an fp8 KV cache, and positions='rolling'",
    "an fp8 KV cache on a GPU older than Ada",
)
"""What does not go with a policy, of quantised caches."""

ROLLING_REFUSED = tuple(
    f"positions='rolling', and {what}"
    for what in (
        "speculative decoding",
        "sliding windows",
        "layers that do without rotary embeddings",
        "several positions of a token (M-RoPE)",
    )
)
"""What does not go with positions that roll."""

CONTINUATION_REFUSED = tuple(
    f"continuation, and {what}" for what in ("speculative decoding", "sliding windows")
)
"""What does not go with conversations that are continued."""

IMAGES_REFUSED = ("positions='rolling', and images", "speculative decoding, and images")
"""What does not go with models that see images."""

WINDOWS_REFUSED = ("prefix caching, and sliding windows",)
"""What does not go with sliding windows, before vLLM 0.33."""

READ_AGAIN_REFUSED = (
    "score=reconstruction, and LoRA",
    "score=reconstruction, and pipeline parallelism or speculative decoding",
    "score=reconstruction, and sliding windows, images, prompt embeddings or M-RoPE",
    "layers that share slots, and prefix caching, sliding windows or pipeline parallelism",
)
"""What does not go with prompts that are read again, and with layers that share slots."""

REFUSED_ELSEWHERE = (
    *READ_AGAIN_REFUSED,
    *WINDOWS_REFUSED,
    *FLOAT8_REFUSED,
    *ROLLING_REFUSED,
    *CONTINUATION_REFUSED,
    *IMAGES_REFUSED,
)
"""What has a file of tests of its own."""
