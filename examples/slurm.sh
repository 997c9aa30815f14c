#!/usr/bin/env bash
# A run on several nodes: Redis, trainer and weight service on the first, a producer and a weight service on each other.
#   sbatch --nodes=5 examples/slurm.sh run.toml     in the checkout, which lies on a file system that all nodes share
# HEADRACE_RUN names a run that is to go on.
#SBATCH --job-name=headrace
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@300
set -euo pipefail
config=${1:?the TOML file of the run}
export HEADRACE_RUN=${HEADRACE_RUN:-slurm-$SLURM_JOB_ID}
port=${HEADRACE_REDIS_PORT:-6379}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes[0]}
folder=$PWD/runs/redis-$HEADRACE_RUN
mkdir -p "$folder"
[ -s "$folder/password" ] || (umask 077 && openssl rand -hex 24 >"$folder/password")
export HEADRACE_REDIS_URL=redis://$first:$port/0 HEADRACE_REDIS_PASSWORD_FILE=$folder/password

on() { # NODES COMMAND…: one step, one task on each of the nodes, with all that the node has
  local where=$1
  shift
  srun --overlap --nodelist="$where" --ntasks-per-node=1 "$@" &
}

(umask 077 && cat >"$folder/redis.conf" <<END
bind 0.0.0.0
port $port
dir $folder
appendonly yes
auto-aof-rewrite-min-size 256mb
save ""
maxmemory-policy noeviction
requirepass $(cat "$folder/password")
END
)
on "$first" redis-server "$folder/redis.conf"
redis=$!
# It waits for Redis.
.venv/bin/headrace register --config "$config" --set weights.bind=0.0.0.0
on "$(IFS=,; echo "${nodes[*]}")" .venv/bin/python -m weightsync
weights=$!
on "$first" .venv/bin/python -m consumers --resume
trainer=$!
producers=()
if [ ${#nodes[@]} -gt 1 ]; then
  on "$(IFS=,; echo "${nodes[*]:1}")" .venv/bin/python -m producers
  producers=($!)
fi

# The time is nearly over, or somebody said `scancel --signal=TERM --batch`: all drain, the trainer writes a checkpoint.
told=
trap 'told=1; .venv/bin/headrace stop || true' TERM
code=0
wait "$trainer" || code=$?
if [ "$told" ]; then
  # What ended `wait` was the signal.
  code=0
  wait "$trainer" || code=$?
fi
# Without a trainer the others would hold the nodes until the time is over.
[ "$code" = 0 ] || .venv/bin/headrace stop || true
wait "$weights" "${producers[@]}" || true
kill "$redis"
wait "$redis" || true
exit "$code"
