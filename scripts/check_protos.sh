#!/bin/sh
# Checks protos/: style, compatibility with what clients may already use, and that the committed code was generated from it.
set -eu
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}

"$BIN/buf" lint

baseline=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null || true)
if [ -n "$baseline" ]; then
    "$BIN/buf" breaking --against ".git#tag=$baseline"
elif git rev-parse --verify --quiet refs/heads/main >/dev/null; then
    "$BIN/buf" breaking --against '.git#branch=main'
else
    echo "Neither a release nor a main branch to compare protos/ with."
fi

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
scripts/generate_stubs.sh "$fresh"
committed=$(find everystop -name '*_pb2*.py*' -not -path '*/__pycache__/*' | sort)
generated=$(cd "$fresh" && find everystop -name '*_pb2*' | sort)
if [ "$committed" != "$generated" ]; then
    printf 'Generated files do not match protos/. Run: make proto\ncommitted:\n%s\ngenerated:\n%s\n' "$committed" "$generated"
    exit 1
fi
for file in $generated; do
    diff -u "$file" "$fresh/$file" || { echo "$file was not generated from protos/. Run: make proto"; exit 1; }
done
