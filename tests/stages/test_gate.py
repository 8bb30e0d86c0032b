"""A gate's yes and no."""

import pytest

from stages.artifacts import Checkpoint, EvalReport
from stages.contract import GateRefused, StageError
from stages.gate import GateConfig, Rules, gate

CHECKPOINT = Checkpoint(uri="file:///nowhere", digest="a" * 64)
BASELINES = {"untrained": {"bits_per_byte": 4.0}, "unigram": {"bits_per_byte": 3.0}, "lzma": {"bits_per_byte": 1.5}}


def report(tmp_path, **values) -> EvalReport:
    summary = {
        "checkpoint_digest": "a" * 64,
        "metrics": {"bits_per_byte": 2.5, "validation_loss": 3.0, "perplexity": 20.0},
        "baselines": BASELINES,
    }
    made = EvalReport.write(tmp_path, summary | values)
    return EvalReport(uri=made.uri, digest="f" * 64)


def test_a_yes_is_bound_to_the_checkpoint_and_holds_its_rules_with_their_values(make_context, tmp_path):
    ctx = make_context("gate")
    rules = Rules(max_bits_per_byte=2.5, max_perplexity=20.0, must_beat=["untrained", "unigram"], min_improvement=0.1)
    approval = gate(GateConfig(rules=rules), ctx, CHECKPOINT, report(tmp_path))
    approval.check()
    facts = approval.summary()
    assert facts["checkpoint_digest"] == "a" * 64 and facts["report_digest"] == "f" * 64
    assert [(rule["rule"], rule["found"], rule["holds"]) for rule in facts["rules"]] == [
        ("max_bits_per_byte", 2.5, True),
        ("max_perplexity", 20.0, True),
        ("must_beat untrained", 2.5, True),
        ("must_beat unigram", 2.5, True),
    ]
    assert "file:" not in str(facts)


def test_a_no_shows_every_rule_and_writes_nothing(make_context, tmp_path):
    ctx = make_context("gate")
    rules = Rules(max_validation_loss=2.9, must_beat=["unigram", "lzma"], min_improvement=0.2)
    with pytest.raises(GateRefused) as refused:
        gate(GateConfig(rules=rules), ctx, CHECKPOINT, report(tmp_path))
    lines = str(refused.value).splitlines()
    assert lines[0] == "3 of 3 rules do not hold"
    assert lines[3] == "| max_validation_loss | validation_loss <= 2.9 | 3.0000 | REFUSED |"
    assert lines[4] == "| must_beat unigram | bits_per_byte < 2.4000 (unigram 3.0000 less 20%) | 2.5000 | REFUSED |"
    assert lines[5] == "| must_beat lzma | bits_per_byte < 1.2000 (lzma 1.5000 less 20%) | 2.5000 | REFUSED |"
    assert not list(ctx.output.iterdir())


def test_as_good_as_a_baseline_is_not_better(make_context, tmp_path):
    same = report(tmp_path, metrics={"bits_per_byte": 3.0})
    with pytest.raises(GateRefused, match="1 of 1 rules do not hold"):
        gate(GateConfig(rules=Rules(must_beat=["unigram"])), make_context("gate"), CHECKPOINT, same)


@pytest.mark.parametrize("metrics", [{}, {"bits_per_byte": None}, {"bits_per_byte": "2.0"}, None])
def test_a_missing_metric_refuses(make_context, tmp_path, metrics):
    with pytest.raises(GateRefused, match="missing or not a number"):
        rules = Rules(max_bits_per_byte=9.0)
        gate(GateConfig(rules=rules), make_context("gate"), CHECKPOINT, report(tmp_path, metrics=metrics))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_metric_that_is_not_finite_refuses(make_context, tmp_path, number):
    made = report(tmp_path)
    path = tmp_path / "summary.json"
    path.write_text(path.read_text().replace("2.5", number))
    with pytest.raises(GateRefused, match="missing or not a number"):
        rules = Rules(max_bits_per_byte=9.0, must_beat=["unigram"])
        gate(GateConfig(rules=rules), make_context("gate"), CHECKPOINT, made)


def test_a_baseline_that_the_report_does_not_have_refuses(make_context, tmp_path):
    with pytest.raises(GateRefused, match=r"a baseline before \(the report has lzma, unigram, untrained\)"):
        gate(GateConfig(rules=Rules(must_beat=["before"])), make_context("gate"), CHECKPOINT, report(tmp_path))


def test_a_report_about_another_checkpoint_is_an_error(make_context, tmp_path):
    with pytest.raises(StageError, match="the report judges checkpoint bbbbbbbbbbbb, not aaaaaaaaaaaa"):
        other = report(tmp_path, checkpoint_digest="b" * 64)
        gate(GateConfig(rules=Rules(must_beat=["unigram"])), make_context("gate"), CHECKPOINT, other)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "a gate without rules is none"),
        ({"min_improvement": 0.1, "max_perplexity": 1.0}, "min_improvement needs rules.must_beat"),
        ({"min_improvement": 1.0, "must_beat": ["unigram"]}, "min_improvement must be from 0 to below 1, got 1.0"),
    ],
)
def test_rules_that_say_nothing_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Rules(**values)
