"""The load verb: what is asked of the load generator, what is made of its times, and that it is refused in words where it is not there."""

import json
import math
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.artifacts import Checkpoint, Corpus, Endpoint, EvalReport, LoadReport, ModelVersion
from stages.contract import GateRefused, ResourcesUnavailable, StageError
from stages.gate import GateConfig, Rules, gate
from stages.load import Arrival, LoadConfig, LoadResources, Objective, _prompts, curves, load, measure, percentile, spec
from stages.serving import guidellm
from stages.serving.guidellm import Request
from stages.serving.options import ServingOptions
from tests.stages.serving_server import DIGEST, NAME, Running, serve
from tests.stages.tiny_model import save_tiny_model

FACTS = {"base_url": "http://127.0.0.1:8000", "model": "tiny"}
TOOL = Path(__file__).resolve().parents[2] / ".raykeel" / "tools" / "guidellm" / "bin" / "guidellm"


def request(began: float, first: float, last: float, ended: float, tokens: int = 5) -> Request:
    return Request(ok=True, began=began, first=first, last=last, ended=ended, tokens=tokens)


LOST = Request(ok=False, began=1.0, first=None, last=None, ended=2.0, tokens=0)


def test_times_are_milliseconds_and_rates_are_over_the_whole_span():
    # Two answers of five tokens between second 0 and second 4, and one request that was lost.
    requests = [request(0.0, 0.1, 0.5, 0.6), request(1.0, 3.0, 3.4, 4.0), LOST]
    metrics = measure(requests, Objective(ttft_ms=1000, itl_ms=200))
    assert metrics["requests"] == 3 and metrics["errors"] == 1
    assert metrics["error_rate"] == pytest.approx(1 / 3)
    assert metrics["output_tokens_per_second"] == pytest.approx(10 / 4)
    assert metrics["requests_per_second"] == pytest.approx(2 / 4)
    assert metrics["ttft_p50_ms"] == pytest.approx(100) and metrics["ttft_p99_ms"] == pytest.approx(2000)
    assert metrics["itl_p95_ms"] == pytest.approx(100)  # 0.4 s over four gaps
    assert metrics["latency_p50_ms"] == pytest.approx(600) and metrics["latency_p95_ms"] == pytest.approx(3000)
    # One of three kept the objective: the second waited too long, the lost one kept nothing.
    assert metrics["goodput"] == pytest.approx(1 / 3) and metrics["goodput_per_second"] == pytest.approx(1 / 4)


def test_a_percentile_is_a_value_that_was_measured():
    assert [percentile([4.0, 1.0, 3.0, 2.0], at) for at in (0, 25, 50, 75, 76, 100)] == [1.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert percentile([7.0], 99) == 7.0
    assert percentile(list(range(1, 101)), 95) == 95


def test_curves_are_the_percentiles_of_what_was_answered():
    drawn = curves([request(0.0, 0.1, 0.5, 0.6), request(0.0, 0.2, 0.6, 0.8), LOST])
    assert {name: len(curve) for name, curve in drawn.items()} == {"ttft_ms": 101, "itl_ms": 101, "latency_ms": 101}
    assert drawn["latency_ms"][0] == pytest.approx(600) and drawn["latency_ms"][100] == pytest.approx(800)


def test_an_answer_of_one_token_has_no_time_between_tokens_and_keeps_that_part():
    one = request(0.0, 0.1, 0.1, 0.2, tokens=1)
    assert one.itl_ms is None
    assert measure([one], Objective(itl_ms=1))["goodput"] == 1
    assert "itl_p50_ms" not in measure([one], Objective())


def test_when_nothing_is_answered_there_is_nothing_to_tell():
    with pytest.raises(StageError, match="none of 2 requests was answered"):
        measure([LOST, LOST], Objective())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give one of concurrency and rate, got concurrency None, rate None"),
        ({"concurrency": 2, "rate": 1.0}, "give one of concurrency and rate, got concurrency 2, rate 1.0"),
        ({"rate": 0.0}, "rate must be above 0, got 0.0"),
        ({"rate": math.inf}, "rate must be above 0, got inf"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"concurrency": 1, "output_tokens": 1}, "output_tokens must be at least 2, got 1"),
    ],
)
def test_a_load_that_means_nothing_is_refused_before_anything_starts(fields, message):
    with pytest.raises(ValueError) as refused:
        LoadConfig(**fields)
    assert str(refused.value) == message


def test_an_objective_asks_for_something():
    with pytest.raises(ValueError, match="objective must hold ttft_ms or itl_ms"):
        Objective(ttft_ms=None, itl_ms=None)


def test_closed_and_open_loops_are_told_in_the_tools_own_words():
    closed = spec(LoadConfig(concurrency=4), FACTS, None, "/tokenizer", 7)
    assert closed["profile"] == {"kind": "concurrent", "streams": [4]}
    assert closed["seed"] == {"kind": "static", "value": 7} and closed["backend"]["request_format"] == "/v1/completions"
    assert closed["data"] == [
        {
            "kind": "synthetic_text",
            "prompt_tokens": 64,
            "prompt_tokens_stdev": 16,
            "prompt_tokens_min": 1,
            "prompt_tokens_max": 128,
            "output_tokens": 32,
        }
    ]
    evenly = spec(LoadConfig(rate=2.0, arrival=Arrival.constant, chat=True), FACTS, Path("/p.json"), "/tokenizer", 0)
    assert evenly["profile"] == {"kind": "constant", "rate": [2.0]}
    assert evenly["backend"]["request_format"] == "/v1/chat/completions"
    assert evenly["data"] == [{"kind": "json_file", "path": "/p.json"}]


def told(ok: bool) -> dict:
    times = {"targeted_start": 10.0, "request_start": 10.5, "first_token_iteration": 11.0, "last_token_iteration": 12.0}
    return {"info": {"timings": {**times, "request_end": 12.5}}, "output_tokens": 5 if ok else None}


def test_in_an_open_loop_waiting_counts_from_when_a_request_was_due(tmp_path):
    path = tmp_path / "measured.json"
    lists = {"successful": [told(True)], "errored": [told(False)], "incomplete": []}
    path.write_text(json.dumps({"benchmarks": [{"requests": lists}]}))
    due, failed = guidellm.read(path, open_loop=True)
    assert due.ttft_ms == 1000 and due.latency_ms == 2500 and due.itl_ms == 250 and due.ok
    assert not failed.ok and failed.tokens == 0
    assert guidellm.read(path, open_loop=False)[0].ttft_ms == 500


@pytest.mark.parametrize(
    "text", ["", "{}", '{"benchmarks": []}', '{"benchmarks": [{"requests": {"successful": [{}]}}]}']
)
def test_a_file_of_another_form_is_refused_in_words(tmp_path, text):
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(StageError, match="is not understood"):
        guidellm.read(path, open_loop=False)


def test_a_missing_program_names_the_command_that_brings_it(tmp_path):
    with pytest.raises(ResourcesUnavailable, match="make load-tool"):
        guidellm.find(str(tmp_path / "guidellm"))


def program(tmp_path: Path, body: str) -> str:
    """A stand-in for the load generator: what it is told stands in `told`, its output's place in `output`."""
    path = tmp_path / "program"
    head = "import json, os, sys\ntold = json.load(open(sys.argv[3]))['spec']\noutput = told['outputs'][0]['path']\n"
    path.write_text(f"#!{sys.executable}\n{head}{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_program_that_fails_says_its_last_words(tmp_path):
    failing = program(tmp_path, "print('first'); print('the port is closed'); sys.exit(3)")
    with pytest.raises(StageError, match="ended with 3: the port is closed"):
        guidellm.run(failing, {"profile": {}}, tmp_path / "work", "none", lambda passed_s: None)


def test_the_key_travels_in_the_environment_and_stands_in_no_file(tmp_path):
    body = "json.dump({'benchmarks': [{'requests': {'successful': [], 'errored': [], 'incomplete': []}}]}, open(output, 'w'))\n"
    body += "open('seen', 'w').write(os.environ['GUIDELLM__SPEC__BACKEND__API_KEY'])"
    work = tmp_path / "work"
    assert guidellm.run(program(tmp_path, body), {"profile": {}}, work, "a-secret-key", lambda passed_s: None) == []
    assert (work / "seen").read_text() == "a-secret-key"
    assert "a-secret-key" not in "".join(path.read_text() for path in work.iterdir() if path.name != "seen")


def load_report(tmp_path: Path, **metrics: float) -> LoadReport:
    known = {"ttft_p95_ms": 900.0, "itl_p95_ms": 80.0, "latency_p95_ms": 3000.0, "error_rate": 0.0, "goodput": 0.97}
    directory = tmp_path / "load"
    directory.mkdir()
    made = LoadReport.write(
        directory, {"digest": "a" * 64, "metrics": {**known, "output_tokens_per_second": 40.0, **metrics}}
    )
    return LoadReport(uri=made.uri, digest="b" * 64)


def test_a_gate_asks_what_a_crowd_got(make_context, tmp_path):
    ctx = make_context("gate")
    rules = Rules(max_ttft_p95_ms=900, max_error_rate=0.0, min_goodput=0.95, min_output_tokens_per_second=40)
    facts = gate(GateConfig(rules=rules), ctx, load=load_report(tmp_path)).summary()
    assert [(rule["rule"], rule["found"], rule["holds"]) for rule in facts["rules"]] == [
        ("max_ttft_p95_ms", 900.0, True),
        ("max_error_rate", 0.0, True),
        ("min_goodput", 0.97, True),
        ("min_output_tokens_per_second", 40.0, True),
    ]
    assert facts["checkpoint_digest"] == "a" * 64 and facts["load_digest"] == "b" * 64 and facts["report_digest"] == ""


def test_a_gate_refuses_what_a_crowd_did_not_get(make_context, tmp_path):
    rules = Rules(max_itl_p95_ms=79.9, min_goodput=0.95)
    with pytest.raises(GateRefused, match=r"1 of 2 rules do not hold") as refused:
        gate(GateConfig(rules=rules), make_context("gate"), load=load_report(tmp_path))
    assert "| max_itl_p95_ms | itl_p95_ms <= 79.9 | 80.0000 | REFUSED |" in str(refused.value)


def test_a_gate_takes_the_load_of_no_other_model(make_context, tmp_path):
    other = Checkpoint(uri="file:///nowhere", digest="c" * 64)
    summary = {"checkpoint_digest": "c" * 64, "metrics": {"bits_per_byte": 1.0}}
    report = EvalReport(uri=EvalReport.write(tmp_path, summary).uri, digest="f" * 64)
    rules = Rules(max_bits_per_byte=2.0, min_goodput=0.5)
    with pytest.raises(StageError, match="the load judges checkpoint aaaaaaaaaaaa, not cccccccccccc"):
        gate(GateConfig(rules=rules), make_context("gate"), other, report, load_report(tmp_path))


@pytest.mark.parametrize(
    ("rules", "connected", "message"),
    [
        (Rules(min_goodput=0.9), {"checkpoint", "report"}, "rules.min_goodput asks what a crowd got"),
        (Rules(max_perplexity=9), {"load"}, "rules.max_perplexity asks the model's report"),
        (Rules(max_perplexity=9), {"report"}, "rules.max_perplexity asks the model's report"),
    ],
)
def test_a_rule_without_the_report_that_it_asks_is_found_when_it_is_planned(rules, connected, message):
    with pytest.raises(ValueError, match=message):
        GateConfig(rules=rules).check(frozenset(connected))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serve(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"), ServingOptions())


def given(tmp_path: Path, running: Running) -> tuple[Endpoint, ModelVersion]:
    identity = {"model": NAME, "version": 7, "digest": DIGEST}
    facts = {"base_url": f"http://127.0.0.1:{running.port}", **identity, "config_digest": "", "instance": ""}
    version = {"name": NAME, "version": 7, "digest": DIGEST, "uri": running.directory.as_uri()}
    for name in ("endpoint", "version"):
        (tmp_path / name).mkdir()
    return Endpoint.write(tmp_path / "endpoint", facts), ModelVersion.write(tmp_path / "version", version)


def test_warm_up_requests_are_asked_and_not_measured(make_context, tmp_path, running):
    before = running.app.engine.stats().generated_tokens
    lists = {"successful": [told(True)], "errored": [], "incomplete": []}
    body = f"json.dump({{'benchmarks': [{{'requests': {lists!r}}}]}}, open(output, 'w'))"
    resources = LoadResources(program=program(tmp_path, body))
    cfg = LoadConfig(concurrency=1, warmup_requests=3, objective=Objective(itl_ms=250), resources=resources)
    ctx = make_context("load")
    summary = load(cfg, ctx, *given(tmp_path, running)).summary()
    assert 3 <= running.app.engine.stats().generated_tokens - before <= 3 * 8
    assert summary["metrics"]["requests"] == 1 and summary["digest"] == DIGEST
    assert summary["load"] == {"concurrency": 1, "rate": None, "requests": 64, "prompt_tokens": 64, "output_tokens": 32}
    assert ("goodput", 1.0, None) in ctx.tracker.metrics


def test_the_endpoint_must_serve_the_model_that_is_connected(make_context, tmp_path, running):
    endpoint, version = given(tmp_path, running)
    (tmp_path / "other").mkdir()
    other = ModelVersion.write(tmp_path / "other", version.summary() | {"digest": "e" * 64})
    with pytest.raises(StageError, match="connect the same model to deploy and load"):
        load(LoadConfig(concurrency=1), make_context("load"), endpoint, other)


def corpus_of(tmp_path: Path) -> Corpus:
    rows = tmp_path / "corpus" / "rows"
    rows.mkdir(parents=True)
    texts, splits = (
        ["for training only", "one text to go on with, somewhat longer", " ", "two"],
        ["train"] + 3 * ["validation"],
    )
    pq.write_table(pa.table({"text": texts, "split": splits}), rows / "part-00000.parquet")
    return Corpus.write(rows.parent, {})


def test_prompts_are_the_corpus_validation_texts_cut_to_length(make_context, tmp_path, running):
    cfg = LoadConfig(concurrency=1, requests=3, prompt_tokens=8, output_tokens=4)
    path = _prompts(cfg, make_context("load"), corpus_of(tmp_path), running.directory)
    assert json.loads(path.read_text()) == [
        {"prompt": "one text", "output_tokens_count": 4},  # the tiny tokenizer has one token a letter
        {"prompt": "two", "output_tokens_count": 4},
        {"prompt": "one text", "output_tokens_count": 4},
    ]
    assert _prompts(cfg, make_context("load"), None, running.directory) is None


@pytest.mark.slow
@pytest.mark.skipif(not TOOL.exists(), reason="the load generator is not installed: make load-tool")
@pytest.mark.parametrize(
    ("how", "with_corpus"), [({"concurrency": 2}, False), ({"rate": 20.0}, False), ({"concurrency": 2}, True)]
)
def test_the_real_tool_measures_a_real_endpoint(make_context, tmp_path, running, how, with_corpus):
    lengths = {"prompt_tokens": 12, "prompt_tokens_stdev": 2, "output_tokens": 4}
    cfg = LoadConfig(**how, **lengths, requests=8, warmup_requests=2, resources=LoadResources(program=str(TOOL)))
    before = running.app.engine.stats().generated_tokens
    corpus = corpus_of(tmp_path) if with_corpus else None
    summary = load(cfg, make_context("load"), *given(tmp_path, running), corpus).summary()
    metrics = summary["metrics"]
    assert metrics["requests"] == 8 and metrics["errors"] == 0 and metrics["goodput"] == 1
    assert 0 < metrics["ttft_p50_ms"] <= metrics["ttft_p99_ms"] <= metrics["latency_p99_ms"]
    assert running.app.engine.stats().generated_tokens - before >= 8 * 4
