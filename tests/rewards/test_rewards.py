"""Rewards, with answers that try to cheat."""

import pytest
import reasoning_gym

from nanodag.data.adapters import open_adapter
from nanodag.data.opening import open_source
from nanodag.rewards.reward import Reward
from nanodag.rewards.text_rewards import boxed_math, exact, gsm8k, math_answer, multiple_choice, reasoning_gym_answer


def value(reward, answer: str, completion: str) -> float:
    return reward({"answer": answer, "metadata": {}}, completion).value


def test_exact_ignores_blanks_at_the_ends_and_nothing_else():
    assert value(exact, "42", " 42\n") == 1.0
    assert [value(exact, "42", text) for text in ("4 2", "42.", "41 42", "", "42 42")] == [0.0] * 5
    assert value(exact, "", "") == 0.0


@pytest.mark.parametrize("given", ["1234", "1,234", "$1,234.00", "1234.", "+1234", "1234\nI am sure.", " 1234 "])
def test_gsm8k_accepts_the_number_however_it_is_spelled(given):
    assert value(gsm8k, "1234", f"2 + 2 = 4\n#### {given}") == 1.0
    assert value(gsm8k, "He pays.\n#### 1,234", f"#### {given}") == 1.0


OF_MATH = [
    "", "\\boxed{}", "\\boxed{8}",
    "\\boxed{7} \\boxed{8}",  # two guesses
    "\\boxed{7, 8}", "\\boxed{7 \\text{ or } 8}", "\\boxed{\\{7, 8\\}}", "7\nno idea", "\\boxed{7",
    "\\boxed{" + "9^" * 300 + "9}",
    # what sympy would write out for ever
    "\\boxed{9^{9^{9^9}}}", "\\boxed{10^{10^{10}}}", "\\boxed{2^{10000000000}}", "\\boxed{\\binom{10000000}{5000000}}",
    "\\boxed{\\sum_{i=1}^{1000000} i^{i}}", "\\boxed{1000000!}",
    "\\boxed{((99!)!)!}", "\\boxed{9^{9^9}}", "\\boxed{(9^{9999})^{9999}}",
]  # fmt: skip
CHEATS = {  # by reward: the right answer, and what must not pass for it
    gsm8k: ("1234", [
        "1234",  # no mark
        "#### 1 #### 1234",  # two guesses
        "#### 1234\n#### 7", "#### 1234 or 7", "#### 1234 7", "#### 1,2,3,4", "#### 12,34", "#### 1234e0", "#### nan",
        "#### ٣",  # another script's digit
        "#### ", "####", "#### .", "#### <<1234>>", "#### " + "1234" * 100_000,
    ]),
    multiple_choice: ("B", [
        "A", "", "ABCD", "A B C D", "A) B) C) D)", "B) or C)", "(B) (C)", "B. Paris\nC. Rome",
        "The answer is B. The answer is C.", "Answer: B\nAnswer: A", "A bee is B", "Because it is Paris",
        "B is the second letter", "The answer is a bit tricky: B or C", "I think the answer is a bee, so (C).",
    ]),
    math_answer: ("7", OF_MATH),
    boxed_math: ("7", OF_MATH),
}  # fmt: skip


@pytest.mark.parametrize("reward", CHEATS)
def test_a_reward_refuses_to_be_cheated(reward):
    answer, cheats = CHEATS[reward]
    assert [cheat for cheat in cheats if value(reward, answer, cheat)] == []


def test_gsm8k_says_when_the_prompt_itself_has_no_number():
    with pytest.raises(ValueError, match="'many' has no number"):
        gsm8k({"answer": "many"}, "#### 3")


@pytest.mark.parametrize(
    "given",
    ["B", "(B)", "B.", " B ", "B) Paris", "B. Paris", "**B**", "The answer is B.", "Answer: (B)", "the ANSWER is b"],
)
def test_multiple_choice_accepts_the_letter_however_it_is_stated(given):
    assert value(multiple_choice, "B", given) == 1.0


@pytest.mark.parametrize(
    "given", ["The answer is A", "Answer: a", "answer is (a)", "the answer is A because", "answer: a\nB"]
)
def test_multiple_choice_tells_the_letter_a_from_the_article(given):
    assert value(multiple_choice, "A", given) == 1.0
    assert value(multiple_choice, "A", "The answer is a cat.") == 0.0
    assert value(multiple_choice, "B", "The answer is a bit tricky. Answer: B") == 1.0


@pytest.mark.parametrize(("answer", "given"), [
    ("2^{2^n}-1", "\\boxed{2^{2^{n}} - 1}"), ("4294967296", "\\boxed{2^{2^5}}"), ("x_1^{2^n}", "$x_{1}^{2^{n}}$"),
    ("49995000", "\\boxed{\\binom{10000}{2}}"), ("2^{12345}-1", "\\boxed{2^{12345} - 1}"), ("$9^{9^9}$", "9^{9^{9}}"),
    ("10^{10^{10}}", "\\boxed{10^{10^{10}}}"), ("e^{x^2}", "\\boxed{e^{x^{2}}}"), ("2^{100}", "\\boxed{4^{50}}"),
    ("\\frac{1}{2}", "so \\boxed{0.5}"), ("\\frac{1}{2}", "so \\boxed{\\frac{2}{4}}"),
    ("\\boxed{12}", "\\boxed{12} as said, \\boxed{12}"), ("$x^2+1$", "\\boxed{1+x^2}"), ("7", "The sum is\n$7$"),
])  # fmt: skip
def test_math_accepts_equal_expressions(answer, given):
    assert value(math_answer, answer, given) == 1.0


def test_boxed_math_is_math_that_needs_the_box():
    assert value(boxed_math, "7", "so \\boxed{7.0}") == 1.0
    assert value(math_answer, "7", "so:\n7") == 1.0 and value(boxed_math, "7", "so:\n7") == 0.0


def entry(dataset: str, question: str, answer: str, **metadata):
    row = {"question": question, "answer": answer, "metadata": {"source_dataset": dataset, **metadata}}
    return {"answer": answer, "metadata": {"entry": row}}


def test_reasoning_gym_pays_nothing_for_partial_credit_unless_asked_to():
    prompt = entry("spell_backward", "Spell this word backward: ammonia", "ainomma", word="ammonia", word_len=7)
    assert reasoning_gym_answer(prompt, "ainomma").value == 1.0
    assert reasoning_gym_answer(prompt, "<answer>ainomma</answer>").value == 1.0
    for cheat in ("ainommx", "ainomma or 3", "None", "", "<answer>ainomma</answer><answer>x</answer>"):
        assert reasoning_gym_answer(prompt, cheat).value == 0.0
    partial = reasoning_gym_answer(prompt, "ainommx", strict=False)
    assert 0.0 < partial.value < 1.0 and partial.components == {"verifier": partial.value}


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e10, 1e300])
def test_a_reward_that_float32_cannot_square_is_refused(value):
    for made in (lambda: Reward(value), lambda: Reward(0.0, {"part": value})):
        with pytest.raises(ValueError, match="must be finite, and at most 1e"):
            made()


def test_reasoning_gyms_own_scores_are_the_rewards():
    for name in ("chain_sum", "spell_backward", "letter_counting", "basic_arithmetic"):
        url = f"reasoning_gym:{name}?size=5&seed=3"
        tasks, adapt = reasoning_gym.create_dataset(name, size=5, seed=3), open_adapter("auto", url, "prompt", {})
        for number, row in open_source(url).rows():
            record, task = adapt(number, row), tasks[number]
            for answer in (task["answer"], f"{task['answer']}x", task["answer"][:-1], "7", ""):
                score = float(tasks.score_answer(answer, task))
                assert reasoning_gym_answer(record, answer, strict=False).value == score, (name, answer)
                assert reasoning_gym_answer(record, answer).value == float(score == 1.0), (name, answer)


def test_reasoning_gym_verifier_that_raises_on_words_is_a_wrong_answer():
    prompt = entry("prime_factorization", "Factorise 139", "139", number=139, factors=[139])
    assert reasoning_gym_answer(prompt, "139").value == 1.0
    assert reasoning_gym_answer(prompt, "words").value == 0.0
