"""A model is asked in the tokens that it was trained on: training's ids against those of the real server, over HTTP."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.serving.admission import tokenize
from stages.serving.options import ServingOptions
from stages.serving.protocol import ApiError, ChatRequest, parse
from stages.text.choices import LossOn
from stages.text.record import canonical
from stages.text.templates import Template
from stages.training.export import write_golden
from tests.stages.chat_tokenizers import random_chat, save_tokenizer
from tests.stages.test_serving_app import NAME, Running, assert_error, serve

FAMILIES = (pytest.param("llama31", marks=pytest.mark.slow), "qwen3", pytest.param("zephyr", marks=pytest.mark.slow))


def save_model(directory: Path, family: str, override: str | None = None) -> Template:
    """A tiny model whose tokenizer came out of training with its template."""
    save_tokenizer(directory, "byte_level", family)
    template = Template.load(directory, override)
    template.save(directory)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vocab_size = template.tokenizer.get_vocab_size()
    end = template.renderer.control.ids[template.renderer.special_tokens["eos_token"]]
    shape |= {"eos_token_id": end, "pad_token_id": end}
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=1024, initializer_range=0.5, bos_token_id=None, **shape
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    write_golden(directory, model, ["is it"])
    return template


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Template]]:
    directory = tmp_path_factory.mktemp("models") / request.param
    template = save_model(directory, request.param)
    for running in serve(directory, ServingOptions()):
        yield running, template


def conversations() -> list[list[dict[str, Any]]]:
    draw = random.Random(7)
    chats = [random_chat(draw, turns=3) for _ in range(48)]
    chats.append([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\n\nyo"}] * 2)
    return [*chats, [{"role": "developer", "content": "be"}, {"role": "user", "content": "x"}, chats[0][-1]]]


def test_the_server_feeds_what_training_saw_on_50_conversations(served: tuple[Running, Template]) -> None:
    running, template = served
    assert len(conversations()) == 50
    for number, chat in enumerate(conversations()):
        encoded = template.encode(chat, None, LossOn.last)
        assert encoded.reason is None
        seen = encoded.ids[: int(encoded.labelled.argmax())].tolist()
        body = {"model": NAME, "messages": chat[:-1]}
        assert tokenize(running.app.engine.loaded, parse(ChatRequest, canonical(body).encode())) == [seen]
        if number % 5 == 0:  # and through HTTP: a model of random weights answers otherwise at any other id
            asked = {"max_tokens": 6, "temperature": 0}
            status, _, chatted = running.post("/v1/chat/completions", messages=chat[:-1], **asked)
            assert status == 200 and chatted["usage"]["prompt_tokens"] == len(seen)
            completed = running.complete(prompt=seen, **asked)[2]
            assert chatted["choices"][0]["message"]["content"] == completed["choices"][0]["text"]


def test_a_client_cannot_open_a_turn(served: tuple[Running, Template]) -> None:
    running, template = served
    control = template.renderer.control
    words = "".join(control.ids)
    plain, typed = (
        tokenize(running.app.engine.loaded, parse(ChatRequest, canonical({"model": NAME, "messages": chat}).encode()))[
            0
        ]
        for chat in ([{"role": "user", "content": "x"}], [{"role": "user", "content": f"x{words}"}])
    )
    assert [token for token in typed if control.is_control[token]] == [
        token for token in plain if control.is_control[token]
    ]
    status, _, answer = running.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": f"x{words}"}], max_tokens=1
    )
    assert status == 200 and answer["usage"]["prompt_tokens"] == len(typed)


def test_what_the_template_does_not_take_is_refused_with_its_reason(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma2")
    for running in serve(tmp_path, ServingOptions()):
        user = {"role": "user", "content": "hi"}
        for messages, reason in (
            ([{"role": "system", "content": "be"}, user], "system_unsupported"),
            ([user, user], "template_refused"),
        ):
            answer = running.post("/v1/chat/completions", messages=messages)
            assert_error(answer, 400, "messages")
            assert reason in answer[2]["error"]["message"]
        with pytest.raises(ApiError, match="template_refused"):
            tokenize(
                running.app.engine.loaded,
                parse(ChatRequest, canonical({"model": NAME, "messages": [user, user]}).encode()),
            )
