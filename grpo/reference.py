"""The frozen policy of the KL term: the base model, the adapter that a run started from, or a policy of some steps ago.

References are adapters in save_path/references/, under the number of the version that they were made with. Each
published version names its reference in its manifest, so which one a group's ref_logprobs come from follows from its
adapter version alone: it is the same on all samplers and after a crash.
"""

import copy
from pathlib import Path

import torch
from peft import LoraConfig

from grpo.adapters import AdapterError, AdapterStore, adapter_in, read_adapter

SPECIAL = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern")  # of LoraConfig
RANKS = 4  # a mixed reference keeps at most so many times the adapter's rank


class References:
    """The learner's side; one call for each published version, at rank 0.

    init: the adapter folder the run starts from, whose policy is the first reference; None for the base model.
    sync_steps: steps between renewals (TR-DPO, arXiv 2404.09656), 0 for none; alpha: the policy's share in each.
    """

    def __init__(self, store: AdapterStore, init: str | None, sync_steps: int, alpha: float):
        self._store = AdapterStore(store.path, "references")
        self._init = Path(init).expanduser().absolute() if init else None
        self._sync_steps, self._alpha = sync_steps, alpha

    @property
    def facts(self) -> list:
        """What a run that goes on must have as it was."""
        return [self._init and str(self._init), self._sync_steps, self._alpha if self._sync_steps else None]

    def start(self) -> Path | None:
        """The adapter folder that training starts from: the run's own copy once it has one, for `init` may change."""
        return self._store.folder(0) if self._init and 0 in self._store.versions() else self._init

    def of(self, version: int) -> int | None:
        """The reference that goes with an adapter version; None for the base model."""
        newest = version // self._sync_steps * self._sync_steps if self._sync_steps else 0
        return newest if newest or self._init else None

    def renew(self, version: int, state: dict[str, torch.Tensor], config: LoraConfig, fields: dict) -> None:
        """Write the reference of `version`, if one is due; `state` is the adapter's, `fields` its manifest's.

        Raises:
            ValueError: from version 0 on, for an adapter that is to be mixed and has more than LoRA matrices.
        """
        other = other_names(state) if self._sync_steps else []
        if other:
            raise ValueError(f"--ref_sync_steps can mix LoRA matrices only, the adapter has {other[0]}: --lora_targets")
        number = self.of(version)
        if number != version or number in self._store.versions():
            return
        before = self.of(version - 1) if version else None
        if before is not None:
            _, old_config, old = self._store.read(before)
            state, config = mix(state, config, old, old_config, self._alpha)
        elif version:
            state, config = mix(state, config, {}, config, self._alpha)
        shape = fields["lora"] | {"rank": config.r, "alpha": config.lora_alpha}
        self._store.publish(state, config, fields | {"lora": shape, "canary": []})

    def prune(self, versions: list[int]) -> None:
        """Remove the references that go with none of these adapter versions, except the one of the start."""
        self._store.prune(keep_newest=1, keep={0} | {self.of(version) for version in versions})


def mix(
    policy: dict[str, torch.Tensor],
    policy_config: LoraConfig,
    reference: dict[str, torch.Tensor],
    reference_config: LoraConfig,
    alpha: float,
) -> tuple[dict[str, torch.Tensor], LoraConfig]:
    """The adapter whose update of each weight is alpha times the policy's plus 1 - alpha times the reference's.

    Two products B A add up to one of the sum of their ranks; above RANKS times the policy's rank it is replaced by the
    nearest one of that rank (Eckart and Young). An empty `reference` stands for the base model.
    """
    rank, scaling = policy_config.r, policy_config.lora_alpha / policy_config.r
    parts = [(policy, alpha)]
    if reference and alpha < 1:
        parts.append((reference, (1 - alpha) * reference_config.lora_alpha / reference_config.r / scaling))
    mixed, found = {}, rank
    for name in (name for name in policy if ".lora_A." in name):
        up_name = name.replace(".lora_A.", ".lora_B.")
        down = torch.cat([state[name].float() for state, _ in parts])  # (R, in)
        up = torch.cat([state[up_name].float() * share for state, share in parts], dim=1)  # (out, R)
        down, up = shorten(down, up, RANKS * rank)
        found = len(down)
        mixed[name], mixed[up_name] = (tensor.to(policy[name].dtype).contiguous() for tensor in (down, up))
    config = copy.deepcopy(policy_config)
    config.r, config.lora_alpha = found, scaling * found
    return mixed, config


def shorten(down: torch.Tensor, up: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors (rank, in) and (out, rank) of the matrix of that rank nearest to up @ down, if theirs is higher."""
    if len(down) <= rank:
        return down, up
    left, inner_left = torch.linalg.qr(up)
    right, inner_right = torch.linalg.qr(down.t())
    u, values, v = torch.linalg.svd(inner_left @ inner_right.t(), full_matrices=False)
    root = values[:rank].sqrt()
    missing = rank - len(root)  # of a matrix that is smaller than `rank`
    down, up = (root[:, None] * v[:rank]) @ right.t(), left @ (u[:, :rank] * root)
    return torch.nn.functional.pad(down, (0, 0, 0, missing)), torch.nn.functional.pad(up, (0, missing))


def other_names(state: dict[str, torch.Tensor]) -> list[str]:
    """What an adapter holds besides LoRA matrices of linear layers."""
    return sorted(name for name in state if not name.endswith((".lora_A.weight", ".lora_B.weight")))


def load_init_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Configuration and tensors of the adapter at --init_adapter.

    Raises:
        ValueError: no adapter there, or one that is more than LoRA matrices.
    """
    try:
        config, state = read_adapter(adapter_in(folder) or folder)
    except AdapterError as error:
        raise ValueError(f"--init_adapter {folder}: {error}") from error
    other = other_names(state)
    special = [name for name in SPECIAL if getattr(config, name)]
    if config.init_lora_weights not in (True, False, "gaussian"):  # these change the base model's weights
        special.append("init_lora_weights")
    if other or special:
        raise ValueError(f"--init_adapter {folder} is more than plain LoRA matrices: it has {(other + special)[0]}")
    config.lora_dropout, config.inference_mode = 0.0, False
    return config, state
