"""Generation: a checkpoint's answers row by row, the same from Ray, inline and after a kill; scores; what is dropped and why."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pyarrow.parquet
import pytest

from stages.artifacts import Checkpoint, Corpus, Rows
from stages.contract import Executor, StageError
from stages.generate import GenerateConfig, GenerateResources, generate
from stages.text.record import FIELDS, Record, canonical
from stages.text.synthesis import Ask, AskAs, Decoding, Endpoint, Kind, Output, Score, ScoreBy
from tests.stages.tiny_model import save_tiny_model

INLINE = GenerateResources(executor=Executor.inline)


def write(directory: Path, records: list[Record], kind: type = Rows, split: list[str] | None = None):
    names = [*FIELDS, *(["split"] if split else [])]
    values = [[*record.values(), *([split[n]] if split else [])] for n, record in enumerate(records)]
    (directory / "rows").mkdir(parents=True)
    table = pyarrow.table([list(column) for column in zip(*values, strict=True)], names=names)
    pyarrow.parquet.write_table(table, directory / "rows" / "part-00000.parquet", row_group_size=100)
    sources = [{"name": "tiny", "weight": 2.0, "rows": len(records), "characters": 1}]
    return kind(uri=kind.write(directory, {"rows": len(records), "sources": sources}).uri, digest="ab" * 32)


def texts(count: int) -> list[Record]:
    words = ["path", "join", "open", "value", "naïve", "list"]
    made = [f"def {words[n % 6]}_{n}(" + " ".join(words[: n % 5]) for n in range(count)]
    return [Record(f"t:{n + 1:09d}", "tiny", "text", text=text) for n, text in enumerate(made)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Checkpoint:
    directory = save_tiny_model(tmp_path_factory.mktemp("model"), golden=False)
    return Checkpoint(uri=directory.as_uri(), digest="cd" * 32)


@pytest.fixture(autouse=True)
def one_thread():
    from stages.training.world import repeatable

    with repeatable(1):  # small matrices, and other work on the machine
        yield


def config(**values) -> GenerateConfig:
    given = {"decoding": Decoding(max_tokens=12, temperature=0.7, keep_unfinished=True), "resources": INLINE}
    return GenerateConfig(**(given | values))


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def rows_of(directory: Path) -> list[dict[str, str]]:
    return [row for part in sorted(directory.glob("rows/*")) for row in pyarrow.parquet.read_table(part).to_pylist()]


def test_every_row_gets_the_answer_that_the_model_gives_to_it_alone(tmp_path, make_context, model) -> None:
    from stages.serving.batch import answers
    from stages.serving.model import load_model
    from stages.serving.sampling import Sampling
    from stages.text.questions import seed_of

    given, ctx = texts(20), make_context(seed=7)
    generate(config(), ctx, rows=write(tmp_path / "rows", given), checkpoint=model)
    made = rows_of(ctx.output)
    assert [row["id"] for row in made] == [record.id for record in given]
    loaded = load_model(model.local())
    sampling = Sampling(max_tokens=12, temperature=0.7)
    for row, record in zip(made, given, strict=True):
        ids = loaded.backend.encode(record.text).ids
        [alone] = answers(loaded, [ids], [seed_of(7, record.id)], sampling)
        assert (row["kind"], row["prompt"], row["text"]) == ("prompt_completion", record.text, alone.text)
    summary = json.loads((ctx.output / "summary.json").read_text())
    assert summary["model"] == {"digest": "cd" * 32} and summary["origin_digest"] == "ab" * 32
    assert summary["sources"][0] | {"characters": 0} == {"name": "tiny", "weight": 2.0, "rows": 20, "characters": 0}


def test_a_run_goes_on_from_torn_and_missing_lines_to_the_bytes_of_an_undisturbed_one(
    tmp_path, make_context, model
) -> None:
    given = write(tmp_path / "rows", texts(40))
    whole = make_context()
    generate(config(), whole, rows=given, checkpoint=model)
    [journal] = (whole.work / "answers").iterdir()
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 40
    again = make_context()
    (again.work / "answers").mkdir()
    (again.work / "answers" / journal.name).write_bytes(b"".join(lines[:21]) + lines[21][:30])
    generate(config(), again, rows=given, checkpoint=model)
    assert tree(again.output) == tree(whole.output)
    # The batch that was half finished and all later ones were computed, not the first.
    [new] = [path for path in (again.work / "answers").iterdir() if path.name != journal.name]
    assert len(new.read_bytes().splitlines()) == 24


def test_what_is_not_wanted_is_dropped_and_what_cannot_be_asked_is_quarantined(tmp_path, make_context, model) -> None:
    records = [*texts(6), Record("u:000000001", "tiny", "text", text="x" * 250), Record("u:000000002", "tiny", "text")]
    ctx = make_context()
    cfg = config(decoding=Decoding(max_tokens=12), max_bad_fraction=0.3)
    with pytest.raises(StageError, match=r"no row is left of 8:\n +6  unfinished: .*max_tokens"):
        generate(cfg, ctx, rows=write(tmp_path / "rows", records), checkpoint=model)
    found = [json.loads(line) for line in (ctx.output / "quarantine.jsonl").read_text().splitlines()]
    assert [(each["id"], each["reason"]) for each in found] == [
        ("u:000000001", "prompt_too_long"),
        ("u:000000002", "no_question"),
    ]
    dropped = pyarrow.parquet.read_table(ctx.output / "dropped").to_pylist()
    assert {(row["id"], row["reason"]) for row in dropped} == {(f"t:{n:09d}", "unfinished") for n in range(1, 7)}
    with pytest.raises(StageError, match=r"2 of 8 rows could not .* at most 1\.0% may"):
        generate(config(), make_context(), rows=write(tmp_path / "again", records), checkpoint=model)


def test_rows_are_scored_by_their_own_log_probability_and_stay_as_they_are(tmp_path, make_context, model) -> None:
    import torch

    from stages.serving.model import load_model

    records = [*texts(9), Record("v:000000001", "tiny", "prompt_completion", prompt="2+2?", text=" four")]
    given = write(tmp_path / "rows", records)
    cfg, ctx = config(score=Score(by=ScoreBy.log_probability)), make_context()
    generate(cfg, ctx, rows=given, checkpoint=model)
    assert rows_of(ctx.output) == rows_of(given.local())
    scores = pyarrow.parquet.read_table(ctx.output / "scores").to_pylist()
    loaded = load_model(model.local())
    for record, scored in zip(records, scores, strict=True):
        before = loaded.backend.encode(record.prompt).ids
        ids = [*before, *loaded.backend.encode(record.text).ids]
        with torch.no_grad():
            logs = torch.log_softmax(loaded.model(torch.tensor([ids])).logits[0].double(), -1)
        each = [float(logs[at - 1, ids[at]]) for at in range(max(1, len(before)), len(ids))]
        assert scored["id"] == record.id
        assert scored["score"] == pytest.approx(sum(each) / len(each), abs=1e-5)
    middle = sorted(row["score"] for row in scores)[5]
    ctx = make_context()
    cfg = config(score=Score(by=ScoreBy.log_probability, keep_from=middle))
    generate(cfg, ctx, rows=given, checkpoint=model)
    assert {row["id"] for row in rows_of(ctx.output)} == {row["id"] for row in scores if row["score"] >= middle}
    assert json.loads((ctx.output / "summary.json").read_text())["dropped"] == {"below_threshold": 5}


def test_a_number_is_read_from_the_answer(tmp_path, make_context, model) -> None:
    given = write(tmp_path / "rows", texts(30))
    free = make_context()
    generate(config(), free, rows=given, checkpoint=model)
    digits = {row["id"]: [c for c in row["text"] if c in "0123456789"] for row in rows_of(free.output)}
    assert 0 < sum(map(bool, digits.values())) < 30
    ctx = make_context()
    generate(config(score=Score(pattern="[0-9]"), max_bad_fraction=1), ctx, rows=given, checkpoint=model)
    scores = {row["id"]: row["score"] for row in pyarrow.parquet.read_table(ctx.output / "scores").to_pylist()}
    assert scores == {row_id: float(found[-1]) for row_id, found in digits.items() if found}
    summary = json.loads((ctx.output / "summary.json").read_text())
    assert summary["reasons"] == {"no_number": 30 - len(scores)}
    assert summary["scores"]["rows"] == len(scores)
    assert summary["scores"]["mean"] == pytest.approx(sum(scores.values()) / len(scores))
    assert summary["waterfall"] == [
        {"step": "in", "rows": 30},
        {"step": "no_number", "rows": 30 - len(scores)},
        {"step": "out", "rows": len(scores)},
    ]


def test_of_a_corpus_only_the_training_split_is_asked(tmp_path, make_context, model) -> None:
    splits = ["train" if n % 3 else "validation" for n in range(12)]
    corpus = write(tmp_path / "corpus", texts(12), Corpus, splits)
    ctx = make_context()
    generate(config(limit=8), ctx, corpus=corpus, checkpoint=model)
    assert [row["id"][-2:] for row in rows_of(ctx.output)] == ["02", "03", "05", "06", "08"]


@pytest.mark.parametrize(
    ("connected", "values", "message"),
    [
        ({"checkpoint"}, {}, "one of rows and corpus"),
        ({"rows", "corpus", "checkpoint"}, {}, "one of rows and corpus"),
        ({"rows"}, {}, "one model must answer"),
    ],
)
def test_edges_must_fit(connected, values, message) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values).check(frozenset(connected))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Ask(template="{answer}"), r"ask\.template may name"),
        (lambda: Output(text="{score}"), r"output\.text may name"),
        (lambda: Decoding(temperature=-1), "temperature"),
        (lambda: Decoding(top_p=0), "top_p"),
        (lambda: Decoding(max_tokens=0), "max_tokens"),
        (lambda: Decoding(stop=[""]), "stop"),
        (lambda: Score(pattern="("), "pattern"),
        (lambda: Score(minimum=2, maximum=1), "minimum"),
        (lambda: config(batch_rows=0), "batch_rows"),
        (lambda: config(max_bad_fraction=2), "max_bad_fraction"),
        (lambda: GenerateResources(actors=0), r"resources\.actors"),
    ],
)
def test_impossible_values_are_refused(made, message) -> None:
    with pytest.raises(ValueError, match=message):
        made()


@pytest.mark.ray
@pytest.mark.slow
def test_actors_and_this_process_give_the_same_bytes(tmp_path, make_context, model, ray_session) -> None:
    given = write(tmp_path / "rows", texts(600))
    alone, pooled = make_context(), make_context()
    generate(config(), alone, rows=given, checkpoint=model)
    generate(config(resources=GenerateResources(actors=2)), pooled, rows=given, checkpoint=model)
    assert tree(pooled.output) == tree(alone.output)
    assert len({path.name.split(".")[1] for path in (pooled.work / "answers").iterdir()}) == 2


def test_a_checkpoint_with_a_template_is_asked_in_chats(tmp_path, make_context) -> None:
    from stages.serving.batch import answers
    from stages.serving.model import load_model
    from stages.serving.sampling import Sampling
    from tests.stages.tiny_model import CHAT_TEMPLATE

    directory = save_tiny_model(tmp_path / "chat", golden=False, chat_template=CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    records = [
        Record("a:000000001", "tiny", "chat", messages=canonical(messages)),
        Record("a:000000002", "tiny", "prompt_completion", prompt="2+2?", text="4"),
    ]
    ctx = make_context()
    cfg = config(decoding=Decoding(max_tokens=12, keep_unfinished=True), output=Output(kind=Kind.chat))
    generate(cfg, ctx, rows=write(tmp_path / "rows", records), checkpoint=Checkpoint(uri=directory.as_uri()))
    loaded = load_model(directory)
    for row, asked in zip(rows_of(ctx.output), ("hi", "2+2?"), strict=True):
        ids = loaded.backend.encode(f"user:{asked}\nassistant:").ids
        [alone] = answers(loaded, [ids], [0], Sampling(max_tokens=12, temperature=0.0))
        user, assistant = json.loads(row["messages"])
        assert user == {"role": "user", "content": asked}
        assert assistant == {"role": "assistant", "content": alone.text.strip()}


def test_what_only_a_chat_can_do_is_refused_without_a_template(tmp_path, make_context, model) -> None:
    given = write(tmp_path / "rows", texts(2))
    with pytest.raises(StageError, match=r"ask\.form=chat: the checkpoint has no chat template"):
        generate(config(ask=Ask(form=AskAs.chat)), make_context(), rows=given, checkpoint=model)
    with pytest.raises(StageError, match=r"ask\.system is set"):
        generate(config(ask=Ask(system="be brief")), make_context(), rows=given, checkpoint=model)


CHAIN = """# @package _global_
defaults: [{/fetch: model}, {/ingest: files}, {/generate: checkpoint}, {/clean: standard}, {/tokenize: base}, _self_]
name: chain
stages:
  generate: {inputs: {rows: ingest, checkpoint: fetch}}
  clean: {inputs: {rows: generate}}
  tokenize: {inputs: {corpus: clean, base: fetch}}
"""


def test_new_rows_go_on_to_clean_and_tokenize(tmp_path) -> None:
    from pipelines import plan
    from pipelines.config import compose

    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "chain.yaml").write_text(CHAIN)
    overrides = ["pipeline=chain", "model=models:/m@champion", "stages.ingest.source.path=my.jsonl"]
    overrides.append("stages.generate.score.keep_from=3")
    steps = plan.build(compose(overrides, str(tmp_path)))
    assert [step.name for step in steps] == ["fetch", "ingest", "generate", "clean", "tokenize"]
    assert steps[2].cfg.score == Score(keep_from=3)


def test_what_names_the_model_is_identity_and_what_only_reaches_it_is_not() -> None:
    from pipelines.fingerprint import identity

    def cfg(**values) -> dict:
        given = {"base_url": "http://h:1/v1", "model": "m", "revision": "1"} | values
        return identity(config(endpoint=Endpoint(**given))) | {"resources": None}

    assert cfg() == cfg(api_key_env="KEY")
    for changed in ({"revision": "2"}, {"model": "n"}, {"base_url": "http://h:2/v1"}):
        assert cfg() != cfg(**changed)


@pytest.mark.ray
@pytest.mark.slow
def test_what_an_actor_says_reaches_the_user_and_an_actor_that_dies_is_replaced(
    tmp_path, make_context, model, ray_session
) -> None:
    given, resources = write(tmp_path / "rows", texts(600)), GenerateResources(actors=1)
    with pytest.raises(StageError, match=r"^stages\.generate\.ask\.system is set"):
        generate(config(ask=Ask(system="be brief"), resources=resources), make_context(), rows=given, checkpoint=model)
    alone, killed = make_context(), make_context()
    generate(config(), alone, rows=given, checkpoint=model)
    answers, gone = killed.work / "answers", []

    def kill_once() -> None:
        while not (found := list(answers.glob("*.jsonl"))):
            time.sleep(0.005)
        gone.append(int(found[0].name.split(".")[1].split("-")[0]))
        os.kill(gone[0], signal.SIGKILL)

    thread = threading.Thread(target=kill_once, daemon=True)
    thread.start()
    generate(config(resources=resources), killed, rows=given, checkpoint=model)
    thread.join(1)
    assert len({path.name.split(".")[1] for path in answers.iterdir()}) == 2 and gone[0] != os.getpid()
    assert tree(killed.output) == tree(alone.output)
