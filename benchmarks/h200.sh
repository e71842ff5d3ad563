#!/usr/bin/env bash
# On a machine with a GPU: the laws on every kernel, every operator beside its peers, then launch configurations.
#
#     benchmarks/h200.sh [FOLDER] [STEP...]
#
# Steps: check bench tune; by default all three, within eight minutes. What is not known is refused with exit code 2,
# before anything runs. FOLDER/gpu.tgz holds all that was found and is written anew as it goes, so that a run which is
# cut short loses little; an older run's is kept beside it, named by its time. CHECK, BENCH and TUNE are the seconds that
# a step may take (CHECK: for each dtype), LIMIT those in which all is over but what has begun: of a step there is as
# much as it leaves. OPERATORS and DTYPES (of the laws) say what is asked, PYTHON names the interpreter; DEVICE=cpu runs
# check and bench without kernels, to see that nothing is missing.
#
# On a machine with several GPUs each takes its part of the shapes, behind the goals' the others too, and laws of other
# operators; cores are shared out among them. GPUS says which (0,2): by default all, or those of CUDA_VISIBLE_DEVICES.
#
# Most of a benchmark's time goes into compiling peers, one kernel after the other. So each is begun beside the laws,
# unheeded: what was compiled by their end lies on disk when it counts, and a GPU is measured with nothing beside on it.
#
# It needs torch, triton, numpy, jaxtyping and typer. Peers are timed where they are there: FlexAttention and SDPA are
# torch's own, transformers gives Qwen3-Next's fallback. Flash Linear Attention, FlashQLA and xFormers come along as
# PEERS=FILE, which benchmarks/peers.sh makes where there is a registry. FLA computes by its Triton kernels, as in
# what it and FlashQLA publish, also where TileLang is there and it would take that for some.
set -u
cd "$(dirname "$0")/.." || exit 2
out=${1:-out/gpu}
shift || true
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
steps=${*:-check bench$([ "$device" = cpu ] || echo ' tune')}
known="delta linear softmax selective_scan scan"
operators=${OPERATORS:-$known}
dtypes=${DTYPES:-bfloat16}
CHECK=${CHECK:-150} BENCH=${BENCH:-195} TUNE=${TUNE:-40} LIMIT=${LIMIT:-470}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=160
refuse() { echo "h200.sh: $1" >&2; exit 2; }
for step in $steps; do
  [[ " check bench tune " == *" $step "* ]] || refuse "unknown STEP $step; expected check, bench or tune"
done
[[ $out != -* ]] || refuse "FOLDER is $out; expected a folder, which does not begin with -"
[[ " check bench tune " != *" $out "* ]] || refuse "FOLDER is $out, which is a STEP; expected a folder before the steps"
[[ " cuda cpu " == *" $device "* ]] || refuse "DEVICE=$device; expected cuda or cpu"
[ "$device" = cuda ] || [[ " $steps " != *" tune "* ]] || refuse "STEP tune with DEVICE=$device; expected DEVICE=cuda"
for dtype in $dtypes; do
  [[ " bfloat16 float16 float32 " == *" $dtype "* ]] || refuse "DTYPES: unknown $dtype; expected bfloat16, float16, float32"
done
for operator in $operators; do
  [[ " $known " == *" $operator "* ]] || refuse "OPERATORS: unknown $operator; expected some of $known"
done
for name in CHECK BENCH TUNE LIMIT; do
  [[ ${!name} =~ ^[1-9][0-9]*$ ]] || refuse "$name=${!name}; expected seconds, a whole number above 0"
done
found=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null) || found=  # its errors it prints as it does GPUs
source=GPUS named=${GPUS:-}
if [ -z "$named" ]; then
  source=CUDA_VISIBLE_DEVICES named=${CUDA_VISIBLE_DEVICES-$found}
  named=${named//$'\n'/,} named=${named// /}
fi
if [ "$device" = cpu ]; then
  [ -z "${GPUS:-}" ] || refuse "GPUS=$GPUS with DEVICE=$device; expected DEVICE=cuda"
  named=0
fi
[ -n "$named" ] && [ "$named" != -1 ] || refuse "there is no GPU; expected one that nvidia-smi or GPUS names, or DEVICE=cpu"
[[ $named =~ ^[^,[:space:]]+(,[^,[:space:]]+)*$ ]] || refuse "$source=$named; expected GPUs joined by commas"
[ -z "${GPUS:-}" ] || export CUDA_VISIBLE_DEVICES=$GPUS
IFS=, read -ra gpus <<<"$named"
[ -z "$(printf '%s\n' "${gpus[@]}" | sort | uniq -d)" ] || refuse "$source=$named; expected each GPU once"
out=$(realpath -m -- "$out")
mkdir -p -- "$out" && [ -w "$out" ] || refuse "FOLDER $out cannot be made or written"
work=$(mktemp -d) rehearsed=$(mktemp -d)
trap 'rm -rf "$work" "$rehearsed"' EXIT
if [ -n "${PEERS:-}" ]; then
  mkdir "$rehearsed/peers" && tar xJf "$PEERS" -C "$rehearsed/peers" ||
    refuse "PEERS=$PEERS; expected an archive that benchmarks/peers.sh made"
  export PYTHONPATH="$PYTHONPATH:$rehearsed/peers" TILELANG_CACHE_DIR="$rehearsed/peers/tilelang_cache"
fi
[ ! -e "$out/gpu.tgz" ] || mv --backup=numbered "$out/gpu.tgz" "$out/gpu.$(date -r "$out/gpu.tgz" +%Y%m%d-%H%M%S).tgz"
export FLA_TILELANG=${FLA_TILELANG:-0}
# Where Python may not write beside what it imports, every process would compile torch's modules again.
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=$rehearsed/python
fi
failed=0
REHEARSAL=30 # GiB of a GPU that benchmarks hold which are begun beside the laws: the largest of them have 12 and 12

# Whatever happens, what there is comes back: also where the archive itself is all that is fetched.
pack() { tar czf "$out/gpu.tmp" -C "$work" . && mv "$out/gpu.tmp" "$out/gpu.tgz"; }
trap 'still; pack; rm -rf "$work" "$rehearsed"' EXIT

# Nothing runs any more that was begun beside.
still() {
  local begun
  begun=$(jobs -p)
  [ -z "$begun" ] || { kill $begun; wait; } 2>/dev/null
}

# at PLACE: what a command on the GPU at this place begins with, in `here`: this GPU alone, and its share of the cores.
mapfile -t cores < <("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")' 2>/dev/null)
at() {
  local many=$((${#cores[@]} / ${#gpus[@]})) IFS=,
  here=()
  [ ${#gpus[@]} = 1 ] && return
  here=(env "CUDA_VISIBLE_DEVICES=${gpus[$1]}")
  [ $many = 0 ] || here+=(taskset -c "${cores[*]:$1 * many:many}")
  "${here[@]}" true 2>/dev/null || here=("${here[@]:0:2}")
}

# ask NAME PLACE SECONDS COMMAND...: its whole output in NAME.txt, how it ended in steps.txt; a hang ends it, and it alone.
ask() {
  local name=$1 place=$2 seconds=$3 began=$SECONDS here code
  shift 3
  at "$place"
  "${here[@]}" timeout -k 10 "$seconds" "$@" >"$work/$name.txt" 2>&1
  code=$?
  echo "$name: exit code $code after $((SECONDS - began)) s$([ $code = 124 ] && echo ', out of time')" | tee -a "$work/steps.txt"
  return $code
}

# each FUNCTION: on every GPU at once, told its place and how what it leaves is named; whether all went well.
each() {
  local place begun=() well=0
  for place in "${!gpus[@]}"; do
    "$1" "$place" "$(named "$place")" &
    begun+=($!)
  done
  for place in "${begun[@]}"; do wait "$place" || well=1; done
  return $well
}

# named PLACE: nothing where there is one GPU.
named() { [ ${#gpus[@]} = 1 ] || echo ".$1"; }

ask doctor 0 60 "$python" -m foci doctor || failed=1
cat "$work/doctor.txt"

# The goals' shapes first: what is over the limit is left out from the end.
declare -A shapes=(
  [delta]="Qwen GDN 8192x1 16:32,KDA 1x8192,small,Qwen GDN 8192x4 16:32,GDN 4x2048x16,Qwen GDN 2048x1 2:8,KDA 1x1024,GDN 2x16384"
  [linear]="GLA 4x2048x16,SSD,small,GLA 2x16384x16,RetNet 4x2048,packed,RWKV"
  [softmax]="softcap,window,sink,bias,dlse,decode 1x4096,decode 64x8192,2x8192x16x128 causal,small,packed,Flux,1x16384x32x64 causal"
  [selective_scan]="2.8b,small"
  [scan]="8x2048,small"
)
declare -A share=([delta]=34 [linear]=30 [softmax]=28 [selective_scan]=5 [scan]=3)
# Where torch's kernels are as right, ours are timed beside them.
declare -A more=([softmax]="--backends aten,triton")
if [ "$device" = cpu ]; then
  more=()
  for operator in "${!shapes[@]}"; do shapes[$operator]=small; done
  shapes[linear]="small simple"
fi

# told_of OPERATOR PLACE: what its benchmark is told, a word a line. Several GPUs take the other shapes too: all have an x.
told_of() {
  local part=()
  [ ${#gpus[@]} = 1 ] || part=(",x" --part "$(($2 + 1))/${#gpus[@]}")
  printf '%s\n' --device "$device" ${more[$1]:-} --shapes "${shapes[$1]}${part[0]:-}" "${part[@]:1}"
}

rehearse() {
  local operator place here
  for place in "${!gpus[@]}"; do
    at "$place"
    for operator in $operators; do
      mapfile -t told < <(told_of "$operator" "$place")
      # What a peer chooses for itself it would keep on disk: it chooses when nothing runs beside it.
      FLA_CACHE_RESULTS=0 TRITON_CACHE_AUTOTUNING=0 "${here[@]}" timeout -k 5 $((CHECK + 30)) "$python" -m foci \
        bench "$operator" "${told[@]}" --out "$rehearsed/$operator.$place" >"$rehearsed/$operator.$place.txt" 2>&1 &
    done
  done
}

# Each GPU has the laws of one operator, the last one those of all that are left.
laws_on() {
  local mine=($operators)
  mine=(${mine[@]:$1:$(($1 + 1 < ${#gpus[@]} ? 1 : ${#mine[@]}))})
  [ ${#mine[@]} = 0 ] || ask "laws_$dtype$2" "$1" $((seconds + 30)) "$python" benchmarks/laws.py "${mine[@]}" \
    --device "$device" --dtype "$dtype" --limit "$seconds" --leave "$leave" --out "$work/laws"
}

# within NAME SECONDS [LEAST]: as many of these `seconds` as LIMIT leaves, and it is said where these are fewer; where
# they are fewer than pay, none. What ends a step takes some seconds.
within() {
  local least=${3:-10}
  seconds=$((LIMIT - SECONDS - 10))
  if [ "$seconds" -ge "$2" ]; then
    seconds=$2
  elif [ "$seconds" -ge "$least" ]; then
    echo "$1: $seconds s of $2, as LIMIT is $LIMIT" | tee -a "$work/steps.txt"
  else
    echo "$1: not begun, $SECONDS s of $LIMIT are over" | tee -a "$work/steps.txt"
    return 1
  fi
}

laws() {
  local dtype seconds
  for dtype in $dtypes; do
    within "laws_$dtype" "$CHECK" || { failed=1; continue; }
    each laws_on || failed=1
    cat "$work/laws_$dtype"*.txt
    pack
  done
}

bench_on() {
  mapfile -t told < <(told_of "$operator" "$1")
  ask "bench_$operator$2" "$1" $((seconds + 50)) "$python" -m foci bench "$operator" "${told[@]}" --limit $seconds \
    --out "$work/$operator$2"
}

bench() {
  # One after the other, as nothing else may run beside what is timed; a process each, as a fault of the GPU ends one.
  # Every operator has START seconds, in which it is imported and compiled, and its share of the rest.
  local operator seconds all count=0 total=0
  local START=15
  within bench "$BENCH" || { failed=1; return; }
  all=$seconds
  for operator in $operators; do
    count=$((count + 1)) total=$((total + share[$operator]))
  done
  for operator in $operators; do
    seconds=$((all > START * count ? START + (all - START * count) * share[$operator] / total : all / count))
    within "bench_$operator" "$seconds" 1 || { failed=1; continue; }
    each bench_on || failed=1
    tail -q -n +3 "$work/bench_$operator"*.txt | sed '/^wrote /d'
    pack
  done
}

decode() {
  local seconds
  within decode 120 40 || { failed=1; return; }
  ask decode 0 "$seconds" "$python" benchmarks/decode.py --device "$device" --json "$work/decode.json" || failed=1
  cat "$work/decode.txt"
}

tune() {
  # A second table for each dtype is not made: half precision is what models run in.
  # It comes last: a slow host has used its time up by then.
  local seconds
  within tune "$TUNE" || return
  ask tune 0 $((seconds + 60)) "$python" -m foci tune $operators --limit "$seconds" --out "$work/tuned" || failed=1
  tail -n 40 "$work/tune.txt"
}

for step in $steps; do
  case $step in
    check)
      leave=0
      [ "$device" = cpu ] || [[ " $steps " != *" bench "* ]] || { rehearse; leave=$REHEARSAL; }
      laws
      still
      ;;
    bench) decode; bench ;;
    tune) tune ;;
  esac
  pack
done
cat "$work/steps.txt"
exit $failed
