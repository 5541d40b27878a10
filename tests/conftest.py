# SPDX-License-Identifier: Apache-2.0
"""Settings of the quick, quiet engine; they must be there before vLLM is imported."""

import gc
import os
import sys

os.environ.update(
    HF_HUB_OFFLINE="1",
    NUMBA_NUM_THREADS="1",  # more of them would spin from the first n-gram on, to the process's end
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    TOKENIZERS_PARALLELISM="false",
    TRITON_INTERPRET="1",  # kernels for GPUs run on a CPU, a program at a time
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # else two engines at a time get the same core each
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    # On a CPU vLLM saves a compiled model and cannot load it: each engine would compile anew.
    VLLM_USE_AOT_COMPILE="0",
)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from llvmlite.binding import ffi  # noqa: E402 (numba's: vLLM's proposer of n-grams loads it)

from tests.draws import QUICK, draws  # noqa: E402
from tests.house_rules import ROOT  # noqa: E402
from tests.interpreted import quicken  # noqa: E402

settings.register_profile(QUICK)
quicken()

_lookup = ffi._lib_wrapper.__getattr__


def _honest(wrapper: object, name: str) -> object:
    """Whenever an engine starts, vLLM asks every attribute of every module for its ``__dict__``.

    This library claims to have any; then no second engine starts in a process with n-grams.
    """
    if name == "__dict__":
        raise AttributeError(name)
    return _lookup(wrapper, name)


ffi._lib_wrapper.__getattr__ = _honest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let one run of both tiers run each test once, at its full size."""
    parser.addoption(
        "--after-test",
        action="store_true",
        help="leave out what `make test` runs as a whole: neither slow, nor of random examples",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has been run."""
    if not config.getoption("--after-test"):
        return
    left, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        stays = item.get_closest_marker("slow") or draws(name(item))
        (left if stays else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = left


def name(item: pytest.Item) -> str:
    """Name of a test's module."""
    return ".".join(item.path.relative_to(ROOT).with_suffix("").parts)


_num_modules = 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Look for garbage, after each engine, among what is newer than most modules.

    Only an engine may have unfrozen the others: to count them takes a tenth of a second.
    """
    global _num_modules
    if report.when != "teardown":
        return
    unfrozen = "engine" in report.keywords and not gc.get_freeze_count()
    if unfrozen or len(sys.modules) > 1.05 * _num_modules:
        _num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Bindings count what is left."""
    gc.unfreeze()
