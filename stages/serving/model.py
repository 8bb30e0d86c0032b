"""A language model from a directory, ready to answer: weights, tokenizer, facts, and one way through the model. Apart, because all
who ask it load it and call it the same way.

Always float32: transformers 5 keeps the checkpoint's dtype, and bfloat16 on a CPU without AVX512_BF16 prefills six
times slower.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from stages.contract import StageError
from stages.serving.text_stream import piece_reader
from stages.text.templates import Template
from stages.training import adapters
from stages.training import model as models


@dataclass(frozen=True)
class LoadedModel:
    """Weights, tokenizer and the facts a request is checked against."""

    model: Any
    tokenizer: Any
    context_length: int
    """Tokens of prompt and answer together."""
    vocab_size: int
    eos_ids: frozenset[int]
    """Ids that end an answer: those of the generation config and the tokenizer's."""
    start_id: int | None
    """Stands for an empty prompt: the beginning-of-sequence token, else the end-of-sequence token."""
    template: Template | None
    """Makes tokens of a chat, as it did in training; None: the model has none."""

    @functools.cached_property
    def backend(self) -> Tokenizer:
        backend: Tokenizer = self.tokenizer.backend_tokenizer
        return backend

    @functools.cached_property
    def piece(self) -> Callable[[int], bytes]:
        """The bytes of the text that a token stands for: of a special token none."""
        return piece_reader(self.tokenizer)

    @functools.cached_property
    def _takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(self.model.forward).parameters

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def forward(
        self,
        ids: Sequence[Sequence[int]],
        cache: DynamicCache,
        *,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        keep: int = 1,
    ) -> torch.Tensor:
        """Logits [rows, keep, vocab_size] of the last `keep` places (0: of all) of rows of ids that go on from `cache`, which grows.

        `positions` [rows, new]: of each id in its text; None: the text begins here. They are always said where the model takes them: some
        models count every call from nought, others by the cache's width. `mask` [rows, cached + new]: 1 for what is a token.
        """
        tokens = torch.tensor(ids, dtype=torch.long)
        if positions is None:
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
        said = {"position_ids": positions} if self._takes_positions else {}
        output = self.model(
            input_ids=tokens, attention_mask=mask, cache=cache, use_cache=True, logits_to_keep=keep, **said
        )
        logits: torch.Tensor = output.logits
        return logits


def load_model(directory: Path) -> LoadedModel:
    """Load a Hugging Face layout from disk; StageError names what is missing or wrong. No pickle, no remote code."""
    for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise StageError(
                f"{directory / pattern}: the model's directory misses this file; train or register it again"
            )
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        model, facts = _weights(directory, config)
    except StageError:
        raise
    except Exception as error:  # transformers and safetensors raise a dozen kinds for a broken directory
        raise StageError(f"{directory}: the model does not load ({type(error).__name__}: {error})") from error
    if facts["missing_keys"]:  # transformers would fill them with random numbers and only warn
        raise StageError(f"{directory}: the weights miss {sorted(facts['missing_keys'])[0]} (and maybe more)")
    model.eval()
    context_length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not context_length:
        raise StageError(
            f"{directory / 'config.json'}: max_position_embeddings is missing: the context length is unknown"
        )
    eos_ids = frozenset(_ids(model.generation_config.eos_token_id)) | frozenset(_ids(tokenizer.eos_token_id))
    start_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    vocab_size = int(model.get_input_embeddings().num_embeddings)
    template = Template.of_model(directory)
    return LoadedModel(model, tokenizer, int(context_length), vocab_size, eos_ids, start_id, template)


def _weights(directory: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """(the model, what loading it found); of an adapter the base with its corrections merged."""
    if adapters.is_adapter(directory):
        return models.load(directory), {"missing_keys": ()}
    model, facts = AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    return model, facts


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
