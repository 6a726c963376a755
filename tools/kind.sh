#!/bin/sh
# A cluster of kind (https://kind.sigs.k8s.io) on this machine, and the cluster tests on it. Needs docker, kind, kubectl and helm.
#
#   sh tools/kind.sh up      a control plane and three nodes, with both images and the demo model; installs the chart
#   sh tools/kind.sh test    the tests of tests/cluster (more arguments are pytest's)
#   sh tools/kind.sh down    removes the cluster
set -eu
cd "$(dirname "$0")/.."

name=kvrelay
models=$PWD/build/kind-models # kind mounts it into the nodes as /models
for program in docker kind kubectl helm; do
    command -v $program >/dev/null 2>&1 || { echo "kvrelay: $program is not installed; see docs/kubernetes.md" >&2; exit 1; }
done

export BUILD="docker build --tag" LOAD="kind load docker-image --name $name" MODELS="$models" KVRELAY_TEST_MODELS=/models
export KVRELAY_TEST_CRASH_NODE="docker kill {}" KVRELAY_TEST_START_NODE="docker start {}"

create() {
    mkdir -p "$models"
    kind get clusters 2>/dev/null | grep -qx $name && return
    node="{role: worker, extraMounts: [{hostPath: '$models', containerPath: /models, readOnly: true}]}"
    printf 'kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nnodes: [{role: control-plane}, %s, %s, %s]\n' "$node" "$node" "$node" |
        kind create cluster --name $name --config -
}

use() {
    mkdir -p build
    kind get kubeconfig --name $name >build/kind.kubeconfig
    export KUBECONFIG="$PWD/build/kind.kubeconfig"
}

case ${1:-} in
up)
    create
    use
    sh tools/cluster.sh prepare
    helm upgrade --install kvrelay ./helm --values helm/examples/kind.yaml --set image.tag=test --wait --timeout 10m
    echo "export KUBECONFIG=$KUBECONFIG"
    ;;
test)
    shift
    create
    use
    exec sh tools/cluster.sh test "$@"
    ;;
down) kind delete cluster --name $name ;;
*)
    echo "usage: sh tools/kind.sh up | test | down" >&2
    exit 2
    ;;
esac
