"""Asks an OpenAI-compatible endpoint about rows, many at once. Apart from `ask.py`, which is one person's question: here a row
that fails is counted, what may pass is tried again, and an endpoint that is gone stops everything at once.

Nothing but threads that wait for the network: the stage's own process does it, with or without a cluster.
"""

import json
import logging
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import openai

from stages.contract import ResourcesUnavailable, StageError
from stages.text.journal import Entry
from stages.text.questions import Question

DEAD = (401, 403, 404)
"""Wrong key, wrong model, wrong path: no row would fare better."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """An endpoint, how answers are chosen there, and how patiently it is asked."""

    base_url: str
    model: str
    key: str
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...]
    concurrency: int
    timeout_s: float
    retries: int

    def answers(self, questions: Iterable[tuple[int, int, Question]]) -> Iterator[tuple[int, Entry]]:
        """(position, what came of it), in the order of arrival, for questions of (position, seed, question); at most
        `concurrency` are under way. Raises ResourcesUnavailable or StageError when the endpoint can answer none."""
        logging.getLogger("httpx").setLevel(logging.WARNING)
        asked: queue.SimpleQueue[tuple[int, int, Question] | None] = queue.SimpleQueue()
        heard: queue.SimpleQueue[tuple[int, Entry | Exception]] = queue.SimpleQueue()
        with openai.OpenAI(
            base_url=self.base_url, api_key=self.key, max_retries=self.retries, timeout=self.timeout_s
        ) as client:
            for _ in range(self.concurrency):
                # Daemons: an interrupted stage does not wait for answers that nobody wants any more.
                threading.Thread(target=self._work, args=(client, asked, heard), daemon=True).start()
            waiting = 0
            try:
                for question in questions:
                    asked.put(question)
                    waiting += 1
                    if waiting >= 2 * self.concurrency:
                        yield _result(heard)
                        waiting -= 1
                for _ in range(waiting):
                    yield _result(heard)
            finally:
                _drain(asked)
                for _ in range(self.concurrency):
                    asked.put(None)

    def _work(self, client: openai.OpenAI, asked: "queue.SimpleQueue[Any]", heard: "queue.SimpleQueue[Any]") -> None:
        while (item := asked.get()) is not None:
            position, seed, question = item
            try:
                heard.put((position, self._ask(client, seed, question)))
            except Exception as error:  # raised where the answers are wanted
                heard.put((position, error))

    def _ask(self, client: openai.OpenAI, seed: int, question: Question) -> Entry:
        shared: dict[str, Any] = {
            "model": self.model, "temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens,
            "seed": seed,
        }  # fmt: skip
        if self.stop:
            shared["stop"] = list(self.stop)
        try:
            if question.messages is None:
                answer: Any = client.completions.create(prompt=question.asked, **shared)
            else:
                if question.tools:
                    shared["tools"] = question.tools
                answer = client.chat.completions.create(messages=wire(question.messages), **shared)
        except openai.APITimeoutError:
            return {"bad": "request_timed_out", "again": True}
        except openai.APIConnectionError as error:
            raise ResourcesUnavailable(
                f"generate: the endpoint does not answer at {self.base_url}; what is finished is kept: run again to go on"
            ) from error
        except openai.APIStatusError as error:
            return self._refused(error)
        except (openai.APIError, ValueError) as error:  # a reply that was cut is no JSON
            return {"bad": "no_answer", "detail": type(error).__name__}
        return _entry(answer, chat=question.messages is not None)

    def _refused(self, error: openai.APIStatusError) -> Entry:
        detail = f"HTTP {error.status_code}" + (f", {error.code}" if error.code else "")
        if error.status_code in DEAD:
            raise StageError(
                f"generate: {self.base_url} refuses model {self.model} ({detail}): see stages.generate.endpoint"
            ) from error
        if error.code == "no_chat_template":
            raise StageError(
                f"generate: the model {self.model} at {self.base_url} has no chat template: set stages.generate.ask.form=text"
            ) from error
        if error.status_code in (408, 409, 429) or error.status_code >= 500:
            return {"bad": "request_failed", "detail": detail, "again": True}
        return {"bad": "request_refused", "detail": detail}


def wire(messages: list[dict[str, Any]]) -> Any:
    """Canonical messages as the protocol has them: the arguments of a tool call are a string there."""
    made = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            calls = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                if isinstance(call.get("function", {}).get("arguments"), dict)
                else call
                for call in calls
            ]
            message = {**message, "tool_calls": calls}
        made.append(message)
    return made


def _entry(answer: Any, *, chat: bool) -> Entry:
    """Servers and proxies leave out, or write in another form, whatever the protocol has: the client does not look."""
    choices = getattr(answer, "choices", None)
    if not isinstance(choices, list) or not choices:  # a proxy's page, say
        return {"bad": "no_answer", "detail": "the reply has no choices"}
    message = getattr(choices[0], "message", None) if chat else choices[0]
    if not isinstance(message, openai.BaseModel):
        return {"bad": "no_answer", "detail": "the reply has no message"}
    content = getattr(message, "content" if chat else "text", None)
    if content is None and getattr(message, "tool_calls", None):
        return {"bad": "tool_call", "detail": "the model calls a tool instead of answering"}
    if isinstance(content, list):
        texts: list[Any] = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            content = "".join(texts)
    if not isinstance(content, str | None):
        return {"bad": "no_answer", "detail": "an answer that is no text"}
    entry: Entry = {"text": content or "", "finished": getattr(choices[0], "finish_reason", None) == "stop"}
    usage = getattr(answer, "usage", None)
    for name, told in (("prompt_tokens", "prompt_tokens"), ("tokens", "completion_tokens")):
        if isinstance(count := getattr(usage, told, None), int):
            entry[name] = count
    return entry


def _result(heard: "queue.SimpleQueue[tuple[int, Entry | Exception]]") -> tuple[int, Entry]:
    position, result = heard.get()
    if isinstance(result, Exception):
        raise result
    return position, result


def _drain(asked: "queue.SimpleQueue[Any]") -> None:
    while True:
        try:
            asked.get_nowait()
        except queue.Empty:
            return
