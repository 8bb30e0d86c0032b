"""The engine beside `generate`: whoever shares a batch, each answer is the one that it would have been alone."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stages.serving.engine import Engine
from stages.serving.generate import generate
from stages.serving.group import can_share
from stages.serving.model import LoadedModel, load_model
from stages.serving.protocol import ApiError
from stages.serving.rows import Delta, Done, Ended, Event, Job
from stages.serving.sampling import Sampling
from stages.training.export import write_golden
from tests.stages.tiny_model import save_tiny_model

CONTEXT = 2_048
TIE = 1e-3
"""Two best logits that lie closer than this may be chosen either way: float32 rounds differently in a batch."""


@dataclass
class Asked:
    """A job and what came of it."""

    job: Job
    events: list[Event] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def text(self, choice: int = 0) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta) and event.choice == choice)

    def ids(self, choice: int = 0) -> list[int]:
        """The tokens of the text, where log-probabilities were asked for."""
        deltas = [event for event in self.events if isinstance(event, Delta) and event.choice == choice]
        return [told.token for delta in deltas for told in delta.logprobs]

    def done(self) -> dict[int, Done]:
        return {event.choice: event for event in self.events if isinstance(event, Done)}

    def wait(self) -> "Asked":
        assert self.ended.wait(120), "the job did not end"
        return self

    @property
    def error(self) -> ApiError | None:
        last = self.events[-1]
        assert isinstance(last, Ended)
        return last.error


def ask(engine: Engine, *prompts: Sequence[int], n: int = 1, seconds: float = 120, **sampling: Any) -> Asked:
    def emit(event: Event) -> None:
        asked.events.append(event)
        asked.times.append(time.monotonic())
        if isinstance(event, Ended):
            asked.ended.set()

    asked = Asked(Job(prompts, n, Sampling(**sampling), emit, time.monotonic() + seconds))
    engine.submit(asked.job)
    return asked


def start(directory: Path, **options: Any) -> Engine:
    engine = Engine(directory, threads=1, **{"max_queue": 64, **options})
    engine.wait_ready(60)
    return engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=CONTEXT)


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load_model(directory)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    made = start(directory)
    yield made
    made.close()


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 120 tokens."""
    return [[1 + (number * 31 + place * 7) % 250 for place in range(1 + number * 37 % 120)] for number in range(count)]


def reference(loaded: LoadedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """transformers' own greedy answer."""
    ids = torch.tensor([list(prompt)])
    made = loaded.model.generate(ids, max_new_tokens=tokens, do_sample=False, attention_mask=torch.ones_like(ids))
    return [int(token) for token in made[0, len(prompt) :]]


def assert_same_or_tie(loaded: LoadedModel, prompt: Sequence[int], asked: Asked, wanted: Sequence[int]) -> None:
    """The answer's tokens are `wanted`; where they part, the two best logits were equal."""
    made, whole = asked.wait().ids(), [token for token in wanted if token not in loaded.eos_ids]
    if made == whole:
        assert asked.done()[0].tokens == len(wanted)
        return
    same = next(i for i, (a, b) in enumerate(zip(made, whole, strict=False)) if a != b)
    best = loaded.forward([[*prompt, *whole[:same]]], loaded.new_cache())[0, -1].topk(2).values
    assert float(best[0] - best[1]) < TIE, (same, made, whole)


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_greedy_answers_are_those_of_generate_alone_and_in_a_batch(
    engine: Engine, loaded: LoadedModel, count: int
) -> None:
    asked = prompts(count)
    wanted = [reference(loaded, prompt, 24) for prompt in asked]
    together = [ask(engine, prompt, max_tokens=24, temperature=0.0, logprobs=0) for prompt in asked]
    for prompt, one, ids in zip(asked, together, wanted, strict=True):
        assert_same_or_tie(loaded, prompt, one, ids)
    for prompt, ids in zip(asked, wanted, strict=True):
        alone = ask(engine, prompt, max_tokens=24, temperature=0.0, logprobs=0).wait()
        assert_same_or_tie(loaded, prompt, alone, ids)


def test_a_seed_gives_the_same_text_alone_and_among_others(engine: Engine) -> None:
    prompt = [7, 8, 9]
    alone = ask(engine, prompt, max_tokens=40, seed=11).wait().text()
    others = [ask(engine, one, max_tokens=60, seed=number) for number, one in enumerate(prompts(6))]
    among = ask(engine, prompt, max_tokens=40, seed=11).wait().text()
    assert among == alone and among != ask(engine, prompt, max_tokens=40, seed=12).wait().text()
    for other in others:
        other.wait()


def test_choices_of_one_prompt_are_those_of_their_own_random_streams(engine: Engine, loaded: LoadedModel) -> None:
    prompt = list(range(5, 40))
    three = ask(engine, prompt, [3, 4], n=3, max_tokens=16, seed=5, logprobs=0).wait()
    for number, each in enumerate((prompt, [3, 4])):
        for j in range(3):
            ids = list(generate(loaded, each, Sampling(max_tokens=16, seed=5), j))
            assert three.ids(number * 3 + j) == [token for token in ids if token not in loaded.eos_ids]
            assert three.done()[number * 3 + j].tokens == len(ids)
    assert len({tuple(three.ids(j)) for j in range(3)}) == 3


def test_more_choices_than_places_are_answered_in_turn(directory: Path, loaded: LoadedModel) -> None:
    engine = start(directory, max_batch=2)
    asked = ask(engine, [1, 2, 3], [4, 5], n=5, max_tokens=6, temperature=0.0).wait()
    assert asked.error is None and len(asked.done()) == 10
    assert {asked.text(choice) for choice in range(5)} == {asked.text(0)}
    engine.close()


def test_a_long_prompt_is_read_between_the_tokens_of_others(directory: Path, loaded: LoadedModel) -> None:
    """A token for each chunk at least: 2,000 tokens of prompt in chunks of 50 pass beside 40 tokens of each answer."""
    engine = start(directory, prefill_chunk=50)
    growing = [ask(engine, [9, number], max_tokens=400, temperature=0.0, ignore_eos=True) for number in range(3)]
    while not all(one.events for one in growing):
        time.sleep(0.001)
    before = engine.stats().steps
    long = ask(engine, [1 + i % 250 for i in range(2_000)], max_tokens=1, temperature=0.0).wait()
    steps = engine.stats().steps - before
    assert long.error is None and steps >= 2_000 // 50
    for one in growing:
        assert one.wait().done()[0].tokens == 400
    engine.close()


def test_an_answer_to_a_prompt_in_chunks_is_that_of_a_whole_one(directory: Path, loaded: LoadedModel) -> None:
    engine = start(directory, prefill_chunk=7)
    other = ask(engine, [5], max_tokens=300, temperature=0.0, ignore_eos=True)
    prompt = prompts(20)[13]
    answer = ask(engine, prompt, max_tokens=20, temperature=0.0, logprobs=0)
    assert_same_or_tie(loaded, prompt, answer, reference(loaded, prompt, 20))
    other.wait()
    engine.close()


@pytest.mark.slow
def test_what_an_answer_may_come_to_hold_bounds_who_joins(directory: Path) -> None:
    """Two answers of 500 tokens fit into 1,000; the third waits for an end."""
    engine = start(directory, max_batch_tokens=1_000)
    asked = [ask(engine, [1] * 10, max_tokens=490, temperature=0.0, ignore_eos=True) for _ in range(3)]
    while engine.stats().running < 2:
        time.sleep(0.001)
    most = 0
    while not asked[0].ended.is_set():
        most = max(most, engine.stats().running)
        time.sleep(0.002)  # the engine needs this processor, too
    assert most == 2
    assert [one.wait().done()[0].tokens for one in asked] == [490] * 3
    alone = ask(engine, [1] * 1_500, max_tokens=5, temperature=0.0).wait()  # more than all, and it comes through
    assert alone.error is None
    engine.close()


def test_a_cancelled_request_leaves_at_once_and_the_others_stay(engine: Engine) -> None:
    gone, stays = (ask(engine, [1, n], max_tokens=1_500, temperature=0.0, ignore_eos=True) for n in (1, 2))
    while engine.stats().running < 2:
        time.sleep(0.001)
    gone.job.cancelled.set()
    assert gone.ended.wait(1) and gone.error is not None and gone.error.status == 499
    assert engine.stats().running == 1 and not stays.ended.is_set()
    stays.job.cancelled.set()
    stays.wait()


def test_a_request_ends_at_its_deadline_waiting_or_not(directory: Path) -> None:
    engine = start(directory, max_batch=1)
    both = [ask(engine, [1], max_tokens=2_000, seconds=0.3, temperature=0.0, ignore_eos=True) for _ in range(2)]
    for one in both:
        assert one.ended.wait(1.5) and one.error is not None
        assert (one.error.status, one.error.body["error"]["code"]) == (408, "request_timeout")
    assert not any(isinstance(event, Done) for one in both for event in one.events)
    engine.close()


def test_one_requests_bad_numbers_end_that_request_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward pass gives no numbers for the row whose prompt begins with 13."""
    engine = start(directory)
    assert engine._loaded is not None
    whole = LoadedModel.forward

    def spoilt(self: LoadedModel, ids: Any, cache: Any, **more: Any) -> torch.Tensor:
        logits = whole(self, ids, cache, **more).clone()
        for row, tokens in enumerate(ids):
            if tokens[0] == 13:
                logits[row] = torch.nan
        return logits

    monkeypatch.setattr(LoadedModel, "forward", spoilt)
    bad = [ask(engine, [13, 1], max_tokens=5, temperature=t, seed=1) for t in (0.0, 1.0)]
    good = ask(engine, [14, 1], max_tokens=5, temperature=0.0, logit_bias={13: -100.0}).wait()
    for one in bad:
        assert one.wait().error is not None and one.error is not None and one.error.status == 500
    assert good.error is None and engine.alive
    engine.close()


def test_a_failed_pass_ends_the_engine_and_every_request(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(directory, max_batch=1)
    asked = [ask(engine, [1], max_tokens=2_000, temperature=0.0, ignore_eos=True) for _ in range(2)]
    while not asked[0].events:
        time.sleep(0.001)

    def broken(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LoadedModel, "forward", broken)
    for one in asked:
        assert one.wait().error is not None and one.error is not None and one.error.status == 503
    assert not engine.alive
    with pytest.raises(ApiError):
        ask(engine, [1], max_tokens=1)


def small(kind: str) -> Any:
    """(configuration, whether its rows may share a cache)."""
    same = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 0, "pad_token_id": 0,
            "bos_token_id": None, "max_position_embeddings": 256, "initializer_range": 0.5}  # fmt: skip
    wide = {**same, "intermediate_size": 64, "num_key_value_heads": 2}
    made: dict[str, Callable[[], tuple[Any, bool]]] = {
        "gpt2": lambda: (
            transformers.GPT2Config(
                vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=0, bos_token_id=0
            ),
            True,
        ),
        "qwen2": lambda: (transformers.Qwen2Config(**wide), True),
        "qwen3": lambda: (transformers.Qwen3Config(**wide, head_dim=8), True),
        "opt": lambda: (
            transformers.OPTConfig(
                **{k: v for k, v in same.items() if k != "initializer_range"}, ffn_dim=64, word_embed_proj_dim=32
            ),
            True,
        ),
        "gemma2": lambda: (transformers.Gemma2Config(**wide, head_dim=8, sliding_window=8), False),
        "mistral": lambda: (transformers.MistralConfig(**wide, sliding_window=8), False),
        "mamba": lambda: (
            transformers.MambaConfig(
                vocab_size=257, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=0, pad_token_id=0
            ),
            False,
        ),
    }
    return made[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "mistral",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpt2", "qwen2", "qwen3", "opt", "gemma2", "mamba")),
    ],
)
def test_other_kinds_of_models_answer_in_a_batch_as_alone(kind: str, tmp_path: Path) -> None:
    """Where padding cannot be hidden, or the cache does not keep every token, each answer has a pass of its own."""
    config, shares = small(kind)
    directory = save_tiny_model(tmp_path / kind, golden=False)  # for its tokenizer
    for file in (directory / "model.safetensors", directory / "config.json", directory / "generation_config.json"):
        file.unlink(missing_ok=True)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if kind == "mamba":
        model.config.max_position_embeddings = 256
    model.save_pretrained(directory)
    write_golden(directory, model, ["os.path.join("])
    loaded = load_model(directory)
    assert can_share(loaded) is shares
    engine = start(directory)
    asked = prompts(6)
    together = [ask(engine, prompt, max_tokens=12, temperature=0.0, logprobs=0) for prompt in asked]
    for prompt, one in zip(asked, together, strict=True):
        ids = list(generate(loaded, prompt, Sampling(max_tokens=12, temperature=0.0)))
        assert one.wait().error is None
        assert_same_or_tie(loaded, prompt, one, ids)
    two = ask(engine, [5, 6, 7], n=2, max_tokens=8, temperature=0.0, ignore_eos=True).wait()
    assert two.text(0) == two.text(1)
    engine.close()


@pytest.mark.slow
def test_a_model_that_hides_no_padding_is_found_out(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_share(loaded)
    whole = LoadedModel.forward

    def deaf(self: LoadedModel, ids: Any, cache: Any, *, mask: Any = None, **more: Any) -> torch.Tensor:
        return whole(self, ids, cache, **more)

    monkeypatch.setattr(LoadedModel, "forward", deaf)
    assert not can_share(loaded)
