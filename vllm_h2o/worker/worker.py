# SPDX-License-Identifier: Apache-2.0
"""The worker class that ``--kv-policy`` puts in place of vLLM's own for the platform."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

from vllm_h2o.plugin import activate
from vllm_h2o.worker.backend import HeavyHitterBackend
from vllm_h2o.worker.peak import for_pages
from vllm_h2o.worker.recorder import RecordsPages
from vllm_h2o.worker.rotary import BindsRopes
from vllm_h2o.worker.seeds import KeepsSeeds
from vllm_h2o.worker.step import PublishesSteps

activate()

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class HeavyHitterWorker(RecordsPages, BindsRopes, PublishesSteps, KeepsSeeds, PlatformWorker):
    """vLLM's worker, which publishes each step's plan while it runs, and records on demand."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, after which vLLM fits pages to what its layers keep."""
        HeavyHitterBackend.loaded_for = self.vllm_config
        super().load_model(*args, **kwargs)

    def determine_available_memory(self) -> int:
        """Bytes that vLLM finds for pages, less those that kernels keep next to them."""
        available: int = super().determine_available_memory()
        specs = [s for s in self.get_kv_cache_spec().values() if isinstance(s, AttentionSpec)]
        if not specs:  # a pipeline stage that keeps states alone
            return available
        slot_bytes = max(spec.state_content_size_bytes for spec in specs)
        return for_pages(available, self.vllm_config, slot_bytes, len(specs))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache, and get ready to clear pages that another group of layers wrote."""
        super().initialize_from_config(kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) > 1:
            # A liberty: vLLM does this where caches differ in their dtype.
            self.model_runner._init_kv_zero_meta()
