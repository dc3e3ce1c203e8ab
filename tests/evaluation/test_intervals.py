import pytest
from lm_eval.api.metrics import mean_stderr
from scipy.stats import t, ttest_1samp

from nanodag.errors import SourceError
from nanodag.evaluation.intervals import centred_mean, score_of


def test_the_standard_error_is_lm_evals():
    values = [0.0, 1.0, 1.0, 0.25, 0.5, 1.0, 0.0]
    assert score_of(values).stderr == pytest.approx(mean_stderr(values))


def test_items_count_by_their_weight():
    # mean (3 * 1 + 1 * 3) / 4 = 1.5; residuals -.5 and 1.5, of shares .75 and .25: .375^2 / .25 + .375^2 / .75 = .75
    score = score_of([1.0, 3.0], [3.0, 1.0])
    assert (score.value, score.stderr) == (1.5, pytest.approx(0.75**0.5))
    # 12.706 is the 97.5 % quantile of Student's t with one degree of freedom
    assert score.high - 1.5 == 1.5 - score.low == pytest.approx(12.706 * 0.75**0.5, abs=1e-3)


def test_the_interval_of_a_mean_is_students_and_stays_where_all_scores_lie():
    values = [0.25, 0.5, 1.0, 0.75, 0.5]
    score = score_of(values)
    expected = ttest_1samp(values, 0).confidence_interval()
    assert (score.low, score.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert (score_of([0.25, 1.0, 0.9]).high, score_of([0.0, 0.0, 0.6]).low) == (1.0, 0.0)
    assert score_of([0.25, 1.0, 0.9], [1.0, 1.0, 1.0]).high > 1.0  # bits a byte, of documents of one length
    assert score_of([0.25, 1.0, 1.1]).high > 1.1


def test_a_mean_of_tasks_adds_up_their_errors_and_stays_below_all_right():
    # Welch: (2 v)^2 / (v^2 / 1 + v^2 / 2) = 8 / 3 degrees of freedom, v = 0.2^2 / 4
    mean = centred_mean([(0.9, 0.1, 2, 0.5), (0.8, 0.2, 3, 0.0)])
    assert (mean.value, mean.stderr, mean.num_items) == (pytest.approx(0.8), pytest.approx(0.08**0.5 / 2), 5)
    assert (mean.low, mean.high) == (pytest.approx(0.8 + t.ppf(0.025, 8 / 3) * mean.stderr), 1.0)
    assert centred_mean([(0.0, 0.5, 2, 0.5)]).low == -1.0


def test_all_right_still_has_an_interval():
    # n / (n + z^2) = 10 / 13.8415
    score = score_of([1.0] * 10)
    assert (score.low, score.high) == (pytest.approx(0.72247, abs=1e-5), 1.0)
    assert score.stderr == 0.0


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")]])
def test_what_has_no_standard_error_is_refused(values):
    with pytest.raises(SourceError):
        score_of(values)
