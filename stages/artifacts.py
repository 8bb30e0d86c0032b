"""The typed things that stages hand to each other. Apart, so that an edge of a pipeline can be checked before anything runs.

An artifact is a directory with a `summary.json` (facts a reader or a metric wants without opening the data) plus the
files named in its class. Its content never depends on blocks, workers or hosts: rows and tokens stand in id order in
shards of fixed size and fixed name. `ModelVersion` and `Endpoint` record a state of the world instead.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stages.storage import copies

SUMMARY = "summary.json"
MANIFEST = copies.MANIFEST
ADAPTED = "base.json"
"""In an adapter's directory: the identity of the base that it corrects."""


class ArtifactError(Exception):
    """A directory is not what its type promises. The message names the file."""


class DamagedArtifact(ArtifactError):
    """A published artifact is not what was published. The message names the file."""


@dataclass(frozen=True)
class Artifact:
    """A directory at `uri` whose tree has the content `digest` (64 hex characters; empty while unpublished)."""

    uri: str
    digest: str = ""

    def local(self) -> Path:
        """The directory on this node: the artifact itself, or a verified copy of what an object store holds. Raises
        DamagedArtifact, and OSError when the object store cannot be reached."""
        try:
            return copies.local(self.uri)
        except copies.WrongBytes as error:
            raise DamagedArtifact(str(error)) from error

    def summary(self) -> dict[str, Any]:
        """The parsed `summary.json`."""
        path = self.local() / SUMMARY
        try:
            loaded: dict[str, Any] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path}: {type(self).__name__} has no readable summary ({error})") from error
        return loaded

    def check(self) -> None:
        """Raise ArtifactError unless the directory holds what the type promises. Called before publication."""
        self.summary()
        for pattern in self.members():
            if not any(self.local().glob(pattern)):
                raise ArtifactError(f"{self.local() / pattern}: {type(self).__name__} misses this file")

    @classmethod
    def members(cls) -> tuple[str, ...]:
        """Glob patterns, each of which must match at least one file."""
        return ()

    @classmethod
    def write(cls, directory: Path, summary: dict[str, Any]) -> Self:
        """Write `summary.json` (sorted keys, so equal facts are equal bytes) and return the unpublished artifact."""
        text = json.dumps(summary, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        (directory / SUMMARY).write_text(text + "\n", "utf-8")
        return cls(uri=directory.resolve().as_uri())


@dataclass(frozen=True)
class Rows(Artifact):
    """Raw rows: `rows/part-00000.parquet`, ... with the columns of `stages.text.record.Record`: id, source, kind, prompt, text,
    messages, tools, chosen, rejected (all string, not null, empty where they do not apply to the kind).

    Rows that could not be read stand in `quarantine.jsonl` (source, line, reason; never the text). Summary: rows,
    characters, quarantined, reasons, kind.
    """

    @classmethod
    def members(cls) -> tuple[str, ...]:
        return ("rows/part-*.parquet",)


@dataclass(frozen=True)
class Corpus(Artifact):
    """Cleaned rows: `rows/part-*.parquet` = Rows' columns plus `split` ("train" or "validation").

    `dropped/part-*.parquet` (id, reason, detail) keeps a reason for each row that left; `dropped/examples.jsonl` shows some of
    them where that was asked for. Summary: waterfall, reasons in words, rows, characters and bytes by split and by source,
    sizes of clusters of duplicates, split_overlap (0).
    """

    @classmethod
    def members(cls) -> tuple[str, ...]:
        return ("rows/part-*.parquet",)


@dataclass(frozen=True)
class TokenDataset(Artifact):
    """Packed sequences: `train/part-*.parquet`, `validation/part-*.parquet`, and the fast tokenizer in `tokenizer/`.

    Columns, plain list<int32> but the last: `input_ids` [sequence_length]; `labels` [sequence_length], equal to the id at the
    same position or -100 where no loss is taken (prompt, padding, first token of a document); `document_starts`, positions at
    which a document begins (padding counts as a document of its own); `source` (string), which all documents of the row are
    from. `dropped/part-*.parquet` (id, reason) names each document that became no tokens, if any did.
    Summary: sequence_length, vocab_size, eos_token_id; waterfall (documents in, left by reason, out); sources (name, weight,
    rows, documents and tokens by split); and for each split: rows, documents, tokens, supervised_tokens, supervised_bytes
    (UTF-8), utilisation, what was cut (dropped_*, truncated_*), and the text tokens that carry no label (first_tokens,
    unsupervised_bytes), so that bits per byte can count every byte.
    """

    @classmethod
    def members(cls) -> tuple[str, ...]:
        return ("train/part-*.parquet", "validation/part-*.parquet", "tokenizer/tokenizer.json")


@dataclass(frozen=True)
class PairDataset(Artifact):
    """Preference rows in tokens: `train/part-*.parquet`, `validation/part-*.parquet` if that split has any, and the fast
    tokenizer with its chat template in `tokenizer/`.

    Columns: id, source (string); prompt_ids, chosen_ids, rejected_ids (plain list<int32>): either completion follows the
    prompt, ends with the token that ends the turn and alone is in the loss. With reference log-probabilities also
    reference_chosen_logprob and reference_rejected_logprob (float32): the sum over the completion's tokens under the base.
    `dropped/part-*.parquet` (id, reason, detail). Summary: base_digest, sequence_length, waterfall, and for each split: pairs,
    tokens by part, truncated prompts.
    """

    @classmethod
    def members(cls) -> tuple[str, ...]:
        return ("train/part-*.parquet", "tokenizer/tokenizer.json")


@dataclass(frozen=True)
class Checkpoint(Artifact):
    """A model in Hugging Face layout: config.json, *.safetensors, tokenizer.json, generation_config.json, and
    `golden.json` (prompts, greedy ids, top log-probabilities) that a server must reproduce before it takes traffic. Or an
    adapter alone (`adapter_model.safetensors`) with the identity of its base in `base.json`, the base's object beside it.
    """

    def local(self) -> Path:
        """The directory on this node; of an adapter with its base beside it."""
        directory = super().local()
        if (directory / ADAPTED).exists() and not self.uri.startswith("file:"):
            base = json.loads((directory / ADAPTED).read_text("utf-8"))["digest"]
            Checkpoint(uri=f"{self.uri.rstrip('/').rpartition('/')[0]}/{base}").local()
        return directory

    @classmethod
    def members(cls) -> tuple[str, ...]:
        return ("config.json", "*.safetensors", "tokenizer.json", "golden.json")


@dataclass(frozen=True)
class EvalReport(Artifact):
    """What a model is worth: summary = metrics by name, baselines, samples, verdict sentences, digests of what was judged."""


@dataclass(frozen=True)
class Approval(Artifact):
    """A gate's yes, bound to one checkpoint: summary = checkpoint_digest, report_digest, rules with their values."""


@dataclass(frozen=True)
class ModelVersion(Artifact):
    """Receipt of a registry version: summary = name, version, digest (of the checkpoint), uri (of its directory)."""


@dataclass(frozen=True)
class Endpoint(Artifact):
    """Receipt of a live deployment: summary = base_url, model, version, digest, config_digest, instance."""


@dataclass(frozen=True)
class ProbeReport(Artifact):
    """What real requests to an endpoint gave: summary = checks, latency and throughput numbers."""


@dataclass(frozen=True)
class LoadReport(Artifact):
    """What a crowd of requests to an endpoint got: summary = metrics, load (how they came), objective, curves (percentiles), and which
    model it was (name, version, digest)."""
