#!/bin/bash
# Train on several machines under Slurm, for longer than one job may take. From the root of the repository:
#
#     sbatch examples/launch/slurm.sh --out /shared/runs/lm [more options of train_lm.py]
#     sbatch --nodes=16 examples/launch/slurm.sh --out /shared/runs/lm --bf16 --hsdp 2
#
# --out must be a folder that all machines see. What happens when:
#
#   a rank dies                  torchrun starts all ranks again; they go on from the newest checkpoint (multi_node.sh)
#   the time limit comes near    SIGUSR1 reaches this script, which has a checkpoint made and queues the job again
#   the job is preempted         the same, if Slurm sends the signal then too (SlurmctldParameters=preempt_send_user_signal);
#                                otherwise SIGTERM has a checkpoint made, and Slurm queues the job again (PreemptMode=REQUEUE)
#   a machine fails              Slurm queues the job again (--requeue); it goes on from the newest checkpoint
#   training is through          the job ends
#
#SBATCH --job-name=train_lm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train_lm-%j.log

# One task a node: torchrun, which starts the ranks. The signal comes 300 seconds before the end, to this script alone (B:);
# slow disks need more. A requeued job goes on in the same log (append).

set -uo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
export JOB_ID=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}

again=no
save_and_stop() {
    echo "$(date) asked to stop: the ranks save a checkpoint"
    again=yes
    scancel --signal=TERM "$SLURM_JOB_ID" # to the job's steps: torchrun and its ranks, not to this script
}
trap save_and_stop USR1

# In the background: bash runs a trap only when no command holds it, and `wait` lets it through.
srun "$SLURM_SUBMIT_DIR/examples/launch/multi_node.sh" "$SLURM_JOB_NUM_NODES" "$head:$port" "$@" &
step=$!
wait "$step"
status=$?
if [ "$again" = yes ]; then
    wait "$step" # the first one ended when the signal came
    echo "$(date) queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
