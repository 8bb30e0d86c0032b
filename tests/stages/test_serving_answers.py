"""What a server remembers of its answers: enough to follow one to its origin, bounded, and nothing of what was asked."""

import json
import re
from collections.abc import Iterator

import pytest

from stages.serving import app as apps
from stages.serving.options import ServingOptions, key_digest
from tests.stages.serving_server import DIGEST, NAME, Running, assert_error, serve, sse
from tests.stages.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = save_tiny_model(tmp_path_factory.mktemp("models") / "plain", ends=False)
    yield from serve(directory, ServingOptions(key_digests=(key_digest("open-sesame"),)))


def complete(server: Running, **fields: object) -> str:
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 5, "temperature": 0, **fields}).encode()
    kind = {"content_type": "application/json", "authorization": "Bearer open-sesame"}
    status, _, data = server.raw("POST", "/v1/completions", body, **kind)
    assert status == 200
    return data.decode()


def remembered(server: Running, response_id: str, key: str = "open-sesame") -> tuple[int, dict[str, str], dict]:
    status, headers, data = server.raw("GET", f"/answers/{response_id}", authorization=f"Bearer {key}")
    return status, headers, json.loads(data)


def test_an_answer_is_found_by_the_id_of_its_response_whole_or_streamed(guarded: Running) -> None:
    whole = json.loads(complete(guarded, n=2))
    streamed = sse(complete(guarded, stream=True))[0]["id"]
    text = whole["choices"][0]["text"]
    for response_id, texts in ((whole["id"], [text, text]), (streamed, [text])):
        assert re.fullmatch(rf"cmpl-{DIGEST[:12]}[0-9a-f]{{20}}", response_id)
        status, _, found = remembered(guarded, response_id)
        assert status == 200 and found["texts"] == texts and text
        assert (found["model"], found["version"], found["digest"]) == (NAME, 7, DIGEST)
    assert_error(remembered(guarded, f"cmpl-{'0' * 32}"), 404, None, "answer_not_found")
    assert_error(remembered(guarded, whole["id"], key="wrong"), 401, None, "invalid_api_key")


def test_nothing_of_what_was_asked_is_remembered(guarded: Running) -> None:
    complete(guarded, prompt="the-password-is-hunter2")
    assert "hunter2" not in repr(vars(guarded.app))


def test_the_oldest_are_forgotten_first_by_number_and_by_characters(
    guarded: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apps, "REMEMBERED", 3)
    ids = [json.loads(complete(guarded))["id"] for _ in range(4)]
    assert [remembered(guarded, response_id)[0] for response_id in ids] == [404, 200, 200, 200]
    (text,) = remembered(guarded, ids[-1])[2]["texts"]
    monkeypatch.setattr(apps, "REMEMBERED_CHARACTERS", 2 * len(text))
    ids.append(json.loads(complete(guarded))["id"])
    assert [remembered(guarded, response_id)[0] for response_id in ids] == [404, 404, 404, 200, 200]
