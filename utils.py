"""The file to edit: how a completion is rewarded, how rewards become advantages, and the losses.

Everything here is a plain function. The workers import them by name and hold no copy of their rules.
"""

import re
import unicodedata
from fractions import Fraction

# ---------------------------------------------------------------------------------------------------
# Rewards
# ---------------------------------------------------------------------------------------------------

FORMAT_REWARD = 1.25
ANSWER_REWARD = 1.0
MAX_CHARS = 500  # what stands in the answer blocks; longer than this it is an essay, not a value
MAX_DIGITS = 50  # of one number

TAG = re.compile(r"</?(?:think|answer)>")
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
END_TOKEN = re.compile(r"<\|(?:im_end|endoftext|end_of_text|eot_id|end)\|>|</s>")
INVISIBLE = ("\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
             "\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff")


def reward_function(response: str, answer: str) -> dict:
    """Score one completion against the gold answer: {"reward": total, "format": ..., "answer": ...}."""
    format_reward = FORMAT_REWARD * check_format(response)
    answer_reward = ANSWER_REWARD * check_answer(response, answer)
    return {"reward": format_reward + answer_reward, "format": format_reward, "answer": answer_reward}


def check_format(response: str) -> bool:
    """True for <think>...</think><answer>...</answer>: each tag once, no body blank, else only whitespace."""
    if TAG.findall(response) != TAGS:
        return False
    before, thinking, between, body, after = TAG.split(response)
    outside = before + between + END_TOKEN.sub("", after)
    return not outside.strip() and all(re.search(rf"[^\s{INVISIBLE}]", part) for part in (thinking, body))


def check_answer(response: str, answer: str) -> bool:
    """True if the closed answer blocks after the last </think> name the gold's value and no other.

    A gold without one plain number in it is text: then each block must be that text, whitespace and markup aside.
    """
    blocks = response.rpartition("</think>")[2].partition("<answer>")[2].split("</answer>")[:-1]
    # What follows a closing tag is prose up to the next opening one; with none it is an outer, nested block.
    bodies = blocks[:1] + [block.partition("<answer>")[2] if "<answer>" in block else block for block in blocks[1:]]
    bodies = {body.strip() for body in bodies} - {""}
    if not bodies or sum(map(len, bodies)) > MAX_CHARS:
        return False
    gold = gold_value(answer)
    if gold is None:
        return {clean(body).split() for body in ()} == ()
    return all(named_value(body) == gold for body in bodies)
