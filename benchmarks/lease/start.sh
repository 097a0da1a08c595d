#!/usr/bin/env bash
# Start jobs on a rented machine and return at once: bash benchmarks/lease/start.sh BUNDLE... -- RELEASE_OPTION...
# Once the bundles are complete, benchmarks.release runs with the options. It uses a copy of the source code, because
# the next call may replace the working tree.
set -euo pipefail
work=$HOME/lease
mkdir -p "$work/out" "$work/src"
cp -r deskside benchmarks tests pyproject.toml "$work/src"
cd "$work"
setsid nohup bash src/benchmarks/lease/run.sh "$@" > out/release.log 2>&1 < /dev/null &
nvidia-smi --query-gpu=name,memory.used,driver_version --format=csv,noheader
