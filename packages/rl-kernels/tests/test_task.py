import random

import pytest

from rl_kernels.demo import task
from rl_kernels.demo.task import CPU, GPU

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1249", 1.0),
        ("1294", (4 + 2) / 8),  # all digits, two in place
        ("4192", (4 + 0) / 8),  # the prompt itself
        ("1111", (1 + 1) / 8),  # a digit counts once
        ("12", (2 + 2) / 8),  # too short
        ("12499", (4 + 4) / 10),  # too long
        ("=", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_mean_of_the_shares_in_common_and_in_place(answer, expected):
    assert task.reward("4192=", answer) == pytest.approx(expected)


@pytest.mark.parametrize("settings", [CPU, GPU], ids=["cpu", "gpu"])
def test_prompts_survive_the_round_trip_through_tokens(settings):
    source = random.Random(0)
    prompts = {task.draw_prompt(source, settings) for _ in range(500)}
    assert {len(prompt) - 1 for prompt in prompts} == set(range(settings.shortest, settings.longest + 1))
    for prompt in prompts:
        assert len(set(prompt)) == len(prompt)
        ids = settings.encode(prompt)
        assert settings.decode([*ids, settings.end, *ids]) == prompt
    assert settings.end == len(settings.characters)


def test_the_learning_rate_rises_and_then_falls_to_a_tenth():
    rates = [GPU.rate(step) / GPU.learning_rate for step in range(1, 201)]
    assert rates[0] == pytest.approx(1 / 20)
    assert max(rates) == rates[19] == pytest.approx(1 - 0.9 * 19 / 200)
    assert rates[-1] == pytest.approx(1 - 0.9 * 199 / 200)
