"""The arithmetic of verdicts against numbers worked out by hand, the promise that documents quote what was measured, and
the shape of committed results."""

import dataclasses
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, machine, plot, quote
from benchmarks.gpu import __main__ as gpu
from benchmarks.harness import Bench, Check, Pair, Result, number, paired_verdict, ratio_of, summary

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
IDLE = {"load_average": 0.1, "busy": 0.02}


def busy() -> Bench:
    return Bench("test", quick=False, pairs=None, background={"load_average": 3.0, "busy": 0.9})


@pytest.fixture
def bench() -> Bench:
    return Bench("test", quick=False, pairs=None, background=IDLE)


def pairs_of(*ratios: float) -> list[Pair]:
    return [Pair("AB", 2.0, 2.0 * ratio) for ratio in ratios]


def test_the_ratio_is_the_geometric_mean_with_a_t_interval_on_logarithms_below_six_pairs() -> None:
    ratio, interval = ratio_of(pairs_of(0.9, 1.0, 1.1))
    assert ratio == pytest.approx(0.99 ** (1 / 3))
    logs = [math.log(x) for x in (0.9, 1.0, 1.1)]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / 2)
    half = 4.302653 * deviation / math.sqrt(3)  # t(0.975, 2 degrees of freedom), from a table
    assert interval == pytest.approx((math.exp(mean - half), math.exp(mean + half)), rel=1e-4)


def test_from_six_pairs_on_the_interval_is_a_bootstrap_that_lies_within_the_pairs() -> None:
    ratios = (0.95, 0.97, 0.99, 1.01, 1.03, 1.05)
    ratio, interval = ratio_of(pairs_of(*ratios))
    assert interval is not None
    low, high = interval
    assert 0.95 < low < ratio < high < 1.05
    # The mean of six has a sixth of the variance: about 0.99 * 1.96 * 0.0347 / sqrt(6) on both sides.
    assert high - low == pytest.approx(2 * 1.96 * 0.0347 / math.sqrt(6), rel=0.15)
    assert ratio_of(pairs_of(*ratios)) == (ratio, interval)


def test_one_pair_decides_nothing() -> None:
    ratio, interval = ratio_of(pairs_of(0.5))
    assert (ratio, interval) == (pytest.approx(0.5), None)
    assert paired_verdict(ratio, interval, None, 0.03, "higher") == "UNDECIDED"


@pytest.mark.parametrize(
    ("interval", "floor", "better", "verdict"),
    [
        ((0.98, 1.02), None, "higher", "EQUIVALENT"),
        ((0.99, 1.10), None, "higher", "UNDECIDED"),
        ((1.01, 1.10), None, "higher", "SMALL"),
        ((1.05, 1.10), None, "higher", "FASTER"),
        ((1.05, 1.10), None, "lower", "SLOWER"),
        ((0.80, 0.90), None, "higher", "SLOWER"),
        ((0.80, 0.90), None, "lower", "FASTER"),
        ((0.80, 0.90), 0.30, "higher", "UNDECIDED"),
    ],
)
def test_a_verdict_says_no_more_than_the_interval_and_the_noise_floor_allow(
    interval: tuple[float, float], floor: float | None, better: str, verdict: str
) -> None:
    assert paired_verdict(math.sqrt(interval[0] * interval[1]), interval, floor, 0.03, better) == verdict


def compare(bench: Bench, pairs: list[Pair], **more: object) -> Result:
    arms = {"A": "one", "B": "other"}
    return bench.compare("x", "?", unit="s", better="higher", arms=arms, pairs=pairs, margin=0.03, **more)  # type: ignore[arg-type]


def test_a_failed_check_makes_a_comparison_invalid_whatever_its_numbers(bench: Bench) -> None:
    pairs = pairs_of(1.0, 1.0, 1.001)
    assert compare(bench, pairs).verdict == "EQUIVALENT"
    assert compare(bench, pairs, gate=[Check("same losses", False, "step 3 differs")]).verdict == "INVALID"
    assert compare(busy(), pairs).verdict == "INVALID"


def test_the_floor_is_the_half_width_of_the_interval_of_equal_arms(bench: Bench) -> None:
    result = compare(bench, pairs_of(1.5, 1.5), floor_pairs=pairs_of(1.0, 1.02))
    _, around = ratio_of(pairs_of(1.0, 1.02))
    assert around is not None
    assert result.floor == pytest.approx(max(around[1], 1 / around[0]) - 1)
    assert result.level == "indicative"


def test_a_limit_bounds_the_ratio_or_the_median(bench: Bench) -> None:
    assert compare(bench, pairs_of(0.98, 0.98), limit=0.97).limit_met is True
    assert compare(bench, pairs_of(0.96, 0.96), limit=0.97).limit_met is False
    assert bench.value("x", "?", unit="s", values=[1.0, 9.0, 2.0], limit=2.0).verdict == "PASS"
    assert bench.value("x", "?", unit="s", values=[2.1], limit=2.0).verdict == "FAIL"
    assert bench.value("x", "?", unit="s", values=[2.1]).verdict == "INFO"


def test_a_limit_broken_on_a_busy_machine_proves_nothing_and_one_kept_there_is_kept() -> None:
    assert busy().value("x", "?", unit="s", values=[2.1], limit=2.0).verdict == "INVALID"
    assert busy().value("x", "?", unit="s", values=[1.9], limit=2.0).verdict == "PASS"
    assert busy().value("x", "?", unit="bits", values=[2.1], limit=2.0, needs_quiet=False).verdict == "FAIL"


def test_arms_are_measured_in_alternating_order(bench: Bench) -> None:
    calls: list[str] = []

    def arm(name: str) -> float:
        calls.append(name)
        return 1.0

    pairs = bench.alternate(3, lambda: arm("A"), lambda: arm("B"))
    assert "".join(calls) == "ABBAAB"
    assert [pair.order for pair in pairs] == ["AB", "BA", "AB"]


def test_memory_counts_a_grandchild_whose_parent_is_gone() -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = 'import sys, time; keep = bytearray(64_000_000); print(len(keep), flush=True); time.sleep(60)'\n"
        "p = subprocess.Popen([sys.executable, '-c', child], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    try:
        processes = machine.Processes()
        processes.add(parent.pid)
        assert processes.pss_mb() > 64
        parent.kill()
        parent.wait()
        assert [p.pid for p in processes.alive()] == [grandchild]
        assert 64 < processes.pss_mb() < 100
    finally:
        os.kill(grandchild, 9)


def test_a_process_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '77']).pid, flush=True); import time; time.sleep(77)"
    )
    with pytest.raises(RuntimeError, match="took more than"):
        machine.run([sys.executable, "-c", script], tmp_path / "log", os.environ, timeout_s=1.5)
    child = int((tmp_path / "log").read_text().split()[0])
    time.sleep(0.2)
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "zombie" in status.read_text()


# What is quoted


def write(directory: Path, **values: object) -> None:
    bench = Bench("test", quick=False, pairs=None, background=IDLE)
    result = bench.value("speed", "?", unit="s", values=[0.5], limit=1.0, details={"more": {"deep": 12.3456}})
    harness.write(dataclasses.replace(result, **values), directory)  # type: ignore[arg-type]


def test_quotes_are_rewritten_from_the_results_and_nothing_else_is_touched(tmp_path: Path) -> None:
    text = "It took <!-- bench:speed:summary -->9 s<!-- /bench -->, 9 s, <!-- bench:speed:details.more.deep --><!-- /bench -->."
    write(tmp_path)
    assert quote.rewritten(text, tmp_path) == (
        "It took <!-- bench:speed:summary -->0.500 s (limit 1.00) PASS<!-- /bench -->, 9 s, "
        "<!-- bench:speed:details.more.deep -->12.3<!-- /bench -->."
    )


@pytest.mark.parametrize("values", [{"quick": True}, {"verdict": "INVALID"}, None])
def test_a_missing_quick_or_invalid_result_is_never_quoted(tmp_path: Path, values: dict[str, object] | None) -> None:
    if values:
        write(tmp_path, **values)
    assert quote.quoted("speed", "summary", tmp_path) == "not measured here yet"


@pytest.mark.parametrize("path", quote.documents(), ids=lambda p: p.name)
def test_every_number_that_a_document_quotes_is_the_one_in_its_result(path: Path) -> None:
    text = path.read_text("utf-8")
    assert quote.rewritten(text) == text, "run python -m benchmarks.quote"
    assert text.count("<!-- bench:") == text.count("<!-- /bench -->") == len(quote.MARK.findall(text))


def test_every_quoted_result_is_one_that_a_bench_makes() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    for path in quote.documents():
        for match in quote.MARK.finditer(path.read_text("utf-8")):
            assert f'"{match["name"]}"' in sources, f"{path.name}: no bench makes {match['name']}"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.stem)
def test_a_committed_result_is_whole_quiet_and_names_no_machine(path: Path) -> None:
    text = path.read_text("utf-8")
    result = json.loads(text)
    assert set(result) == {field.name for field in dataclasses.fields(Result)}
    assert result["name"] == path.stem
    assert not result["quick"]
    assert result["schema"] == harness.SCHEMA
    assert result["verdict"] in {
        "EQUIVALENT",
        "FASTER",
        "SLOWER",
        "SMALL",
        "UNDECIDED",
        "PASS",
        "FAIL",
        "INFO",
        "INVALID",
    }
    assert (result["ratio"] is None) != (result["median"] is None)
    assert socket.gethostname() not in text
    assert not re.search(r"/(home|root|tmp|work|usr)/", text)
    if result["pairs"]:
        ratio, interval = ratio_of([Pair(**pair) for pair in result["pairs"]])
        assert result["ratio"] == pytest.approx(ratio)
        assert result["interval"] == pytest.approx(interval)


def test_numbers_are_shown_with_three_digits_and_a_summary_with_its_verdict() -> None:
    assert [number(x) for x in (0.0, 0.01234, 0.9994, 12.345, 1234.5)] == ["0", "0.0123", "0.999", "12.3", "1234"]
    shown = {"ratio": 0.99, "interval": [0.95, 1.031], "level": "indicative", "verdict": "UNDECIDED"}
    assert summary(shown) == "0.990 [0.950, 1.03] UNDECIDED, indicative"


@pytest.mark.slow
def test_a_bench_runs_from_the_command_line_and_writes_its_result(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "orchestration", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "orchestration_seconds_per_stage.json").read_text())
    assert result["quick"] and result["median"] > 0
    assert "orchestration_seconds_per_stage" in done.stdout


# The orchestrator against its alternatives


def test_the_no_op_graph_of_dvc_has_the_stages_and_edges_of_ours(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from benchmarks import noop
    from pipelines import plan
    from pipelines.config import compose

    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "twenty.yaml").write_text(noop.pipeline_yaml())
    steps = plan.build(compose(["pipeline=twenty"], str(tmp_path)))
    theirs = OmegaConf.create(noop.dvc_yaml())["stages"]
    assert len(steps) == len(theirs) == 20
    for step in steps:
        read = {name.removesuffix(".txt") for name in theirs[step.name]["deps"]} - {"source"}
        assert read == set(step.cfg.inputs.values())
        assert theirs[step.name]["outs"] == [f"{step.name}.txt"]


def test_the_flows_of_the_alternatives_are_programs_with_five_steps() -> None:
    import ast

    from benchmarks import empty_stages

    def decorated(source: str, name: str) -> list[str]:
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        return [
            node.name for node in found if any(isinstance(d, ast.Name) and d.id == name for d in node.decorator_list)
        ]

    assert decorated(empty_stages.metaflow_source(), "step") == ["start", "s1", "s2", "s3", "end"]
    assert decorated(empty_stages.dagster_source(), "op") == ["s0", "s1", "s2", "s3", "last"]
    assert "last(s3(s2(s1(s0()))))" in empty_stages.dagster_source()


def test_the_sweep_that_is_looked_up_has_two_hundred_different_points() -> None:
    from benchmarks import lookup

    points = lookup.overrides(lookup.POINTS)
    assert len(points) == len({tuple(point) for point in points}) == 200


def test_an_alternative_sees_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import alternatives

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("VIRTUAL_ENV", "somewhere")
    environ = alternatives.environment(tmp_path / "home", DAGSTER_HOME="there")
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(environ)
    assert environ["HOME"] == str(tmp_path / "home") and (tmp_path / "home").is_dir()
    assert environ["DAGSTER_HOME"] == "there"


def test_what_a_command_reads_is_counted_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(5_000_000))
    read = "open('file', 'rb').read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {read!r}], check=True)"
    used = machine.timed(machine.python("-c", child), tmp_path / "log", os.environ, cwd=tmp_path)
    nothing = machine.timed(machine.python("-c", child.replace(read, "0")), tmp_path / "log", os.environ, cwd=tmp_path)
    assert used.read_bytes - nothing.read_bytes == pytest.approx(5_000_000, rel=0.05)
    assert used.wall_s > 0 and used.cpu_s > 0


def test_a_command_that_fails_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*the reason"):
        machine.timed(machine.python("-c", "print('the reason'); exit(3)"), tmp_path / "log", os.environ)


def test_medians_are_those_of_each_arm() -> None:
    pairs = [Pair("AB", 1.0, 10.0), Pair("BA", 3.0, 20.0), Pair("AB", 2.0, 60.0)]
    assert harness.medians(pairs) == {"median_a": 2.0, "median_b": 20.0}


# The picture


def test_a_curve_passes_through_its_points_on_logarithmic_axes() -> None:
    drawn = plot.curve({100.0: 1.0, 1000.0: 2.0, 10000.0: 4.0}, title="t", x="x", y="y")
    circles = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    (x0, y0), (x1, y1), (x2, y2) = circles
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)  # equal factors are equal distances
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1 > y2
    dashed = re.search(r'<polyline points="([^"]+)"[^>]*dasharray', drawn)
    assert dashed is not None
    ends = [tuple(map(float, point.split(","))) for point in dashed[1].split()]
    assert ends[0] == (x0, y0)
    decade = (y0 - y1) / math.log10(2)
    assert ends[-1][1] == pytest.approx(y0 - 2 * decade, abs=0.5)  # linear: two decades up over two decades


@pytest.mark.parametrize("name", plot.PICTURES)
def test_the_pictures_in_the_documents_are_drawn_from_the_committed_results(name: str) -> None:
    drawn, picture = plot.PICTURES[name](quote.RESULTS), quote.PICTURES / name
    if drawn is None:
        assert not picture.exists(), "no valid result, so no picture"
    else:
        assert picture.read_text("utf-8") == drawn, "run python -m benchmarks.quote"


# Launchers


def test_equal_arms_are_runs_of_torchrun_two_by_two() -> None:
    from benchmarks import train_launcher

    pairs = [Pair("AB", a, 9.0) for a in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert train_launcher._floor(pairs) == [Pair("AA", 1.0, 2.0), Pair("AA", 3.0, 4.0)]


def test_a_run_that_lost_a_worker_is_read_from_its_lines() -> None:
    from benchmarks import train_recovery

    def step(number: int, at: float, loss: float = 0.5) -> str:
        return json.dumps({"step": number, "at": at, "loss": loss + number})

    lines = [step(n, 100.0 + n) for n in (1, 2, 3, 4, 5)]  # killed at 104.9: step 5 was on its way
    lines += [json.dumps({"event": "resumed from step 2"})]
    lines += [step(n, 110.0 + n) for n in (3, 4, 5, 6, 7)]
    found = train_recovery.read(lines, killed=104.9)
    assert found.seconds == pytest.approx(116.0 - 104.9)
    assert (found.steps_lost, found.restarts, found.agrees) == (3, 1, True)
    assert found.losses == {n: repr(0.5 + n) for n in range(1, 8)}
    assert not train_recovery.read([*lines[:-1], step(7, 117.0), step(3, 118.0, 0.6)], killed=104.9).agrees


def test_the_options_of_a_job_survive_a_command_line() -> None:
    from benchmarks import train_launcher, workload

    how = {"workers": 1, "checkpoint_every": 8}
    assert workload.how_of(workload.words(**how)) == how
    command = train_launcher.torchrun(Path("d"), Path("w"), 9, *workload.words(**how), restarts=2)
    assert {"--nproc-per-node=1", "--max-restarts=2", "--standalone", "checkpoint_every=8"} <= set(command)
    assert workload.config(9, **how).resources.workers == 1


# The data path against its alternatives


def test_pairs_of_texts_have_the_similarity_that_they_are_said_to_have(tmp_path: Path) -> None:
    from benchmarks import minhash_pairs

    reached = minhash_pairs.write_pairs(tmp_path / "pairs.jsonl", 2)
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == 2 * len(minhash_pairs.SIMILARITIES)
    for place, pair in enumerate(pairs):
        a, b = (
            {tuple(words[at : at + 5]) for at in range(len(words) - 4)}
            for words in (pair["a"].split(), pair["b"].split())
        )
        assert (
            len(a & b) / len(a | b)
            == pytest.approx(reached[place // 2])
            == pytest.approx(pair["similarity"], abs=0.005)
        )
    lines = [json.dumps({"similarity": s}) for s in (0.5, 0.5, 0.9)]
    assert minhash_pairs.shares(lines, [True, False, True]) == [0.5, 1.0]
    assert minhash_pairs.probability(0.8) == pytest.approx(0.924, abs=0.001)


@pytest.mark.parametrize("make", [pytest.param("real", marks=pytest.mark.slow), "generated"])
def test_a_corpus_is_the_same_rows_each_time_and_as_large_as_asked_for(make: str, tmp_path: Path) -> None:
    from benchmarks import data_corpus

    made = [getattr(data_corpus, make)(tmp_path / place, 0.05) for place in ("one", "other")]
    files = sorted((tmp_path / "one").iterdir())
    assert [path.read_bytes() for path in files] == [(tmp_path / "other" / path.name).read_bytes() for path in files]
    texts = [json.loads(line)["text"] for path in files for line in path.open()]
    assert made[0] == made[1] == {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
    assert 50_000 <= made[0]["bytes"] < 100_000


def test_arms_of_a_round_take_turns_and_are_compared_within_it() -> None:
    from benchmarks import data_end_to_end

    assert data_end_to_end.order(1) == data_end_to_end.order(0)[::-1]
    a, b = (
        [{"documents": 10, "seconds": s, "kept": k} for s, k in runs] for runs in ([(1, 3), (2, 3)], [(5, 3), (1, 4)])
    )
    assert data_end_to_end.paired(a, b) == [Pair("AB", 10, 2), Pair("BA", 5, 10)]
    assert data_end_to_end.same({"a": a, "b": a}, "kept").holds
    assert not data_end_to_end.same({"a": a, "b": b}, "kept").holds


# Training against its alternatives


def a_run(seconds: float, losses: list[float], tokens: list[int] | None = None, waited: float | None = None) -> Any:
    from benchmarks import train_trl

    tokens = tokens or [100] * len(losses)
    return train_trl.Run([10.0 + seconds * n for n in range(len(losses))], tokens, losses, waited)


def test_the_speed_of_a_run_is_that_of_its_steps_between_the_warm_up_and_the_last() -> None:
    made = a_run(2.0, [1.0] * 7, [900, 900, 900, 10, 20, 30, 900])
    assert made.speed == pytest.approx((10 + 20 + 30) / 6.0)  # steps 4, 5 and 6, each of two seconds


def test_arms_that_train_on_other_tokens_or_to_other_losses_are_not_compared() -> None:
    from benchmarks import train_trl

    falling = [9.0 - n / 10 for n in range(12)]
    ours, near = a_run(1.0, falling), a_run(1.0, [loss + 9e-5 for loss in falling])
    drifting = a_run(1.0, [*falling[:10], 0.0, 0.0])  # rounding may have grown by then
    far = a_run(1.0, [*falling[:9], falling[9] + 2e-4, *falling[10:]])
    other = a_run(1.0, falling, [100] * 11 + [99])
    assert train_trl.same_losses({"alone": [ours, drifting], "trl_padded": [near]}).holds
    assert not train_trl.same_losses({"alone": [ours], "trl_padded": [near, far]}).holds
    assert not train_trl.same_losses({"alone": [ours, far], "trl_padded": [near]}).holds
    assert train_trl.same_tokens({"alone": [ours], "trl_padded": [near]}).holds
    assert not train_trl.same_tokens({"alone": [ours], "trl_padded": [near, other]}).holds


def test_rounds_of_training_take_turns_and_are_compared_within() -> None:
    from benchmarks import train_trl

    assert train_trl.order(1) == train_trl.order(0)[::-1]
    a, b = ([a_run(s, [1.0] * 6) for s in seconds] for seconds in ((1.0, 2.0), (0.5, 4.0)))
    assert train_trl.paired(a, b) == [Pair("AB", 100, 200), Pair("BA", 50, 25)]


@pytest.mark.slow
def test_the_chats_of_all_arms_are_the_same_in_rows_of_their_own_packed_and_as_text(tmp_path: Path) -> None:
    import numpy as np
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks import chats
    from stages.text.packed import PackedSplit

    chats.make(tmp_path, 300)
    alone, packed = (PackedSplit.read(tmp_path / name, "train") for name in ("alone", "packed"))
    documents = [
        part[: length - start].tolist()
        for ids, starts, length in zip(packed.input_ids, packed.document_starts, packed.lengths, strict=True)
        for start, part in zip(starts, np.split(ids, starts[1:]), strict=True)
        if start < length
    ]
    rows = [ids[:length].tolist() for ids, length in zip(alone.input_ids, alone.lengths, strict=True)]
    assert sorted(documents) == sorted(rows) and len(packed) < len(alone)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    said = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    theirs = [
        tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"] for messages in said
    ]
    steps = len(said) // chats.ROWS
    assert chats.tokens_of_steps(tmp_path / "alone", steps) == [
        sum(map(len, theirs[first : first + chats.ROWS])) for first in range(0, steps * chats.ROWS, chats.ROWS)
    ]
    assert all(ids in rows for ids in theirs) and len(said) == len(rows) // chats.ROWS * chats.ROWS
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert 8e6 < model.num_parameters() < 20e6


def arm_of_a_gpu(losses: list[float], memory: float = 2e9) -> dict[str, Any]:
    return {"losses": losses, "training_memory_bytes": memory, "reloaded": True}


def test_the_check_of_a_gpu_holds_for_what_is_right_and_names_what_is_wrong() -> None:
    falling, near = [7.0, 6.5, 6.0], [7.0001, 6.5002, 6.0002]
    right = {
        "processor": arm_of_a_gpu(falling),
        "float32": arm_of_a_gpu(near),
        "cut": arm_of_a_gpu(near),
        "large_float32": arm_of_a_gpu(falling),
        "large": arm_of_a_gpu([7.01, 6.52, 6.05]),
        "checkpointed": arm_of_a_gpu([7.01, 6.52, 6.05], memory=1e9),
    }
    assert all(check["holds"] for check in gpu.judge(right))
    wrong = {
        "takes the steps of a processor": {
            "float32": arm_of_a_gpu([7.0, 6.4, 6.0]),
            "cut": arm_of_a_gpu([7.0, 6.4, 6.0]),
        },
        "to the last bit": {"cut": arm_of_a_gpu([7.0001, 6.5002, 6.0003])},
        "bfloat16 learns": {
            "large": arm_of_a_gpu([7.01, 6.9, 6.9]),
            "checkpointed": arm_of_a_gpu([7.01, 6.9, 6.9], 1e9),
        },
        "less memory": {"checkpointed": arm_of_a_gpu([7.01, 6.52, 6.05], memory=3e9)},
        "fresh process": {"large_float32": arm_of_a_gpu(falling) | {"reloaded": False}},
    }
    for words, changed in wrong.items():
        broken = [check["name"] for check in gpu.judge({**right, **changed}) if not check["holds"]]
        assert len(broken) == 1 and words in broken[0]
    failed = gpu.judge({**right, "cut": {"failed": "CUDA error"}})
    assert [check["found"] for check in failed if not check["holds"]] == ["not measured: an arm failed"] * 2
