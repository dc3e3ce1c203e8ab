#!/usr/bin/env bash
# One worker of a process work pool. A whole pipeline in one job is simpler, and needs no server: `nanodag slurm`.
#   SERVER=10.0.0.5:4200 LOGIN=~/.nanodag-login sbatch $(nanodag sbatch rl --on 8xH100) docs/templates/slurm.sh POOL
# SERVER: address and port of the Prefect server. LOGIN: the file with its user:password. The store must be a folder of a
# file system that all nodes mount, and nanodag be installed there.
# The worker takes stages of the pool, one at a time, with the GPUs of its node. It ends when there was none for IDLE_S
# seconds; at the time limit the job queues itself again. Stages with `resources.nodes` above 1 have the job's other
# nodes where the pipeline file says so. Each job fills the variable in for itself:
#   cluster:
#     hostfile: $NANODAG_HOSTFILE
#     ssh_command: srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --nodelist={host}
#SBATCH --job-name=nanodag
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
: "${SERVER:?the address of the Prefect server, with its port}" "${LOGIN:?a file with its user:password}"
own="$(mktemp -d)"
slots="${SLURM_GPUS_ON_NODE:-$SLURM_CPUS_ON_NODE}"
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/ slots=$slots/" > "$own/hosts"
export NANODAG_HOSTFILE="$own/hosts" PREFECT_HOME="$own/prefect" PREFECT_API_URL="http://$SERVER/api"
export PREFECT_API_AUTH_STRING; PREFECT_API_AUTH_STRING="$(cat "$LOGIN")"
export PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1 PREFECT_LOGGING_EXTRA_LOGGERS=nanodag
export PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30

prefect worker start --pool "${1:-gpus}" --type process --limit 1 --name "slurm-$SLURM_JOB_ID" & pid=$!
resume=no idle=0
trap 'resume=yes; kill -TERM "$pid"' USR1  # the time limit is near
trap 'kill -TERM "$pid"' TERM  # scancel
while kill -0 "$pid" 2> /dev/null && [ "$idle" -lt "${IDLE_S:-600}" ]; do
  sleep 5 & wait $!
  if pgrep -P "$pid" > /dev/null; then idle=0; else idle=$((idle + 5)); fi  # a stage is its child
done
kill -TERM "$pid" 2> /dev/null
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
rm -rf "$own"
if [ "$resume" = yes ]; then scontrol requeue incomplete "$SLURM_JOB_ID"; fi
