#!/usr/bin/env bash
# Wait until the jobs are done or SECONDS have passed, and print the ends of their logs: benchmarks/lease/poll.sh SECONDS
# Their folders, without weights and plots, come back as $OUT/results.tar.gz. It is made anew every minute, so that
# little is lost if the machine is taken back. Before the first job, it waits 40 s at most, because a bundle of which a piece
# is missing would keep the machine idle.
set -euo pipefail
end=$((SECONDS + $1))
cd "$HOME/lease"
if [ ! -e out/release.log ]; then
    echo "start.sh has not run on this machine: no jobs to wait for" >&2
    exit 2
fi
wait_for_job=$((SECONDS + ${START_SECONDS:-40}))
pack() {
    find out -type f -size -16M ! -name '*.safetensors' ! -name '*.pt' ! -name '*.svg' ! -name tokenizer.json \
        ! -path '*/checkpoints/*' ! -path '*/export/*' -print0 |
        tar --null --files-from - --ignore-failed-read --warning=no-file-changed -czf "$OUT/new" || true
    mv "$OUT/new" "$OUT/results.tar.gz"
}
while [ ! -e out/done ] && [ $SECONDS -lt $end ]; do
    if [ ! -e out/state.json ] && [ $SECONDS -ge $wait_for_job ]; then
        echo "no job has begun; pieces of a bundle are missing:" >&2
        for parts in bundle-*/.parts; do
            if [ ! -e "$parts/unpacked" ]; then echo "$parts has only: $(ls "$parts" | tr '\n' ' ')" >&2; fi
        done
        cat out/release.log >&2
        exit 3
    fi
    sleep $((end - SECONDS < 20 ? end - SECONDS : 20))
    if [ $((SECONDS % 60)) -lt 20 ]; then pack; fi
done
pack
tail -n 8 out/*.log
nvidia-smi --query-gpu=utilization.gpu,memory.used,power.draw --format=csv,noheader
if [ -e out/done ]; then echo DONE; fi
