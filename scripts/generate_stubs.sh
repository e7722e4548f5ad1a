#!/bin/sh
# Generates the Python code of protos/ into a folder.
set -eu
cd "$(dirname "$0")/.."
out=$1

# protoc finds its plugins for mypy on the path.
PATH="$PWD/.venv-proto/bin:$PATH"
# shellcheck disable=SC2046  # our own file names have no spaces
python -m grpc_tools.protoc -I protos \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
    $(find protos -name '*.proto' | sort)
