import io

from rich.console import Console

from rl_kernels.demo import report
from rl_kernels.demo.compare import Comparison
from rl_kernels.demo.measures import Gap
from rl_kernels.demo.numerics import OURS_BF16, PLAIN_BF16, PLAIN_FP32
from rl_kernels.demo.train import StepMetrics


def printed(show, *args):
    console = Console(file=io.StringIO(), width=120)
    show(console, *args)
    return console.file.getvalue()


def test_an_answer_is_printed_as_it_is_whatever_its_bytes():
    text = printed(report.show_answers, [("12=", "[/a]", 0.0), ("21=", "\x07\n\ufffd2", 0.25)])
    assert "[/a]" in text
    assert "···2" in text


def test_a_comparison_gives_count_share_and_largest_difference():
    rows = [
        Comparison("one", "1 sequence", Gap(200, 50, 1e-9, 2.5e-6)),
        Comparison("other", "1", Gap(200, 0, 0.0, 0.0)),
    ]
    text = printed(report.show_comparison, rows)
    assert "50 (25%)" in text
    assert "2.5e-06" in text
    assert "0 (0%)" in text


def test_plain_bf16_that_differs_nowhere_is_explained():
    def told(bf16):
        found = {PLAIN_FP32: 5, PLAIN_BF16: bf16}
        rows = [Comparison(each.name, "1", Gap(200, count, 0.0, 0.0)) for each, count in found.items()]
        return "Plain BF16 differs nowhere" in printed(report.show_comparison, rows)

    assert told(0)
    assert not told(1)


def view(steps, every):
    """Return the lines of the table of so many steps, of which one in ``every`` is watched."""
    console = Console(file=io.StringIO(), width=80)
    found = {OURS_BF16.name: Gap(1280, 0, 0.0, 0.0), PLAIN_BF16.name: Gap(1280, 1100, 1e-5, 0.1)}
    found[PLAIN_FP32.name] = Gap(1280, 300, 1e-14, 1e-6)
    with report.TrainingView(console, steps, caption=report.caption(every)) as table:
        for number in range(1, steps + 1):
            watched = {} if (number - 1) % every else found
            table(StepMetrics(number, 0.5, 0.25, 1.0, 0.125, 0.0, Gap(1280, 7, 0.0, 0.0), watched, 0.1))
    text = console.file.getvalue()
    assert "…" not in text
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "25%" in line]


def test_the_table_of_steps_has_a_row_for_every_step_or_for_the_mean_of_several():
    for steps, rows in ((3, 3), (25, 9)):
        lines = view(steps, 1)
        assert len(lines) == rows
        assert lines[-1][0] == str(steps)


def test_the_table_of_steps_counts_tokens_that_differ():
    assert [row[3:8] for row in view(40, 2)] == [["2,560", "2,200", "600", "0", "28"]] * 10
    assert [row[3:8] for row in view(3, 2)][1] == ["", "", "", "", "7"]
