"""Hugging Face's Trainer, which trains on when nodes die: a GPT-2 from nothing on the bytes of Python's own manual.

elastic-trainer local --nodes 2:3 --recovery in_place --kill-node-at 50 -- examples/transformers/train.py --steps 100
"""

import argparse
from pydoc_data.topics import topics

import torch

from elastic_trainer import Session

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--directory", default="runs/transformers", help="for checkpoints; the job resumes there")
options = parser.parse_args()

text = "\n".join(topics[name] for name in sorted(topics)).encode()
rows = [list(text[start : start + 64]) for start in range(0, len(text) - 64, 64)]

with Session(checkpoint_dir=options.directory, seed=0) as session:
    session.hide_ranks()  # before transformers looks for them
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from elastic_trainer.integrations.transformers import ElasticTrainer

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        f"{options.directory}/out",
        max_steps=options.steps,
        per_device_train_batch_size=16,  # of all ranks together
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        save_strategy="no",  # the session saves
        report_to=[],
        disable_tqdm=True,
        logging_steps=50,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = ElasticTrainer(session, model=GPT2LMHeadModel(config), args=arguments, train_dataset=data)
    done = trainer.train()
    if session.is_rank0:
        print(f"step {done.global_step}: mean loss {done.training_loss:.3f}", flush=True)
