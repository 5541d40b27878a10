"""The form in which a refusal is said."""

from __future__ import annotations

import pickle

import pytest

from vllm_h2o.errors import (
    ConfigError,
    IntegrityError,
    KVPolicyError,
    PatchError,
    UnsupportedError,
)

REFUSALS = (ConfigError, UnsupportedError, PatchError)


@pytest.mark.parametrize("kind", REFUSALS)
def test_four_parts(kind: type[KVPolicyError]) -> None:
    """Asked, is, why not, what to do: in the message and as attributes."""
    error = kind("a policy", "a model", "a reason", "a remedy")
    assert str(error) == (
        "kv-policy: asked: a policy; is: a model; why not: a reason; what to do: a remedy."
    )
    assert (error.asked, error.found, error.why, error.remedy) == error.args


@pytest.mark.parametrize("kind", REFUSALS)
def test_crosses_processes(kind: type[KVPolicyError]) -> None:
    """An engine process sends its error home in one piece."""
    error = kind("a policy", "a model", "a reason", "a remedy")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.remedy) == (str(error), error.remedy)


def test_tree() -> None:
    """A refusal is a ValueError, as vLLM's own are; a broken invariant is not."""
    assert all(issubclass(kind, KVPolicyError) for kind in REFUSALS)
    assert issubclass(KVPolicyError, ValueError)
    assert issubclass(IntegrityError, RuntimeError)
    assert not issubclass(IntegrityError, KVPolicyError)
