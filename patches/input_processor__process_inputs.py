# SPDX-License-Identifier: Apache-2.0
"""Refuses a request whose own budget or images cannot be used, before it reaches the engine.

Symbol: vllm.v1.engine.input_processor:InputProcessor.process_inputs
Why no seam: what vLLM validates of ``extra_args`` goes through logits processors, which would run
    in every step, and knows neither the prompt's length nor the engine's configuration.
What changes: a request with images, ``kv_budget`` or ``kv_transfer_params`` is checked when it is
    complete; a refusal is a VLLMClientError, too, which vLLM's server answers with HTTP 400, where
    a mere ValueError is a 500. Any other request passes untouched.
Upstream: none yet.
Drop when: vLLM calls plugins with each finished request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_h2o.options.request import check_request
from vllm_h2o.patches._patch import Patch, Symbol


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, and a check of what it returns."""

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not before the first request: nothing heavy is loaded where there is no policy.
        from vllm_h2o.planner.model import other_pages

        config, images = self.vllm_config, self.renderer.mm_processor_cache
        request = original(self, *args, **kwargs)
        pages = partial(other_pages, config)
        return check_request(request, config, pages, self.mm_encoder_cache_size, images)

    return process_inputs


PATCH = Patch(
    Symbol("vllm.v1.engine.input_processor:InputProcessor.process_inputs", "e477ed92c9d8"), wrap
)
