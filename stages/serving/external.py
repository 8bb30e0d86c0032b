"""A server that is there already (vLLM, SGLang, llama.cpp's, another cluster's): asked, never started, changed or stopped. Apart from the
roll-out, because nothing of one happens here.

It must list the model, give the golden answers that were recorded where the model was made, and behave as OpenAI's clients rely on in what
every such server can: more is not asked, since other people's servers word their refusals in their own ways.
"""

from pathlib import Path
from typing import Any

from stages.contract import ResourcesUnavailable, StageError
from stages.serving.golden import read_golden

TIMEOUT_S = 60.0


def listed(base_url: str, key: str, timeout_s: float = TIMEOUT_S) -> list[str] | None:
    """The models that it serves, or None when it does not answer. StageError when it refuses the key."""
    import openai

    try:
        client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=1, timeout=timeout_s)
        return [model.id for model in client.models.list().data]
    except openai.APIStatusError as error:
        raise StageError(f"{base_url}/v1/models answers {error.status_code}: {error.message}") from error
    except openai.APIConnectionError:
        return None


def check(base_url: str, model: str, key: str, directory: Path, min_golden: float) -> float:
    """The share of golden questions that it answers as recorded. StageError with the first thing that is wrong."""
    found = listed(base_url, key)
    if found is None:
        raise ResourcesUnavailable(
            f"nothing answers at {base_url}/v1/models: start the server, or correct stages.deploy.external.base_url"
        )
    if model not in found:
        raise StageError(f"{base_url} serves {found}, not {model!r}: set stages.deploy.external.model to one of them")
    import openai

    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=2, timeout=TIMEOUT_S)
    try:
        share = _golden(client, model, directory)
        if share < min_golden:
            raise StageError(
                f"{base_url} answers {share:.0%} of the golden questions as they were answered where the model was made, wanted "
                f"{min_golden:.0%}: it serves other weights, another tokenizer or a coarser number format "
                "(if the last is meant, lower stages.deploy.external.min_golden)"
            )
        _behaves(client, model, base_url, read_golden(directory)[0]["prompt_ids"])
    except openai.OpenAIError as error:
        raise StageError(f"{base_url} refuses a legal request: {error}") from error
    return share


def _golden(client: Any, model: str, directory: Path) -> float:
    """Greedy texts, as a client gets them: an answer that ends early must end where the recorded one does."""
    import tokenizers

    decoder = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    questions = read_golden(directory)
    right = 0
    for question in questions:
        ids = question["greedy_ids"]
        asked: dict[str, Any] = {
            "model": model,
            "prompt": question["prompt_ids"],
            "max_tokens": len(ids),
            "temperature": 0,
        }
        text = client.completions.create(**asked).choices[0].text
        # The last token may end inside a character, which servers drop or replace: what stands before must be equal.
        wanted = decoder.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        right += text.rstrip("\ufffd").strip() == wanted.strip()
    return right / len(questions)


def _behaves(client: Any, model: str, base_url: str, prompt: list[int]) -> None:
    import openai

    asked: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**asked)
    usage = whole.usage
    if usage is None or usage.prompt_tokens != len(prompt):
        raise StageError(
            f"{base_url} counts {usage and usage.prompt_tokens} tokens of a prompt of {len(prompt)}: another tokenizer serves"
        )
    parts = client.completions.create(**asked, stream=True)
    if "".join(part.choices[0].text for part in parts if part.choices) != whole.choices[0].text:
        raise StageError(f"{base_url} streams another text than it answers whole")
    try:
        client.completions.create(**{**asked, "temperature": -1})
    except openai.APIStatusError as error:
        if 400 <= error.status_code < 500:
            return
        raise StageError(f"{base_url} answers a wrong temperature with {error.status_code}, wanted 400") from error
    raise StageError(f"{base_url} answers a temperature of -1, wanted 400")
