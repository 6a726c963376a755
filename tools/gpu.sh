#!/bin/sh
# What only a GPU can show, in less than ten minutes: first whether it is right, then how fast it is.
#
#     sh tools/gpu.sh OUT       in the project's folder
#     PYTHON=python3 …          an interpreter with what workers and tests need; default: .venv/bin/python
#
# A part that fails, or is stopped at its time, stops no other. OUT gets the tests' results (gpu-*.xml, kernels.xml),
# and all figures so far (gpu.json), also of a part that is stopped. The exit code is 1 if a part failed.
set -u
out=${1:?"usage: sh tools/gpu.sh OUT"}
python=${PYTHON:-.venv/bin/python}
ends=$(($(date +%s) + 570))
failed=0
mkdir -p "$out"
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
modules="torch triton transformers numpy safetensors huggingface_hub llguidance click msgspec zmq cryptography xxhash prometheus_client \
starlette uvicorn fastapi httptools httpx tokenizers jinja2 rich hypothesis pytest pytest_asyncio pytest_timeout xdist"
import_all='
import importlib, sys
missing = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        missing.append(f"{name} ({error})")
if missing:
    print("cannot import", ", ".join(missing))
    sys.exit(1)
'

part() { # name, most seconds, command
    name=$1 seconds=$2
    shift 2
    echo "== $name, at most $seconds s"
    # At an interrupt pytest writes its results, and gpu.py prints its report and removes its model.
    timeout --signal INT --kill-after 15 "$seconds" "$@" || { echo "== $name FAILED with status $?"; failed=1; }
}

tests() { # name, most seconds, file of results, pytest's arguments
    name=$1 seconds=$2 results=$3
    shift 3
    # Warnings of another version of a library fail no test here.
    part "$name" "$seconds" \
        "$python" -m pytest -q -W default --continue-on-collection-errors --junitxml "$out/$results" "$@"
}

left() { # seconds until the end
    echo $((ends - $(date +%s)))
}

# Names all that is missing at once, and reads large libraries from the disk before a test's time begins.
part "imports" 90 "$python" -c "$import_all" $modules
# Apart, because a conftest that cannot be imported ends pytest.
tests "kernels' tests that need a GPU" 120 gpu-kernels.xml -m gpu --timeout 50 tests/kernels
tests "the KV pool's tests that need a GPU" 60 gpu-kv.xml -m gpu --timeout 50 tests/engine/kv
tests "workers that are killed" 120 gpu-workers.xml -m gpu --timeout 110 tests/e2e/test_on_gpu.py
tests "one model of each kind" 90 gpu-models.xml -m 'not full' -n 8 --timeout 60 \
    tests/models/test_types.py tests/models/test_kernels.py tests/models/test_transformers_adapters.py
budget=$(($(left) - 120))
part "numerics and figures" $((budget + 20)) "$python" benchmarks/gpu.py --budget-s "$budget" --json "$out/gpu.json"
tests "kernels against their references" "$(left)" kernels.xml \
    -m 'not full and not gpu' -n 8 --timeout 60 --ignore tests/kernels/test_compile_check.py tests/kernels
exit $failed
