#!/usr/bin/env bash
# On a machine with a GPU: the laws on every kernel there, then every operator beside its peers; all into one archive.
#     benchmarks/h200.sh [FOLDER]     writes FOLDER/gpu.tgz within ten minutes; PYTHON names the interpreter
set -u
cd "$(dirname "$0")/.."
out=${1:-out/gpu}
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
work=$(mktemp -d)
# Whatever happens, what there is comes back.
trap 'tar czf "$out/gpu.tgz" -C "$work" .' EXIT

$python -m foci doctor >"$work/doctor.txt" 2>&1
cat "$work/doctor.txt"

# A kernel of each kind first, compiled side by side: compiling is the processor's work, and the cache is shared.
operators="softmax linear delta scan selective_scan"

for operator in $operators; do
  for dtype in bfloat16 float32; do
    timeout 240 "$python" -m foci check $operator --backend triton --device cuda --dtype $dtype \
      --json "$work/check_${operator}_$dtype.json" >"$work/check_${operator}_$dtype.txt" 2>&1 || touch "$work/failed" &
  done
done
wait
tail -n 2 "$work"/check_*.txt

# A process for each operator: a fault of the GPU ends one of them.
shapes="small,2x16384x16x128,8192x4 16:32,2048x1 16:32,1x4096x64x128,decode,causal,softcap,window,sink,bias,dlse,packed,Flux,SSD,Mamba,x2048x"
for operator in delta linear softmax scan selective_scan; do
  timeout 90 "$python" -m foci bench $operator --device cuda --limit 60 --shapes "$shapes" --out "$work/$operator" \
    2>&1 | tee -a "$work/bench.txt"
  [ "${PIPESTATUS[0]}" = 0 ] || touch "$work/failed"
done
[ ! -e "$work/failed" ]
