"""vLLM as the engine, for real; run by tests/test_vllm.py under the Python that has vLLM.

    python tests/vllm_check.py MODEL FOLDER

Publishes two adapter versions, samples with both, and prints one JSON line with what test_vllm.py checks.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from peft import LoraConfig, get_peft_model_state_dict

from grpo.adapters import AdapterStore
from grpo.batch import collate
from grpo.logprobs import completion_logprobs
from grpo.models import add_lora, eos_token_ids, load_model, load_tokenizer
from grpo.policy import canary_batch
from grpo.vllm_engine import VllmPolicy

CONFIG = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
TEMPERATURE = 0.9


@torch.no_grad()
def publish(store: AdapterStore, model_path: str, version: int) -> None:
    """Version 0 changes nothing, later ones a little."""
    model = add_lora(load_model(model_path).float(), CONFIG)
    generator = torch.Generator().manual_seed(version)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and version:
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    batch = canary_batch(model.get_input_embeddings().num_embeddings)
    canary = completion_logprobs(model, batch, TEMPERATURE)[0].flatten().tolist()
    fields = {"run_id": "run", "version": version, "lora": {}, "canary": canary}
    store.publish(get_peft_model_state_dict(model), CONFIG, fields)


def main() -> None:
    """Two versions, greedy and sampled."""
    model_path, folder = sys.argv[1:]
    store, tokenizer = AdapterStore(folder), load_tokenizer(model_path)
    model = load_model(model_path)
    policy = VllmPolicy(
        model,
        eos_token_ids(model, tokenizer),
        "cpu",
        dtype="float32",
        temperature=TEMPERATURE,
        model_path=model_path,
        vllm_dtype="auto",
        max_model_len=256,
        memory=0.5,
    )
    prompts = [tokenizer(text).input_ids for text in ("Two and two are", "The capital of France is")]
    found: dict[str, list] = {"greedy": [], "ours": [], "gap": [], "canary": []}
    for version in (0, 1):
        publish(store, model_path, version)
        assert policy.load_newest(store, "run", at_least=version, limit=10) and policy.version == version
        found["canary"].append(policy._canary_gaps()[0])
        greedy = policy.generate(prompts, [1, 2], 1, 12, temperature=0)
        ours = super(VllmPolicy, policy).generate(prompts, [1, 2], 1, 12, temperature=0)
        found["greedy"].append([one.ids.tolist() for (one,) in greedy])
        found["ours"].append([one.ids.tolist() for (one,) in ours])
        groups = policy.generate(prompts, [3, 4], 4, 16)
        batch = collate([torch.tensor(prompt) for prompt in prompts], [one.ids for group in groups for one in group])
        sampled = torch.cat([one.logprobs for group in groups for one in group])
        found["gap"].append(float((policy.logprobs(batch) - sampled).abs().max()))
        again = policy.generate(prompts, [3, 4], 4, 16)
        pairs = zip(sum(groups, []), sum(again, []), strict=True)
        found["repeatable"] = all(torch.equal(one.ids, other.ids) for one, other in pairs)
        assert len({tuple(one.ids.tolist()) for one in groups[0]}) > 1
    found["adapters"] = sorted(policy._llm.llm_engine.list_loras())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
