"""The adapter folder: the learner publishes versions, samplers find and load them.

    save_path/run.json                  which run this folder belongs to
    save_path/adapters/v00000012/       PEFT's own format plus manifest.json (version, sha256, LoRA shape, canary)
    save_path/latest                    symlink to the newest version
    save_path/references/v00000000/     the same, for the KL term (grpo/reference.py)

A version is written under a temporary name, fsynced and renamed, then `latest` is replaced, so a reader meets whole
versions only. Nothing is edited in place. A reader takes the file's bytes into memory, compares hash, keys and shapes,
and touches the model only when all fit; otherwise AdapterError says why and the model keeps what it had.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load, save

from grpo.files import lock, sync, write_file
from grpo.json_lines import to_json

WEIGHTS, CONFIG, MANIFEST = "adapter_model.safetensors", "adapter_config.json", "manifest.json"
# entries of a LoRA configuration that do not change what its weights do
NO_SHAPE = {"inference_mode", "base_model_name_or_path", "revision", "init_lora_weights", "auto_mapping"}
NO_SHAPE |= {"peft_version", "lora_dropout", "runtime_config", "task_type"}
NO_SHAPE |= {"eva_config", "corda_config", "loftq_config"}  # of how the weights are first drawn


class AdapterError(RuntimeError):
    """A version that cannot be used now: absent, half there, or of another model; the message names the file."""


@dataclass(frozen=True)
class Manifest:
    """What the learner says of a version."""

    run_id: str
    version: int  # optimizer steps done when it was published
    sha256: str  # of the weights file
    lora: dict  # rank, alpha, targets
    canary: list[float]  # log-probs of a fixed text with this version, see grpo/policy.py
    reference: int | None = None  # its version in references/, None for the base model
    base_canary: list[float] | None = None  # the same log-probs without the adapter

    def __post_init__(self):
        lists = [self.canary] + ([] if self.base_canary is None else [self.base_canary])
        numbers = all(isinstance(one, list) and all(isinstance(value, (int, float)) for value in one) for one in lists)
        if not (isinstance(self.lora, dict) and isinstance(self.sha256, str) and numbers):
            raise TypeError("its entries are not of the kinds that a learner writes")


class AdapterStore:
    """One run's adapter folder, at either side; `kind` is adapters or references."""

    def __init__(self, path: str | Path, kind: str = "adapters"):
        self.path, self._kind = Path(path).expanduser().resolve(), kind

    def read_run(self) -> dict | None:
        """The content of run.json, or None while there is none."""
        try:
            return json.loads((self.path / "run.json").read_text())
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise AdapterError(f"cannot read {self.path / 'run.json'}: {error}") from error

    def write_run(self, run: dict) -> None:
        """Claim the folder for a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_file(self.path / "run.json", to_json(run, indent=2).encode())

    def lock(self) -> IO | None:
        """Claim the folder for this process until it ends; AdapterError if another learner has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        held = lock(self.path / ".lock")
        if held is None:
            raise AdapterError(f"another learner is at work in --save_path {self.path}: end it, or choose another")
        for leftover in self.path.glob("*/.tmp-v*"):  # of a learner that was killed while publishing
            shutil.rmtree(leftover)
        return held

    def folder(self, version: int) -> Path:
        """Where a version lies."""
        return self.path / self._kind / f"v{version:08d}"

    def versions(self) -> list[int]:
        """All published versions, oldest first."""
        return sorted(int(p.name[1:]) for p in (self.path / self._kind).glob("v*") if p.name[1:].isdigit())

    def publish(
        self, state: dict[str, torch.Tensor], config: LoraConfig, manifest_fields: dict, card: str = ""
    ) -> Manifest:
        """Write a new version, newer than all there are; of adapters, point `latest` at it.

        `state` is PEFT's state dict of the adapter; `manifest_fields` holds the Manifest's fields but for the hash;
        `card` is its README.md.
        """
        version = manifest_fields["version"]
        newest = max(self.versions(), default=-1)
        assert version > newest, f"version {version} after version {newest} in {self.path}"
        weights = save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, {"format": "pt"})
        manifest = Manifest(sha256=hashlib.sha256(weights).hexdigest(), **manifest_fields)
        temporary = self.folder(version).with_name(f".tmp-v{version:08d}")
        shutil.rmtree(temporary, ignore_errors=True)  # left by a learner that was killed here
        temporary.mkdir(parents=True)
        config.save_pretrained(temporary)
        write_file(temporary / WEIGHTS, weights)
        write_file(temporary / MANIFEST, json.dumps(vars(manifest)).encode())
        write_file(temporary / "README.md", card.encode())
        sync(temporary / CONFIG)
        sync(temporary)
        os.rename(temporary, self.folder(version))
        if self._kind == "adapters":
            self._point_latest(version)
        return manifest

    def prune(self, keep_newest: int, keep: set[int]) -> None:
        """Remove old versions, except the newest `keep_newest` and those in `keep`."""
        for version in self.versions()[:-keep_newest]:
            if version not in keep:
                shutil.rmtree(self.folder(version))

    def remove_from(self, first: int) -> None:
        """Remove version `first` and all later ones; `latest` points at the newest that stays."""
        versions = self.versions()
        kept = [version for version in versions if version < first]
        if self._kind == "adapters" and len(kept) < len(versions):
            self._point_latest(kept[-1]) if kept else (self.path / "latest").unlink(missing_ok=True)
        for version in reversed(versions[len(kept) :]):
            shutil.rmtree(self.folder(version))

    def repair(self) -> None:
        """Point `latest` at the newest whole version, as a publishing that was killed did not; later ones are removed.

        A version is whole unless the disk failed, since it is renamed into place; it is written again then.
        """
        for version in reversed(self.versions()):
            try:
                self.read(version)
            except AdapterError as error:
                print(f"{error}; it is removed, and published again")
                shutil.rmtree(self.folder(version))
                continue
            if (self.path / "latest").resolve() != self.folder(version):
                self._point_latest(version)
            return

    def check_owner(self, run_id: str | None, at_most: float) -> None:
        """AdapterError where versions lie that are not of the run `run_id`, or are newer than `at_most`.

        run_id: None where the folder has no run.json.
        """
        for version in self.versions():
            try:
                owner = json.loads((self.folder(version) / MANIFEST).read_text())["run_id"]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # removed by halves when a learner was killed
            if owner != run_id or version > at_most:
                whose = f"run {owner}" if owner != run_id else f"a step that {self.path / 'tickets.jsonl'} lacks"
                raise AdapterError(
                    f"--save_path {self.path} holds version {version} in {self._kind}/, of {whose}, and samplers would "
                    f"take it for this run's: move {self._kind}/ away, or choose another --save_path"
                )

    def read(self, version: int) -> tuple[Manifest, LoraConfig, dict[str, torch.Tensor]]:
        """A version's manifest, PEFT config and tensors, with the weights checked against the manifest's hash."""
        folder = self.folder(version)
        try:
            manifest = Manifest(**json.loads((folder / MANIFEST).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise AdapterError(f"adapter version {version} in {folder} cannot be read: {error}") from error
        return manifest, *read_adapter(folder, manifest.sha256)

    def hash_of(self, version: int) -> str | None:
        """The sha256 that a version's manifest has for its weights; None for a version that is not there."""
        try:
            return json.loads((self.folder(version) / MANIFEST).read_text())["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def wait_for(self, at_least: int, limit: float) -> int:
        """The newest version, once it is `at_least`; AdapterError after `limit` seconds without one."""
        deadline = time.monotonic() + limit
        while True:
            newest = max(self.versions(), default=-1)
            if newest >= at_least:
                return newest
            if time.monotonic() > deadline:
                raise AdapterError(
                    f"version {at_least} did not appear in {self.path} within {limit:.0f} s, the newest is {newest}; "
                    "is --lora_path the learner's --save_path?"
                )
            time.sleep(0.02)

    def _point_latest(self, version: int) -> None:
        temporary = self.path / ".tmp-latest"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.folder(version).relative_to(self.path))
        os.replace(temporary, self.path / "latest")
        sync(self.path)


def read_adapter(folder: Path, sha256: str | None = None) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """PEFT config and tensors of an adapter folder; AdapterError if it holds none, or weights of another hash."""
    try:
        if not (folder / CONFIG).is_file():  # PEFT would look for the folder's name on the hub
            raise FileNotFoundError(f"{folder / CONFIG} is not there")
        config = LoraConfig.from_pretrained(str(folder))
        weights = (folder / WEIGHTS).read_bytes()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {error}") from error
    found = hashlib.sha256(weights).hexdigest()
    if sha256 and found != sha256:
        raise AdapterError(f"{folder / WEIGHTS} has sha256 {found[:12]}, its manifest says {sha256[:12]}")
    try:
        return config, load(weights)  # from memory: a mapped file could change under the reader
    except (SafetensorError, ValueError) as error:
        raise AdapterError(f"{folder / WEIGHTS} is no safetensors file: {error}") from error


def adapter_in(folder: Path) -> Path | None:
    """The newest version in a run's folder, or the folder itself if it is a PEFT adapter."""
    return next((place for place in (folder / "latest", folder) if (place / CONFIG).is_file()), None)


def find_adapter(lora_path: str) -> str | None:
    """The adapter folder that --lora_path means: a run's newest version, or a PEFT folder; None for "none"."""
    if lora_path == "none":
        return None
    folder = adapter_in(Path(lora_path).expanduser())
    if folder:
        return str(folder.resolve())
    raise ValueError(f"--lora_path {lora_path} holds no adapter; --lora_path none evaluates the model without one")


def adapter_tensors(model, name: str = "default") -> dict[str, torch.Tensor]:
    """PEFT's state dict of the adapter `name`.

    Embeddings are left out, which an adapter here never trains: to find out whether they have changed, PEFT would ask
    the hub for the base model's configuration, each time.
    """
    return get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


def copy_into(model, state: dict[str, torch.Tensor], origin: str, name: str = "default") -> None:
    """Put tensors into the adapter `name` of a PEFT model.

    AdapterError, and nothing changed, unless keys and shapes all fit.
    """
    present = adapter_tensors(model, name)
    wrong = sorted(present.keys() ^ state.keys())
    wrong += [key for key in present.keys() & state.keys() if present[key].shape != state[key].shape]
    if wrong:
        raise AdapterError(f"{origin} does not fit the model's LoRA layers, for instance {wrong[0]}")
    set_peft_model_state_dict(model, state, adapter_name=name)


def shape_of(config: LoraConfig) -> dict:
    """All that a LoRA configuration says of the function that its weights make."""
    return {
        name: sorted(value) if isinstance(value, (set, list, tuple)) else value
        for name, value in config.to_dict().items()
        if name not in NO_SHAPE
    }


def check_shape(manifest: Manifest, config: LoraConfig, held: tuple[Manifest, LoraConfig] | None, origin: str) -> None:
    """AdapterError unless manifest and configuration agree, with each other and with the version that is `held`."""
    pairs = [("rank", manifest.lora.get("rank", config.r), config.r, MANIFEST)]
    pairs += [("alpha", manifest.lora.get("alpha", config.lora_alpha), config.lora_alpha, MANIFEST)]
    if held:
        for present, new in ((shape_of(held[1]), shape_of(config)), (held[0].lora, manifest.lora)):
            pairs += [(name, value, new.get(name), "the version in use") for name, value in present.items()]
    for name, expected, found, source in pairs:
        if found != expected:
            raise AdapterError(f"{origin} has the LoRA setting {name} {found}, {source} has {expected}")


@contextlib.contextmanager
def unchanged_on_failure(model) -> Iterator[None]:
    """Whatever goes wrong within, a base model is afterwards without adapter layers.

    PEFT puts its layers into the model that it is given, freezes the others, and may fail half-way.
    """
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        yield
    except BaseException:
        for name, module in list(model.named_modules()):
            if isinstance(module, BaseTunerLayer):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, module.get_base_layer())
        for mark in ("peft_config", "_hf_peft_config_loaded"):
            vars(model).pop(mark, None)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable[name])
        raise
