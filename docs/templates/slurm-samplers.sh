#!/usr/bin/env bash
# Samplers of one RL stage, each a task of an array with a GPU of its own. They come, go and move to other nodes; the
# stage follows the file that they write: set rl.sampler.urls_file to FOLDER/servers, in the pipeline file.
#   openssl rand -hex 24 > FOLDER/key && chmod 600 FOLDER/key
#   sbatch --array=0-7 --gpus-per-task=1 docs/templates/slurm-samplers.sh FOLDER --model MODEL --engine sglang
# FOLDER: on a file system that all nodes mount. What follows it goes to `nanodag sampler serve`.
#SBATCH --job-name=nanodag-samplers
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
folder="${1:?a folder that all nodes mount, with the key in it}"
shift
port=$((20000 + SLURM_JOB_ID % 10000)) mine="$folder/servers.d/$SLURM_JOB_ID"
list() {  # one task at a time; whoever reads sees the old file or the new one
  flock "$folder/servers.lock" sh -c 'cat "$0"/servers.d/* > "$0/servers.new" 2> /dev/null; mv "$0/servers.new" "$0/servers"' "$folder"
}
mkdir -p "$folder/servers.d"
nanodag sampler serve --host 0.0.0.0 --port "$port" --api-key-file "$folder/key" "$@" & pid=$!
trap 'kill -TERM "$pid"' TERM
echo "http://$(hostname):$port $folder/key" > "$mine"
list
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done  # a signal ends a wait, too
wait "$pid"; code=$?
rm -f "$mine"
list
exit "$code"
