"""The loss of supervised rows with pictures, in rlkit and in TRL: `python -m tests.bench.sft_pictures`.

Both read the same rows: a picture, a question and an answer, of a random LLaVA, whose processor needs no torchvision.
What is compared is the loss of the first step, the mean over the tokens of the answers.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from rlkit.api import fit
from rlkit.tasks import Pictures
from tests.vision_models import save_random_vision_model

ROWS, TOLERANCE = 16, 1e-5


def write_rows(folder: Path) -> list[dict[str, Any]]:
    """Write rows with pictures, as rlkit's task `TRL` reads them; return those of the task."""
    rows = Pictures().rows("train")[:ROWS]
    lines = []
    for number, row in enumerate(rows):
        (folder / f"{number}.png").write_bytes(row["image"])
        lines.append({"prompt": f"<image>{row['question']}", "completion": row["answer"], "images": [f"{number}.png"]})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return rows


def loss_of_rlkit(model: Path, folder: Path) -> float:
    fit(
        "quick_image",
        model={"path": str(model)},
        task={"class_path": "TRL", "init_args": {"path": str(folder / "rows.jsonl")}},
        rollout={"engine": "Recorded", "group_size": 1}, reward=None, loss="CrossEntropy", advantage=None,
        validation=None, train={"steps": 1, "prompts_per_step": ROWS}, out=str(folder / "run"),
    )  # fmt: skip
    return float(json.loads((folder / "run/metrics.jsonl").read_text(encoding="utf-8"))["policy/loss"])


def loss_of_trl(model: Path, rows: list[dict[str, Any]]) -> float:
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []

    class Recording(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            computed = super().compute_loss(*args, **kwargs)
            losses.append(float((computed[0] if isinstance(computed, tuple) else computed).detach()))
            return computed

    data = [
        {
            "images": [Image.open(io.BytesIO(row["image"]))],
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]}],
            "completion": [{"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]}],
        }
        for row in rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, per_device_train_batch_size=ROWS, max_steps=1, logging_steps=1, save_strategy="no",
            report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False, packing=False,
            completion_only_loss=True, max_length=None,
        )  # fmt: skip
        trainer = Recording(
            model=AutoModelForImageTextToText.from_pretrained(model), args=config,
            train_dataset=Dataset.from_list(data), processing_class=AutoProcessor.from_pretrained(model),
        )  # fmt: skip
        trainer.train()
    return losses[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_vision_model(Path(folder) / "model", "llava")
        template = (
            model / "chat_template.jinja"
        )  # TRL trains the line break after a turn, which the policy never writes
        text = template.read_text(encoding="utf-8").replace(
            "<|im_end|>\\n' -}}\n{%- endfor", "<|im_end|>' -}}\n{%- endfor"
        )
        template.write_text(text, encoding="utf-8")
        rows = write_rows(Path(folder))
        ours, trls = loss_of_rlkit(model, Path(folder)), loss_of_trl(model, rows)
    print(f"loss of {ROWS} rows with pictures: rlkit {ours:.7f}, TRL {trls:.7f}, difference {abs(ours - trls):.1e}")
    assert abs(ours - trls) < TOLERANCE


if __name__ == "__main__":
    main()
