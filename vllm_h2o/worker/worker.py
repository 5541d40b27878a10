"""The worker class that ``--kv-policy`` puts in place of vLLM's own for the platform."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.plugin import activate
from vllm_h2o.worker import rotary
from vllm_h2o.worker.inspect import RecordsPages
from vllm_h2o.worker.step import PublishesSteps

activate()

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class HeavyHitterWorker(RecordsPages, PublishesSteps, PlatformWorker):
    """vLLM's worker, which publishes each step's plan while it runs, and records on demand."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, and find what turns queries where a policy asks them again."""
        super().load_model(*args, **kwargs)
        config = KVPolicyConfig.from_additional_config(self.vllm_config.additional_config)
        if config is not None and config.score_replays:
            rotary.bind(self.model_runner.get_model())
