# SPDX-License-Identifier: Apache-2.0
"""Errors: their tree and the form of their messages."""

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
def test_error_message_is_three_sentences(kind: type[KVPolicyError]) -> None:
    """The four parts stay as attributes."""
    error = kind("a policy", "the model has none", "it needs one", "use another")
    assert str(error) == (
        "kv-policy: a policy is not supported: the model has none. It needs one. Use another."
    )
    assert (error.asked, error.found, error.why, error.remedy) == error.args


@pytest.mark.parametrize(
    ("why", "remedy", "end"),
    [
        ("max_model_len=9 is short", "did you mean 'h2o'?", "max_model_len=9 is short. Did you"),
        ("vLLM has one", "use 3.", "vLLM has one. Use 3."),
        ("h2o2 needs it, too", "'h2o' is one", "h2o2 needs it, too. 'h2o' is one."),
        ("it, alone", "--kv-policy h2o", "It, alone. --kv-policy h2o."),
    ],
)
def test_error_message_keeps_names_as_written(why: str, remedy: str, end: str) -> None:
    """Only plain words are capitalised, and no sentence ends twice."""
    message = str(ConfigError("a", "b", why, remedy))
    assert message.startswith(f"kv-policy: a is not supported: b. {end}")
    assert message.endswith((".", "?")) and ".." not in message and "?." not in message


@pytest.mark.parametrize("kind", REFUSALS)
def test_error_survives_pickling(kind: type[KVPolicyError]) -> None:
    """An engine process sends it to the front end."""
    error = kind("a policy", "the model has none", "it needs one", "use another")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.remedy) == (str(error), error.remedy)


def test_errors_form_a_tree() -> None:
    """A refusal is a ValueError, like vLLM's; a broken invariant is not."""
    assert all(issubclass(kind, KVPolicyError) for kind in REFUSALS)
    assert issubclass(KVPolicyError, ValueError)
    assert issubclass(IntegrityError, RuntimeError)
    assert not issubclass(IntegrityError, KVPolicyError)
