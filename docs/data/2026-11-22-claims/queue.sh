# Studies one after the other on one card; nothing else runs on this machine.
export PYTHONPATH=$WORK/src:$WORK/site PYTHONUNBUFFERED=1
cd "$WORK"
(while true; do echo "$(date -u +%T) $(cut -d' ' -f1-4 /proc/loadavg) $(nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu,memory.used --format=csv,noheader)"; sleep 5; done) > load.txt &
SAMPLER=$!
study() { out=$1; shift; echo "$(date -u +%T) $out begins"; python3 -m deskside study $(if [ "$1" = --resume ]; then echo studies/$out; else echo claims --data.path data/english --out studies/$out; fi) "$@" > $out.log 2>&1; echo "$(date -u +%T) $out ended with $?"; }
for job in "$@"; do case $job in
  library) study library --resume;;
  fp8) study fp8 --only work=8x2048x16,16x2048x16,18x2048x16;;
  layout) study layout --only layout attention;;
  repeat) study repeat --only fp8-work_8x2048x16-precision_fp8;;
  sixteen) study sixteen --only work=16x2048x16;;
  small) study small --only work=4x512,4x512x16,12x2048,18x2048x16;;
  sizes) study sizes --only sizes;;
esac; done
kill $SAMPLER
echo done
