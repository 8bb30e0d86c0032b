"""`make ask` and `make chat` as people type them: a real server, the real command, a pipe for a terminal."""

import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipelines.chat import Conversation, shown
from pipelines.config import ROOT
from stages.serving.endpoint import Deployed, write_record
from stages.serving.options import ServingOptions, key_digest
from tests.stages.serving_server import DIGEST, NAME, Running, serve
from tests.stages.tiny_model import CHAT_TEMPLATE, save_tiny_model

KEY_ENV = "TEST_ENDPOINT_KEY"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = save_tiny_model(tmp_path_factory.mktemp("m") / "chat", context=1_024, chat_template=CHAT_TEMPLATE)
    yield from serve(directory, ServingOptions(key_digests=(key_digest("s3cret"),)))


@pytest.fixture
def state(guarded: Running, tmp_path: Path) -> Path:
    """A state root that says that the server is this project's endpoint."""
    options = guarded.app.options
    record = Deployed(
        application="a", base_url=f"http://127.0.0.1:{guarded.port}", model=NAME, version=7, digest=DIGEST,
        config_digest=options.digest(), instance="i" * 32, uri="file:///nowhere", num_cpus=0.5, options=options,
        api_key_env=KEY_ENV,
    )  # fmt: skip
    state = tmp_path / "state"
    state.mkdir()
    write_record(state, record)
    return state


def run(command: str, state: Path, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines", command, f"state={state}"],
        cwd=ROOT, input=typed, capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


def test_lines_of_a_pipe_are_a_conversation(guarded: Running, state: Path) -> None:
    made = run(
        "chat",
        state,
        "/temperature 0\n/tokens 8\nhi\n\n/nonsense\nagain\n/quit\nnever asked\n",
        TEST_ENDPOINT_KEY="s3cret",
    )
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    assert lines[:2] == ["temperature is 0.0", "max_tokens is 8"]
    assert "there is no /nonsense; /help says what there is" in lines and "never asked" not in made.stdout
    asked = guarded.raw(
        "POST", "/v1/chat/completions",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}',
        content_type="application/json", authorization="Bearer s3cret",
    )  # fmt: skip
    import json

    answer = json.loads(asked[2])["choices"][0]["message"]["content"]
    assert made.stdout.startswith(f"temperature is 0.0\nmax_tokens is 8\n{answer}\n")


def test_ask_says_who_answered_and_under_which_id(state: Path) -> None:
    made = run("ask", state, TEXT="hi", TEST_ENDPOINT_KEY="s3cret")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("hi") and f"{NAME}@7, " in made.stdout and f"chatcmpl-{DIGEST[:12]}" in made.stdout


@pytest.mark.parametrize(("key", "said"), [("", f"{KEY_ENV} is not set"), ("wrong", f"{KEY_ENV} holds another key")])
def test_a_missing_or_wrong_key_is_told_by_the_variables_name(state: Path, key: str, said: str) -> None:
    made = run("ask", state, TEXT="hi", TEST_ENDPOINT_KEY=key)
    assert made.returncode == 2 and said in made.stderr + made.stdout
    assert "wrong" not in (made.stderr + made.stdout).replace("wrong answer", "")


@dataclass
class Parrot:
    """Stands for an asker: says what it was asked, word by word."""

    temperature: float = 0.0
    max_tokens: int = 5
    heard: list[Sequence[dict[str, str]]] = field(default_factory=list)

    def stream(self, turns: Sequence[dict[str, str]]) -> Generator[str]:
        self.heard.append(list(turns))
        yield from turns[-1]["content"].split()


def test_an_answer_that_was_stopped_stays_as_far_as_it_came() -> None:
    parrot = Parrot()
    conversation = Conversation(parrot)
    stopped = conversation.say("one two three")
    assert next(stopped) == "one"
    stopped.close()
    assert conversation.turns == [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "one"}]
    assert "".join(conversation.say("four")) == "four"
    assert [turn["content"] for turn in parrot.heard[-1]] == ["one two three", "one", "four"]


def test_a_models_words_cannot_command_a_terminal() -> None:
    words = "a\tb\nc\x1b]0;title\x07\x1b[31m\r\x9b2J é 🙂"
    assert shown(words, terminal=True) == "a\tb\nc\ufffd]0;title\ufffd\ufffd[31m\ufffd\ufffd2J é 🙂"
    assert shown(words, terminal=False) == words


def test_commands_change_the_conversation_and_refuse_what_they_cannot_take() -> None:
    conversation = Conversation(Parrot())
    list(conversation.say("x"))
    conversation.command("/system be brief")
    list(conversation.say("y"))
    assert conversation.asker.heard[-1] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "y"}]
    assert conversation.command("/temperature 3") == "wanted a number from 0 to 2, got '3'"
    assert conversation.command("/tokens x") == "wanted a number from 1 to 1000000, got 'x'"
    assert conversation.command("/temperature 1.5") == "temperature is 1.5" and conversation.asker.temperature == 1.5
    conversation.command("/reset")
    assert conversation.turns == [] and conversation.command("/quit") is None
