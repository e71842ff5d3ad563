#!/usr/bin/env bash
# The peers of the delta rule, linear attention and softmax in one file, for a GPU machine that reaches no registry.
#
#     benchmarks/peers.sh [FILE.tar.xz] [SHAPE...]            and on the machine
#     PEERS=FILE.tar.xz benchmarks/h200.sh
#
# For Linux on x86-64 and Python 3.12 (PYTHON_THERE names another). FlashQLA compiles for minutes when it is first
# called; where nvcc is, its kernels for an H200 are compiled here, for the problems that have one of the words SHAPE in
# their name, and travel along: on the machine they are found by the same versions. The file is 42 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
file=${1:-out/peers.tar.xz}
shift || true
there=${PYTHON_THERE:-3.12}
flash_qla=(flash_qla==0.1.3 tilelang==0.1.15 apache-tvm-ffi==0.1.12 torch-c-dlpack-ext==0.1.5 z3-solver==4.15.4.0)
others=(fla-core==0.6.0 einops==0.8.2 xformers==0.0.35)
here=(cloudpickle ml-dtypes psutil tqdm)  # what tilelang needs besides, which torch's images have

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=.venv/bin/python
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
  platforms+=(--platform "${name}_x86_64")
done

"$python" -m pip install -q --no-deps --no-compile --only-binary=:all: --python-version "$there" "${platforms[@]}" \
  --target "$work/there" "${flash_qla[@]}" "${others[@]}"
rm -rf "$work/there/bin"
if command -v nvcc >/dev/null; then
  "$python" -m pip install -q --no-deps --no-compile --target "$work/here" "${flash_qla[@]}" "${here[@]}"
  PYTHONPATH="$PWD/src:$work/here" TILELANG_CACHE_DIR="$work/there/tilelang_cache" \
    "$python" benchmarks/flash_qla_ahead.py "${@:-Qwen GDN 8192x}"
else
  echo "nvcc is not here: FlashQLA's kernels will be compiled on the machine" >&2
fi
# One library lies there twice, under two names.
find "$work/there/z3/lib" -name 'libz3.so' -exec ln -sf libz3.so.4.15 {} \;
mkdir -p "$(dirname "$file")"
tar c -C "$work/there" . | xz -6 -T0 >"$file"
ls -l "$file"
