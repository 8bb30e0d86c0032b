"""The training of `benchmarks.train_chats` done with TRL's SFTTrainer, in its own environment:
`python train_with_trl.py BASE CHATS WORK STEPS padded|packed|recomputed` prints its findings as one line of JSON.

What is equal: the model's weights, the tokenizer and its template, the chats and the order in which they come, rows in a forward pass,
optimizer and learning rate, loss on what the assistant says, float32, threads. Everything else is as the trainer has it by default,
but for one thing: by default it computes the layers again in the backward pass, to save memory. `recomputed` leaves it so.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from trl import SFTConfig, SFTTrainer

from benchmarks import chats


class Clock(transformers.TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.at.append(time.time())


class Watched(SFTTrainer):
    """The trainer, and the loss of each step before it is averaged with others."""

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss = super().compute_loss(*arguments, **named)
        self.seen.append(float(loss.detach()))
        return loss


class Counted:
    """The trainer's collator, and how many tokens of text each batch has."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.tokens: list[int] = []

    def __call__(self, examples: Any) -> Any:
        made = self.collate(examples)
        self.tokens.append(int(made["attention_mask"].sum() if "attention_mask" in made else made["input_ids"].numel()))
        return made


def main() -> None:
    base, said, work, steps, arm = sys.argv[1:]
    torch.set_num_threads(chats.THREADS)
    datasets.disable_progress_bars()
    settings = SFTConfig(
        output_dir=work,
        max_length=chats.LENGTH,
        packing=arm == "packed",
        assistant_only_loss=True,
        per_device_train_batch_size=chats.ROWS,
        max_steps=int(steps),
        learning_rate=chats.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=chats.BETAS[0],
        adam_beta2=chats.BETAS[1],
        weight_decay=0.0,
        max_grad_norm=chats.MAX_NORM,
        bf16=False,
        gradient_checkpointing=arm == "recomputed",
        train_sampling_strategy="sequential",  # the chats come in the order in which the other arms take them
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = Watched(
        model=transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=settings,
        train_dataset=datasets.load_dataset(
            "json", data_files=said, split="train", cache_dir=str(Path(work) / "cache")
        ),
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
        callbacks=[clock],
    )
    trainer.seen = []
    trainer.data_collator = counted = Counted(trainer.data_collator)
    trainer.train()
    print(json.dumps({"at": clock.at, "losses": trainer.seen, "tokens": counted.tokens[: int(steps)]}))


if __name__ == "__main__":
    main()
