"""CURVE keys: who may talk to a learner that listens beyond its own machine.

    python -m grpo.keys DIR       (or ./run.sh keys DIR)

makes learner.key, learner.key_secret, sampler.key and sampler.key_secret. The learner needs learner.key_secret and
every sampler's public key; a sampler needs sampler.key_secret and learner.key. Copying the folder to all machines
gives both sides what they need; for samplers of different owners make one pair each and put only their .key with the
learner.
"""

import os
import struct
import sys
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

KEY_BYTES = 32


def make_keys(folder: Path) -> None:
    """Write two fresh pairs; ValueError rather than overwrite one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    present = sorted(path.name for path in folder.glob("*.key*"))
    if present:
        raise ValueError(f"{folder} holds {', '.join(present)} already: choose another folder, or remove them")
    before = os.umask(0o077)  # the secret halves are for their owner's eyes
    try:
        for name in ("learner", "sampler"):
            zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(before)


def guard_learner(socket: zmq.Socket, folder: Path, context: zmq.Context) -> ThreadAuthenticator:
    """Let only those in whose public key lies in `folder`; the result must be stopped before the context ends."""
    socket.curve_publickey, socket.curve_secretkey = _load(folder / "learner.key_secret")
    for path in folder.glob("*.key"):
        _load(path)  # with one that cannot be read ZeroMQ lets nobody in
    socket.curve_server = True
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=str(folder))
    return authenticator


def check_sampler_keys(folder: Path) -> None:
    """ValueError unless `folder` holds what `guard_sampler` reads."""
    _load(folder / "sampler.key_secret")
    _load(folder / "learner.key")


def guard_sampler(socket: zmq.Socket, folder: Path) -> None:
    """Speak only with the owner of learner.key, and as the owner of sampler.key_secret."""
    socket.curve_publickey, socket.curve_secretkey = _load(folder / "sampler.key_secret")
    socket.curve_serverkey, _ = _load(folder / "learner.key")


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        if path.suffix == ".key_secret" and not secret:
            raise ValueError("it has no secret key")
        for key in (public, secret) if secret else (public,):
            if len(z85.decode(key)) != KEY_BYTES:
                raise ValueError("a key has 40 characters")
        return public, secret
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ValueError(f"--keys {path.parent}: {path.name} cannot be read ({error}): see ./run.sh keys") from error


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: ./run.sh keys DIR")
    try:
        make_keys(Path(sys.argv[1]))
    except (ValueError, OSError) as error:
        sys.exit(f"keys: {error}")
    print(f"keys are in {sys.argv[1]}; start learner and samplers with --keys {sys.argv[1]}")
