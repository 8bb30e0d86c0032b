"""Other people's tools against a live server: an evaluation harness must measure what it measures on the model itself, and a fuzzer that
reads the API's own document must find no request that breaks it."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.serving.options import ServingOptions
from tests.stages.serving_server import NAME, Running, serve
from tests.stages.tiny_model import CHAT_TEMPLATE, save_tiny_model

pytestmark = pytest.mark.slow
CASES = 60
"""For each operation and phase."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = save_tiny_model(tmp_path_factory.mktemp("m") / "chat", context=512, chat_template=CHAT_TEMPLATE)
    yield from serve(directory, ServingOptions(max_tokens=16, max_queue=64))


def test_a_harness_measures_through_the_endpoint_what_it_measures_on_the_model(chat: Running) -> None:
    """lm-eval's completions adapter: prompts as token ids, echoed with log-probabilities."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    texts = [
        ("def f(x):", " return x"), ("The sea is", " blue"), ("", "import os\n"), ("naïve", " 🙂 text"), ("a" * 200, "b" * 20),
    ]  # fmt: skip
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=number) for number, pair in enumerate(texts)
    ]
    url = f"http://127.0.0.1:{chat.port}/v1/completions"
    through = LocalCompletionsAPI(
        model=NAME, base_url=url, tokenizer=str(chat.directory), tokenizer_backend="huggingface", num_concurrent=2,
        max_length=512,
    )  # fmt: skip
    direct = HFLM(pretrained=str(chat.directory), device="cpu", dtype="float32", batch_size=1, max_length=512)
    measured: list[Any] = through.loglikelihood(asked, disable_tqdm=True)
    wanted: list[Any] = direct.loglikelihood(asked, disable_tqdm=True)
    assert [pytest.approx(value, abs=1e-3) for value, _ in wanted] == [value for value, _ in measured]
    assert [greedy for _, greedy in measured] == [greedy for _, greedy in wanted]


def test_a_fuzzer_finds_no_request_that_the_server_fails_at(chat: Running, tmp_path: Path) -> None:
    """Schemathesis makes requests from the document, legal and illegal; a good one is answered as before afterwards."""
    before = chat.complete(prompt="golden", max_tokens=8, temperature=0)[2]["choices"]
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program is not None, "schemathesis is not installed: make setup"
    made = subprocess.run(
        [
            program, "run", f"http://127.0.0.1:{chat.port}/openapi.json", "--phases", "coverage,fuzzing", "--max-examples",
            str(CASES), "--checks", "not_a_server_error", "--seed", "1", "--request-timeout", "20", "--no-color",
        ],
        capture_output=True, text=True, timeout=400, cwd=tmp_path,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout[-5_000:] + made.stderr[-2_000:]
    assert chat.complete(prompt="golden", max_tokens=8, temperature=0)[2]["choices"] == before
    assert chat.app.engine.alive
