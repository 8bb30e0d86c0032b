"""One question to the live endpoint, answered as it is generated. Apart, because a person asks it (`make ask`), not a stage."""

from collections.abc import Iterator
from typing import Any

import openai

from stages.contract import ResourcesUnavailable, StageError


def stream_answer(
    base_url: str, text: str, *, max_tokens: int = 64, temperature: float = 0.0, timeout_s: float = 120.0
) -> Iterator[str]:
    """Yield the answer piece by piece: a chat turn when the model has a chat template, else the text's continuation.

    `base_url` is scheme, host and port. ResourcesUnavailable when nothing serves there, StageError when it refuses.
    """
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=timeout_s)
    try:
        asked: dict[str, Any] = {
            "model": client.models.list().data[0].id,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
        }
        try:
            chat = client.chat.completions.create(messages=[{"role": "user", "content": text}], **asked)
        except openai.BadRequestError as error:
            if error.code != "no_chat_template":
                raise
            for part in client.completions.create(prompt=text, **asked):
                yield part.choices[0].text
            return
        for chunk in chat:
            yield chunk.choices[0].delta.content or ""
    except openai.APIConnectionError as error:
        raise ResourcesUnavailable(f"nothing answers at {base_url}: make run starts an endpoint") from error
    except openai.APIError as error:
        raise StageError(f"the endpoint at {base_url} refuses: {error.message}") from error
