"""The table of a stage's metrics and cost in Prefect's UI."""

from tasks.stage_task import _table


def test_each_row_has_a_name_a_value_and_its_unit():
    cost = {"seconds": 250.0, "peak_bytes": 3 * 2**29, "tokens": 327_680, "mfu": 0.31, "start_s": 2.5, "device": "a|b"}
    assert _table("cost", cost) == [
        "| cost | value | unit |",
        "|---|---:|---|",
        "| seconds | 4 min 10 s |  |",
        "| peak bytes | 1.5 GiB |  |",
        "| tokens | 328 k | tokens |",
        "| mfu | 31.0 | % |",
        "| start | 2.5 s |  |",
        "| device | a\\|b |  |",
    ]


def test_scores_are_in_percent_and_what_is_kept_by_benchmark_has_a_row_each():
    assert _table("reached", {"sort": 0.415, "bits_per_byte": 1.8431}, "eval")[2:] == [
        "| sort | 41.5 | % |",
        "| bits per byte | 1.843 | bits a byte |",
    ]
    assert _table("cost", {"seconds_by_benchmark": {"sort": 2.4, "reverse": 1.5}})[2:] == [
        "| seconds by benchmark sort | 2.4 s |  |",
        "| seconds by benchmark reverse | 1.5 s |  |",
    ]
