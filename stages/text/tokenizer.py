"""The tokenizer as a thing on disk: trained or taken over, and read back with what packing must know about it. Apart from
packing, because a base model's tokenizer comes with habits (begin token, byte alphabet, normalisation) of its own."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from stages.contract import StageError

END_OF_TEXT = "<|endoftext|>"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What of a model's directory belongs to its tokenizer."""

Int32 = npt.NDArray[np.int32]


def train(texts: Iterable[str], vocab_size: int, directory: Path, control_tokens: Sequence[str] = ()) -> None:
    """Train a byte-level BPE (no unknown token: all 256 bytes are in it) and save it so that AutoTokenizer loads it. EOS and
    `control_tokens` are among its `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *control_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
    }
    config |= {"clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def take_over(base: Path, directory: Path) -> None:
    """Copy a model's tokenizer as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (base / name).is_file():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(base / name, directory / name)
    if not (directory / "tokenizer_config.json").exists():
        raise StageError("the base model has no tokenizer_config.json; save it again with its tokenizer")


def extend(directory: Path, tokens: Sequence[str], control_tokens: Sequence[str]) -> int:
    """Add tokens to a saved tokenizer, behind those that it has: words, and control tokens (which no text becomes). How many
    are new; what it had already keeps its id."""
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    before = tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size(with_added_tokens=True) - before


@dataclass(frozen=True)
class Encoder:
    """A saved tokenizer, ready to encode. Make it with `load`."""

    tokenizer: Tokenizer
    eos: str
    eos_id: int
    pad_id: int
    prefix: Int32
    """What the tokenizer puts before a text (a begin token), usually nothing."""
    vocab_size: int
    bytes_of_id: Int32 | None
    """UTF-8 bytes that each token stands for, for byte-level tokenizers; None: found by offsets."""

    @classmethod
    def load(cls, directory: Path, model: Path | None = None) -> "Encoder":
        """`model`: directory whose config.json or generation_config.json may name the EOS that the tokenizer does not."""
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # text that looks like a control token is text
        config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
        eos_id = _token_id(tokenizer, config.get("eos_token"))
        if eos_id is None:
            eos_id = _eos_of_model(model or directory)
        if eos_id is None:
            raise StageError("the tokenizer names no eos_token in tokenizer_config.json; documents need an end")
        pad_id = _token_id(tokenizer, config.get("pad_token"))
        around = tokenizer.encode("", add_special_tokens=True).ids
        return cls(
            tokenizer=tokenizer,
            eos=tokenizer.id_to_token(eos_id) or "",
            eos_id=eos_id,
            pad_id=eos_id if pad_id is None else pad_id,
            prefix=np.array([token for token in around if token != eos_id], np.int32),
            vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
            bytes_of_id=_bytes_of_id(tokenizer),
        )

    def encode(self, texts: list[str], *, behind: bool = False) -> Iterator[tuple[Int32, Int32]]:
        """For each text its ids and the UTF-8 bytes that each id stands for; the bytes sum up to those of the text.
        `behind`: the texts stand behind others, so that a tokenizer which begins a text with a space begins these without."""
        heads = [self._head(text) if behind else "" for text in texts]
        wholes = [head + text for head, text in zip(heads, texts, strict=True)]
        encodings = self.tokenizer.encode_batch_fast(wholes, add_special_tokens=False)
        for text, head, encoding in zip(texts, heads, encodings, strict=True):
            ids = np.array(encoding.ids, np.int32)
            if head and ids[: len(self._known[head])].tolist() != self._known[head]:  # the two became one token
                head, ids = "", np.array(_ids(self.tokenizer, text), np.int32)
            ids = ids[len(self._known[head]) :]
            sizes = None if self.bytes_of_id is None else self.bytes_of_id[ids]
            if sizes is None or int(sizes.sum()) != len(text.encode()):
                sizes = self._sizes_by_offset(text, head)
            yield ids, sizes

    def _head(self, text: str) -> str:
        """What stands before a text that must not begin with a space of the tokenizer's, and is taken off again; nothing for a
        tokenizer that begins no text with one."""
        return "" if not self._known["\n"] else "." if text.startswith("\n") else "\n"

    @cached_property
    def _known(self) -> dict[str, list[int]]:
        """Ids of each head; none where heads are not needed."""
        alone, behind = _ids(self.tokenizer, "a"), _ids(self.tokenizer, "\na")
        needed = behind[-len(alone) :] != alone
        return {head: _ids(self.tokenizer, head) if needed else [] for head in ("", "\n", ".")}

    def _sizes_by_offset(self, text: str, head: str) -> Int32:
        """Each token's bytes reach from where the one before it ended; what no token covers goes to the next, or last."""
        offsets = self.tokenizer.encode(head + text, add_special_tokens=False).offsets[len(self._known[head]) :]
        ends = np.array([max(end - len(head), 0) for _, end in offsets], np.int64)
        if not len(ends):
            return ends.astype(np.int32)
        ends = np.maximum.accumulate(ends)
        ends[-1] = len(text)
        code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        before = np.append(0, np.cumsum(1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF)))
        return np.diff(before[ends], prepend=0).astype(np.int32)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """A token as tokenizer_config.json writes it: a string, or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(content) if isinstance(content, str) else None


def _eos_of_model(model: Path) -> int | None:
    for name in ("generation_config.json", "config.json"):
        if (model / name).is_file():
            eos = json.loads((model / name).read_text("utf-8")).get("eos_token_id")
            eos = eos[0] if isinstance(eos, list) and eos else eos
            if isinstance(eos, int):
                return eos
    return None


def _bytes_of_id(tokenizer: Tokenizer) -> Int32 | None:
    """A byte-level token is written with one character a byte, an added one as it is; control tokens stand for nothing."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    sizes = np.zeros(max(vocabulary.values()) + 1, np.int32)
    for token, index in vocabulary.items():
        sizes[index] = len(token)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        sizes[index] = 0 if added.special else len(added.content.encode())
    return sizes
