"""GRPO in about 100 lines on transformers alone, as an expert writes it by hand: a side of `tests.bench.step`.

It samples with `generate`, sorts answers by length, cuts micro-batches to the longest one, computes logits of answers
alone, and takes one AdamW step. It has no checkpoints, validation, log or recovery: what a trainer adds costs more than
this. The policy of an update is the one that sampled, so that the ratio of both is 1 in value and need not be stored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.bench.step import Gate, Row, reset_peak, reward

RATE, MAX_NORM = 1e-6, 1.0


class Answers(NamedTuple):
    """Sequences [B,P+T] of prompts padded on the left and answers on the right, with the answers' mask [B,T]."""

    tokens: Tensor
    prompt_mask: Tensor
    mask: Tensor
    advantages: Tensor

    def micro_batches(self, size: int) -> Iterator[Answers]:
        """Yield answers from the shortest to the longest, without columns that are padding in all of them."""
        width = self.prompt_mask.shape[1]
        for rows in self.mask.sum(1).argsort().split(size):
            first = int((~self.prompt_mask[rows].any(0)).sum())
            length = int(self.mask[rows].sum(1).max())
            yield Answers(
                self.tokens[rows, first : width + length],
                self.prompt_mask[rows, first:],
                self.mask[rows, :length],
                self.advantages[rows],
            )


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: list[str], samples: int, length: int) -> Answers:
    """Sample answers to each prompt; advantages are 0 until they are scored."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, padding_side="left", return_tensors="pt", return_dict=True
    )
    model.eval()
    tokens = model.generate(
        **inputs, num_return_sequences=samples, max_new_tokens=length,
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
    )  # fmt: skip
    model.train()
    answers = tokens[:, inputs["input_ids"].shape[1] :]
    ends = answers == tokenizer.eos_token_id
    prompt_mask = inputs["attention_mask"].bool().repeat_interleave(samples, 0)
    return Answers(tokens, prompt_mask, (ends.cumsum(1) - ends.int()) == 0, torch.zeros(len(tokens)))


def group_advantages(rewards: Tensor, samples: int) -> Tensor:
    """Return rewards [B] in standard deviations from the mean of their group (Shao et al. 2024, section 4.1.2)."""
    groups = rewards.view(-1, samples)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def logps(model: Any, batch: Answers) -> Tensor:
    """Return the log-probs [b,T] of answers."""
    length = batch.mask.shape[1]
    attention = torch.cat((batch.prompt_mask, batch.mask), 1)
    logits = model(
        input_ids=batch.tokens,
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=length + 1,
        use_cache=False,
    ).logits[:, :-1]
    targets = batch.tokens[:, -length:, None]
    return logits.gather(2, targets).squeeze(2) - logits.logsumexp(2)  # type: ignore[no-any-return]


def update(model: Any, reference: Any, optimizer: Any, answers: Answers, row: Row) -> None:
    """Take one step on the policy gradient, and on the KL divergence from the reference if there is one."""
    total = answers.mask.sum()
    for batch in answers.micro_batches(row.trl_micro_batch):
        new = logps(model, batch)
        losses = -(new - new.detach()).exp() * batch.advantages[:, None]
        if reference is not None:
            with torch.no_grad():
                old = logps(reference, batch)
            difference = old - new
            losses = losses + row.kl * (difference.exp() - difference - 1)
        ((losses * batch.mask).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def train(row: Row, folder: Path, steps: int) -> None:
    """Make steps when the bench asks for them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.bench.work import questions

    gate = Gate()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = copy.deepcopy(model).eval() if row.kl else None
    if row.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    prompts = [question for question, _ in questions(row.prompts * steps, 3)]
    gate.report(rss=reset_peak())
    for step in range(steps):
        gate.wait()
        batch = prompts[row.prompts * step : row.prompts * (step + 1)]
        answers = sample(model, tokenizer, batch, row.samples, row.length)
        width = answers.prompt_mask.shape[1]
        texts = tokenizer.batch_decode(answers.tokens[:, width:], skip_special_tokens=True)
        advantages = group_advantages(torch.tensor(reward(texts)), row.samples)
        update(model, reference, optimizer, answers._replace(advantages=advantages), row)
        gate.report(length=float(answers.mask.sum(1).float().mean()))
