"""`--engine vllm`: completions by vLLM's Python API, everything else as with our own decode loop.

vLLM gets each adapter version as a LoRA request of its own name, and the old one is removed. Old and reference
log-probs still come from the transformers model, by the learner's own function; the log-probs of the draw are vLLM's.
After each reload a fixed text is scored by both, so a version that vLLM does not really use is noticed at once.

vLLM is no requirement; see the README for how to install it.
"""

import torch

from grpo.adapters import AdapterError, Manifest
from grpo.generation import Completion
from grpo.policy import CANARY_TOLERANCE, Policy, canary_batch

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the LoRA ranks that vLLM can be set up for
# On a CPU vLLM cannot go on with a seed's noise after a prompt that it took in in pieces, so it takes none in pieces.
UNCHUNKED = {} if torch.cuda.is_available() else {"enable_chunked_prefill": False, "max_num_batched_tokens": 16384}


class VllmPolicy(Policy):
    """A Policy whose completions come from vLLM.

    `model_path` names the same model once more, for vLLM to load. `dtype` "auto" is the run's; `max_model_len` bounds
    prompt and completion together; `memory` is the share of the GPU that vLLM may take.
    """

    def __init__(self, *args, model_path: str, vllm_dtype: str, max_model_len: int, memory: float, **settings):
        super().__init__(*args, **settings)
        self._settings = dict(
            model=model_path,
            dtype=self.dtype if vllm_dtype == "auto" else vllm_dtype,
            max_model_len=max_model_len,
            gpu_memory_utilization=memory,
        )
        self._llm = self._request = None

    def _confirm(self, manifest: Manifest, origin: str) -> None:
        """As a Policy does, and vLLM must agree with it; vLLM keeps nothing of a version that fails."""
        super()._confirm(manifest, origin)
        from vllm.lora.request import LoRARequest

        self._llm = self._llm or _start(self.model.peft_config["default"].r, **self._settings)
        old, version = self._request, manifest.version
        self._request = LoRARequest(f"v{version}", version + 1, origin)
        try:
            if old:
                self._llm.llm_engine.remove_lora(old.lora_int_id)
            gap, base = self._canary_gaps()
            limit = CANARY_TOLERANCE[self.dtype]
            if not gap <= max(limit, base):
                raise AdapterError(f"vLLM gives the canary text log-probs {gap:.4f} nats off ours (limit {limit})")
        except BaseException:
            self._llm.llm_engine.remove_lora(self._request.lora_int_id)
            self._request = old  # vLLM reads it again when it is next asked for
            raise

    def _canary_gaps(self) -> tuple[float, float]:
        """How far vLLM's log-probs of the fixed text are from ours, with the adapter and without it."""
        from vllm import SamplingParams

        batch = canary_batch(self.model.get_input_embeddings().num_embeddings)
        ids = torch.cat([batch.prompt_ids[0], batch.completion_ids[0]]).tolist()
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        gaps, temperature = [], self.temperature
        for request, ours in ((self._request, self.logprobs), (None, self.base_logprobs)):
            (out,) = self._llm.generate([{"prompt_token_ids": ids}], params, lora_request=request, use_tqdm=False)
            found = torch.tensor([row[i].logprob for row, i in zip(out.prompt_logprobs[4:], ids[4:], strict=True)])
            self.temperature = 1.0  # of prompts vLLM gives plain log-probs
            try:
                gaps.append(float((found - ours(batch)).abs().max()))
            finally:
                self.temperature = temperature
        return gaps[0], gaps[1]

    def generate(
        self, prompts, seeds, group_size: int, max_new_tokens: int, places: int = 0, temperature=None
    ) -> list[list[Completion]]:
        """Sample from the policy; vLLM sees to how many fit at a time."""
        from vllm import SamplingParams

        temperature = self.temperature if temperature is None else temperature
        params = [
            SamplingParams(
                n=group_size,
                seed=seed,
                temperature=temperature,
                top_p=1.0,
                top_k=0,
                repetition_penalty=1.0,
                max_tokens=max_new_tokens,
                stop_token_ids=self.eos_ids,
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, params, lora_request=self._request, use_tqdm=False)
        return [[_completion(one) for one in output.outputs] for output in outputs]


def _completion(output) -> Completion:
    ids = list(output.token_ids)
    logprobs = [row[i].logprob for row, i in zip(output.logprobs, ids, strict=True)]
    return Completion(
        torch.tensor(ids, dtype=torch.int32), torch.tensor(logprobs), truncated=output.finish_reason == "length"
    )


def _start(rank: int, **settings):
    if rank > RANKS[-1]:
        raise ValueError(f"--engine vllm: the adapter's rank is {rank} (--lora_rank), vLLM takes {RANKS[-1]} at most")
    try:
        from vllm import LLM
    except ImportError as error:
        raise ValueError(f"--engine vllm: vLLM is not installed here ({error}); see the README") from error
    return LLM(
        **settings,
        **UNCHUNKED,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=next(size for size in RANKS if size >= rank),
        logprobs_mode="processed_logprobs",  # under the distribution that is drawn from
        generation_config="vllm",  # nothing of the model's own sampling settings
    )
