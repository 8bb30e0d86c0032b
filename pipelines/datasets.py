"""What MLflow is told of a data set: the columns and types of its tables, and its numbers by split. Apart, because it is read from the
artifact itself (Parquet footers and `summary.json`), so that no stage has to describe what it has just written.
"""

import logging
from collections.abc import Mapping
from typing import Any

from stages.artifacts import Artifact

SPLITS = ("train", "validation")
SHOWN = (
    "rows",
    "documents",
    "pairs",
    "characters",
    "tokens",
    "supervised_tokens",
    "utilisation",
    "quarantined",
    "sequence_length",
    "vocab_size",
)
OUTPUT = "output"
"""Context of what an attempt made; what it took is named by its use: training, validation."""


def is_dataset(kind: type[Artifact]) -> bool:
    """Whether it holds rows."""
    return any(pattern.endswith(".parquet") for pattern in kind.members())


def columns(artifact: Artifact) -> list[dict[str, Any]]:
    """Its columns as MLflow writes a schema (`mlflow_colspec`). Empty when there is none to read: nothing depends on it."""
    try:
        pattern = next(pattern for pattern in artifact.members() if pattern.endswith(".parquet"))
        shard = min(artifact.local().glob(pattern))
        with shard.open("rb") as file:
            if file.read(4) != b"PAR1":
                return []
        import pyarrow.parquet

        schema = pyarrow.parquet.read_schema(shard)
    except (StopIteration, OSError, ValueError) as error:
        logging.getLogger(__name__).info("no columns of %s: %s", artifact.uri, error)
        return []
    return [{**_type(field.type), "name": field.name, "required": not field.nullable} for field in schema]


def _type(kind: Any) -> dict[str, Any]:
    """MLflow's name for an Arrow type."""
    import pyarrow.types as of

    if of.is_list(kind) or of.is_large_list(kind) or of.is_fixed_size_list(kind):
        return {"type": "array", "items": _type(kind.value_type)}
    if of.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return {"type": "object", "properties": {f.name: {**_type(f.type), "required": not f.nullable} for f in fields}}
    named = (
        ("boolean", of.is_boolean(kind)),
        ("long", of.is_int64(kind) or of.is_uint32(kind) or of.is_uint64(kind)),
        ("integer", of.is_integer(kind)),
        ("double", of.is_float64(kind)),
        ("float", of.is_floating(kind)),
        ("binary", of.is_binary(kind) or of.is_large_binary(kind)),
        ("datetime", of.is_timestamp(kind) or of.is_date(kind)),
    )
    return {"type": next((name for name, fits in named if fits), "string")}


def profile(summary: Mapping[str, Any]) -> dict[str, float]:
    """How much there is, those of a split behind its name: `rows`, `train_tokens`. MLflow's page shows the columns below these
    numbers, so that a summary's every detail would hide them; the whole summary is among the artifacts."""
    found = _numbers(summary)
    for split in SPLITS:
        if isinstance(summary.get(split), dict):
            found |= {f"{split}_{name}": number for name, number in _numbers(summary[split]).items()}
    return found


def _numbers(facts: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(facts[name]) for name in SHOWN if isinstance(facts.get(name), int | float)}
