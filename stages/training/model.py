"""Models in memory: built from a shape or loaded from a checkpoint, always float32, and proved to keep packed documents
apart before a step is taken. Apart, because training, evaluation and fetching must load a model in the same way."""

from pathlib import Path
from typing import Any

import torch
import transformers

from stages.contract import StageError
from stages.text.packed import positions
from stages.training import adapters
from stages.training.config import ModelConfig

LEAK_LIMIT = 1e-4
"""Largest logit difference that rounding explains: an isolated document differs by 6e-8, a leaking one by 0.2."""


def build(shape: ModelConfig, *, vocab_size: int, eos_token_id: int, seed: int) -> Any:
    """A Llama-architecture model with random weights that depend on `shape`, `vocab_size` and `seed` alone."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        tie_word_embeddings=shape.tie_word_embeddings,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        initializer_range=shape.initializer_range,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    return initialise(config, seed)


def initialise(config: Any, seed: int) -> Any:
    """A model of this configuration with random float32 weights."""
    _quiet()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def load(directory: Path, base: Path | None = None) -> Any:
    """The model in a directory of Hugging Face layout, float32 whatever it was saved in (version 5 takes the saved
    dtype by default), safetensors alone, no code of the model's own. An adapter is merged into its base, which is looked for
    beside it unless `base` says where it is."""
    _quiet()
    if adapters.is_adapter(directory):
        return adapters.merge(adapted(directory, base)).eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    return model.eval()


def adapted(directory: Path, base: Path | None = None) -> Any:
    """An adapter on its base, not merged."""
    found, known = adapters.base_of(directory, base)
    model = load(found)
    widen(model, known["vocab_size"])
    model = adapters.read(model, directory)
    settings = transformers.GenerationConfig.from_pretrained(directory)
    whole = model.get_base_model()
    whole.generation_config, whole.config.eos_token_id = settings, settings.eos_token_id
    return model


def widen(model: Any, vocab_size: int, added: int = 0) -> None:
    """Make room for tokens that were added to the tokenizer: each begins as the mean of those that the model knows. The last
    `added` do so also where the model has rows to spare, which nothing has ever trained."""
    rows = model.get_input_embeddings().num_embeddings
    known = min(rows, vocab_size - added)
    if known >= vocab_size:
        return
    if rows < vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            for values in (layer.weight, getattr(layer, "bias", None)):
                if values is not None:
                    values[known:vocab_size] = values[:known].mean(dim=0)


def parameters(model: Any) -> int:
    """Trainable numbers, shared ones counted once."""
    return sum(p.numel() for p in model.parameters())


def leak(model: Any, vocab_size: int) -> float:
    """Largest difference between the logits of a document alone and of the same document packed behind another one."""
    generator = torch.Generator().manual_seed(0)
    first, second = 24, 40
    ids = torch.randint(vocab_size, (1, first + second), generator=generator)
    starts = torch.tensor([0, first], dtype=torch.int32).numpy()
    packed = torch.from_numpy(positions(starts, first + second)).long()[None]
    alone = torch.arange(second)[None]
    was_training = model.training
    model.train()  # the mode that takes the gradient: it has leaked where evaluation did not
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()  # an adapter's: it draws for each length anew
    # With gradients: without them a model that computes its layers again does not take that way.
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        together = model(input_ids=ids, position_ids=packed, attention_mask=None, use_cache=False).logits[0, first:]
        torch.manual_seed(0)
        apart = model(input_ids=ids[:, first:], position_ids=alone, attention_mask=None, use_cache=False).logits[0]
    model.train(was_training)
    return float((together - apart).detach().abs().max())


def require_isolation(model: Any, vocab_size: int) -> None:
    """StageError when this model class lets packed documents see each other. Takes well under a second."""
    found = leak(model, vocab_size)
    if not found < LEAK_LIMIT:
        raise StageError(
            f"{type(model).__name__}: packed documents see each other (logits differ by {found:.2g}, wanted below "
            f"{LEAK_LIMIT}); use an architecture whose attention follows position_ids"
        )


def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
