#!/bin/sh
# Makes a separate environment in .clients for each of other projects' clients, because their requirements conflict with ours and
# with each other's. `make test-all` runs their unmodified packages against a deployment.
#   sh tools/clients.sh          run again at any time; does nothing if nothing changed (make clients calls it)
set -eu

cd "$(dirname "$0")/.."
python=.venv/bin/python

environment() { # NAME PACKAGE...
    directory=.clients/$1
    shift
    stamp=$directory/.done
    if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$*" ]; then return; fi
    printf 'kvrelay clients: %s\n' "$*"
    rm -rf "$directory"
    "$python" -m venv "$directory"
    "$directory/bin/python" -m pip --disable-pip-version-check install -qq "$@"
    printf '%s' "$*" >"$stamp"
}

# Two runs at a time would break each other's environments, so the second one waits.
exec 9<tools/clients.sh
if command -v flock >/dev/null 2>&1; then flock 9; fi

environment langchain 'langchain-openai>=1.0'
environment litellm 'litellm[mcp]>=1.80'  # tool calls need the extra
environment tgi 'text-generation>=0.7'
