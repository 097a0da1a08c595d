# As it ran. common.sh had functions: wait_for a bundle, extract an archive, run a command with a log in out/.
# Two cards, 29 minutes. Bundles: site, indic, half.
# docs/languages.md: seeds 2 and 3 at a temperature of 1.04, on both cards. Then the ninth trial of expert-formats
# (docs/indicmoe.md) on the first card, and the load test of the server (docs/performance.md) on the second one.
source "$(dirname "$0")/common.sh"
echo languages expert-formats > out/folders
wait_for site
extract src/data/2026-11-29-languages/seed-1.tar.zst # since replaced by languages.tar.zst
mkdir expert-formats
(cd expert-formats && extract ../src/data/2026-11-28-experts/expert-formats.tar.zst)
rm -r expert-formats/runs/precision_nvfp4-s3 # interrupted, and its checkpoint is not in the archive
wait_for indic
run languages python3 -m deskside study ./languages --resume --seeds 3
wait_for half
ln -sfn half english
(
    export CUDA_VISIBLE_DEVICES=1
    run served python3 -m deskside train 124m --hours 1m --data.path half --evaluate.every none --runs served --name r
    for number in 1 2; do
        run "serve-$number" python3 src/benchmarks/serve_load.py served/r --seconds 30 --clients 64 --max-batch 64 \
            --warm-up 8 --json "out/serve-$number.json"
    done
    run serve-host python3 -m benchmarks.serve_host served/r
) &
CUDA_VISIBLE_DEVICES=0 run expert-formats python3 -m deskside study ./expert-formats --resume
wait
