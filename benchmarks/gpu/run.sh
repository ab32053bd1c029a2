#!/usr/bin/env bash
# All that has to be measured and checked on one GPU (H100 or H200: about 20 minutes). See README.md.
#
#   bash benchmarks/gpu/run.sh                          everything
#   bash benchmarks/gpu/run.sh steps                    one part: steps, timed, correctness, tests
#   OUT=/some/folder PYTHON=python3 bash benchmarks/gpu/run.sh
#   DRY=1 bash benchmarks/gpu/run.sh                    the same commands on the CPU, with a tiny model
#
# A part is made of steps of at most nine minutes each. A step that fails does not stop the others.
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${OUT:-benchmarks/gpu/results}
PARTS=${*:-steps timed correctness tests}
MORE=()
if [ "${DRY:-0}" = 1 ]; then MORE=(--device cpu --size tiny); fi
mkdir -p "$OUT"
failed=()

step() { # name, then the command
    local name=$1 start=$SECONDS
    shift
    echo "== $name: $*"
    timeout 540 "$@" 2>&1 | tee "$OUT/$name.log"
    local code=${PIPESTATUS[0]}
    echo "== $name: $((SECONDS - start)) s, exit $code"
    if [ "$code" != 0 ]; then failed+=("$name"); fi
}
bench() { # name, script, options
    local name=$1 script=$2
    shift 2
    step "$name" "$PYTHON" "benchmarks/gpu/$script" --out "$OUT/$name.json" "$@" ${MORE[@]+"${MORE[@]}"}
}

for part in $PARTS; do
    case $part in
    steps)
        bench step-nothing step.py --group nothing --variants floor,none,torch,fsdp2,fsdp2-flat,fsdp2-1M,fsdp2-all
        bench step-nccl step.py --group nccl --rounds 1 --variants none,torch,fsdp2,fsdp2-flat
        ;;
    timed)
        bench step-timed-100 step.py --group timed --bandwidth-gb 100 --rounds 1 \
            --variants none,torch,torch-lists,fsdp2,fsdp2-lists,fsdp2-auto,fsdp2-flat
        bench step-timed-25 step.py --group timed --bandwidth-gb 25 --rounds 1 --variants none,torch,fsdp2,fsdp2-lists
        ;;
    correctness)
        bench delays delays.py
        bench delays-2-ranks delays.py --ranks-on-gpu 2 --settings "direct,no reshard,replicas,offload"
        bench sanitizer sanitize.py
        ;;
    tests)
        step tests "$PYTHON" -m pytest -m gpu -q -n 6
        ;;
    *)
        echo "unknown part $part; known are steps, timed, correctness, tests" >&2
        exit 2
        ;;
    esac
done
if [ ${#failed[@]} != 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
