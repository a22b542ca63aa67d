#!/usr/bin/env bash
# Versions: transformers 5.24.0, gguf 0.19.0, torch 2.13.0, accelerate 1.15.0, numpy 2.4.6.
#
# Behaviour: from_pretrained(..., gguf_file=...) of a Llama reads the base of the rotary embedding and ignores how it
#   is scaled: both the keys `llama.rope.scaling.*` (linear, YaRN) and the tensor `rope_freqs.weight`, in which GGUF
#   files of Llama 3.1 and later hold theirs. The model computes with unscaled positions; nothing is logged.
# Why it surprises: all of it is in the file, every other length and base of the file is read, and the same library
#   applies the same scaling where config.json has it. Short texts hide it, long ones are read wrongly.
# Seen:
#   no scaling in the file         {'rope_theta': 10000.0, 'rope_type': 'default'}
#   llama.rope.scaling.factor 8    {'rope_theta': 10000.0, 'rope_type': 'default'}, same logits: True
#   rope_freqs.weight of 8         {'rope_theta': 10000.0, 'rope_type': 'default'}, same logits: True
#   what factor 8 does to the logits: 0.97 of their norm
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.24.0 gguf==0.19.0 torch==2.13.0 accelerate==1.15.0 numpy==2.4.6

cd "$work"
HF_HUB_OFFLINE=1 "$work/venv/bin/python" - 2> "$work/log" <<'PY' || { cat "$work/log"; exit 1; }
import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False)
torch.manual_seed(0)
weights = LlamaForCausalLM(config).state_dict()
weights = {name: value * 16 if "q_proj" in name or "k_proj" in name else value for name, value in weights.items()}
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
ids = torch.randint(0, 64, (1, 256))


def logits(file, factor=None, frequencies=None):
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in dict(block_count=2, context_length=512, embedding_length=64, feed_forward_length=96, head_count=4,
                           head_count_kv=2, layer_norm_rms_eps=1e-6, rope_freq_base=10000.0, rope_dimension_count=16,
                           vocab_size=64).items():
        getattr(writer, f"add_{key}")(value)
    if factor:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    for name, value in weights.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.numpy())
    if frequencies is not None:
        writer.add_tensor("rope_freqs.weight", frequencies)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file=file, dtype=torch.float32).eval()
    with torch.no_grad():
        return model, model(ids).logits


model, plain = logits("plain.gguf")
print(f"{'no scaling in the file':30}", model.config.rope_parameters)
for text, file, more in (("llama.rope.scaling.factor 8", "scaled.gguf", {"factor": 8.0}),
                         ("rope_freqs.weight of 8", "freqs.gguf", {"frequencies": np.full(8, 8, np.float32)})):
    read, same = logits(file, **more)
    print(f"{text:30} {read.config.rope_parameters}, same logits: {torch.equal(same, plain)}")
    assert read.config.rope_parameters["rope_type"] == "default" and torch.equal(same, plain)
model.config.rope_parameters = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
scaled = LlamaForCausalLM(model.config).eval()
scaled.load_state_dict(model.state_dict())
with torch.no_grad():
    share = ((scaled(ids).logits - plain).norm() / plain.norm()).item()
print(f"what factor 8 does to the logits: {share:.2f} of their norm")
assert share > 0.05
PY
! grep -i "rope" "$work/log"
