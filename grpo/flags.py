"""Command lines of the two programs: errors of one sentence, help without empty defaults, and where flags that people
know from elsewhere are to be found here.
"""

import argparse
import difflib
import importlib
import os
import sys

_LR = "the learning rate is optimizer.params.lr in the file that the learner's --ds_config names (ds_config.json)"
_SIZES = (
    "the learner's batch sizes are train_micro_batch_size_per_gpu and gradient_accumulation_steps in ds_config.json; "
    "--batch_size, the completions decoded at a time, is the sampler's"
)
_PRECISION = "precision is set in ds_config.json: bf16, fp16, or neither for float32"
_LENGTH = "a run is as long as the learner's --max_steps says; it goes through the dataset again and again"
_LOSS = "the loss is one line, LOSS = ..., in training_worker.py"
ELSEWHERE = {  # names from TRL, verl and the papers, without dashes
    "lr": _LR,
    "learning_rate": _LR,
    "lr_scheduler_type": "a scheduler is the section scheduler of ds_config.json",
    "warmup_steps": "warm-up is the section scheduler of ds_config.json",
    "warmup_ratio": "warm-up is the section scheduler of ds_config.json",
    "weight_decay": "weight_decay is in optimizer.params of ds_config.json",
    "max_grad_norm": "the limit on the gradient is gradient_clipping in ds_config.json",
    "batch_size": _SIZES,
    "train_batch_size": _SIZES,
    "per_device_train_batch_size": _SIZES,
    "gradient_accumulation_steps": _SIZES,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "loss": _LOSS,
    "loss_type": _LOSS,
    "num_generations": "completions for each prompt are the learner's --group_size",
    "num_epochs": _LENGTH,
    "num_train_epochs": _LENGTH,
    "max_completion_length": "completions are cut at the sampler's --max_new_tokens",
    "max_length": "lengths are the sampler's --max_prompt_length and --max_new_tokens",
    "output_dir": "the run's folder is the learner's --save_path, which is the sampler's --lora_path",
    "model": "the model is --model_path, at both programs",
    "model_name_or_path": "the model is --model_path, at both programs",
    "lora_r": "the rank is the learner's --lora_rank",
    "lora_dropout": "there is no dropout: log-probs of both programs must agree",
    "epsilon": "the clip widths are the learner's --clip_eps and --clip_eps_high",
    "epsilon_high": "the upper clip width is the learner's --clip_eps_high",
    "kl_coef": "the weight of the KL term is the learner's --beta",
    "use_vllm": "vLLM is --engine vllm at the sampler",
    "reward_funcs": "the reward is the function reward_function in utils.py",
    "report_to": "trackers are the learner's --log_to",
    "logging_steps": "every step is logged, in metrics.jsonl",
    "num_gpus": "GPUs are chosen by run.sh: TRAINER_GPUS=0,1 ./run.sh trainer, SAMPLER_GPUS=2 ./run.sh sampler",
}


class Parser(argparse.ArgumentParser):
    """argparse with errors of one sentence; `other` is the module of the other side's program, with a make_parser."""

    def __init__(self, *arguments, other: str, **settings):
        super().__init__(*arguments, formatter_class=_Formatter, **settings)
        self._other = other

    def parse_args(self, args=None, namespace=None):
        """The flags; unknown ones end the program with a sentence that says where they are, or what is meant."""
        # names from elsewhere first: argparse would take --lora_r for a short form of --lora_rank
        for name in (word.partition("=")[0] for word in (sys.argv[1:] if args is None else args)):
            if name.startswith("--") and name not in self._option_string_actions and name[2:] in ELSEWHERE:
                self.error(f"{name} is no flag here: {ELSEWHERE[name[2:]]}")
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._where(unknown[0].partition("=")[0]))
        return parsed

    def error(self, message: str):
        """One sentence, by one rank, without the wall of usage."""
        self.exit(2, f"{self.prog}: error: {message}\n" if os.environ.get("RANK", "0") == "0" else None)

    def _where(self, name: str) -> str:
        other = importlib.import_module(self._other)  # a program, for this error alone
        if name in other.make_parser()._option_string_actions:
            return f"{name} is a flag of the other program, {self._other}.py"
        near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "--help lists the flags"
        return f"{name} is no flag of this program; {hint}"


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        nothing = action.default is None or action.default is False or action.default == []
        return action.help if nothing or "(default" in action.help else super()._get_help_string(action)
