import random

import pytest

from rl_kernels.demo import task
from rl_kernels.demo.tokenizer import encode


def test_the_solution_has_the_digits_in_ascending_order():
    assert task.solution("4192=") == "1249"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1249", 1.0),
        ("1294", (4 + 2) / 8),  # all digits, two in place
        ("4192", (4 + 0) / 8),  # the prompt itself
        ("1111", (1 + 1) / 8),  # a digit counts once
        ("12", (2 + 2) / 8),  # too short
        ("12499", (4 + 4) / 10),  # too long
        ("124", (3 + 3) / 8),
        ("\x00ab\n", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_mean_of_the_shares_in_common_and_in_place(answer, expected):
    assert task.reward("4192=", answer) == pytest.approx(expected)


def test_only_the_solution_earns_the_whole_reward():
    for answer in ("419", "1924", "1249 ", "01249", "12 49"):
        assert task.reward("4192=", answer) < 1


def test_prompts_and_solutions_fit_the_model():
    source = random.Random(0)
    prompts = {task.draw_prompt(source) for _ in range(500)}
    assert {len(prompt) for prompt in prompts} == {task.SHORTEST + 1, task.LONGEST, task.LONGEST + 1}
    for prompt in prompts:
        digits = prompt.removesuffix("=")
        assert len(set(digits)) == len(digits)
        assert digits.isdigit()
        assert len(encode(prompt)) <= task.PROMPT_TOKENS
        assert len(encode(task.solution(prompt))) + 1 <= task.ANSWER_TOKENS
