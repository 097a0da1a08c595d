# Studies one after the other on one card; nothing else runs on this machine.
# $WORK has the unpacked bundle (english, old, site) and src, a copy of the working tree.
export PYTHONPATH=$WORK/src:$WORK/site PYTHONUNBUFFERED=1
cd "$WORK"; mkdir -p data studies; ln -sfn "$WORK/english" data/english; cp -r old16 studies/sixteen
(while true; do echo "$(date -u +%T) $(cut -d' ' -f1-4 /proc/loadavg) $(nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu,memory.used --format=csv,noheader)"; sleep 5; done) > load.txt &
SAMPLER=$!
trap 'kill $SAMPLER' EXIT
study() { out=$1; shift; echo "$(date -u +%T) $out begins"; python3 -m deskside study "$@" > $out.log 2>&1; echo "$(date -u +%T) $out ended with $?"; }
for job in "$@"; do case $job in
  sixteen) study sixteen studies/sixteen --resume;;
  sizes) study sizes claims --data.path data/english --out studies/sizes --only sizes;;
  host) echo "$(date -u +%T) host begins"; (cd src && python3 -m benchmarks.planner_host --out $WORK/host.json --seconds 60) > host.log 2>&1; echo "$(date -u +%T) host ended with $?";;
esac; done
echo done
