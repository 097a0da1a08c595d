#!/usr/bin/env bash
# Start a job of this folder on a rented machine and return at once: bash benchmarks/lease/start.sh JOB
# The job runs from a copy of the source code, because the next call may replace the working tree.
set -euo pipefail
work=$HOME/lease
mkdir -p "$work/out" "$work/src"
cp -r deskside benchmarks docs/data "$work/src"
cd "$work"
setsid nohup bash "src/benchmarks/lease/$1.sh" > out/job.log 2>&1 < /dev/null &
nvidia-smi --query-gpu=name,memory.used,driver_version --format=csv,noheader
