"""LoRA on a loaded model: attached, kept as state, merged, written and read. Apart, because the loop must not know whether it
trains a whole model or corrections to one.

What leaves as an adapter alone is `adapter_model.safetensors` and `adapter_config.json` as PEFT writes them, and `base.json`:
{digest, name, revision, vocab_size, weights_sha256} of the base that it corrects. The base is looked for beside it, under its
content digest, which is where a store keeps it.
"""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch

from stages.artifacts import ADAPTED, SUMMARY
from stages.contract import StageError
from stages.storage.hashing import sha256_file, tree_digest
from stages.training.config import ALL_LINEAR, Adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGE_LIMIT = 1e-5
"""Largest difference that merging may make to a logit, as a share of the largest logit. Measured: 4e-7 on a model of 0.1 M
parameters."""


def attach(model: Any, adapter: Adapter, seed: int) -> Any:
    """`model` with corrections that begin as nothing; they alone (and `modules_to_save`) take gradients. StageError when a
    named module is not there."""
    if adapter.quantize:
        raise StageError(
            f"adapter.quantize: {_no_quantisation()}; set it to false: a float32 base takes 4 bytes a parameter"
        )
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for field, wanted in (("target_modules", adapter.target_modules), ("modules_to_save", adapter.modules_to_save)):
        missing = sorted(set(wanted) - names - {ALL_LINEAR})
        if missing:
            raise StageError(
                f"adapter.{field}: {type(model).__name__} has no {', '.join(missing)}; it has "
                f"{', '.join(sorted(name for name in names if name and not name.isdigit()))}"
            )
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=ALL_LINEAR if adapter.target_modules == [ALL_LINEAR] else sorted(adapter.target_modules),
        modules_to_save=sorted(adapter.modules_to_save) or None,
        ensure_weight_tying=adapter.ensure_weight_tying,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parted matrices: what the field's documentation says
        torch.manual_seed(seed)
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def require_trained_rows(model: Any, adapter: Adapter | None, added: int) -> None:
    """StageError when `added` tokens came to the tokenizer whose rows in the embedding or the head an adapter would leave as they
    begin, all alike: the model could never tell them apart, nor end a turn with one of them."""
    if adapter is None:
        return
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    wanted = [names[id(embedding)], names[id(head)]]
    if not set(wanted) <= set(adapter.modules_to_save):
        tied = " adapter.ensure_weight_tying=true" if embedding.weight is head.weight else ""
        raise StageError(
            f"the data set brings {added} tokens that the base does not know, and the adapter leaves their rows in the embedding and "
            f"the head as they begin; set adapter.modules_to_save=[{','.join(wanted)}]{tied}"
        )


def _no_quantisation() -> str:
    """Why a base cannot be held in 4 bits here."""
    if not torch.cuda.is_available():
        return "QLoRA needs an NVIDIA GPU, and this machine shows none"
    if importlib.util.find_spec("bitsandbytes") is None:
        return "QLoRA needs bitsandbytes, which is not installed"
    return "QLoRA was not exercised in this release, and is refused until it was"


def is_attached(model: Any) -> bool:
    return isinstance(model, peft.PeftModel)


def trained(model: Any) -> int:
    """Numbers that take gradients."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def state(model: Any) -> dict[str, torch.Tensor]:
    """What must be kept to go on: all of a whole model, of an adapted one what is trained."""
    if not is_attached(model):
        found: dict[str, torch.Tensor] = model.state_dict()
        return found
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def restore(model: Any, kept: dict[str, torch.Tensor]) -> None:
    """Put back what `state` gave. StageError when it is of another recipe."""
    if not is_attached(model):
        model.load_state_dict(kept)
        return
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if parameters.keys() != kept.keys():
        raise StageError("the checkpoint holds other corrections than adapter asks for; remove it and run again")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])


def merge(model: Any) -> Any:
    """The base with the corrections added into its matrices, in place: a model of the base's own class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.merge_and_unload()


def save(model: Any, directory: Path, base: dict[str, Any]) -> None:
    """Corrections and the base's identity, in bytes that depend on nothing else."""
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.revision, config.inference_mode = base["name"], base["revision"], True
    config.save_pretrained(str(directory))
    settled = {
        name: sorted(value) if isinstance(value, list) else value  # PEFT holds names as sets
        for name, value in json.loads((directory / CONFIG).read_text("utf-8")).items()
    }
    _write(directory / CONFIG, settled)
    # Whether to keep embeddings is said here: PEFT would ask a hub what the base's vocabulary is.
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    safetensors.torch.save_file({n: t.detach().clone().contiguous() for n, t in tensors.items()}, directory / WEIGHTS)
    _write(directory / ADAPTED, base)
    model.get_base_model().config.save_pretrained(directory)


def identity(base: Path, digest: str, vocab_size: int) -> dict[str, Any]:
    """Who a base is: `vocab_size` is that of the adapted model, to which the base is widened."""
    facts = json.loads((base / SUMMARY).read_text("utf-8")) if (base / SUMMARY).exists() else {}
    return {
        "digest": digest,
        "name": facts.get("repository") or facts.get("name") or "base",
        "revision": facts.get("commit") or facts.get("revision"),
        "vocab_size": vocab_size,
        "weights_sha256": weights_sha256(base),
    }


def weights_sha256(directory: Path) -> str:
    """One digest over every weight file of a model."""
    return tree_digest({file.name: sha256_file(file) for file in sorted(directory.glob("*.safetensors"))})


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds corrections alone."""
    return (directory / ADAPTED).exists()


def base_of(directory: Path, given: Path | None = None) -> tuple[Path, dict[str, Any]]:
    """(the base of an adapter, its recorded identity). StageError unless it is there and its weights are the same."""
    known = _read(directory / ADAPTED)
    base = given or directory.parent / str(known.get("digest"))
    what = f"{known.get('name')} at {known.get('revision') or 'no revision'}"
    if not any(base.glob("*.safetensors")):
        raise StageError(
            f"{directory}: an adapter on {what}, whose weights are not in {base}: put the base there, or export with "
            "adapter.merge=true"
        )
    found = weights_sha256(base)
    if found != known.get("weights_sha256"):
        raise StageError(
            f"{base}: holds weights {found[:12]}, the adapter in {directory} was trained on "
            f"{str(known.get('weights_sha256'))[:12]} ({what}): bring that base"
        )
    return base, known


def read(model: Any, directory: Path) -> Any:
    """`model`, which is the base, with the corrections in `directory`. StageError when they are not this model's."""
    settings = {name: value for name, value in _read(directory / CONFIG).items() if name != "auto_mapping"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(**settings), autocast_adapter_dtype=False)
        tensors = safetensors.torch.load_file(directory / WEIGHTS)
        wanted = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        wrong = sorted(
            name
            for name in wanted.keys() | tensors.keys()
            if name not in wanted or name not in tensors or wanted[name].shape != tensors[name].shape
        )
        if wrong:
            raise StageError(f"{directory / WEIGHTS}: {len(wrong)} tensors do not fit the base, {wrong[0]} among them")
        peft.set_peft_model_state_dict(adapted, tensors)
    return adapted.eval()


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
        assert isinstance(value, dict)
    except (OSError, ValueError, AssertionError) as error:
        raise StageError(f"{path}: not readable as JSON ({type(error).__name__}); train the adapter again") from error
    return value


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")
