#!/usr/bin/env bash
# On a machine with a GPU: the laws on every kernel there, then every operator beside its peers; all into one folder.
#     benchmarks/h200.sh [FOLDER]          under eight minutes on one H200; PYTHON names the interpreter
set -u
cd "$(dirname "$0")/.."
out=${1:-out/gpu}
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
$python -m foci doctor >"$out/doctor.txt" || exit 1
cat "$out/doctor.txt"

# Compiling is the work of the processor, so the operators are checked side by side.
failed=0
for operator in softmax linear delta scan selective_scan; do
  timeout 170 "$python" -m foci check "$operator" --backend triton --device cuda --dtype bfloat16,float32 \
    --json "$out/check_$operator.json" >"$out/check_$operator.txt" 2>&1 &
done
for job in $(jobs -p); do wait "$job" || failed=1; done
tail -n 3 "$out"/check_*.txt

$python -m foci bench delta linear softmax scan selective_scan --device cuda --limit 270 --out "$out" | tee "$out/bench.txt"
exit $((failed || PIPESTATUS[0]))
