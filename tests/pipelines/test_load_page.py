"""What the report says of a load: its times, its goodput and one picture."""

from xml.etree import ElementTree

from pipelines import load_page, report

LOAD = {
    "load": {"concurrency": None, "rate": 2.0, "requests": 64, "prompt_tokens": 64, "output_tokens": 32},
    "objective": {"ttft_ms": 1000.0, "itl_ms": None},
    "curves": {"ttft_ms": [float(10 + i) for i in range(101)], "latency_ms": [float(200 + 8 * i) for i in range(101)]},
    "metrics": {
        "requests": 64.0,
        "errors": 2.0,
        "error_rate": 2 / 64,
        "goodput": 0.9375,
        "goodput_per_second": 1.8,
        "requests_per_second": 1.9,
        "output_tokens_per_second": 61.4,
        "ttft_p50_ms": 60.0,
        "ttft_p95_ms": 105.0,
        "ttft_p99_ms": 109.0,
        "latency_p50_ms": 600.0,
        "latency_p95_ms": 960.0,
        "latency_p99_ms": 992.0,
    },
}


def test_both_forms_of_the_report_say_what_a_crowd_got() -> None:
    facts = report.Facts("t", "FINISHED", "", "make run", 1, [], summaries={"LoadReport": LOAD})
    page, description = report.page(facts), report.markdown(facts)
    for said in (
        "64 requests, 2 requests a second, 64 tokens each, 32 back",
        "61.4 output tokens and 1.90 answers a second",
        "2 of 64 requests were not answered",
        "93.8% kept the objective (first token within 1000 ms): 1.80 a second",
    ):
        assert said in page and said in description
    assert page.count("<h2>Under load</h2>") == 1
    assert "| first token | 60.0 | 105.0 | 109.0 |" in description
    assert "| from token to token |  |  |  |" in description


def test_each_curve_is_drawn_once_within_the_picture_and_longer_waits_stand_higher() -> None:
    drawn = ElementTree.fromstring(load_page.picture(LOAD))
    lines = [line.attrib["points"] for line in drawn.iter("polyline")]
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.split()]
        assert len(points) == 101 and [x for x, _ in points] == sorted(x for x, _ in points)
        assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
        assert all(0 <= x <= load_page.WIDTH and 0 <= y <= load_page.HEIGHT for x, y in points)


def test_equal_times_still_have_a_picture() -> None:
    same = {**LOAD, "curves": {"ttft_ms": [10.0] * 101}}
    assert "polyline" in load_page.picture(same)
