"""Chats, prompts and texts of several sources in one data set, without Ray: what is learned, what leaves and why, and that a
model which was trained on it is served as it was taught."""

import json
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from stages.artifacts import Checkpoint, Corpus, TokenDataset
from stages.contract import STAGES, Context, Executor, StageError
from stages.evaluate import EvaluateConfig, EvaluateResources, evaluate
from stages.text.choices import ControlStrings, LossOn, OverLong, Packing
from stages.text.packed import PackedSplit
from stages.text.record import Record, canonical
from stages.text.shards import CORPUS_SCHEMA, ShardWriter
from stages.text.templates import Template
from stages.tokenize import TokenizeConfig, TokenizeResources, tokenize
from stages.train import train
from tests.stages.chat_tokenizers import save_tokenizer
from tests.stages.tiny_model import CHAT_TEMPLATE, save_tiny_model
from tests.stages.training_jobs import config as train_config

MakeContext = Callable[..., Context]
CONTROL = ["<|im_start|>", "<|im_end|>"]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(name: str, *messages: dict[str, Any], tools: list[Any] | None = None, source: str = "chats") -> Record:
    return Record(name, source, "chat", messages=canonical(messages), tools=canonical(tools) if tools else "")


def corpus_of(directory: Path, records: Iterable[Record], weights: dict[str, float] | None = None) -> Corpus:
    """As clean writes it: ids in order, every fifth row for validation."""
    directory.mkdir(parents=True)
    with ShardWriter(directory / "rows", CORPUS_SCHEMA) as writer:
        for index, record in enumerate(sorted(records, key=lambda record: record.id)):
            writer.write(*record.values(), "validation" if index % 5 == 4 else "train")
    facts = [{"name": name, "weight": weight} for name, weight in (weights or {}).items()]
    Corpus.write(directory, {"sources": facts} if facts else {})
    return Corpus(uri=directory.as_uri())


def settings(blocks: int = 2, **values: Any) -> TokenizeConfig:
    given: dict[str, Any] = {"vocab_size": 300, "sequence_length": 64, "chat_template": "chatml"}
    given |= {"add_control_tokens": CONTROL, "resources": TokenizeResources(blocks=blocks, executor=Executor.inline)}
    return TokenizeConfig(**given | values)


def small_chats(count: int = 50) -> list[Record]:
    return [
        chat(f"c:{i:04d}", user(f"ask {i}"), assistant(f"say {i}"), user("and"), assistant("so")) for i in range(count)
    ]


def documents(dataset: TokenDataset, split: str = "train") -> list[tuple[str, str, str]]:
    """(source, text, learned text) of each packed document, padding left out."""
    tokenizer = Tokenizer.from_file(str(dataset.local() / "tokenizer" / "tokenizer.json"))
    packed = PackedSplit.read(dataset.local(), split)
    found = []
    for row, starts in enumerate(packed.document_starts):
        for start, end in zip(starts, [*starts[1:], packed.input_ids.shape[1]], strict=True):
            labels = packed.labels[row, start:end]
            if (labels != -100).any():
                ids = packed.input_ids[row, start:end].tolist()
                text, taught = (
                    tokenizer.decode(part, skip_special_tokens=False) for part in (ids, labels[labels != -100].tolist())
                )
                found.append((packed.sources[row], text, taught))
    return found


def tree(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def test_chats_prompts_and_texts_of_three_sources_share_a_data_set_but_no_row(
    make_context: MakeContext, tmp_path: Path
) -> None:
    rows = small_chats()
    rows += [Record(f"p:{i:04d}", "pairs", "prompt_completion", f"p{i} ", f"c{i}") for i in range(50)]
    rows += [Record(f"t:{i:04d}", "texts", "text", text=f"text {i}") for i in range(50)]
    corpus = corpus_of(tmp_path / "in", rows, {"chats": 2.0, "pairs": 0.5, "texts": 1.0})
    made = [tokenize(settings(blocks), make_context(), corpus) for blocks in (1, 7)]
    assert tree(made[0].local()) == tree(made[1].local())
    found = documents(made[0])
    assert ("chats", "<|im_start|>user\nask 0<|im_end|>\n<|im_start|>assistant\nsay 0<|im_end|>\n<|im_start|>user\nand<|im_end|>\n"
            "<|im_start|>assistant\nso<|im_end|>\n", "say 0<|im_end|>so<|im_end|>") in found  # fmt: skip
    assert ("pairs", "p0 c0<|endoftext|>", "c0<|endoftext|>") in found
    first = next(taught for _, text, taught in found if text == "text 0<|endoftext|>")
    assert (
        first.endswith(" 0<|endoftext|>") and "text 0".endswith(first.removesuffix("<|endoftext|>")) and first[0] != "t"
    )
    assert sorted({source for source, _, _ in found}) == ["chats", "pairs", "texts"] and len(found) == 120
    facts = made[0].summary()
    assert [(s["name"], s["weight"], s["train"]["documents"]) for s in facts["sources"]] == [
        ("chats", 2.0, 40),
        ("pairs", 0.5, 40),
        ("texts", 1.0, 40),
    ]
    for split in ("train", "validation"):
        for unit in ("rows", "tokens", "documents", "supervised_bytes"):
            assert sum(source[split][unit] for source in facts["sources"]) == facts[split][unit]
    assert facts["waterfall"] == [{"step": "in", "documents": 150}, {"step": "out", "documents": 150}]
    assert not (made[0].local() / "dropped").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_chats_give_one_digest_on_ray_and_without(ray_session: None, make_context: MakeContext, tmp_path: Path) -> None:
    rows = [*small_chats(3_000), chat("z", user("only asks"))]
    rows += [Record(f"p:{i:04d}", "pairs", "prompt_completion", f"p{i} ", f"c{i}") for i in range(3_000)]
    corpus = corpus_of(tmp_path / "in", rows)
    on_ray = [TokenizeResources(blocks=blocks) for blocks in (2, 7)]
    inline = settings(over_long=OverLong.truncate, sequence_length=48)
    made = [
        tokenize(config, make_context(), corpus).local()
        for config in (inline, *(replace(inline, resources=resources) for resources in on_ray))
    ]
    assert tree(made[0]) == tree(made[1]) == tree(made[2])


@pytest.mark.parametrize(
    ("loss_on", "wanted"), [(LossOn.assistant, "say 7<|im_end|>so<|im_end|>"), (LossOn.last, "so<|im_end|>")]
)
def test_loss_is_taken_on_the_turns_that_were_asked_for_and_their_ends(
    make_context: MakeContext, tmp_path: Path, loss_on: LossOn, wanted: str
) -> None:
    dataset = tokenize(settings(loss_on=loss_on), make_context(), corpus_of(tmp_path / "in", small_chats()))
    learned = {text: taught for _, text, taught in documents(dataset)}
    assert next(taught for text, taught in learned.items() if "ask 7<" in text) == wanted
    words = {LossOn.assistant: "say 0so", LossOn.last: "so"}[loss_on]
    facts = dataset.summary()
    assert facts["chat_template"]["loss_on"] == loss_on.value
    # ids 0 to 49, of two digits from 10 on; every fifth row is not trained on
    digits = sum(len(str(i)) - 1 for i in range(50) if i % 5 != 4) if loss_on is LossOn.assistant else 0
    assert facts["train"]["supervised_bytes"] == 40 * len(words) + digits


def test_a_source_of_a_mix_that_has_no_row_left_is_named(make_context: MakeContext, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "in", small_chats(), {"chats": 2.0, "gone": 0.5})
    with pytest.raises(StageError, match=r"source 'gone' has a weight of 0\.5 in the mix but no row left to train on"):
        tokenize(settings(), make_context(), corpus)


def test_the_headline_tells_when_many_documents_are_longer_than_a_row(
    make_context: MakeContext, tmp_path: Path
) -> None:
    corpus = corpus_of(tmp_path / "in", small_chats())
    for length, wanted in ((24, "; 100% of the documents are longer than a row"), (64, "% used; 300 in vocabulary")):
        said: list[str] = []
        tokenize(settings(sequence_length=length), replace(make_context(), headline=said.append), corpus)
        assert wanted in said[0]


def test_prompts_and_completions_are_turns_of_a_chat_when_that_is_asked_for(
    make_context: MakeContext, tmp_path: Path
) -> None:
    rows = [Record(f"p:{i:04d}", "pairs", "prompt_completion", f"p{i}", f"c{i}") for i in range(20)]
    dataset = tokenize(settings(as_chat=True), make_context(), corpus_of(tmp_path / "in", rows))
    text = "<|im_start|>user\np0<|im_end|>\n<|im_start|>assistant\nc0<|im_end|>\n"
    assert ("pairs", text, "c0<|im_end|>") in documents(dataset)


def test_what_cannot_become_tokens_is_counted_and_named_and_too_much_of_it_stops_the_stage(
    make_context: MakeContext, tmp_path: Path
) -> None:
    odd = [
        chat("d:1", user("SECRET<|im_end|>"), assistant("x")),
        chat("d:2", user("SECRET only asks")),
        chat("d:3", {"role": "system", "content": "first"}, user("SECRET"), assistant("y")),
        chat("d:4", user("SECRET"), assistant("z"), user("more")),
    ]
    corpus = corpus_of(tmp_path / "in", [*small_chats(46), *odd])
    with pytest.raises(StageError) as refused:
        tokenize(settings(), make_context(), corpus)
    message = str(refused.value)
    assert "2 of 50 rows (4.0%) do not become tokens" in message and "max_bad_fraction=0.01" in message
    assert "1  control_strings: " in message and "; d:1" in message
    assert "1  no_answer: " in message and "; d:2" in message
    assert "SECRET" not in message

    dataset = tokenize(settings(max_bad_fraction=0.1), make_context(), corpus)
    assert dataset.summary()["waterfall"] == [
        {"step": "in", "documents": 50},
        {"step": "control_strings", "documents": 1},
        {"step": "no_answer", "documents": 1},
        {"step": "out", "documents": 48},
    ]
    left = pyarrow.parquet.read_table(dataset.local() / "dropped" / "part-00000.parquet").to_pylist()
    assert left == [{"id": "d:1", "reason": "control_strings"}, {"id": "d:2", "reason": "no_answer"}]
    kept = tokenize(settings(max_bad_fraction=0.1, control_strings=ControlStrings.neutralise), make_context(), corpus)
    end = kept.summary()["chat_template"]["terminators"][0]
    for split in ("train", "validation"):
        ids = PackedSplit.read(kept.local(), split).input_ids
        turns = [json.loads(row.messages) for row in [*small_chats(46), odd[0], *odd[2:]]]
        if split == "train":
            counted = int((ids == end).sum())
        else:
            assert counted + int((ids == end).sum()) == sum(map(len, turns))


def test_tools_that_a_template_does_not_know_are_refused(make_context: MakeContext, tmp_path: Path) -> None:
    rows = [chat(f"c:{i}", user("time?"), assistant("late"), tools=[TOOL]) for i in range(20)]
    with pytest.raises(StageError, match="tools_unsupported"):
        tokenize(settings(chat_template="zephyr"), make_context(), corpus_of(tmp_path / "in", rows))
    some = [*small_chats(50), *rows[:5]]
    with pytest.raises(StageError, match=r"5  tools_unsupported: .*; c:0, c:1"):
        tokenize(settings(chat_template="zephyr"), make_context(), corpus_of(tmp_path / "some", some))


def test_preference_pairs_are_sent_to_the_verb_that_takes_them(make_context: MakeContext, tmp_path: Path) -> None:
    pair = Record("p", "s", "preference", messages=canonical([user("q")]), chosen="[]", rejected="[]")
    with pytest.raises(StageError, match=r"preference pairs .* connect it to the `pair` verb"):
        tokenize(settings(), make_context(), corpus_of(tmp_path / "in", [*small_chats(), pair]))


def test_chats_without_a_template_are_refused_with_the_ways_out(make_context: MakeContext, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "in", small_chats())
    with pytest.raises(StageError, match=r"no chat template.*set stages.tokenize.chat_template.*prompt/completion"):
        tokenize(settings(chat_template=None), make_context(), corpus)
    endless = tmp_path / "endless.jinja"
    endless.write_text(CHAT_TEMPLATE)
    with pytest.raises(StageError, match=r"never learn to stop|no control token"):
        tokenize(settings(chat_template=str(endless)), make_context(), corpus)


@pytest.mark.parametrize("over_long", list(OverLong))
def test_no_token_is_lost_uncounted_whatever_becomes_of_long_documents(
    make_context: MakeContext, tmp_path: Path, over_long: OverLong
) -> None:
    chance = random.Random(1)
    rows = small_chats(40)
    rows += [
        chat(f"l:{i:04d}", user("q " * chance.randrange(1, 60)), assistant("a " * chance.randrange(1, 60)))
        for i in range(60)
    ]
    corpus = corpus_of(tmp_path / "in", rows)
    wide = tokenize(settings(sequence_length=512), make_context(), corpus).summary()
    dataset = tokenize(settings(over_long=over_long), make_context(), corpus)
    facts = dataset.summary()
    steps = {step["step"]: step["documents"] for step in facts["waterfall"]}
    assert wide["waterfall"][-1]["documents"] == 100 == steps["in"]
    for split in ("train", "validation"):
        found, whole = facts[split], wide[split]
        kept = found["tokens"] + found["dropped_tokens"] + found["truncated_tokens"]
        if over_long is OverLong.split:
            assert kept == whole["tokens"] and found["documents"] == whole["documents"]
            assert found["supervised_tokens"] == whole["supervised_tokens"] - found["first_tokens"]
        else:
            assert kept < whole["tokens"] and found["pieces"] == found["documents"]
        assert found["supervised_bytes"] + found["unsupervised_bytes"] <= whole["supervised_bytes"]
    reasons = {OverLong.split: set(), OverLong.truncate: {"answer_cut_off"}, OverLong.drop: {"over_long"}}
    assert set(steps) - {"in", "out"} == reasons[over_long]
    assert steps["out"] == facts["train"]["documents"] + facts["validation"]["documents"]
    left = dataset.local() / "dropped" / "part-00000.parquet"
    assert (pyarrow.parquet.read_table(left).num_rows if left.exists() else 0) == steps["in"] - steps["out"]
    if over_long is OverLong.truncate:
        assert facts["train"]["truncated_documents"] > 0
        assert all(text.startswith("<|im_start|>user") for _, text, _ in documents(dataset))


def test_without_packing_each_document_has_a_row_of_its_own(make_context: MakeContext, tmp_path: Path) -> None:
    dataset = tokenize(settings(packing=Packing.none), make_context(), corpus_of(tmp_path / "in", small_chats()))
    packed = PackedSplit.read(dataset.local(), "train")
    assert len(packed) == 40 and all(len(starts) <= 2 for starts in packed.document_starts)


def test_rows_of_real_lengths_are_at_least_97_percent_full_also_of_small_sources_and_splits(
    make_context: MakeContext, tmp_path: Path
) -> None:
    draw = np.random.default_rng(5)
    lengths = draw.lognormal(4.6, 1.0, 4_400).astype(int)
    rows = [
        Record(f"{i:06d}", "big" if i % 50 else "small", "text", text="x" * max(1, n)) for i, n in enumerate(lengths)
    ]
    dataset = tokenize(
        settings(vocab_size=257, add_control_tokens=[], chat_template=None, sequence_length=512), make_context(),
        corpus_of(tmp_path / "in", rows),
    )  # fmt: skip
    assert dataset.summary()["train"]["utilisation"] >= 0.97
    assert dataset.summary()["validation"]["utilisation"] >= 0.97
    packed = PackedSplit.read(dataset.local(), "train")
    assert (packed.labels != -100).sum() == dataset.summary()["train"]["supervised_tokens"]
    small = next(source for source in dataset.summary()["sources"] if source["name"] == "small")["train"]
    assert small["rows"] == -(-small["tokens"] // 512)  # the least: what came from three windows is packed together


def test_a_template_is_known_by_its_content_and_not_by_its_place(tmp_path: Path) -> None:
    class Digests:
        def path(self, path: Path) -> str:
            return path.read_text()

        def model(self, model: str) -> str:
            raise AssertionError(model)

    sources = STAGES[TokenizeConfig].sources
    assert sources is not None
    file = tmp_path / "one.jinja"
    file.write_text("template")
    assert sources(settings(chat_template=str(file)), Digests()) == {"chat_template": "template"}
    assert sources(settings(chat_template="chatml"), Digests()) != sources(settings(chat_template="zephyr"), Digests())
    assert sources(settings(chat_template=None), Digests()) == {}
    assert TokenizeConfig.__dataclass_fields__["chat_template"].metadata["identity"] is False


def test_a_model_without_a_template_learns_chats_with_new_tokens_and_is_served_as_it_was_taught(
    make_context: MakeContext, tmp_path: Path
) -> None:
    base = Checkpoint(uri=save_tiny_model(tmp_path / "base", context=64).as_uri(), digest="b" * 64)
    corpus = corpus_of(tmp_path / "in", small_chats(60))
    dataset = tokenize(settings(vocab_size=None, add_tokens=["ask "]), make_context(), corpus, base)
    facts = dataset.summary()
    assert (facts["added_tokens"], facts["vocab_size"]) == (3, 260)
    assert facts["stop_token_ids"] == [0, *facts["chat_template"]["terminators"]] == [0, 258]

    config = train_config(model=None, epochs=2, max_steps=None)
    trained = train(config, make_context(), dataset, base)
    directory = trained.local()
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [0, 258]
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == 260
    served, taught = Template.of_model(directory), Template.load(dataset.local() / "tokenizer", None)
    assert served is not None
    files = [place / "chat_template.jinja" for place in (directory, dataset.local() / "tokenizer")]
    assert files[0].read_bytes() == files[1].read_bytes()
    messages = [user("ask 1"), assistant("say 1"), user("and")]
    prompt = served.prompt_ids(messages)
    whole = taught.encode([*messages, assistant("so")], None, LossOn.last)
    assert whole.ids[: len(prompt)].tolist() == prompt and not whole.labelled[: len(prompt)].any()
    loaded = AutoTokenizer.from_pretrained(directory)
    assert loaded.convert_tokens_to_ids([*CONTROL, "ask "]) == [257, 258, 259]
    assert loaded.decode(prompt, skip_special_tokens=True).startswith("user\nask 1")

    options = EvaluateConfig(samples=3, sample_tokens=4, resources=EvaluateResources(executor=Executor.inline))
    report = evaluate(options, make_context(), trained, dataset, corpus, base).summary()
    said = sum(len(f"say {i}so") for i in range(60) if i % 5 == 4)
    assert report["validation"]["text_bytes"] == said
    assert report["metrics"]["validation_loss"] < report["baselines"]["before"]["validation_loss"]
    assert [sample["prompt"] for sample in report["samples"]] == ["and"] * 3


def test_a_data_set_of_another_tokenizer_is_refused_also_when_it_is_larger(
    make_context: MakeContext, tmp_path: Path
) -> None:
    base = Checkpoint(uri=save_tiny_model(tmp_path / "base", context=64).as_uri(), digest="b" * 64)
    dataset = tokenize(settings(), make_context(), corpus_of(tmp_path / "in", small_chats()))
    with pytest.raises(StageError, match="tokenized with another tokenizer"):
        train(train_config(model=None), make_context(), dataset, base)


def test_the_template_for_tools_travels_with_a_taken_over_tokenizer(make_context: MakeContext, tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", context=64, chat_template="{{ messages[0].content }}<|endoftext|>")
    place = base / "additional_chat_templates" / "tool_use.jinja"
    place.parent.mkdir()
    place.write_text("{{ tools }}")
    rows = [Record(f"t:{i}", "texts", "text", text=f"text {i}") for i in range(20)]
    config = settings(vocab_size=None, chat_template=None, add_control_tokens=[])
    dataset = tokenize(
        config, make_context(), corpus_of(tmp_path / "in", rows), Checkpoint(uri=base.as_uri(), digest="b")
    )
    copied = dataset.local() / "tokenizer" / "additional_chat_templates" / "tool_use.jinja"
    assert copied.read_text() == "{{ tools }}"
    shutil.rmtree(dataset.local())


def test_values_that_do_not_fit_are_refused_by_name() -> None:
    for values, message in (
        ({"max_bad_fraction": 1.5}, "max_bad_fraction must be between 0 and 1"),
        ({"add_tokens": [" "]}, "add_tokens must be words"),
        ({"vocab_size": 258}, r"vocab_size must be at least 259 \(all bytes, EOS and add_control_tokens\)"),
    ):
        with pytest.raises(ValueError, match=message):
            settings(**values)


def test_two_attempts_in_one_work_directory_leave_each_other_alone(make_context: MakeContext, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "in", small_chats())

    def files(context: Context) -> dict[str, bytes]:
        made = tokenize(settings(), context, corpus).local()
        return {f.relative_to(made).as_posix(): f.read_bytes() for f in made.rglob("*") if f.is_file()}

    def meanwhile(fraction: float, text: str) -> None:
        if text == "1 of 1 windows tokenised":
            others.append(files(make_context(fingerprint="f" * 64)))

    expected, others = files(make_context()), []
    context = replace(make_context(fingerprint="f" * 64), progress=meanwhile)
    assert files(context) == expected and others == [expected] and not list(context.work.iterdir())


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe", "unigram"])
def test_prompts_and_completions_are_the_text_of_the_file_for_every_kind_of_tokenizer(
    make_context: MakeContext, tmp_path: Path, kind: str
) -> None:
    both = [("hello say", "s the"), ("Q: hi\nA:", " the model"), ("Q: hi\n", "the model")] * 10
    rows = [Record(f"{i:03d}", "s", "prompt_completion", prompt, text) for i, (prompt, text) in enumerate(both)]
    base = save_tokenizer(tmp_path / "base", kind, "mistral_v1")
    (base / "config.json").write_text("{}")
    config = settings(vocab_size=None, add_control_tokens=[], chat_template=None)
    dataset = tokenize(config, make_context(), corpus_of(tmp_path / "in", rows), Checkpoint(uri=base.as_uri()))
    # The space with which such a tokenizer begins a text is taken off by its decoder only when nothing stands before.
    found = {(text.replace("<s> ", "<s>"), learned.strip()) for _, text, learned in documents(dataset)}
    assert found == {(f"<s>{prompt}{text}</s>", f"{text.strip()}</s>") for prompt, text in both}
