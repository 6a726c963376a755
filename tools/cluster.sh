#!/bin/sh
# kvrelay on a cluster for tests, whatever kind of cluster it is.
#
#   sh tools/cluster.sh prepare     builds both images for the CPU, brings them and the demo model to the cluster
#   sh tools/cluster.sh test        the same, and images to upgrade from and to; then the tests of tests/cluster (more arguments are
#                                   pytest's)
#
# Upgrades go from the newest release before this tree, or, where there is no tag of one, from this tree; and to this tree as the next
# version might be (tests/cluster/next_version.py).
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

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
images=

# shellcheck disable=SC2086 # commands with their arguments
image() { # NAME:TAG CONTEXT OPTIONS...
    echo "== image $1"
    # Retry once: an image store may delete the old image's layers while the new image starts to share them.
    $BUILD "$@" || { echo "== again: image $1"; $BUILD "$@"; }
    images="$images $1"
}

both_images() { # TAG CONTEXT
    image "kvrelay-gateway:$1" "$2" --target gateway
    # shellcheck disable=SC2086
    image "kvrelay-worker:$1" "$2" --target worker $TORCH
}

both_images "$KVRELAY_TEST_TAG" .
if [ "$1" = test ]; then
    export KVRELAY_TEST_NEXT_TAG=next
    mkdir "$work/next"
    cp tests/cluster/next_version.py "$work/next"
    for name in gateway worker; do
        printf '%s\n' "FROM kvrelay-$name:$KVRELAY_TEST_TAG" "USER 0" "COPY next_version.py /tmp/" \
            "RUN python /tmp/next_version.py" "USER 10001:10001" >"$work/next/Dockerfile"
        image "kvrelay-$name:next" "$work/next"
    done
    released=$(git tag --list 'v[0-9]*' --merged HEAD --sort=-v:refname 2>/dev/null | sed -n 1p)
    if [ -n "$released" ]; then
        export KVRELAY_TEST_OLD_TAG=old KVRELAY_TEST_OLD_TREE="$work/old"
        mkdir "$work/old"
        git archive "$released" | tar -x -C "$work/old"
        both_images old "$work/old"
    fi
fi
$UP
if [ -n "$LOAD" ]; then
    # shellcheck disable=SC2086
    for one in $images; do $LOAD "$one"; done
fi

# Pods do not run as root, so make the model readable for all.
model=$(.venv/bin/kvrelay fetch demo)
mkdir -p "$MODELS"
cp -R "$model" "$MODELS/"
if [ "$1" = test ]; then .venv/bin/python tests/cluster/fewer_heads.py "$model" "$MODELS"; fi
chmod -R a+rX "$MODELS"

if [ "$1" = test ]; then
    shift
    .venv/bin/python -m pytest -s --durations=15 tests/cluster "$@"
fi
