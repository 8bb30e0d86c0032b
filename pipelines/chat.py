"""`make ask` and `make chat`: a person and the endpoint that this project serves. Apart from the commands, because here a terminal is
talked with: an answer shows as it comes, Ctrl-C ends the answer and not the conversation.

What the model says goes to stdout, alone; what is said about it goes to stderr.
"""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Generator, Iterator
from typing import Any

from pipelines.config import compose
from pipelines.console import Console
from pipelines.mistakes import ConfigError
from stages.contract import ResourcesUnavailable, StageError

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HELP = """\
  /system TEXT         what the model is told before the conversation (alone: nothing)
  /temperature NUMBER  0 takes the likeliest word each time, 1 draws from all
  /tokens NUMBER       most tokens of an answer
  /reset               forget the conversation
  /quit                or Ctrl-D; Ctrl-C ends an answer"""


def ask(console: Console, overrides: list[str], conf: str | None) -> int:
    text = os.environ.get("TEXT") or os.environ.get("RAYKEEL_TEXT") or ""
    if not text:
        raise ConfigError('nothing to ask: make ask TEXT="os.path.join("')
    endpoint = _endpoint(overrides, conf)
    asker = _asker(endpoint)
    _say(asker, text, asker.stream([{"role": "user", "content": text}]))
    _tell(_facts(asker.said))
    return 0


def chat(console: Console, overrides: list[str], conf: str | None) -> int:
    """A conversation until its end of file. Lines come from a terminal, or from a pipe, one question a line."""
    endpoint = _endpoint(overrides, conf)
    asker = _asker(endpoint, temperature=0.7, max_tokens=None)
    conversation = Conversation(asker)
    talking = sys.stdin.isatty()
    if talking:
        _tell(f"{endpoint['model']}@{endpoint['version']}; /help says what else may be typed, Ctrl-D ends")
    chats = True
    for line in _lines("> " if talking and sys.stdout.isatty() else ""):
        if line.startswith("/"):
            reply = conversation.command(line)
            if reply is None:
                return 0
            _tell(reply)
            continue
        try:
            with contextlib.closing(conversation.say(line)) as answer:
                _say(asker, line, answer)
        except KeyboardInterrupt:
            _write("\n")
            _tell("stopped; Ctrl-C again or Ctrl-D ends")
        except StageError as error:
            if not talking or isinstance(error, ResourcesUnavailable):
                raise
            _tell(str(error))
        else:
            _tell(_facts(asker.said))
            if chats and not asker.said.chat:
                _tell("this model has no chat template: it continues each line, without a conversation")
            chats = asker.said.chat
    return 0


def _say(asker: Any, text: str, pieces: Iterator[str]) -> None:
    """The answer as it comes, neither wrapped nor coloured; without a chat template the text that it continues stands before it."""
    first = next(pieces, "")
    for piece in ("" if asker.said.chat else text, first):
        _write(shown(piece))
    for piece in pieces:
        _write(shown(piece))
    _write("\n")


def _facts(said: Any) -> str:
    """What answered, how much, and the way to its origin."""
    cut = ", cut: no more tokens allowed" if said.finish_reason == "length" else ""
    return (
        f"{said.model}, {said.prompt_tokens} + {said.tokens} tokens{cut}; where it comes from: make trace ID={said.id}"
    )


class Conversation:
    """Turns so far, and how answers are chosen."""

    def __init__(self, asker: Any) -> None:
        self.asker, self.system, self.turns = asker, "", list[dict[str, str]]()

    def say(self, text: str) -> Generator[str]:
        """The answer, piece by piece. What was said of one that was stopped stays in the conversation; a refused question leaves it."""
        begun = [{"role": "system", "content": self.system}] if self.system else []
        question, answer = {"role": "user", "content": text}, ""
        try:
            for piece in self.asker.stream([*begun, *self.turns, question]):
                answer += piece
                yield piece
        finally:
            if answer:
                self.turns += [question, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str | None:
        """What a line that begins with / does, in words; None: it ends the conversation."""
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        match name:
            case "quit" | "exit":
                return None
            case "help":
                return HELP
            case "reset":
                self.turns = []
                return "forgotten"
            case "system":
                self.system, self.turns = rest, []
                return "the model is told so; the conversation begins anew" if rest else "the model is told nothing"
            case "temperature":
                return self._number(rest, "temperature", float, 0, 2)
            case "tokens":
                return self._number(rest, "max_tokens", int, 1, 1_000_000)
        return f"there is no /{name}; /help says what there is"

    def _number(self, text: str, name: str, kind: type[int] | type[float], least: float, most: float) -> str:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not least <= value <= most:
            return f"wanted a number from {least} to {most}, got {text!r}"
        setattr(self.asker, name, value)
        return f"{name} is {value}"


def _endpoint(overrides: list[str], conf: str | None) -> dict[str, Any]:
    from pipelines import cluster

    endpoint = cluster.endpoint_record(compose(overrides, conf).state_root)
    if endpoint is None:
        raise ResourcesUnavailable("nothing is served by this project now: make run starts an endpoint")
    return endpoint


def _asker(endpoint: dict[str, Any], **how: Any) -> Any:
    from stages.serving.ask import Asker

    return Asker(endpoint["base_url"], endpoint.get("api_key_env"), **how)


def _lines(prompt: str) -> Iterator[str]:
    """Lines that hold something, until the end of the input. Ctrl-C at the prompt ends it too."""
    if prompt:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # from then on input() has arrow keys and a history
    while True:
        try:
            line = input(prompt) if prompt else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return
        if not prompt and not line:
            return
        if line.strip():
            yield line.strip("\n")


def shown(piece: str, terminal: bool | None = None) -> str:
    """A model's words as a terminal may have them: what would move its cursor, recolour it or type into it is a mark. Into a pipe they go
    as they are."""
    if not (sys.stdout.isatty() if terminal is None else terminal):
        return piece
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", piece)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(words: str) -> None:
    """To stderr, fainter than what the model says where there are colours."""
    faint = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    sys.stderr.write(f"\x1b[2m{words}\x1b[0m\n" if faint else f"{words}\n")
    sys.stderr.flush()
