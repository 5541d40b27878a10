# SPDX-License-Identifier: Apache-2.0
"""Which library of the native kernels is opened, and which are refused."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from vllm_h2o.kernels.native import layout, loader
from vllm_h2o.kernels.native.loader import NativeUnavailableError

VARIANTS = loader.available()
NEEDS_LIBRARY = pytest.mark.skipif(not VARIANTS, reason="no native library has been built")


def test_variants_are_ordered() -> None:
    """What this processor can run is the end of the list: each variant needs what later ones do."""
    able = loader.runnable()
    assert able and able == list(loader.VARIANTS)[-len(able) :]
    assert set(VARIANTS) <= set(able)


def test_one_library_built_means_all_are() -> None:
    """Where one library was built, so were all that this processor can run."""
    assert VARIANTS in ([], loader.runnable())


def test_missing_libraries_are_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said what is missing and what to do."""
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    assert loader.available() == []
    with pytest.raises(NativeUnavailableError) as error:
        loader.load()
    assert str(error.value) == (
        f"kernels='native' is not available: there is no library in {tmp_path}. There was no C++ "
        "compiler when vllm-h2o was installed, or it failed. Install g++ (GCC 12 or later) or "
        "clang++ and reinstall vllm-h2o from its source, or choose kernels=torch."
    )


def test_library_that_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own words are passed on."""
    monkeypatch.setattr(loader, "FOLDER", tmp_path)
    monkeypatch.setattr(loader, "VARIANTS", {"broken": frozenset()})
    loader.library_path("broken").write_text("no library")
    with pytest.raises(NativeUnavailableError, match=r"h2o_broken\.so.*(Reinstall|invalid)"):
        loader.load("broken")


@NEEDS_LIBRARY
def test_refused_variant_falls_to_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system refuses the best variant, the next one is taken."""
    opened = loader._open

    def refusing(variant: str) -> ctypes.CDLL:
        if variant == VARIANTS[0]:
            raise NativeUnavailableError("it", "this is", "no", "go")
        return opened(variant)

    monkeypatch.setattr(loader, "_open", refusing)
    if len(VARIANTS) > 1:
        assert loader.load().variant == VARIANTS[1]
    monkeypatch.setattr(loader, "available", lambda: VARIANTS[:1])
    with pytest.raises(NativeUnavailableError, match=r"it is not available: this is\. No\. Go\."):
        loader.load()


def test_variant_of_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that would fault is refused."""
    monkeypatch.setattr(loader, "processor_flags", lambda: frozenset({"sse2"}))
    assert loader.runnable() == ["portable"]
    with pytest.raises(NativeUnavailableError, match="'v4' .*This processor cannot run it"):
        loader.load("v4")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_library_of_other_sources(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was built before its structs changed is not called; it is said what to do."""
    monkeypatch.setattr(loader, "_open", loader._open.__wrapped__)
    assert loader.load(variant).variant == variant
    monkeypatch.setitem(layout.CONSTANTS, "kScores", 99)
    with pytest.raises(NativeUnavailableError) as error:
        loader.load(variant)
    assert str(error.value) == (
        f"variant {variant!r} of the C++ kernels is not available: {loader.library_path(variant)} "
        "was built from other sources than this module. It would read its arguments wrongly: "
        "kScores is not the same there. Run `make native`, or reinstall vllm-h2o from its source."
    )


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
        loader.load(variant)
        assert b"libgomp" not in loader.library_path(variant).read_bytes()
    addresses = loader._openmp()
    assert addresses is not None and len(addresses) == 5
    (runtime,) = {library_at(address) for address in addresses}
    assert "omp" in Path(runtime).name and runtime in before
