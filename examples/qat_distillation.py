# SPDX-License-Identifier: Apache-2.0
"""QAT with distillation: TRL's SFTTrainer trains a model that is rounded to 4 bits as it learns.

For whom: anybody to whom GPTQ at 4 bits loses too much, with data and time to train.
Needs: TRL (pip install trl), and a GPU that holds model, teacher and AdamW's state.
Serve with: vLLM or SGLang, as any W4A16.
Comes out: a folder whose logits are those that the training ended with.
"""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer
from trl import SFTConfig, SFTTrainer

from llmcompressor.training import SessionManagerMixIn

MODEL = "Qwen/Qwen3-0.6B"
DATASET = "trl-lib/Capybara"  # conversations
OUTPUT = MODEL.rpartition("/")[2] + "-QAT-W4A16"
RECIPE = """
modifiers:
  QuantizationModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}
  OutputDistillationModifier: {temperature: 2.0, orig_scale: 0.5}
"""


class SFTTrainerOfLogits(SFTTrainer):
    """SFTTrainer takes the loss from the head's weight; distillation has to see its logits."""

    compute_loss = Trainer.compute_loss


class RecipeTrainer(SessionManagerMixIn, SFTTrainerOfLogits):
    """The same with a recipe and a teacher."""


trainer = RecipeTrainer(
    model=MODEL,
    args=SFTConfig(
        OUTPUT + "-run",
        model_init_kwargs={"dtype": "float32"},  # small steps are rounded away in 16 bits
        bf16=torch.cuda.is_available(),
        learning_rate=1e-5,
        max_length=1024,
    ),
    train_dataset=load_dataset(DATASET, split="train"),
    recipe=RECIPE,
    teacher=AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16", device_map="auto"),
)
trainer.train()
trainer.save_model(OUTPUT)
print(f"Next: vllm serve {OUTPUT}")
