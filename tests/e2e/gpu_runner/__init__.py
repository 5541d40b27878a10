# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Model Runner V2 and its asynchronous scheduling, run on a CPU, with the policy.

V2 needs Triton, and vLLM takes none on CPUs but Triton's CPU backend. In a process of its own
(``python -m tests.e2e.gpu_runner``) that backend is named, and the kernels run in Triton's
interpreter. For streams, events, pinned memory, and buffers that GPU and host share, vLLM has
stand-ins for CPUs. :mod:`graphs` adds the one for CUDA graphs, and :mod:`device` what switches them
and the asynchronous scheduling on. All else is vLLM's: scheduler, engine, runner, sampler, kernels,
profiling, warm-up.
"""
