"""From the engine's adapter to a version in the adapter folder."""

from collections.abc import Callable

import torch

from grpo.adapters import AdapterStore
from grpo.engine import adapter_state
from grpo.logprobs import completion_logprobs
from grpo.policy import canary_batch
from grpo.reference import References
from grpo.soundness import NotFinite


class Publisher:
    """Publishes versions newer than `newest`, as `run_id`; every rank takes part, rank 0 writes."""

    def __init__(self, engine, store: AdapterStore, references: References, ranks, args, vocab_size: int):
        self._engine, self._store, self.references, self._ranks = engine, store, references, ranks
        self._args, self._vocab_size = args, vocab_size
        self.run_id, self.newest = "", -1
        self._base_canary: list[float] = []  # the same for all versions

    @property
    def lora(self) -> dict:
        """The adapter's shape."""
        config = self._engine.module.peft_config["default"]
        targets = config.target_modules  # names, or a pattern
        if not self._args.init_adapter:
            targets = self._args.lora_targets
        elif not isinstance(targets, str):
            targets = ",".join(sorted(targets))
        return {"rank": config.r, "alpha": config.lora_alpha, "targets": targets}

    def publish(self, version: int, card: Callable[[], str]) -> None:
        """Write the present adapter as `version`, unless it is there from before a crash.

        `card` gives the version's README.md.

        Raises:
            NotFinite: at every rank, if the adapter or the log-probs that it gives are not.
        """
        if version <= self.newest:
            return
        canaries = self._canaries()
        state = adapter_state(self._engine)
        numbers = [torch.tensor(canaries["canary"]), *state.values()]
        if self._ranks.any(not all(bool(tensor.isfinite().all()) for tensor in numbers)):
            rate = self._engine.get_lr()[0]
            raise NotFinite(
                f"step {version} made an adapter whose log-probs are not finite: the learning rate {rate:g} is too "
                "high; lower lr in --ds_config and start the same command again"
            )
        if self._ranks.rank == 0:
            self._write(version, state, canaries, card)
        self.newest = version

    @torch.no_grad()
    def _canaries(self) -> dict[str, list[float]]:
        """Log-probs of the fixed text with the adapter, and without it."""
        model, batch = self._engine.module, canary_batch(self._vocab_size).to(self._engine.device)

        def logprobs() -> list[float]:
            return completion_logprobs(model, batch, self._args.temperature)[0].flatten().tolist()

        if not self._base_canary:
            with model.disable_adapter():
                self._base_canary = logprobs()
        return {"canary": logprobs(), "base_canary": self._base_canary}

    def _write(self, version: int, state: dict[str, torch.Tensor], canaries: dict[str, list[float]], card) -> None:
        config = self._engine.module.peft_config["default"]
        fields = {"run_id": self.run_id, "version": version, "lora": self.lora} | canaries
        self.references.renew(version, state, config, fields)
        self._store.publish(state, config, fields | {"reference": self.references.of(version)}, card())

    def prune(self, pinned: set[int], checkpoints: list[int]) -> None:
        """At rank 0: keep the newest versions, the `pinned` ones and those of `checkpoints`, with their references."""
        self._store.prune(keep_newest=self._args.max_staleness + 2, keep=pinned | set(checkpoints))
        self.references.prune(self._store.versions())
