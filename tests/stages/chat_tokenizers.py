"""Small tokenizers of the kinds that chat models have, and the chat templates of known models with their control tokens.

The templates in tests/data/chat_templates/ are the models' own, shortened where that changes no token of a chat.
"""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
LLAMA = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"]
IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
DEEPSEEK = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁outputs▁end｜>",
]
INST = [
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
PHI = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
# name of the template -> special tokens, other added tokens, begin, end, whether the tokenizer too adds the begin token
FAMILIES: dict[str, tuple[list[str], list[str], str | None, str, bool]] = {
    "chatml": (IM, [], None, "<|endoftext|>", False),
    "deepseek_r1": (DEEPSEEK, ["<think>", "</think>"], DEEPSEEK[0], DEEPSEEK[1], True),
    "gemma2": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], ["\n", "\n\n"], "<bos>", "<eos>", True),
    "gemma3": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], ["\n", "\n\n"], "<bos>", "<eos>", True),
    "llama31": (LLAMA, [], "<|begin_of_text|>", "<|end_of_text|>", True),
    "mistral_v1": (["<s>", "</s>"], [], "<s>", "</s>", True),
    "mistral_v3": (["<s>", "</s>", *INST], [], "<s>", "</s>", True),
    "phi35": (PHI, [], None, "<|endoftext|>", False),
    "phi4mini": (PHI, [], None, "<|endoftext|>", False),
    "qwen25": (IM, TOOL_TAGS, None, "<|im_end|>", False),
    "qwen3": (IM, [*TOOL_TAGS, "<think>", "</think>"], None, "<|im_end|>", False),
    "smollm2": (IM, [], "<|im_start|>", "<|im_end|>", False),
    "zephyr": (["<s>", "</s>"], [], "<s>", "</s>", False),
}
KINDS = ("byte_level", "sentencepiece_bpe", "unigram", "wordpiece")
WORDS = [
    "the",
    "a",
    "model",
    "said",
    "that",
    "hello",
    "hi",
    "it",
    "is",
    "was",
    "café",
    "naïve",
    "你好",
    "🙂",
    "def",
    "f(x):",
    "return",
    "x+1",
    "http://a.b/c?d=e",
    "3.14",
    "yes",
    "no",
    "--",
    "ok",
    "thanks",
    "tail",
    "system",
    "user",
    "assistant",
    "tool",
    "Question",
    "Answer",
    "[x]",
    "{y}",
    "<b>bold</b>",
    "a<b",
]


def text_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def save_tokenizer(directory: Path, kind: str, family: str, template: str | None = None) -> Path:
    """A tokenizer of one kind with the control tokens and the template of one family, as a model's folder holds it."""
    special, added, begin, end, adds_begin = FAMILIES[family]
    tokenizer = _untrained(kind, special)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    if begin is not None and adds_begin:
        number = tokenizer.token_to_id(begin)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, number)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=end)
    fast.chat_template = text_template(family) if template is None else template
    fast.save_pretrained(directory)
    return directory


def _untrained(kind: str, special: list[str]) -> Tokenizer:
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=12)) + "\n" * draw.randint(1, 3) for _ in range(300)]
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator(
            lines, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        letters = sorted({chr(code) for code in range(32, 127)} | {letter for line in lines for letter in line})
        trainer = trainers.UnigramTrainer(
            vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], initial_alphabet=letters, show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
    elif (
        kind == "sentencepiece_bpe"
    ):  # as Llama 2 has it: a space before the text by the normaliser, unknown letters as bytes
        letters = [chr(code) for code in range(33, 127)] + ["▁", "\n"]
        pairs = ["▁ s", "a y", "▁ t", "h e", "] h", "▁ ▁", "\n h", "▁t h", "\n \n"]
        words = [
            "<unk>",
            *(f"<0x{code:02X}>" for code in range(256)),
            *letters,
            *(pair.replace(" ", "") for pair in pairs),
        ]
        merges = [(one, other) for one, _, other in (pair.partition(" ") for pair in pairs)]
        vocab = {word: number for number, word in enumerate(words)}
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.train_from_iterator(
            lines, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], show_progress=False)
        )
    return tokenizer


def random_chat(draw: random.Random, *, system: bool = True, turns: int = 3) -> list[dict[str, Any]]:
    """A chat of one to `turns` exchanges."""

    def say() -> str:
        words = draw.choices(WORDS, k=draw.randint(1, 9))
        return (
            draw.choice(("", "", "", " ", "\n"))
            + draw.choice((" ", " ", "\n", "\n\n", "  ")).join(words)
            + draw.choice(("", "", "\n", " "))
        )

    chat = [{"role": "system", "content": say()}] if system and draw.random() < 0.5 else []
    for _ in range(draw.randint(1, turns)):
        chat += [{"role": "user", "content": say()}, {"role": "assistant", "content": say()}]
    return chat


def tool_chat() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A chat with a call, its result and an answer; and the functions that may be called."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_city", "arguments": {"city": "X"}}}
    messages = [
        {"role": "user", "content": "which?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_city", "content": "seven"},
        {"role": "assistant", "content": "It is seven."},
    ]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get_city", "description": "Finds a city", "parameters": parameters}
    return json.loads(json.dumps(messages)), [{"type": "function", "function": function}]
