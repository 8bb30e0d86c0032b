"""`make ask` and `make chat` as people type them: a real server, the real command, a pipe for a terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipelines.chat import Conversation, shown
from pipelines.config import ROOT
from stages.serving.endpoint import Deployed, write_record
from stages.serving.options import ServingOptions, key_digest
from tests.stages.serving_server import DIGEST, NAME, Running, serve, wait_until
from tests.stages.tiny_model import CHAT_TEMPLATE, save_tiny_model

KEY_ENV = "TEST_ENDPOINT_KEY"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = save_tiny_model(tmp_path_factory.mktemp("m") / "chat", context=1_024, chat_template=CHAT_TEMPLATE)
    yield from serve(directory, ServingOptions(key_digests=(key_digest("s3cret"),)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serve(save_tiny_model(tmp_path_factory.mktemp("m") / "plain"), ServingOptions(max_tokens=16))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Answers that take minutes."""
    directory = tmp_path_factory.mktemp("m") / "endless"
    made = save_tiny_model(directory, context=16_000, chat_template=CHAT_TEMPLATE, ends=False)
    yield from serve(made, ServingOptions())


@pytest.fixture
def state(guarded: Running, tmp_path: Path) -> Path:
    return recorded(guarded, tmp_path / "state", api_key_env=KEY_ENV)


def recorded(server: Running, state: Path, api_key_env: str | None = None) -> Path:
    """A state root that says that the server is this project's endpoint."""
    options = server.app.options
    record = Deployed(
        application="a", base_url=f"http://127.0.0.1:{server.port}", model=NAME, version=7, digest=DIGEST,
        config_digest=options.digest(), instance="i" * 32, uri="file:///nowhere", num_cpus=0.5, options=options,
        api_key_env=api_key_env,
    )  # fmt: skip
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
    for said in ("temperature is 0.0", "max_tokens is 8", "there is no /nonsense; /help says what there is"):
        assert said in made.stderr.splitlines()
    asked = guarded.raw(
        "POST", "/v1/chat/completions",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}',
        content_type="application/json", authorization="Bearer s3cret",
    )  # fmt: skip
    answer = json.loads(asked[2])["choices"][0]["message"]["content"]
    second = made.stdout.removeprefix(f"{answer}\n")
    assert second != made.stdout and second.endswith("\n"), "stdout holds the two answers and nothing else"
    assert made.stderr.count(f"make trace ID=chatcmpl-{DIGEST[:12]}") == 2 and "\x1b" not in made.stderr
    assert "never asked" not in made.stdout + made.stderr


def test_ask_says_who_answered_and_under_which_id(state: Path) -> None:
    made = run("ask", state, TEXT="hi", TEST_ENDPOINT_KEY="s3cret")
    assert made.returncode == 0, made.stderr
    assert re.search(
        rf"^{NAME}@7, \d+ \+ \d+ tokens.*; where it comes from: make trace ID=chatcmpl-{DIGEST[:12]}[0-9a-f]{{20}}$",
        made.stderr,
        re.M,
    )
    assert "make trace" not in made.stdout and made.stdout.endswith("\n"), "the answer alone"


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


def test_a_model_without_a_chat_template_continues_each_line_and_says_so_once(plain: Running, tmp_path: Path) -> None:
    made = run("chat", recorded(plain, tmp_path / "state"), "/temperature 0\nos.path\nx = \n")

    def continued(prompt: str) -> str:
        return prompt + plain.complete(prompt=prompt, max_tokens=None, temperature=0)[2]["choices"][0]["text"]

    assert made.returncode == 0 and made.stdout == f"{continued('os.path')}\n{continued('x = ')}\n"
    assert made.stderr.count("no chat template") == 1


class Terminal:
    """The command line in a terminal of its own."""

    def __init__(self, state: Path, **environment: str) -> None:
        self.seen = ""
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipelines", "chat", f"state={state}"],
            cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "xterm", **environment},
        )  # fmt: skip
        os.close(slave)

    def until(self, pattern: str, seconds: float = 60.0) -> str:
        """What was shown since the last call, up to the pattern."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.seen!r}"
            try:
                self.seen += os.read(self._master, 65536).decode("utf-8", "replace")
            except OSError:
                time.sleep(0.02)
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_a_second_one_the_program(endless: Running, tmp_path: Path) -> None:
    terminal = Terminal(recorded(endless, tmp_path / "state"), NO_COLOR="1")
    try:
        for question in ("hi", "again"):
            terminal.until("> ")
            terminal.type(f"{question}\n")
            terminal.until(rf"{question}[\s\S]{{60}}")
            assert endless.app.engine.busy, "the control: an answer is being made"
            terminal.interrupt()
            shown = terminal.until("stopped; Ctrl-C again or Ctrl-D ends")
            wait_until(lambda: not endless.app.engine.busy, 1)
            assert not re.search(r"\x1b\[[0-9;]*m", shown), "no colour was asked for"
            assert terminal.process.poll() is None
        terminal.until("> ")
        terminal.type("\x1b[A")  # the arrow that brings back what was typed last
        terminal.until("again")
        terminal.interrupt()
        assert terminal.process.wait(10) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
