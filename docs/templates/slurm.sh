#!/usr/bin/env bash
# One worker of a process work pool for as long as a Slurm job lasts. What a stage needs of each node comes first:
#   sbatch $(nanodag sbatch rl --on 8xH100) docs/templates/slurm.sh POOL
# The worker takes stages of that pool, one at a time, with the GPUs of its node; with `resources.nodes: 2` a stage takes
# the other nodes of the allocation too. Set SERVER and LOGIN (a password file); store.url must be a folder of a file
# system that all nodes mount, and nanodag be installed there.
#SBATCH --job-name=nanodag
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail
: "${SERVER:?the address of the Prefect server}" "${LOGIN:?a file with its user:password}"
# cluster.hostfile: ~/.nanodag-hostfile-$SLURM_JOB_ID, as it stands: variables are filled in where the stage runs.
# cluster.ssh_command: srun --overlap --nodes=1 --ntasks=1 --nodelist={host}
hostfile="$HOME/.nanodag-hostfile-$SLURM_JOB_ID"
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/ slots=${SLURM_GPUS_ON_NODE:-1}/" > "$hostfile"
export PREFECT_API_URL="http://$SERVER:4200/api" PREFECT_API_AUTH_STRING PREFECT_HOME="${TMPDIR:-/tmp}/prefect-$SLURM_JOB_ID"
PREFECT_API_AUTH_STRING="$(cat "$LOGIN")"
export PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1 PREFECT_LOGGING_EXTRA_LOGGERS=nanodag PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30
exec prefect worker start --pool "${1:-gpus}" --type process --limit 1 --name "slurm-$SLURM_JOB_ID"
