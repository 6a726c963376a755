#!/bin/sh
# What only a GPU can show, in less than ten minutes: first whether it is right, then how fast it is.
#
#     sh tools/gpu.sh OUT       in the project's folder
#     PYTHON=python3 …          an interpreter with what workers and tests need; default: .venv/bin/python
#
# A part that fails, or is stopped at its time, stops no other. OUT gets the tests' results (gpu-tests.xml, kernels.xml), and all
# figures after each section (gpu.json). The exit code is 1 if a part failed.
set -u
out=${1:?"usage: sh tools/gpu.sh OUT"}
python=${PYTHON:-.venv/bin/python}
ends=$(($(date +%s) + 570))
failed=0
mkdir -p "$out"
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"

part() { # name, most seconds, command
    name=$1 seconds=$2
    shift 2
    echo "== $name, at most $seconds s"
    timeout --kill-after 5 "$seconds" "$@" || { echo "== $name FAILED with status $?"; failed=1; }
}

left() { # seconds until the end
    echo $((ends - $(date +%s)))
}

# Warnings of another version of a library fail no test here.
part "tests that need a GPU" 60 \
    "$python" -m pytest -q -W default -m gpu --timeout 50 --junitxml "$out/gpu-tests.xml" tests/kernels tests/engine/kv
budget=$(($(left) - 40))
part "numerics and figures" $((budget + 5)) "$python" benchmarks/gpu.py --budget-s "$budget" --json "$out/gpu.json"
part "kernels against their references" "$(left)" \
    "$python" -m pytest -q -W default -m 'not full and not gpu' -n 8 --timeout 60 --junitxml "$out/kernels.xml" \
    --ignore tests/kernels/test_compile_check.py tests/kernels
exit $failed
