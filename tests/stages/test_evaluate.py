"""Evaluation: every number against an independent computation, samples, and the stage under Ray."""

import json
import lzma
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from stages.artifacts import Checkpoint, TokenDataset
from stages.contract import Executor, ResourcesUnavailable, StageError
from stages.evaluate import EvaluateConfig, EvaluateResources, evaluate, table
from stages.text.corpus import documents
from stages.training import model
from stages.training.loop import run
from stages.training.scoring import Question, findings, score
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import config, job


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    work = tmp_path_factory.mktemp("trained")
    run(job(config(), data[0], work))
    return work / "export"


def question(data, checkpoint: Path, **values) -> Question:
    given = {
        "checkpoint": checkpoint,
        "base": None,
        "dataset": data[0].local(),
        "corpus": data[1].local(),
        "seed": 0,
        "samples": 10,
        "prompt_characters": 12,
        "sample_tokens": 8,
        "temperature": 0.0,
        "primer_bytes": 1 << 20,
        "batch_rows": 4,
        "threads": 1,
    }
    return Question(**given | values)


@pytest.fixture(scope="module")
def scored(data, trained):
    return score(question(data, trained))


def pieces(data, split: str):
    """Each document's ids in pieces of the sequence length, from the corpus and the tokenizer alone."""
    tokenizer = tokenizers.Tokenizer.from_file(str(data[0].local() / "tokenizer" / "tokenizer.json"))
    for _, _, text in documents(data[1].local(), split):
        ids = [*tokenizer.encode(text).ids, 0]
        yield from (ids[first : first + tiny.LENGTH] for first in range(0, len(ids), tiny.LENGTH))


def test_loss_and_bits_per_byte_equal_those_of_each_document_alone(data, trained, scored):
    loaded = model.load(trained)
    nats, predicted, first = 0.0, 0, 0
    with torch.no_grad():
        for ids in pieces(data, "validation"):
            logits = loaded(input_ids=torch.tensor([ids])).logits[0].double()
            chosen = torch.log_softmax(logits[:-1], dim=-1)[range(len(ids) - 1), ids[1:]]
            nats, predicted, first = nats - chosen.sum().item(), predicted + len(ids) - 1, first + (len(ids) > 1)
    text_bytes = sum(len(text.encode()) for _, _, text in documents(data[1].local(), "validation"))
    metrics = scored["metrics"]
    assert metrics["validation_loss"] == pytest.approx(nats / predicted, abs=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(nats / predicted), rel=1e-5)
    bits = nats / math.log(2) + first * math.log2(257)
    assert metrics["bits_per_byte"] == pytest.approx(bits / text_bytes, abs=1e-5)
    facts = scored["validation"]
    assert (facts["predicted_tokens"], facts["uncharged_tokens"], facts["documents"]) == (predicted, first, 18)


def test_the_unigram_is_add_one_frequencies_of_predicted_training_tokens(data, scored):
    seen = Counter(token for ids in pieces(data, "train") for token in ids[1:])
    # The packer of the tiny data set leaves its last, incomplete row out of neither split, so counts agree exactly.
    total = sum(seen.values()) + 257
    tokens = [token for ids in pieces(data, "validation") for token in ids[1:]]
    wanted = -sum(math.log((seen[token] + 1) / total) for token in tokens) / len(tokens)
    assert scored["baselines"]["unigram"]["validation_loss"] == pytest.approx(wanted, abs=1e-9)


def test_lzma_is_primed_with_the_training_text(data, scored, trained):
    train, validation = (
        b"".join(text.encode() + b"\x00" for _, _, text in documents(data[1].local(), split))
        for split in ("train", "validation")
    )
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]

    def size(text: bytes) -> int:
        return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=filters))

    wanted = 8 * (size(train + validation) - size(train)) / scored["validation"]["text_bytes"]
    assert scored["baselines"]["lzma"]["bits_per_byte"] == pytest.approx(wanted, abs=1e-3)
    unprimed = score(question(data, trained, primer_bytes=1, samples=0))
    assert unprimed["baselines"]["lzma"]["bits_per_byte"] > 1.2 * wanted
    assert unprimed["validation"]["lzma_primer_bytes"] == 1


def test_the_untrained_model_knows_nothing_and_training_helped(scored):
    untrained = scored["baselines"]["untrained"]
    assert untrained["validation_loss"] == pytest.approx(np.log(257), abs=0.1)
    assert scored["metrics"]["bits_per_byte"] < untrained["bits_per_byte"]


def test_the_numbers_do_not_depend_on_the_batch(data, trained, scored):
    other = score(question(data, trained, batch_rows=1, samples=0))
    assert other["metrics"] == pytest.approx(scored["metrics"], rel=1e-6)


def test_samples_continue_what_validation_documents_begin_with(data, scored):
    texts = {name: text for name, _, text in documents(data[1].local(), "validation")}
    assert len(scored["samples"]) == 10
    for sample in scored["samples"]:
        assert sample["prompt"] == texts[sample["id"]][:12]
        assert "before" not in sample


def test_with_a_base_before_and_after_stand_side_by_side(data, trained, tmp_path):
    run(job(config(model=None), data[0], tmp_path, base=Checkpoint(uri=trained.as_uri())))
    both = score(question(data, tmp_path / "export", base=trained))
    assert "untrained" not in both["baselines"]
    assert both["metrics"]["bits_per_byte"] < both["baselines"]["before"]["bits_per_byte"]
    assert all({"before", "completion"} <= sample.keys() for sample in both["samples"])
    assert both["findings"][1].startswith("The model it started from needs")


def test_sampling_depends_on_the_seed_alone(data, trained):
    def completions(seed: int) -> list[str]:
        torch.manual_seed(seed + 100)
        given = question(data, trained, temperature=1.0, seed=seed)
        return [sample["completion"] for sample in score(given)["samples"]]

    assert completions(0) == completions(0) != completions(1)


def test_prompts_of_prompt_rows_are_asked_and_not_charged(tmp_path, trained):
    data = tiny.dataset(tmp_path, prompts=True)
    found = score(question(data, trained))
    assert all(sample["prompt"].startswith("def ") and sample["prompt"].endswith(":") for sample in found["samples"])
    texts = [text for _, _, text in documents(data[1].local(), "validation")]
    assert found["validation"]["text_bytes"] == sum(len(text.encode()) for text in texts)
    # One byte is one token here: every byte and every end is predicted, but the first of each later piece.
    facts = found["validation"]
    assert facts["predicted_tokens"] + facts["uncharged_tokens"] >= facts["text_bytes"] + len(texts) - 2


def test_an_empty_validation_split_is_named(tmp_path, data, trained):
    dataset = tmp_path / "dataset"
    shutil.copytree(data[0].local(), dataset)
    facts = data[0].summary()
    facts["validation"] |= {"supervised_bytes": 0, "unsupervised_bytes": 0}
    TokenDataset.write(dataset, facts)
    empty = replace(question(data, trained), dataset=dataset)
    with pytest.raises(StageError, match="0 bytes of text, so nothing can be measured"):
        score(empty)


def test_findings_do_not_boast():
    metrics = {"bits_per_byte": 2.26}
    said = findings(metrics, {"untrained": {"bits_per_byte": 4.1}, "lzma": {"bits_per_byte": 1.57}})
    assert said == [
        "The model needs 2.26 bits per byte on the validation text.",
        "The same model with random weights needs 4.10 bits per byte: the model is better.",
        "lzma primed with the training text needs 1.57 bits per byte: this model does not beat a compressor.",
    ]


@pytest.mark.ray
def test_the_stage_reports_what_the_function_measures(make_context, data, trained, scored, ray_session):
    ctx = make_context("evaluate")
    cfg = EvaluateConfig(prompt_characters=12, sample_tokens=8, resources=EvaluateResources(batch_rows=4))
    report = evaluate(cfg, ctx, Checkpoint(uri=trained.as_uri(), digest="a" * 64), *data)
    report.check()
    facts = report.summary()
    assert facts["metrics"] == scored["metrics"] and facts["samples"] == scored["samples"]
    digests = ("checkpoint_digest", "dataset_digest", "corpus_digest", "base_digest")
    assert [facts[name] for name in digests] == ["a" * 64, "d" * 64, "c" * 64, None]
    logged = {name: value for name, value, _ in ctx.tracker.metrics}
    assert logged["bits_per_byte"] == scored["metrics"]["bits_per_byte"]
    assert logged["lzma_bits_per_byte"] == scored["baselines"]["lzma"]["bits_per_byte"]
    assert ctx.tracker.texts["evaluation.md"] == table(scored)
    assert "/tmp" not in json.dumps(facts)
    cfg.resources.executor = Executor.inline
    inline = evaluate(cfg, make_context("evaluate"), Checkpoint(uri=trained.as_uri(), digest="a" * 64), *data)
    assert (inline.local() / "summary.json").read_bytes() == (report.local() / "summary.json").read_bytes()


@pytest.mark.ray
def test_more_cpus_than_the_cluster_has_are_refused(make_context, data, trained, ray_session):
    cfg = EvaluateConfig(resources=EvaluateResources(cpus=9))
    with pytest.raises(
        ResourcesUnavailable, match=r"needs 9 CPU, cluster has 4: set stages.evaluate.resources.cpus <= 4"
    ):
        evaluate(cfg, make_context("evaluate"), Checkpoint(uri=trained.as_uri()), *data)


@pytest.mark.parametrize(
    "values", [{"samples": -1}, {"sample_tokens": 0}, {"temperature": -0.1}, {"primer_megabytes": 0}]
)
def test_impossible_values_are_named(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        EvaluateConfig(**values)
