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

Variables: TRAINER_GPUS=0,1  SAMPLER_GPUS=2   which GPUs each side takes
           TRAINER_RANKS=2                    ranks of the learner on a machine without GPU
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

# Install what the files in $@ list, unless exactly that is installed already.
setup() {
    local python=${PYTHON:-python3} stamp
    stamp=$VENV/installed-$(cat "$@" | cksum | cut -d' ' -f1)
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
        echo "installing into $VENV (a few minutes the first time)"
        local file arguments=()
        for file in "$@"; do arguments+=(-r "$file"); done
        "$VENV/bin/python" -m pip install -q "${arguments[@]}" || fail "pip could not install ${*##*/}: see its message above"
        touch "$stamp"
    ) 9>"$VENV/.lock"
}

log_to() { # copy all further output to a file; exec keeps signals and the exit status those of the worker
    exec > >(tee -i -a "$1") 2>&1
}

trainer() {
    local count launch
    count=$(gpu_count)
    if [ "$count" -eq 0 ]; then
        export CUDA_VISIBLE_DEVICES=
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
    exec "$VENV/bin/deepspeed" "${launch[@]}" --master_port "${MASTER_PORT:-$port}" "$ROOT/training_worker.py" "$@"
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
            setup "$ROOT/requirements.txt" "$ROOT/tests/requirements.txt"
            cd "$ROOT" && exec "$VENV/bin/python" -m pytest "$@"
            ;;
        trainer) setup "$ROOT/requirements.txt" && trainer "$@" ;;
        sampler) setup "$ROOT/requirements.txt" && sampler "$@" ;;
        help | -h | --help) usage ;;
        *)
            usage >&2
            fail "unknown verb $verb"
            ;;
    esac
}

main "$@"
