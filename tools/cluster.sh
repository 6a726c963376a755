#!/bin/sh
# kvrelay on a cluster for tests, whatever kind of cluster it is.
#
#   sh tools/cluster.sh prepare     builds both images for the CPU, brings them and the demo model to the cluster
#   sh tools/cluster.sh test        the same, then the tests of tests/cluster (more arguments are pytest's)
#
# What differs between clusters comes from the environment:
#
#   BUILD   builds an image, called as: $BUILD TAG CONTEXT OPTIONS      default: docker build --tag
#   TORCH   build arguments that say which torch                        default: PyTorch's own index of CPU builds
#   UP      brings the cluster up, behind the builds                    default: nothing, it is up
#   LOAD    brings an image to every node, called as: $LOAD TAG         default: nothing, BUILD did
#   MODELS  directory of this machine that every node sees as KVRELAY_TEST_MODELS
#
# and KUBECONFIG and KVRELAY_TEST_* as in tests/cluster/cluster.py.
set -eu
cd "$(dirname "$0")/.."

: "${BUILD:=docker build --tag}" "${TORCH=--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu}"
: "${UP:=}" "${LOAD:=}" "${MODELS:?}"
export KVRELAY_TEST_TAG=test

# shellcheck disable=SC2086 # commands with their arguments
for image in gateway worker; do
    arguments=
    if [ $image = worker ]; then arguments=$TORCH; fi
    echo "== image kvrelay-$image:$KVRELAY_TEST_TAG"
    build="$BUILD kvrelay-$image:$KVRELAY_TEST_TAG . --target $image $arguments"
    # Once more: an image store that collects the former image's layers may take those that it is just about to share with the new one.
    $build || { echo "== again: image kvrelay-$image:$KVRELAY_TEST_TAG"; $build; }
done
$UP
if [ -n "$LOAD" ]; then
    # shellcheck disable=SC2086
    for image in gateway worker; do $LOAD "kvrelay-$image:$KVRELAY_TEST_TAG"; done
fi

# Pods are not root: they must be able to read it.
model=$(.venv/bin/kvrelay fetch demo)
mkdir -p "$MODELS"
cp -R "$model" "$MODELS/"
chmod -R a+rX "$MODELS"

if [ "$1" = test ]; then
    shift
    exec .venv/bin/python -m pytest -s --durations=15 tests/cluster "$@"
fi
