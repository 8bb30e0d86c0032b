"""A tiny random Llama with a byte-level tokenizer (one byte a token), made on the spot: every answer is exact in float32."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stages.training.export import write_golden

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    context: int = 256,
    chat_template: str | None = None,
    golden: bool = True,
    ends: bool = True,
) -> Path:
    """`ends=False`: no token ends an answer, so that one lasts until the context is full."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0, **{letter: number for number, letter in enumerate(alphabet, 1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>" if ends else None)
    fast.chat_template = chat_template
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.5,
        eos_token_id=0 if ends else None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    if golden:
        write_golden(directory, model, ["os.path.join(", "def f(x):", "naïve 🙂"])
    return directory
