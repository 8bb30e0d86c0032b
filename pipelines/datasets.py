"""What MLflow is told of a data set: the columns and types of its tables, and its numbers by split. Apart, because it is read from the
artifact itself (Parquet footers and `summary.json`), so that no stage has to describe what it has just written.
"""

import logging
from collections.abc import Mapping
from typing import Any

from stages.artifacts import Artifact

SPLITS = ("train", "validation")
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
    """The numbers of a summary, those of a split behind its name: `rows`, `train_tokens`."""
    found = _numbers(summary)
    for split in SPLITS:
        if isinstance(summary.get(split), dict):
            found |= {f"{split}_{name}": number for name, number in _numbers(summary[split]).items()}
    return found


def _numbers(facts: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in facts.items() if isinstance(v, int | float) and not isinstance(v, bool)}
