"""`make trace` over a store, a registry and an endpoint that are real: from a response's id to the rows that its words are from."""

import io
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import uvicorn

from pipelines import trace
from pipelines.console import Console
from pipelines.mistakes import ConfigError
from pipelines.store import Record as Result
from stages.contract import ResourcesUnavailable
from stages.serving.app import App, build_app
from stages.serving.endpoint import Deployed, write_record
from stages.serving.options import ServingOptions
from stages.text.record import TEXT, Record
from stages.text.shards import CORPUS_SCHEMA, DROPPED_SCHEMA
from tests.pipelines.stored import World
from tests.stages.tiny_model import save_tiny_model


def new_id(kind: str, digest: str) -> str:
    return f"{kind}-{digest[:12]}{uuid.uuid4().hex[12:]}"


POEM = "the keel runs the whole length of a ship and keeps it upright in any sea"
ROWS = [
    ("poem.txt:000000001", POEM, "train"),
    ("poem.txt:000000002", "a row about nothing in particular that shares no run of words with it", "train"),
    ("notes.txt:000000009", "somebody noted: The keel runs the WHOLE length of it", "train"),
    ("held.txt:000000001", f"held out: {POEM}", "validation"),
    ("long.txt:000000001", f"left out by tokenize: {POEM} and more", "train"),
]


def parquet(rows: list[tuple[str, ...]], schema: pyarrow.Schema) -> bytes:
    sink = io.BytesIO()
    columns = [list(column) for column in zip(*rows, strict=True)]
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=schema), sink)
    return sink.getvalue()


@dataclass
class Past:
    """A model with all that it was made from."""

    corpus: Result
    tokens: Result
    model: Result

    @property
    def id(self) -> str:
        return new_id("cmpl", self.model.digest)


@pytest.fixture
def past(world: World) -> Past:
    rows = [(*Record(name, "poems", TEXT, text=text).values(), split) for name, text, split in ROWS]
    corpus = world.result(
        "clean",
        "corpus",
        world.result("ingest", "raw"),
        files={"rows/part-00000.parquet": parquet(rows, CORPUS_SCHEMA)},
    )
    dropped = parquet([("long.txt:000000001", "too_long", "")], DROPPED_SCHEMA)
    tokens = world.result("tokenize", "tokens", corpus, files={"dropped/part-00000.parquet": dropped})
    model = world.result("train", "weights", tokens)
    world.version("lm", model, "champion")
    return Past(corpus, tokens, model)


def run_trace(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **asked: str
) -> list[str]:
    for name in ("ID", "TEXT", "MODEL"):
        monkeypatch.setenv(name, asked.get(name, ""))
    assert trace.trace(Console(), world.overrides, None) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_an_id_leads_to_version_checkpoint_run_data_and_the_row_that_was_repeated(
    world: World, past: Past, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = "It was said that the keel runs the whole length of a ship and keeps it, they say."
    lines = run_trace(world, monkeypatch, capsys, ID=past.id, TEXT=answer)
    facts = dict(line.split(None, 1) for line in lines if line.startswith("  ") and not line.startswith("   "))
    assert facts["model"] == "lm@1 (champion)" and facts["checkpoint"] == past.model.digest
    assert facts["made"].startswith("by     train, 2026-11-30 12:00:00") and facts["run"] == "not recorded in MLflow"
    assert facts["data"] == f"{past.tokens.digest} (tokenize)" and facts["corpus"] == f"{past.corpus.digest} (clean)"
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("rows:")) :]
    assert rows[0].startswith(
        f"rows: 3 of the 4 training rows of corpus {past.corpus.digest[:12]} share 5 words in a row"
    )
    assert rows[1:] == [
        "  12 words  poem.txt:000000001  (source poems)",
        "      the keel runs the whole length of a ship and keeps it",
        "  7 words  notes.txt:000000009  (source poems)",
        "      The keel runs the WHOLE length of",
    ], "neither what was held out of training nor what tokenize left out taught the model anything"


def test_an_answer_that_repeats_no_row_says_so(
    world: World, past: Past, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_trace(
        world, monkeypatch, capsys, MODEL="models:/lm@champion", TEXT="words of its own, the whole length"
    )
    where = f"4 training rows of corpus {past.corpus.digest[:12]}"
    assert lines[-1] == f"rows: none of the {where} shares 5 words in a row with the answer"


def test_the_rows_behind_the_base_of_a_fetched_model_are_searched_too(
    world: World, past: Past, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = world.result("fetch", "base", past.model)
    tuned = world.result("train", "tuned", base)
    world.version("tuned", tuned)
    lines = run_trace(world, monkeypatch, capsys, ID=new_id("chatcmpl", tuned.digest), TEXT=POEM)
    assert f"  base        {base.digest} (fetch)" in lines and f"  corpus      {past.corpus.digest} (clean)" in lines
    assert "  16 words  poem.txt:000000001  (source poems)" in lines


def test_what_an_answer_quotes_cannot_command_the_terminal(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "one two three \x1b]0;owned\x07 four five six"
    row = (*Record("\x1b[2Jrow", "s", TEXT, text=text).values(), "train")
    corpus = world.result("clean", "c", files={"rows/part-00000.parquet": parquet([row], CORPUS_SCHEMA)})
    model = world.result("train", "w", world.result("tokenize", "t", corpus))
    lines = run_trace(world, monkeypatch, capsys, ID=new_id("cmpl", model.digest), TEXT=text)
    assert "one two three ␛]0;owned␇ four five six" in lines[-1] and "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({}, ConfigError, "nothing to trace: make trace ID=<response id>"),
        ({"ID": "chatcmpl-123"}, ConfigError, "no response of a server of this project has such an id"),
        (
            {"ID": new_id("cmpl", "f" * 64)},
            ResourcesUnavailable,
            "no model whose files have a digest that begins with ffffffffffff is registered or stored here",
        ),
    ],
)
def test_what_cannot_be_traced_says_why(
    world: World,
    asked: dict[str, str],
    kind: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(kind, match=words):
        run_trace(world, monkeypatch, capsys, **asked)


@pytest.fixture
def serving(world: World, tmp_path: Path) -> Iterator[App]:
    """A registered tiny model behind uvicorn, recorded as this project's endpoint."""
    directory = save_tiny_model(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    model = world.result("train", "tiny", world.result("tokenize", "none"), files=files)
    version = world.version("tiny", model, "champion")
    options = ServingOptions()
    app = build_app(directory, name="tiny", version=version, digest=model.digest, options=options)
    app.engine.wait_ready(60)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    deployed = Deployed(
        application="raykeel", base_url=url, **app.identity.fields(), uri="", num_cpus=0.5, options=options
    )
    write_record(world.app.state_root, deployed)
    yield app
    server.should_exit = True
    thread.join(10)
    listener.close()


def test_ask_prints_an_id_whose_answer_is_traced_without_its_text(
    world: World, serving: App, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipelines import chat

    monkeypatch.setenv("TEXT", "os.path.join(")
    assert chat.ask(Console(), world.overrides, None) == 0
    said = capsys.readouterr()
    response_id = said.err.strip().rpartition("ID=")[2]
    text = said.out.removeprefix("os.path.join(").removesuffix("\n")
    assert text and said.out == f"os.path.join({text}\n"
    assert said.err.startswith(
        f"tiny@1, 13 + 64 tokens, cut: no more tokens allowed; where it comes from: make trace ID=cmpl-{serving.identity.digest[:12]}"
    )
    lines = run_trace(world, monkeypatch, capsys, ID=response_id)
    assert "  model       tiny@1 (champion)" in lines
    assert lines[-1] == "rows: no corpus of this project went into the model"
    forgotten = new_id("cmpl", serving.identity.digest)
    lines = run_trace(world, monkeypatch, capsys, ID=forgotten)
    assert (
        lines[-1]
        == f'rows: the answer is no longer in the memory of an endpoint; give its text: make trace ID={forgotten} TEXT="..."'
    )
