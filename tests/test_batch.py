"""From groups to micro-batches."""

import torch

from grpo.batch import collate, pad_right


def test_collate_pads_prompts_left_and_completions_right():
    batch = collate([torch.tensor([5, 6, 7]), torch.tensor([8])], [torch.tensor([1]), torch.tensor([2, 0])])
    assert batch.prompt_ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.prompt_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.completion_ids.tolist() == [[1, 0], [2, 0]]
    assert batch.present.tolist() == [[1, 0], [1, 1]]  # an id equal to the pad id is a token
    assert batch.completion_mask.tolist() == [[True, False], [True, True]]


def test_collate_holds_a_groups_prompt_once():
    batch = collate([torch.tensor([5]), torch.tensor([6, 7])], [torch.tensor([n]) for n in range(4)])
    assert batch.prompt_ids.shape == (2, 2) and batch.completion_ids.shape == (4, 1)
    assert batch.packed.ids.tolist() == [[5, 6, 7]]  # completions of one token are not run
    assert batch.packed.predictors.tolist() == [0, 0, 2, 2]


def test_pad_right():
    assert pad_right([torch.tensor([1.5]), torch.tensor([1.0, 2.0])], 3).tolist() == [[1.5, 0, 0], [1, 2, 0]]
