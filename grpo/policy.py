"""The sampler's policy: one base model in memory with one adapter on it, reloaded in place.

With the adapter on it is pi_old, with the adapter off the reference. The adapter is never merged, so a reload cannot
be without effect; the canary, log-probs of a fixed text that the learner stores with each version, proves after each
load that the weights in use are the learner's.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError

from grpo.adapters import AdapterError, AdapterStore, copy_into
from grpo.batch import Batch, collate
from grpo.generation import Completion, generate
from grpo.logprobs import completion_logprobs
from grpo.models import DTYPES, add_lora

CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}  # nats a token; kernels differ by machine
RETRY_SECONDS = 1.0
REFERENCE = "reference"  # its name among the model's adapters


def canary_batch(vocab_size: int) -> Batch:
    """A fixed text of 4 prompt and 12 completion ids spread over the vocabulary: the same for both sides."""
    ids = (torch.arange(16) * 2654435761 % vocab_size).to(torch.int64)
    return collate([ids[:4]], [ids[4:]])


class Policy:
    """Base model plus the newest usable adapter version."""

    def __init__(self, model, eos_ids: list[int], device: str, *, dtype: str, temperature: float):
        self.dtype, self.device, self.temperature, self.eos_ids = dtype, torch.device(device), temperature, eos_ids
        self.model = model.to(self.device, DTYPES[dtype])
        self.version, self.sha256 = -1, ""
        self._reference: int | None = None  # the one that goes with the version; None: the base model
        self._held_reference: int | None = None  # the one that is loaded

    def load_newest(self, store: AdapterStore, run_id: str, at_least: int, limit: float) -> bool:
        """Take on the newest published version; True if it changed.

        A version that fails a check is reported and tried again until `limit` seconds have passed; then AdapterError.
        """
        return self._load_usable(lambda: store.wait_for(at_least, limit), store, run_id, limit)

    def load_version(self, store: AdapterStore, run_id: str, version: int, limit: float) -> bool:
        """Take on one version, as load_newest does."""
        return self._load_usable(lambda: version, store, run_id, limit)

    def _load_usable(self, choose: Callable[[], int], store: AdapterStore, run_id: str, limit: float) -> bool:
        self._origin = AdapterStore(store.path, "references"), run_id, limit

        def attempt() -> bool:
            version = choose()
            if version == self.version:
                return False
            self._load(store, version, run_id)
            return True

        return self._patiently(attempt, limit)

    def _patiently(self, attempt: Callable, limit: float):
        deadline = time.monotonic() + limit
        while True:
            try:
                return attempt()
            except AdapterError as error:
                print(f"keeping adapter version {self.version}: {error}")
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)

    def load_folder(self, folder: str | Path) -> None:
        """Take on any PEFT adapter of this base model, from a run or from elsewhere."""
        try:
            self.model = PeftModel.from_pretrained(self.model, str(folder), autocast_adapter_dtype=False).eval()
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            why = " ".join(str(error).split())[:300]  # PyTorch lists every tensor
            raise AdapterError(f"--lora_path {folder} holds no adapter that fits the model: {why}") from error

    def _load(self, store: AdapterStore, version: int, run_id: str) -> None:
        manifest, config, state = store.read(version)
        origin = str(store.folder(version))
        if manifest.run_id != run_id or manifest.version != version:
            raise AdapterError(f"{origin} is version {manifest.version} of run {manifest.run_id}")
        if not isinstance(self.model, PeftModel):
            config.inference_mode = True
            self.model = add_lora(self.model, config).eval()
        before = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(self.model).items()}
        copy_into(self.model, state, origin)
        try:
            self._check_canary(manifest.canary, origin)
        except AdapterError:
            copy_into(self.model, before, "the previous version")
            raise
        self.version, self.sha256, self._reference = version, manifest.sha256, manifest.reference

    def _load_reference(self) -> None:
        """Put the version's reference beside the adapter."""
        (store, run_id, _), version = self._origin, self._reference
        manifest, config, state = store.read(version)
        if manifest.run_id != run_id or manifest.version != version:
            raise AdapterError(f"{store.folder(version)} is version {manifest.version} of run {manifest.run_id}")
        if REFERENCE in self.model.peft_config:
            self.model.delete_adapter(REFERENCE)
        self.model.add_adapter(REFERENCE, config, autocast_adapter_dtype=False)
        copy_into(self.model, state, str(store.folder(version)), REFERENCE)
        self._held_reference = version

    def _check_canary(self, expected: list[float], origin: str) -> None:
        batch = canary_batch(self.model.get_input_embeddings().num_embeddings)
        found = self.logprobs(batch).tolist()
        gap = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        if not gap <= CANARY_TOLERANCE[self.dtype]:
            raise AdapterError(
                f"{origin} gives log-probs {gap:.4f} nats away from the learner's on the canary text "
                f"(limit {CANARY_TOLERANCE[self.dtype]} in {self.dtype})"
            )

    def generate(
        self, prompts, seeds, group_size: int, max_new_tokens: int, places: int = 0, temperature=None
    ) -> list[list[Completion]]:
        """Sample from the policy with the adapter on, at most `places` completions at a time (0: all)."""
        return generate(
            self.model,
            prompts,
            seeds,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            eos_ids=self.eos_ids,
            places=places,
        )

    @torch.inference_mode()
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Log-probs by the learner's own forward function, adapter on: old_logprobs.

        Returns (N,): those of all completion tokens, row after row, without padding.
        """
        return completion_logprobs(self.model, batch.to(self.device), self.temperature)[0].cpu()[batch.present.bool()]

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """The same by the reference policy, the adapter off or another one on: ref_logprobs."""
        if self._reference is None:
            return self.base_logprobs(batch)
        if self._held_reference != self._reference:
            self._patiently(self._load_reference, self._origin[2])
        self.model.set_adapter(REFERENCE, inference_mode=True)
        try:
            return self.logprobs(batch)
        finally:
            self.model.set_adapter("default", inference_mode=True)

    def base_logprobs(self, batch: Batch) -> torch.Tensor:
        """The same with the adapter off."""
        with self.model.disable_adapter():
            return self.logprobs(batch)
