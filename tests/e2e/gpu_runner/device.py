# SPDX-License-Identifier: Apache-2.0
"""What makes this process one in which vLLM runs Model Runner V2: called before vLLM is imported.

Of CUDA it lacks, and so do the tests: time (a kernel is through when its launch returns, a copy
when it is asked for), the caching allocator, and piecewise graphs, which need torch.compile.
"""

from __future__ import annotations

import os
from gc import collect  # the real one: a test's engine starts without
from typing import Any
from unittest import mock

import triton.backends
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class _NoDriver:
    """Of a backend that is installed and computes nothing: the interpreter does."""

    @staticmethod
    def is_active() -> bool:
        """No: else Triton would compile for it."""
        return False


def prepare() -> None:
    """Let vLLM find Triton, take Model Runner V2, run ahead of tokens, and capture graphs."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    backend: Any = triton.backends.Backend(compiler=None, driver=_NoDriver)
    triton.backends.backends["cpu"] = backend
    _take_any_mask()
    _like_a_gpu()


def _take_any_mask() -> None:
    """The interpreter fails on masks that numpy has made integers of; a compiler takes them."""
    builder: Any = InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: TensorHandle) -> TensorHandle:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, boolean(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, boolean(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _like_a_gpu() -> None:
    """Of the platform, what it refuses on a CPU; of the worker, how vLLM's for GPUs starts."""
    import torch
    from vllm import SamplingParams
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.workspace import init_workspace_manager

    from tests.e2e.gpu_runner import graphs

    check_config = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
        asked = scheduler.async_scheduling, compilation.cudagraph_capture_sizes
        check_config(vllm_config)
        scheduler.async_scheduling, compilation.cudagraph_capture_sizes = asked

    init_device = CPUWorker.init_device

    def init_device_and_workspace(worker: Any) -> None:
        init_device(worker)
        init_workspace_manager(worker.device)

    available_memory = CPUWorker.determine_available_memory

    def determine_available_memory(worker: Any) -> int:
        runner = worker.model_runner
        runner.profile_run()
        pools, capture = [], runner.capture_model

        def capture_model(**kwargs: Any) -> int:
            pools.extend(StorageWeakRef(cache.untyped_storage()) for cache in runner.kv_caches)
            return capture(**kwargs)

        with mock.patch.object(runner, "capture_model", capture_model):
            runner.profile_cudagraph_memory()
        collect()
        if not all(pool.expired() for pool in pools):
            raise RuntimeError("the pool of the profiling of graphs is held past its end")
        return available_memory(worker)

    platform: Any = CpuPlatform
    platform.check_and_update_config = staticmethod(check_and_update_config)
    platform.support_static_graph_mode = classmethod(lambda cls: True)
    platform.graph_pool_handle = lambda self: (0, 0)
    worker: Any = CPUWorker
    worker.init_device = init_device_and_workspace
    worker.determine_available_memory = determine_available_memory
    worker.compile_or_warm_up_model = gpu_worker.Worker.compile_or_warm_up_model
    # Tunes kernels of libraries for GPUs, for other models.
    gpu_worker.kernel_warmup = lambda worker: None
    # The interpreter does not carry the kernel for top-k and top-p, which the warm-up asks for.
    params: Any = SamplingParams
    params.for_sampler_warmup = staticmethod(lambda: SamplingParams(temperature=0))
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph = graphs.Graph, graphs.capture
