#!/bin/bash
# Train on several machines: run the same command on each of them, in any order.
#
#     examples/launch/multi_node.sh NODES HEAD[:PORT] [options of train_lm.py]
#
#     examples/launch/multi_node.sh 2 node-a:29500 --out /shared/runs/lm          # exactly two machines
#     examples/launch/multi_node.sh 1:2 node-a:29500 --out /shared/runs/lm --global-batch-size 32    # one will do
#
# HEAD is the machine that the others look for; it has to be one of them. --out must be a folder that all machines see.
# When a rank dies, all are started again and go on from the newest complete checkpoint. With 1:2 a machine may go for
# good, or come back: the ranks that are there share the model and the batch among themselves.
#
# NPROC         ranks a machine (default: one for each GPU)
# MAX_RESTARTS  how many failures, and machines that come or go, the job bears (default 3)
# NODE_RANK     0 on HEAD, 1, 2, ... on the others: fixes who is who, instead of whoever comes first. Then nothing is
#               started again by itself: a rank that dies ends the job on all machines, with status 1. Start it there anew.
# JOB_ID        tells jobs apart that use one HEAD and PORT one after the other (default train_lm)
# RDZV_CONF     more for torchrun's --rdzv-conf, for instance last_call_timeout=10
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
fi
nodes=$1 head=$2
shift 2

if [ -n "${NODE_RANK:-}" ]; then
    port=29500
    [[ $head == *:* ]] && port=${head##*:}
    # No restarts: with fixed ranks each agent restarts when its own ranks fail, in no common round (torch 2.13).
    meet=(--node-rank="$NODE_RANK" --master-addr="${head%:*}" --master-port="$port" --max-restarts=0)
else
    meet=(--rdzv-backend=c10d --rdzv-endpoint="$head" --rdzv-id="${JOB_ID:-train_lm}" --rdzv-conf="${RDZV_CONF:-}"
        --max-restarts="${MAX_RESTARTS:-3}")
fi

# How long ranks that were asked to stop may take for their checkpoint, in seconds. It is also how long a rank that
# hangs holds up a restart.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}

# torchrun otherwise gives the ranks of every round one store, in which those of the next round find the addresses of
# the last one's dead ranks: "connectFullMesh failed" (torch 2.13; https://github.com/pytorch/pytorch/issues/135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes="$nodes" --nproc-per-node="${NPROC:-gpu}" "${meet[@]}" \
    "$(dirname "$0")/../train_lm/train_lm.py" --auto-resume "$@"
