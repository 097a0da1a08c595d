#!/usr/bin/env bash
# Print the last lines of a job's logs, after SECONDS or when the job is done: bash benchmarks/lease/poll.sh SECONDS
# What the job has made so far, without weights, comes back as $OUT/results.tar.gz, and is packed anew every minute, so
# that little is lost if the machine is taken back.
set -euo pipefail
end=$((SECONDS + $1))
cd "$HOME/lease"
pack() {
    tar --exclude '*.safetensors' --exclude '*.pt' --exclude '*.png' --exclude '*.svg' --exclude checkpoints \
        --exclude tokenizer.json --ignore-failed-read --warning=no-file-changed -czf "$OUT/new" $(cat out/folders 2>/dev/null) out || true
    mv "$OUT/new" "$OUT/results.tar.gz"
}
while [ ! -e out/done ] && [ $SECONDS -lt $end ]; do
    sleep $((end - SECONDS < 60 ? end - SECONDS : 60))
    pack
done
pack
tail -n 12 out/*.log
nvidia-smi --query-gpu=utilization.gpu,memory.used,power.draw --format=csv,noheader
[ -e out/done ] && echo DONE
