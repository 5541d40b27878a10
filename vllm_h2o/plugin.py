# SPDX-License-Identifier: Apache-2.0
"""The entry points, and the one place where order matters.

::

    import vllm ... -> before_engine_args   (group vllm.platform_plugins: while vLLM is imported)
                         -> register        (as soon as vllm.engine.arg_utils is there)
    load_general_plugins -> register        (group vllm.general_plugins: every process, again)
    with a policy: in each worker -> activate   (its patches; where the engine is configured, the
                   patch of create_engine_config applies those of the front end)
    with continuation or a KV connector: in the scheduler -> activate_engine   (those of the
                   engine's process)

``LLM(..., kv_policy="h2o")`` makes its engine arguments before vLLM loads general plugins. The only
entry point that runs earlier is the one that asks which platform this is; ours answers "none of
mine" and waits for the module. (vLLM does not ask when ``VLLM_TARGET_DEVICE=cpu`` is set; a policy
then comes by ``vllm serve`` or ``additional_config``.)
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

_ENGINE_ARGS = "arg_utils"


def before_engine_args() -> None:
    """Have :func:`register` run when vLLM's engine arguments have been defined.

    Returns:
        None: this package is no platform.

    """
    package = importlib.import_module("vllm.engine")
    if not hasattr(package, _ENGINE_ARGS):
        # A liberty: a module of vLLM's changes its class until its submodule is there.
        package.__class__ = _EnginePackage


def register() -> None:
    """Verify what is patched in every process, fill the registries, add the flags. Runs often.

    Raises:
        PatchError: when this vLLM is not the known one, or the patches are not there. Nothing has
            been changed then.

    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_h2o.errors import PatchError, end_plainly

    end_plainly()
    if not Path(__file__).with_name("patches").is_dir():
        raise PatchError(
            "vllm-h2o without its patches",
            "vllm_h2o/patches is not a link to the folder patches",
            "this checkout was made without symbolic links",
            "run `git config core.symlinks true`, then `git checkout -- vllm_h2o/patches`",
        )
    from vllm_h2o.patches import ALWAYS
    from vllm_h2o.patches._patch import verify_all
    from vllm_h2o.paths import BACKEND

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        raise PatchError(
            "vllm-h2o next to another attention plugin",
            f"{custom.get_path()} is registered as the custom backend",
            "vLLM has one place for a custom backend",
            "uninstall one of the two, or name the wanted one in VLLM_PLUGINS",
        )
    verify_all(ALWAYS)
    if not custom.is_overridden():
        register_backend(custom, BACKEND)
    for patch in ALWAYS:
        patch.apply()


def activate() -> None:
    """Apply the patches that a policy needs. Called where a worker with a policy starts."""
    register()
    from vllm_h2o.patches._with_policy import activate_worker

    activate_worker()


def activate_engine() -> None:
    """Apply the patches that an engine's own process needs. Called where its scheduler starts."""
    register()
    from vllm_h2o.patches._with_policy import activate_engine_core

    activate_engine_core()


class _EnginePackage(ModuleType):
    """``vllm.engine`` while ``arg_utils`` is not there, or is being imported.

    Python binds a submodule in its package as the last act of importing it. A finder would come
    too late for ``from vllm import EngineArgs``, which asks for the platform halfway through.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == _ENGINE_ARGS:
            self.__class__ = ModuleType  # type: ignore[assignment]
            register()
