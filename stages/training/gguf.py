"""A model from a GGUF file, as safetensors and a fast tokenizer. Apart from `model.py`, because it is read in this way once, when
it is fetched; everybody else loads what stands here afterwards.

Weights are dequantised to float32: what the quantised file says, exactly. transformers does it, and makes the tokenizer too, but
does not know every name for how text is split into words (SmolLM2's is unknown to it); those are set here, and what was written
is compared with the file.
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from stages.contract import StageError

TEMPLATE = "chat_template.jinja"
CONTROL = 3
"""Type of a token that stands for no text."""
PROBES = ("def f(x):\n    return x[10:200] + 'naïve 🙂'\n\n", "  12 3.14  \t\n x", "It's 2026, isn't it? I'LL see…")
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
"""Each digit is a word of its own."""


def write(file: Path, directory: Path) -> dict[str, Any]:
    """Write weights, configuration and tokenizer of a GGUF file in Hugging Face layout; returns facts of it. StageError when
    it is none, its architecture or its tokenizer is not known, or what was written is not what it says."""
    try:
        reader = gguf.GGUFReader(str(file))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise StageError(f"{file.name}: not readable as GGUF ({type(error).__name__}: {error})") from error
    said = {name: field.contents() for name, field in reader.fields.items()}
    quantised = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    del reader  # it maps the whole file
    _write_tokenizer(file, said, directory)
    _write_weights(file, directory)
    return {"gguf": str(said.get("general.name", "")), "quantised_as": quantised}


def _write_weights(file: Path, directory: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that nothing else turns off
            model = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=transformers.GgufConfig(dequantize=True),
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
            )
    except Exception as error:  # whatever a foreign file makes the library raise
        raise StageError(f"{file.name}: transformers does not read it ({type(error).__name__}: {error})") from error
    model.hf_quantizer = None  # these are plain numbers now, which the library would not save
    model.config.name_or_path = ""
    model.save_pretrained(directory)


def _write_tokenizer(file: Path, said: dict[str, Any], directory: Path) -> None:
    splitter = _splitter(file, said)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the same
        raise StageError(f"{file.name}: its tokenizer is not readable ({type(error).__name__}: {error})") from error
    if splitter is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = splitter
    tokenizer.chat_template = said.get("tokenizer.chat_template")
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(directory)
    _require_same(file, said, directory)


def _splitter(file: Path, said: dict[str, Any]) -> Any | None:
    """How text is split before merges are applied; None: as the library already does."""
    kind, name = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre", "gpt-2")
    if kind == "llama":
        return None
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "gpt2" and name in GGUF_PRE_TOKENIZER_SPLITS:
        return None
    if kind == "gpt2" and name == "gpt-2":
        return words
    if kind == "gpt2" and name in SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    known = ("gpt-2", *SINGLE_DIGITS, *GGUF_PRE_TOKENIZER_SPLITS)
    raise StageError(
        f"{file.name}: its text is split as {name!r} ({kind!r}), known are {', '.join(known)} and sentencepiece; fetch "
        "the model in Hugging Face layout instead"
    )


def _require_same(file: Path, said: dict[str, Any], directory: Path) -> None:
    """StageError unless the tokenizer in `directory` has the file's tokens, endings and template, and loses no text."""
    made = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens, types = said["tokenizer.ggml.tokens"], said.get("tokenizer.ggml.token_type", [])
    wrong = next((i for i, token in enumerate(tokens) if made.id_to_token(i) != token), None)
    if wrong is not None or made.get_vocab_size() != len(tokens):
        raise StageError(
            f"{file.name}: has {len(tokens)} tokens, the tokenizer made of it {made.get_vocab_size()}, and they differ "
            f"from {wrong} on; fetch the model in Hugging Face layout instead"
        )
    for number in (i for i, kind in enumerate(types) if kind == CONTROL):
        if made.encode(tokens[number], add_special_tokens=False).ids != [number]:
            raise StageError(f"{file.name}: {tokens[number]} (token {number}) is not read as one token")
    for text in PROBES:
        found = made.decode(made.encode(text, add_special_tokens=False).ids)
        if found != text and found.strip() != text.strip():
            raise StageError(f"{file.name}: its tokenizer turns {text!r} into {found!r}")
    loaded = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if loaded.eos_token_id != said.get("tokenizer.ggml.eos_token_id"):
        raise StageError(
            f"{file.name}: texts end with {said.get('tokenizer.ggml.eos_token_id')}, got {loaded.eos_token_id}"
        )
    template = said.get("tokenizer.chat_template")
    if loaded.chat_template != template or (template and (directory / TEMPLATE).read_text("utf-8") != template):
        raise StageError(f"{file.name}: its chat template did not come through as it is")
