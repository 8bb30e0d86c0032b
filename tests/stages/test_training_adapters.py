"""LoRA: what is trained, what is kept, and that each form in which it leaves is the model that was trained."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from stages.artifacts import Checkpoint
from stages.contract import StageError
from stages.serving.model import load_model
from stages.training import adapters
from stages.training import model as models
from stages.training.checkpoints import STATE
from stages.training.config import Adapter, ModelConfig
from stages.training.loop import Training, run
from stages.training.world import World
from tests.stages import tiny_dataset as tiny
from tests.stages.training_jobs import SHAPE, config, job, losses

DIGEST = "b" * 64
EMBEDDINGS = ["embed_tokens", "lm_head"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data"))[0]


@pytest.fixture(scope="module")
def base(data, tmp_path_factory) -> Checkpoint:
    """A trained base in a store of objects, under its digest."""
    work = tmp_path_factory.mktemp("base")
    run(job(config(max_steps=4), data, work))
    place = work / "objects" / DIGEST
    shutil.copytree(work / "export", place)
    return Checkpoint(uri=place.as_uri(), digest=DIGEST)


def lora(base: Checkpoint, data, work: Path, *, resources=None, seed: int = 0, max_steps: int = 12, **adapter):
    cfg = config(model=None, adapter=Adapter(**adapter), learning_rate=1e-2, max_steps=max_steps, resources=resources)
    return job(cfg, data, work, seed=seed, base=base)


def logits(model) -> torch.Tensor:
    ids = torch.arange(60)[None] % 257
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("adapter", "tied"),
    [
        (Adapter(), True),
        (Adapter(modules_to_save=["lm_head"]), False),
        (Adapter(modules_to_save=EMBEDDINGS), False),
        (Adapter(modules_to_save=EMBEDDINGS, ensure_weight_tying=True), True),
        (Adapter(target_modules=["q_proj", "v_proj"], r=2), True),
    ],
    ids=["all linear", "head", "embedding and head", "kept tied", "two matrices"],
)
def test_merged_merged_reloaded_and_adapter_reloaded_agree(tmp_path, adapter, tied):
    built = models.build(ModelConfig(**SHAPE), vocab_size=257, eos_token_id=0, seed=0)
    settings = transformers.GenerationConfig(eos_token_id=0)
    built.save_pretrained(tmp_path / DIGEST)
    model = adapters.attach(models.load(tmp_path / DIGEST), adapter, seed=1)
    assert torch.equal(logits(model), logits(built)), "corrections begin as nothing"
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(4):
        out = model(input_ids=torch.arange(60)[None]).logits[0, :-1]
        torch.nn.functional.cross_entropy(out, torch.arange(1, 60)).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = logits(model)
    assert float((wanted - logits(built)).abs().max()) > 0.01
    (tmp_path / "adapter").mkdir()
    adapters.save(model, tmp_path / "adapter", adapters.identity(tmp_path / DIGEST, DIGEST, 257))
    settings.save_pretrained(tmp_path / "adapter")
    merged = adapters.merge(model)
    merged.save_pretrained(tmp_path / "merged")
    for found in (merged, models.load(tmp_path / "merged"), models.load(tmp_path / "adapter")):
        assert type(found) is transformers.LlamaForCausalLM
        assert float((logits(found) - wanted).abs().max()) < 1e-5
    assert float((logits(models.adapted(tmp_path / "adapter")) - wanted).abs().max()) < 1e-5
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is tied


def test_corrections_alone_are_trained_and_checkpointed_and_their_number_is_told(data, base, tmp_path):
    run(lora(base, data, tmp_path, r=2))
    matrices = {
        "q": (32, 32),
        "k": (32, 16),
        "v": (32, 16),
        "o": (32, 32),
        "up": (32, 64),
        "gate": (32, 64),
        "down": (64, 32),
    }
    wanted = 2 * sum(2 * (rows + columns) for rows, columns in matrices.values())
    facts = json.loads((tmp_path / "export" / "summary.json").read_text())
    assert facts["trained_parameters"] == wanted
    assert facts["parameters"] == models.parameters(models.load(base.local())) + wanted
    state = torch.load(tmp_path / "checkpoints" / "step-00000012" / STATE, weights_only=True)
    assert sum(t.numel() for t in state["model"].values()) == wanted
    assert all(".lora_" in name for name in state["model"])
    seen = losses(tmp_path)
    assert seen[12] < seen[1]
    assert not torch.equal(logits(models.load(tmp_path / "export")), logits(models.load(base.local())))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_run_of_an_adapter_that_was_cut_off_goes_on_bitwise(data, base, tmp_path, dropout):
    for name in ("straight", "cut"):
        given = lora(base, data, tmp_path / name, dropout=dropout, modules_to_save=["lm_head"])
        if name == "cut":
            training = Training(given, World(0, 1), lambda: None)
            for step in range(training.resume(), 6):
                training.step(step)
            training.writer.close()
        run(given)
    assert losses(tmp_path / "cut") == losses(tmp_path / "straight")
    assert tiny.tree(tmp_path / "cut" / "export") == tiny.tree(tmp_path / "straight" / "export")


def test_another_seed_begins_and_drops_otherwise(data, base, tmp_path):
    for seed in (0, 1):
        run(lora(base, data, tmp_path / str(seed), seed=seed, dropout=0.5, max_steps=3))
    assert losses(tmp_path / "0") != losses(tmp_path / "1")


@pytest.fixture
def apart(data, base, tmp_path) -> Path:
    """An adapter that left alone, in the store of its base."""
    run(lora(base, data, tmp_path, merge=False))
    place = base.local().parent / ("a" * 64)
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(tmp_path / "export", place))


def test_an_adapter_alone_is_a_checkpoint_that_everybody_loads(data, base, apart, tmp_path):
    Checkpoint(uri=apart.as_uri()).check()
    assert json.loads((apart / "base.json").read_text())["digest"] == DIGEST
    assert not list(apart.glob("model*.safetensors"))
    assert str(tmp_path.parent) not in "".join(f.decode("utf-8", "replace") for f in tiny.tree(apart).values())
    run(lora(base, data, tmp_path / "merged"))
    merged = models.load(tmp_path / "merged" / "export")
    for found in (models.load(apart), load_model(apart).model):
        assert torch.equal(logits(found), logits(merged))
        assert found.generation_config.eos_token_id == merged.generation_config.eos_token_id
    for name in ("golden.json", "tokenizer.json"):
        assert (apart / name).read_bytes() == (tmp_path / "merged" / "export" / name).read_bytes()


def test_an_adapter_without_its_base_or_on_another_is_refused_by_name(base, apart, tmp_path):
    alone = Path(shutil.copytree(apart, tmp_path / "alone" / "adapter"))
    for load in (models.load, load_model):
        with pytest.raises(
            StageError, match=rf"an adapter on base at no revision, whose weights are not in .*{DIGEST}"
        ):
            load(alone)
    other = alone.parent / DIGEST
    shutil.copytree(base.local(), other)
    changed = models.load(other)
    changed.get_input_embeddings().weight.data[0, 0] += 1
    changed.save_pretrained(other)
    with pytest.raises(StageError, match=r"holds weights \w{12}, the adapter in .* was trained on \w{12}"):
        models.load(alone)


def test_an_adapter_that_does_not_fit_its_base_is_refused(base, apart, tmp_path):
    place = Path(shutil.copytree(apart, base.local().parent / ("c" * 64), dirs_exist_ok=True))
    settings = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(settings | {"r": 4}))
    with pytest.raises(StageError, match=r"adapter_model\.safetensors: 28 tensors do not fit the base"):
        models.load(place)


def test_isolation_is_probed_through_corrections_that_drop(base):
    model = adapters.attach(models.load(base.local()), Adapter(dropout=0.5), seed=0).eval()
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    models.require_isolation(model, 257)
    assert not any(module.training for module in model.modules())


def test_modules_that_are_not_there_and_new_tokens_that_nothing_teaches_are_refused(base):
    model = models.load(base.local())
    with pytest.raises(StageError, match=r"adapter.target_modules: LlamaForCausalLM has no c_attn; it has .*q_proj"):
        adapters.attach(model, Adapter(target_modules=["c_attn"]), seed=0)
    wanted = r"brings 3 tokens .* set adapter.modules_to_save=\[embed_tokens,lm_head\] adapter.ensure_weight_tying=true"
    for half in ([], ["embed_tokens"], ["lm_head"]):
        with pytest.raises(StageError, match=wanted):
            adapters.require_trained_rows(model, Adapter(modules_to_save=half), 3)
    adapters.require_trained_rows(model, Adapter(modules_to_save=EMBEDDINGS, ensure_weight_tying=True), 3)
    adapters.require_trained_rows(model, None, 3)


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_that_were_added_can_be_told_apart_after_training(tied):
    shape = {**SHAPE, "tie_word_embeddings": tied}
    model = models.build(ModelConfig(**shape), vocab_size=257, eos_token_id=0, seed=0)
    models.widen(model, 259, added=2)
    assert torch.equal(model.lm_head.weight[257], model.lm_head.weight[258])  # the control: they begin alike
    model = adapters.attach(model, Adapter(modules_to_save=EMBEDDINGS, ensure_weight_tying=tied), seed=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.tensor([[257, 5, 6, 258, 257, 7, 8, 258]])
    for _ in range(120):
        torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    said = adapters.merge(model).eval()(input_ids=ids).logits[0].argmax(dim=-1).tolist()
    assert said[:-1] == ids[0, 1:].tolist(), "a turn is begun and ended with its own token"


def test_added_tokens_in_rows_to_spare_begin_as_the_mean_of_the_known_ones():
    model = models.build(ModelConfig(**SHAPE), vocab_size=260, eos_token_id=0, seed=0)
    before = model.get_input_embeddings().weight.detach().clone()
    models.widen(model, 258, added=2)
    after = model.get_input_embeddings().weight
    assert torch.allclose(after[256:258], before[:256].mean(dim=0).expand(2, -1))
    assert torch.equal(after[:256], before[:256]) and torch.equal(after[258:], before[258:])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"r": 0}, "adapter.r must be at least 1, got 0"),
        ({"dropout": 1.0}, "adapter.dropout must be from 0 to below 1"),
        ({"target_modules": []}, "adapter.target_modules must name a module"),
        ({"target_modules": ["all-linear", "q_proj"]}, "or names of modules, got both"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["q_proj"]}, "must not repeat target_modules, got q_proj"),
        ({"ensure_weight_tying": True}, "must be false without modules_to_save"),
    ],
)
def test_impossible_adapters_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Adapter(**given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the reason is another one where there is a GPU")
def test_a_base_in_four_bits_is_refused_with_the_reason(base):
    with pytest.raises(
        StageError, match=r"adapter\.quantize: QLoRA needs an NVIDIA GPU, and this machine shows none; set it"
    ):
        adapters.attach(models.load(base.local()), Adapter(quantize=True), seed=0)


def test_an_adapter_needs_a_base():
    with pytest.raises(ValueError, match="adapter must be null when no base input is connected"):
        config(adapter=Adapter()).check(frozenset({"dataset"}))
