import io

from rich.console import Console

from rl_kernels.demo import report
from rl_kernels.demo.compare import Comparison
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
    rows = [Comparison("one", "1 sequence", 200, 50, 2.5e-6), Comparison("other", "1 sequence", 200, 0, 0.0)]
    text = printed(report.show_comparison, rows)
    assert "50 (25%)" in text
    assert "2.5e-06" in text
    assert "0 (0%)" in text


def test_the_table_of_steps_has_a_row_for_every_step_or_for_the_mean_of_several():
    for steps, rows in ((3, 3), (25, 9)):
        console = Console(file=io.StringIO(), width=120)
        with report.TrainingView(console, steps) as view:
            for number in range(1, steps + 1):
                view(StepMetrics(number, 0.5, 0.25, 1.0, 0.125, 10, 0, 0.1))
        lines = [line for line in console.file.getvalue().splitlines() if "12.5%" in line]
        assert len(lines) == rows
        assert str(steps) in lines[-1]
