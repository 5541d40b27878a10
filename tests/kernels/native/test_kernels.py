"""The native kernels: which library is opened, and whole lives of requests with each."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.kernels.harness import Layer, Life, Shape
from tests.kernels.lives import TABLE, cases, make_lives, pool_size
from tests.kernels.native.cases import Pool, decode_batch, prompt_chunk
from tests.kernels.truth import OUTPUT_ATOL, Ranking, live
from vllm_h2o.kernels.batch import Scoring
from vllm_h2o.kernels.native import kernels as native
from vllm_h2o.kernels.native.kernels import NativeUnavailableError

VARIANTS = native.available()
NEEDS_LIBRARY = pytest.mark.skipif(not VARIANTS, reason="no native library has been built")


@pytest.fixture(scope="module")
def ranking() -> Iterator[Ranking]:
    """Over all lives of this module, float32 may rank one selection in a thousand otherwise."""
    count = Ranking()
    yield count
    count.check()


def output_atol(variant: str, dtype: torch.dtype) -> float:
    """Weights of a bfloat16 prompt are rounded to bfloat16 where the processor multiplies those."""
    rounded = dtype == torch.bfloat16 and variant in ("amx", "bf16")
    return 2e-2 if rounded else OUTPUT_ATOL


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TABLE)
def test_lives(name: str, variant: str, ranking: Ranking) -> None:
    """Retained tokens, scores, K, V, outputs and writes are the reference's after every step."""
    policy, shape, rows = TABLE[name]
    lives = make_lives(rows)
    num_blocks = pool_size(lives, shape.block_size, share=0.7)
    layer = Layer(shape, policy, num_blocks, kernels=native.load(variant))
    live(layer, policy, lives, ranking, output_atol=output_atol(variant, shape.dtype))


@NEEDS_LIBRARY
@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=cases())
def test_any_lives(case: tuple[str, Shape, list[Life], float, int], ranking: Ranking) -> None:
    """The same for drawn shapes, policies, budgets, prompts, chunks and schedules."""
    policy, shape, lives, share, seed = case
    kernels = native.load()
    num_blocks = pool_size(lives, shape.block_size, share)
    layer = Layer(shape, policy, num_blocks, seed, kernels=kernels)
    atol = output_atol(kernels.variant, shape.dtype)
    live(layer, policy, lives, ranking, output_atol=atol)


def test_variants_are_ordered() -> None:
    """What this processor can run is the end of the list: each variant needs what later ones do."""
    able = native.runnable()
    assert able and able == list(native.VARIANTS)[-len(able) :]
    assert set(VARIANTS) <= set(able)


def test_built() -> None:
    """Where one library was built, so were all that this processor can run."""
    assert VARIANTS in ([], native.runnable())


def test_without_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said what is missing and what to do."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert native.available() == []
    with pytest.raises(NativeUnavailableError) as error:
        native.load()
    assert str(error.value) == (
        f"asked for the native CPU kernels; found no library in {tmp_path}: there was no C++ "
        "compiler when vllm-h2o was installed, or it failed. Install g++ (GCC 12 or later) or "
        "clang++ and reinstall vllm-h2o from its source, or choose the torch kernels."
    )


def test_library_that_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own words are passed on."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "VARIANTS", {"broken": frozenset()})
    native.library_path("broken").write_text("no library")
    with pytest.raises(NativeUnavailableError, match=r"h2o_broken\.so.*(Reinstall|invalid)"):
        native.load("broken")


@NEEDS_LIBRARY
def test_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses the best variant, the next one is taken."""
    opened = native._open

    def refusing(variant: str) -> ctypes.CDLL:
        if variant == VARIANTS[0]:
            raise NativeUnavailableError("it", "this", "no", "Go")
        return opened(variant)

    monkeypatch.setattr(native, "_open", refusing)
    if len(VARIANTS) > 1:
        assert native.load().variant == VARIANTS[1]
    monkeypatch.setattr(native, "available", lambda: VARIANTS[:1])
    with pytest.raises(NativeUnavailableError, match="asked for it; found this: no. Go."):
        native.load()


def test_variant_of_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that would fault is refused."""
    monkeypatch.setattr(native, "processor_flags", lambda: frozenset({"sse2"}))
    assert native.runnable() == ["portable"]
    with pytest.raises(NativeUnavailableError, match="'v4'; .*: this processor cannot run it"):
        native.load("v4")


def library_at(address: int) -> str:
    """The file that is mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, path = line.split()
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= address < high:
            return path
    raise AssertionError(f"nothing is mapped at {address:#x}")


@NEEDS_LIBRARY
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the maps are Linux's")
def test_no_openmp_runtime_of_its_own() -> None:
    """The kernels run on the threads of the one runtime that torch uses, and bring none along."""
    before = Path("/proc/self/maps").read_text()
    for variant in VARIANTS:
        native.load(variant)
        assert b"libgomp" not in native.library_path(variant).read_bytes()
    addresses = native._openmp()
    assert addresses is not None and len(addresses) == 5
    (runtime,) = {library_at(address) for address in addresses}
    assert "omp" in Path(runtime).name and runtime in before


SHAPE = Shape(num_kv_heads=2, group=2, head_size=64, block_size=16)


def decode_once(pool: Pool, **changed: torch.Tensor) -> None:
    """One step of one request, with some tensors exchanged."""
    query, key, value = pool.tokens(1)
    given = {"query": query, "key": key, "value": value, "out": torch.empty_like(query), **changed}
    victims = given.pop("victims", torch.zeros(pool.page.num_blocks, 2, dtype=torch.int32))
    batch = decode_batch(pool.table, attended_len=[20], position=[19])
    first = given.pop("first", None)
    kernels = native.load()
    kernels.decode(pool.page, batch, victims, first=first, scale=1.0, scoring=Scoring(), **given)


@NEEDS_LIBRARY
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.zeros(1, 4, 128)[:, :, ::2]}, r"heads of 64 are not side by side"),
        ({"key": torch.zeros(1, 2, 64).half()}, r"torch.float16 beside a cache of torch.float32"),
        ({"out": torch.zeros(1, 4, 64).half()}, r"torch.float16 beside a cache of torch.float32"),
        ({"first": torch.zeros(1, 2).double()}, r"first scores are torch.float64"),
        ({"victims": torch.zeros(3, 2)}, r"victims of torch.float32"),
    ],
)
def test_tensors_are_checked(changed: dict[str, torch.Tensor], message: str) -> None:
    """What would be misread is refused."""
    with pytest.raises(ValueError, match=message):
        decode_once(Pool(SHAPE, [20]), **changed)


@NEEDS_LIBRARY
def test_pages_are_checked() -> None:
    """Views of something else than pages, and sizes that no kernel has, are refused."""
    pool = Pool(SHAPE, [20])
    page = pool.page
    pool.page = dataclasses.replace(page, value=page.value.clone())
    with pytest.raises(ValueError, match="not of pages of 16 slots"):
        decode_once(pool)
    with pytest.raises(ValueError, match="a head size of 40 is not a multiple of 16"):
        decode_once(Pool(dataclasses.replace(SHAPE, head_size=40), [20]))
    with pytest.raises(ValueError, match="a head size of 1040 is more"):
        decode_once(Pool(dataclasses.replace(SHAPE, head_size=1040), [20]))
    table = torch.zeros(2, dtype=torch.int64)
    chunk = prompt_chunk(table, slice(0, 1), 0)
    with pytest.raises(ValueError, match="a block table of torch.int64"):
        native.load().pack_survivors([page], [chunk], Scoring())
    with pytest.raises(ValueError, match="powers 0, 1 or 2, not 3"):
        native.load().pack_survivors([page], [], Scoring(power=3))
