"""The verbs of a model's life, one file each, and the nouns they share.

To add a stage: write `stages/<verb>.py` (a `StageConfig`, a function under `@stage`), write `conf/<verb>/<option>.yaml`
(first line `# @package stages.<verb>`, then `defaults: [schema, _self_]`), and name it in a pipeline. Nothing else is edited.
"""

import importlib
import pkgutil

_NOT_VERBS = {"contract", "artifacts"}


def import_verbs() -> None:
    """Import every verb module, so that `contract.STAGES` is complete. Loads no ray, torch, transformers or mlflow."""
    for module in pkgutil.iter_modules(__path__):
        if not module.ispkg and module.name not in _NOT_VERBS:
            importlib.import_module(f"stages.{module.name}")
