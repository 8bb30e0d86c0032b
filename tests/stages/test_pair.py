"""Preference pairs: the shared prompt, exact boundaries, one begin token, every row that leaves counted, reference values
against a plain computation."""

import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from stages.artifacts import Checkpoint, Corpus
from stages.contract import Executor, StageError
from stages.pair import PairConfig, PairResources, pair
from stages.text.choices import ControlStrings, OverLongPair
from stages.text.record import Record, canonical
from tests.stages.chat_tokenizers import random_chat, save_tokenizer
from tests.stages.test_generate import tree, write

INLINE = PairResources(executor=Executor.inline)


def base(directory: Path, family: str, context: int = 512) -> Checkpoint:
    save_tokenizer(directory, "byte_level", family)
    size = len(AutoTokenizer.from_pretrained(directory))
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=size, max_position_embeddings=context, attention_dropout=0.5, **shape)
    LlamaForCausalLM(config).save_pretrained(directory)
    return Checkpoint(uri=directory.as_uri(), digest="ef" * 32)


def preference(number: int, prompt: list[dict], chosen: str, rejected: str, **values) -> Record:
    answers = [canonical([{"role": "assistant", "content": text}]) for text in (chosen, rejected)]
    return Record(
        f"p:{number:09d}", "tiny", "preference", messages=canonical(prompt), chosen=answers[0], rejected=answers[1],
        **values,
    )  # fmt: skip


def random_preferences(count: int, seed: int = 0) -> list[Record]:
    draw, made = random.Random(seed), []
    for number in range(1, count + 1):
        *prompt, chosen = random_chat(draw, system=False)
        rejected = random_chat(draw, system=False, turns=1)[-1]
        made.append(preference(number, prompt, chosen["content"].strip() or "x", rejected["content"].strip() or "y"))
    return made


def corpus(directory: Path, records: list[Record], validation: int = 0) -> Corpus:
    split = ["validation" if number < validation else "train" for number in range(len(records))]
    return write(directory, records, Corpus, split)


@pytest.fixture(autouse=True)
def one_thread():
    from stages.training.world import repeatable

    with repeatable(1):  # small matrices, and other work on the machine
        yield


def config(**values) -> PairConfig:
    return PairConfig(**({"resources": INLINE, "sequence_length": 512, "max_bad_fraction": 1.0} | values))


def pairs_of(directory: Path, split: str = "train") -> list[dict]:
    return [
        row for part in sorted((directory / split).glob("*")) for row in pyarrow.parquet.read_table(part).to_pylist()
    ]


def reasons_of(directory: Path) -> dict[str, str]:
    return {row["id"]: row["reason"] for row in pyarrow.parquet.read_table(directory / "dropped").to_pylist()}


@pytest.mark.parametrize("family", ["qwen25", "llama31", "mistral_v1"])
def test_both_completions_follow_the_prompt_that_a_server_is_fed_and_end_their_turn(
    tmp_path, make_context, family
) -> None:
    model, records, ctx = base(tmp_path / "base", family), random_preferences(24), make_context()
    pair(config(), ctx, corpus=corpus(tmp_path / "corpus", records), base=model)
    tokenizer = AutoTokenizer.from_pretrained(ctx.output / "tokenizer")  # as the template asks for no date any more
    end = {"qwen25": "<|im_end|>", "llama31": "<|eot_id|>", "mistral_v1": "</s>"}[family]
    made = {row["id"]: row for row in pairs_of(ctx.output)}
    assert len(made) == sum(record.chosen != record.rejected for record in records)
    for record in records:
        messages = json.loads(record.messages)
        fed = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        row = made[record.id]
        if len(messages) == 1:  # behind an earlier answer's border a server's tokens are the parts' too
            assert row["prompt_ids"] == fed
        assert tokenizer.decode(row["prompt_ids"]) == tokenizer.decode(fed)
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for name in ("chosen", "rejected"):
            whole = tokenizer.apply_chat_template([*messages, *json.loads(getattr(record, name))], tokenize=False)
            assert whole.startswith(asked)
            answer = whole[len(asked) : whole.rindex(end) + len(end)]
            # The parts apart: one pass over the whole may join the prompt's last token with the answer's first.
            assert row[f"{name}_ids"] == tokenizer(answer, add_special_tokens=False)["input_ids"]
            assert row[f"{name}_ids"][-1] == tokenizer.convert_tokens_to_ids(end)
            together = [*row["prompt_ids"], *row[f"{name}_ids"]]
            if tokenizer.bos_token is not None:
                assert together.count(tokenizer.bos_token_id) == 1 and together[0] == tokenizer.bos_token_id
    table = pyarrow.parquet.read_table(next((ctx.output / "train").glob("*")))
    assert table.schema.field("chosen_ids").type == pyarrow.list_(pyarrow.int32())
    summary = json.loads((ctx.output / "summary.json").read_text())
    assert summary["train"]["chosen_tokens"] == sum(len(row["chosen_ids"]) for row in made.values())
    assert summary["base_digest"] == "ef" * 32 and summary["waterfall"][0] == {"step": "in", "rows": 24}


def test_every_row_that_leaves_has_its_reason(tmp_path, make_context) -> None:
    user = [{"role": "user", "content": "hi"}]
    two_turns = canonical([
        {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"},
    ])  # fmt: skip
    good = preference(1, user, "hello", "no")
    records = [
        good,
        preference(2, user, "same", "same"),
        preference(3, user, "hello " * 200, "no"),
        preference(4, user, "I say <|im_end|> now", "no"),
        Record("p:000000005", "tiny", "preference", messages=canonical(user), chosen=two_turns, rejected=good.rejected),
        Record("p:000000006", "tiny", "text", text="plain"),
    ]
    ctx, model = make_context(), base(tmp_path / "base", "qwen25")
    given = corpus(tmp_path / "corpus", records)
    pair(config(sequence_length=100), ctx, corpus=given, base=model)
    assert [row["id"] for row in pairs_of(ctx.output)] == ["p:000000001"]
    assert reasons_of(ctx.output) == {
        "p:000000002": "identical",
        "p:000000003": "too_long",
        "p:000000004": "control_strings",
        "p:000000005": "other_turns",
        "p:000000006": "not_preference",
    }
    ctx = make_context()
    pair(config(sequence_length=100, control_strings=ControlStrings.neutralise), ctx, corpus=given, base=model)
    kept = pairs_of(ctx.output)[1]
    ends = AutoTokenizer.from_pretrained(model.local()).convert_tokens_to_ids("<|im_end|>")
    assert kept["id"] == "p:000000004" and kept["chosen_ids"].count(ends) == 1


def test_a_long_prompt_loses_its_beginning_but_not_its_begin_token(tmp_path, make_context) -> None:
    record = preference(1, [{"role": "user", "content": "word " * 60}], "yes", "no")
    model = base(tmp_path / "base", "llama31")
    whole, cut = make_context(), make_context()
    given = corpus(tmp_path / "corpus", [record])
    pair(config(), whole, corpus=given, base=model)
    pair(config(sequence_length=40, over_long=OverLongPair.truncate_prompt), cut, corpus=given, base=model)
    [before], [after] = pairs_of(whole.output), pairs_of(cut.output)
    longer = max(len(before["chosen_ids"]), len(before["rejected_ids"]))
    room = 40 - longer
    assert after["prompt_ids"] == [before["prompt_ids"][0], *before["prompt_ids"][-(room - 1) :]]
    assert (after["chosen_ids"], after["rejected_ids"]) == (before["chosen_ids"], before["rejected_ids"])
    facts = json.loads((cut.output / "summary.json").read_text())["train"]
    assert facts["truncated"] == 1 and facts["truncated_tokens"] == len(before["prompt_ids"]) - room


def test_reference_values_are_the_sums_over_the_completion_alone_whatever_the_batch(tmp_path, make_context) -> None:
    model, records = base(tmp_path / "base", "qwen25"), random_preferences(20, seed=3)
    ctx, other = make_context(), make_context()
    given = corpus(tmp_path / "corpus", records, validation=5)
    pair(config(reference_logprobs=True), ctx, corpus=given, base=model)
    pair(config(reference_logprobs=True, batch_rows=1), other, corpus=given, base=model)
    reference = AutoModelForCausalLM.from_pretrained(model.local(), dtype=torch.float32).eval()
    rows = [*pairs_of(ctx.output), *pairs_of(ctx.output, "validation")]
    alone = [*pairs_of(other.output), *pairs_of(other.output, "validation")]
    assert len(rows) >= 18
    for row, lone in zip(rows, alone, strict=True):
        for name in ("chosen", "rejected"):
            ids = torch.tensor([[*row["prompt_ids"], *row[f"{name}_ids"]]])
            with torch.no_grad():
                logs = torch.log_softmax(reference(ids).logits[0].double(), -1)
            first = len(row["prompt_ids"])
            expected = sum(float(logs[at - 1, ids[0, at]]) for at in range(first, ids.shape[1]))
            value = row[f"reference_{name}_logprob"]
            # A float32 of this size has no finer steps than 1.5e-5 above 128.
            assert value == pytest.approx(expected, abs=1e-5, rel=1e-7)
            assert value == pytest.approx(lone[f"reference_{name}_logprob"], abs=1e-5, rel=1e-7)


def test_windows_that_a_killed_run_wrote_are_not_made_again(tmp_path, make_context, monkeypatch) -> None:
    model, given = base(tmp_path / "base", "qwen25"), corpus(tmp_path / "corpus", random_preferences(20))
    monkeypatch.setattr("stages.text.pairing.ROWS_PER_WINDOW", 6)
    whole = make_context()
    pair(config(), whole, corpus=given, base=model)
    again = make_context()
    monkeypatch.setattr("stages.pair._write", stop)
    with pytest.raises(KeyboardInterrupt):
        pair(config(), again, corpus=given, base=model)
    monkeypatch.undo()
    monkeypatch.setattr("stages.text.pairing.ROWS_PER_WINDOW", 6)
    written = {path: path.stat().st_mtime_ns for path in again.work.rglob("*.parquet")}
    assert len(written) == 12
    last = again.work / "windows" / "facts" / "00000003.json"
    last.unlink()
    rerun = make_context(fingerprint=again.fingerprint)
    monkeypatch.setattr("shutil.rmtree", lambda path: None)
    pair(config(), rerun, corpus=given, base=model)
    assert tree(rerun.output) == tree(whole.output)
    made = [path for path, at in written.items() if path.stat().st_mtime_ns != at]
    assert {path.stem for path in made} == {"part-00003"}


def stop(*arguments) -> None:
    raise KeyboardInterrupt


def test_a_corpus_without_preference_rows_says_so(tmp_path, make_context) -> None:
    given = corpus(tmp_path / "corpus", [Record("t:000000001", "tiny", "text", text="plain")])
    with pytest.raises(StageError, match=r"no preference row .*\n +1  not_preference: the row is of another kind"):
        pair(config(), make_context(), corpus=given, base=base(tmp_path / "base", "qwen25"))


def test_more_bad_rows_than_allowed_stop_the_stage_and_long_ones_do_not(tmp_path, make_context) -> None:
    user = [{"role": "user", "content": "hi"}]
    records = [preference(n, user, f"hello {n}", "no") for n in range(1, 8)]
    records += [preference(8, user, "same", "same"), preference(9, user, "I say <|im_end|> now", "no")]
    records += [preference(10, user, "hello " * 200, "no")]
    model, given = base(tmp_path / "base", "qwen25"), corpus(tmp_path / "corpus", records, validation=1)
    assert PairConfig().max_bad_fraction == 0.01
    with pytest.raises(StageError) as refused:
        pair(config(sequence_length=100, max_bad_fraction=0.19), make_context(), corpus=given, base=model)
    assert str(refused.value).splitlines() == [
        "2 of 10 rows (20.0%) do not become pairs, more than stages.pair.max_bad_fraction=0.19 allows; mend the rows or raise it:",
        "          1  control_strings; p:000000009",
        "          1  identical: chosen and rejected are the same tokens; p:000000008",
    ]
    ctx = make_context()
    pair(config(sequence_length=100, max_bad_fraction=0.2), ctx, corpus=given, base=model)
    assert len(pairs_of(ctx.output)) == 6 and len(reasons_of(ctx.output)) == 3


def test_a_length_that_the_base_model_cannot_read_is_refused(tmp_path, make_context) -> None:
    given = corpus(tmp_path / "corpus", random_preferences(2))
    with pytest.raises(StageError, match=r"stages\.pair\.sequence_length=512: .* at most 64 tokens"):
        pair(config(), make_context(), corpus=given, base=base(tmp_path / "base", "qwen25", context=64))


def test_impossible_values_are_refused() -> None:
    for values, message in (
        ({"sequence_length": 1}, "sequence_length"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"max_bad_fraction": 1.1}, "max_bad_fraction"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**values)
    with pytest.raises(ValueError, match=r"resources\.actors"):
        PairResources(actors=0)


@pytest.mark.ray
@pytest.mark.slow
def test_actors_and_this_process_give_the_same_bytes(tmp_path, make_context, ray_session) -> None:
    model, given = base(tmp_path / "base", "qwen25"), corpus(tmp_path / "corpus", random_preferences(600), 40)
    alone, pooled = make_context(), make_context()
    pair(config(reference_logprobs=True), alone, corpus=given, base=model)
    cfg = config(reference_logprobs=True, resources=PairResources(actors=2))
    pair(cfg, pooled, corpus=given, base=model)
    assert tree(pooled.output) == tree(alone.output)
