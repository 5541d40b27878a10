# SPDX-License-Identifier: Apache-2.0
"""Where vLLM finds this package's classes: it takes their dotted paths, and imports them late."""

SCHEDULER = "vllm_h2o.scheduler.scheduler.HeavyHitterScheduler"
WORKER = "vllm_h2o.worker.worker.HeavyHitterWorker"
BACKEND = "vllm_h2o.worker.backend.HeavyHitterBackend"
