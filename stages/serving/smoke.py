"""What every endpoint must do before it keeps its traffic: a few requests whose right answers are known without knowing the model. Apart
from the golden questions, which ask about this model. And how long an answer takes, to compare one version with another.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from stages.contract import StageError

TOKENS = 16
TIMED = 5
"""Answers whose time is taken."""


class Smoke:
    """A client of one endpoint."""

    def __init__(self, base_url: str, model: str, key: str, timeout_s: float = 60.0) -> None:
        import openai

        self._where, self._model = base_url, model
        self._client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=2, timeout=timeout_s)

    def check(self, prompt: list[int]) -> None:
        """StageError with the first thing that is not as OpenAI's clients rely on. `prompt` is in token ids."""
        import openai

        try:
            for fault in self._faults(prompt):
                raise StageError(f"the endpoint at {self._where} {fault}")
        except openai.OpenAIError as error:
            raise StageError(f"the endpoint at {self._where} refuses a legal request: {error}") from error

    def seconds(self, prompt: list[int]) -> float:
        """Median seconds of an answer of 16 tokens, one request at a time."""
        times = []
        for _ in range(TIMED):
            began = time.perf_counter()
            self._ask(prompt, extra_body={"ignore_eos": True})
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _faults(self, prompt: list[int]) -> Iterator[str]:
        listed = [model.id for model in self._client.models.list().data]
        if self._model not in listed:
            yield f"lists {listed}, and not {self._model}"
        whole = self._ask(prompt)
        usage, choice = whole.usage, whole.choices[0]
        if usage is None or usage.total_tokens != usage.prompt_tokens + usage.completion_tokens:
            yield "does not add up its tokens"
        elif usage.prompt_tokens != len(prompt) or not 1 <= usage.completion_tokens <= TOKENS:
            yield f"counts {usage.prompt_tokens} and {usage.completion_tokens} tokens where {len(prompt)} and 1 to {TOKENS} are right"
        if choice.finish_reason not in ("stop", "length"):
            yield f"ends an answer for the reason {choice.finish_reason!r}"
        yield from self._stream_faults(prompt, choice)
        if len(choice.text) > 1:
            stop = choice.text[len(choice.text) // 2 :][:4]
            cut = self._ask(prompt, stop=[stop]).choices[0]
            if cut.text != choice.text[: choice.text.find(stop)] or cut.finish_reason != "stop":
                yield "does not end an answer before its stop string"
        yield from self._refusal_faults(prompt)

    def _stream_faults(self, prompt: list[int], choice: Any) -> Iterator[str]:
        parts = list(self._ask(prompt, stream=True))
        if "".join(part.choices[0].text for part in parts) != choice.text:
            yield "streams another text than it answers whole"
        reasons = [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason]
        if reasons != [choice.finish_reason]:
            yield f"ends a stream with the reasons {reasons}, the whole answer with {choice.finish_reason!r}"
        if any(part.usage is not None for part in parts):
            yield "sends a usage that nobody asked for"
        last = list(self._ask(prompt, stream=True, stream_options={"include_usage": True}))[-1]
        if last.usage is None or last.choices:
            yield "does not end a stream with the usage that was asked for"

    def _refusal_faults(self, prompt: list[int]) -> Iterator[str]:
        for what, asked, status, told in (
            ("a temperature of -1", {"temperature": -1}, 400, {"param": "temperature"}),
            ("an unknown model", {"model": f"{self._model}-which-is-not-there"}, 404, {"code": "model_not_found"}),
            ("a prompt beyond the context", {"max_tokens": 10**9}, 400, {"code": "context_length_exceeded"}),
        ):
            found = self._refused(prompt, asked)
            wanted = {"status": status, **told}
            if {name: found.get(name) for name in wanted} != wanted:
                yield f"answers {what} with {found}, wanted {wanted}"

    def _refused(self, prompt: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        import openai

        try:
            self._ask(prompt, **asked)
        except openai.APIStatusError as error:
            return {"status": error.status_code, "param": error.param, "code": error.code}
        return {"status": 200}

    def _ask(self, prompt: list[int], **more: Any) -> Any:
        asked: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **more}
        return self._client.completions.create(**asked)
