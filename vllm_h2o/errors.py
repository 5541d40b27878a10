"""What can go wrong, and the one form in which it is said.

::

    KVPolicyError(ValueError)      four parts: asked / is / why not / what to do
    ├── ConfigError                a value of the policy's own configuration
    ├── UnsupportedError           a model, engine option or platform that the policy refuses
    └── PatchError                 this vLLM is not the one the plugin was written against
    IntegrityError(RuntimeError)   a broken invariant of pages or lengths: a bug, never bad input
"""

from __future__ import annotations


class KVPolicyError(ValueError):
    """A refusal in four parts.

    Args:
        asked: what the caller asked for.
        found: what is the case.
        why: why the two do not go together.
        remedy: what to do instead.

    """

    def __init__(self, asked: str, found: str, why: str, remedy: str) -> None:
        self.asked, self.found, self.why, self.remedy = asked, found, why, remedy
        super().__init__(asked, found, why, remedy)

    def __str__(self) -> str:
        return (
            f"kv-policy: asked: {self.asked}; is: {self.found}; "
            f"why not: {self.why}; what to do: {self.remedy}."
        )


class ConfigError(KVPolicyError):
    """A value of the policy's own configuration cannot be used."""


class UnsupportedError(KVPolicyError):
    """The model, an engine option or the platform does not go with the policy."""


class PatchError(KVPolicyError):
    """A patched or relied-upon symbol of vLLM is not the one that is known."""


class IntegrityError(RuntimeError):
    """An invariant of page or length accounting does not hold: a bug in this package."""
