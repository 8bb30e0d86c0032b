"""The columns of preference pairs in tokens. Apart from `pairing`, which makes them: training reads them, and must not be made
anew because code that renders chats has changed."""

import pyarrow

_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
PAIRS_SCHEMA = pyarrow.schema(
    [pyarrow.field(name, pyarrow.string(), nullable=False) for name in ("id", "source")]
    + [pyarrow.field(name, pyarrow.list_(pyarrow.int32()), nullable=False) for name in _IDS]
)
REFERENCE = ("reference_chosen_logprob", "reference_rejected_logprob")
"""Columns, float32, of pairs that bring along what a reference thinks of them."""
