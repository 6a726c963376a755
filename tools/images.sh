#!/bin/sh
# Builds the images and pushes them, by the names that the chart takes: make images REGISTRY=ghcr.io/you VERSION=0.1.0
#
#   kvrelay-gateway:VERSION       amd64 and arm64
#   kvrelay-worker:VERSION        amd64, CUDA
#   kvrelay-worker:VERSION-cpu    amd64, no GPU
set -eu
cd "$(dirname "$0")/.."
registry=${REGISTRY:?"names where images go, such as ghcr.io/you"}
version=${VERSION:-$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/kvrelay/__init__.py)}

image() { # TAG PLATFORMS OPTIONS...
    tag=$registry/$1 platforms=$2
    shift 2
    printf '== %s\n' "$tag"
    docker buildx build --push --sbom=true --provenance=true --platform "$platforms" --build-arg VERSION="$version" --tag "$tag" "$@" .
}

image "kvrelay-gateway:$version" linux/amd64,linux/arm64 --target gateway
image "kvrelay-worker:$version" linux/amd64 --target worker
image "kvrelay-worker:$version-cpu" linux/amd64 --target worker --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
