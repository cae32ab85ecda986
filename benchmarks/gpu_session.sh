#!/usr/bin/env bash
# One sitting on a CUDA machine, at most ten minutes: calibrate, fit, run models live, compare with the shipped profile.
# Everything lands in one folder (default: gpu-session) and in gpu-session.tar.gz beside it; each step's output is in
# FOLDER/log.txt, and a step that fails leaves the others standing. Needs Python with torch and numpy; fitting and the
# live run also need rooftrace's own requirements and transformers, and are left out, saying so, without them.
#
#   benchmarks/gpu_session.sh [FOLDER]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-gpu-session}
python=${PYTHON:-python3}
mkdir -p "$out"
failed=0
step() { # step SECONDS COMMAND...: under a time limit, logged
  local limit=$1
  shift
  echo "+ $*" | tee -a "$out/log.txt"
  timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$out/log.txt"
  local code=${PIPESTATUS[0]}
  if [ "$code" -ne 0 ]; then
    echo "step ended with $code" | tee -a "$out/log.txt"
    failed=1
  fi
}
rooftrace() { printf '%s\n' "$python" -c "from sim.cli import main; main()"; }
mapfile -t cli < <(rooftrace)

nvidia-smi >"$out/nvidia-smi.txt" 2>&1
"$python" -m pip freeze >"$out/packages.txt" 2>&1
step 300 "$python" -m hwmodels.calibrate --backend torch --device cuda --model llama-3.1-8b --model gpt2-xl --budget 4min --out "$out"
if "$python" -c "import scipy, typer, rich, matplotlib, pandas" 2>/dev/null; then
  step 60 "${cli[@]}" calibrate --fit-only --out "$out"
  label=$("$python" -c "import json, sys; print(json.loads(open(sys.argv[1]).readline())['facts']['label'])" "$out/samples.jsonl")
  step 20 "${cli[@]}" hardware diff "$label" "$out/profile.toml"
  step 20 "${cli[@]}" validate --measured "$out/measured" --hardware "$out/profile.toml" --out "$out/own.csv"
  step 20 "${cli[@]}" validate --measured "$out/measured" --out "$out/shipped.csv"
  if "$python" -c "import transformers" 2>/dev/null; then
    step 150 "${cli[@]}" validate --live --hardware "$out/profile.toml" --out "$out/live.json" --plots "$out"
  else
    echo "transformers is not installed: no live run" | tee -a "$out/log.txt"
  fi
else
  echo "scipy, typer, rich, matplotlib or pandas is missing: fit elsewhere with rooftrace calibrate --fit-only --out $out" | tee -a "$out/log.txt"
fi
tar -czf "$out.tar.gz" "$out"
exit "$failed"
