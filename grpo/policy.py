"""The sampler's policy: one base model in memory with one adapter on it, reloaded in place.

With the adapter on it is pi_old, with the adapter off the reference. The adapter is never merged, so a reload cannot
be without effect. Before a load, manifest, configuration and the version in use are compared exactly; after it the
canary, log-probs of a fixed text that the learner stores with each version, shows that the model computes what the
learner's does.

What the canary sees: log-probs further off than another machine's rounding (CANARY_TOLERANCE), and an effect of the
adapter, log-probs with it minus those without, that is off by more than half of itself. The second is the sharper one
for a young adapter in half precision, of which the rounding in the first would hide all. It cannot see differences
below EFFECT_FLOOR, nor such as leave the fixed text as it is.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError

from grpo.adapters import (
    AdapterError,
    AdapterStore,
    Manifest,
    adapter_tensors,
    check_shape,
    copy_into,
    unchanged_on_failure,
)
from grpo.batch import Batch, collate
from grpo.generation import Completion, generate
from grpo.logprobs import completion_logprobs, ways_that_fit
from grpo.models import DTYPES, add_lora
from grpo.ways import attempt

CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}  # nats a token; kernels differ by machine
EFFECT_FLOOR = {"float32": 1e-3, "bfloat16": 0.03, "float16": 0.01}  # nats a token, in what the adapter changes
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
        self._held: tuple[Manifest, LoraConfig] | None = None  # of the version
        self._base_canary: torch.Tensor | None = None  # the model's own, without adapter

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
        check_shape(manifest, config, self._held, origin)
        ways_that_fit(self.model)  # tried on the model alone where no adapter is on it yet
        with self._as_before_on_failure():
            self._put_on(config, origin)
            copy_into(self.model, state, origin)
            self._confirm(manifest, origin)
        self.version, self.sha256, self._reference = version, manifest.sha256, manifest.reference
        self._held = manifest, config

    @contextlib.contextmanager
    def _as_before_on_failure(self) -> Iterator[None]:
        """Whatever goes wrong within, the model is what it was."""
        base = self.model
        if isinstance(base, PeftModel):
            before = {name: tensor.clone() for name, tensor in adapter_tensors(base).items()}
            try:
                yield
            except BaseException:
                copy_into(base, before, "the previous version")
                raise
        else:
            try:
                with unchanged_on_failure(base):
                    yield
            except BaseException:
                self.model = base
                raise

    def _put_on(self, config: LoraConfig, origin: str) -> None:
        """Adapter layers by this configuration, unless they are there."""
        if isinstance(self.model, PeftModel):
            return
        inference = replace(config, inference_mode=True)
        wrapped, reason = attempt(lambda: add_lora(self.model, inference).eval())
        if wrapped is None:
            raise AdapterError(f"{origin} does not fit the model: {reason}")
        self.model = wrapped

    def _load_reference(self) -> None:
        """Put the version's reference beside the adapter."""
        (store, run_id, _), version = self._origin, self._reference
        manifest, config, state = store.read(version)
        origin = str(store.folder(version))
        if manifest.run_id != run_id or manifest.version != version:
            raise AdapterError(f"{origin} is version {manifest.version} of run {manifest.run_id}")
        self._held_reference = None
        if REFERENCE in self.model.peft_config:
            self.model.delete_adapter(REFERENCE)
        _, reason = attempt(lambda: self.model.add_adapter(REFERENCE, config, autocast_adapter_dtype=False))
        if reason:
            raise AdapterError(f"{origin} does not fit the model: {reason}")
        copy_into(self.model, state, origin, REFERENCE)
        self._held_reference = version

    def _confirm(self, manifest: Manifest, origin: str) -> None:
        """AdapterError unless the model, with the version on it, computes what the learner's does."""
        batch = canary_batch(self.model.get_input_embeddings().num_embeddings)
        found, reason = attempt(lambda: self.logprobs(batch))
        if found is None:
            raise AdapterError(f"the model does not run with {origin} on it: {reason}")
        expected = torch.tensor(manifest.canary)
        limit = CANARY_TOLERANCE[self.dtype]
        gap = float((found - expected).abs().max()) if found.shape == expected.shape else float("inf")
        if not gap <= limit:
            raise AdapterError(
                f"{origin} gives log-probs {gap:.4f} nats away from the learner's on the canary text "
                f"(limit {limit} in {self.dtype})"
            )
        if manifest.base_canary:
            self._confirm_effect(batch, found, expected, torch.tensor(manifest.base_canary), origin)

    def _confirm_effect(self, batch: Batch, found, expected, expected_base, origin: str) -> None:
        """AdapterError unless the adapter changes the log-probs as it does at the learner."""
        if self._base_canary is None:
            self._base_canary = self.base_logprobs(batch)
        rounding = float((self._base_canary - expected_base).abs().max())  # between this machine and the learner's
        effect = expected - expected_base
        gap = float((found - self._base_canary - effect).abs().max())
        limit = EFFECT_FLOOR[self.dtype] + 4 * rounding + 0.5 * float(effect.abs().max())
        if not gap <= limit:
            raise AdapterError(
                f"{origin} changes log-probs of the canary text by {gap:.4f} nats more or less than at the learner "
                f"(limit {limit:.4f} in {self.dtype})"
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
