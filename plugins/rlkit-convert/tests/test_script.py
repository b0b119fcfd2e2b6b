"""Python scripts that train with TRL: what is read of them, what is listed, and that nothing of them is run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from rlkit_convert import convert
from rlkit_convert.conversion import NO_RULE
from rlkit_convert.write import recipe_problems, recipe_text, remark

from rlkit.base.errors import RecipeError

SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
from mine.rewards import short as brief

MODEL = "org/model"
RATE = 2e-6

def form(completions, **kwargs):
    return [1.0 for _ in completions]

dataset = load_dataset("openai/gsm8k", "main", split="train")
dataset = dataset.map(lambda row: {"prompt": row["question"]})
extra = {"max_completion_length": 256, "beta": 0.04}
args = GRPOConfig(
    "out", learning_rate=RATE, num_generations=4, per_device_train_batch_size=8, max_steps=100, warmup_steps=-0,
    reward_weights=[1.0, 0.5, 0.25], mask_truncated_completions=True, run_name=f"x-{MODEL}", **extra,
)
trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype="auto"),
    [accuracy_reward, form, brief], args, train_dataset=dataset,
    eval_dataset=load_dataset("openai/gsm8k", "main")["test"],
    peft_config=LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj", "v_proj"]), callbacks=[print],
)
open("ran", "w").write("this script was run")
"""


def converted(content: str, *options: str) -> tuple[dict, list[str]]:
    conversion = convert("trl", content, "train.py", options)
    return yaml.safe_load(recipe_text(conversion)), [remark(conversion, key) for key in conversion.notes]


def test_a_script_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, listed = converted(SCRIPT)
    assert not list(tmp_path.iterdir())
    assert recipe["model"]["path"] == "org/model"
    assert recipe["model"]["lora"] == {"rank": 16, "alpha": 64, "targets": ["q_proj", "v_proj"]}
    task = {"path": "openai/gsm8k", "name": "main", "train_split": "train", "validation_split": "test"}
    assert recipe["task"] == {"class_path": "HFDataset", "init_args": {"prompt_field": "question", **task}}
    assert recipe["train"]["lr"] == 2e-6
    assert recipe["train"]["steps"] == 100
    assert recipe["train"]["mask_truncated"] is True
    assert recipe["rollout"] == {"group_size": 4, "sampling": {"max_tokens": 256}}
    assert recipe["kl_loss"] == {"coef": 0.04}
    rewards = recipe["reward"]["init_args"]
    assert rewards["weights"] == {"accuracy_reward": 1.0, "form": 0.5, "short": 0.25}
    assert rewards["rewards"]["accuracy_reward"] == {"class_path": "MathReward", "init_args": {}}
    assert rewards["rewards"]["form"]["init_args"] == {"function": "rewards.py:form"}
    assert rewards["rewards"]["short"]["init_args"] == {"function": "mine.rewards:short"}
    assert not [line for line in listed if NO_RULE in line]
    assert any(line.startswith("def form: it is in train.py, which trains when it is imported") for line in listed)
    problems = recipe_problems(recipe_text(convert("trl", SCRIPT, "train.py", [])))
    assert ["allow_code: true" in problem for problem in problems] == [True, True]  # of form and of short


def test_functions_of_a_script_with_a_guard_stay_there() -> None:
    guarded = SCRIPT.replace("args = GRPO", "if __name__ == '__main__':\n  args = GRPO").replace(
        "\ntrainer =", "\n  trainer ="
    )
    recipe, _ = converted(guarded)
    assert recipe["reward"]["init_args"]["rewards"]["form"]["init_args"] == {"function": "train.py:form"}


@pytest.mark.parametrize(
    ("lines", "rate"),
    [
        ("rate = 1e-5", 1e-5),
        ("rate = 1e-5\nrate = 2e-5", 2e-5),
        ("first = 3e-5\nrate = first", 3e-5),
        ("rate = 1e-5\nif fast:\n    rate = 1e-4", None),
        ("rate = 1e-5\nfor rate in rates: pass", None),
        ("rate = float('1e-5')", 1e-5),
        ("rate = float(read('1e-5'))", None),
        ("rate = 10 ** 1000", None),
        ("def f(rate): pass\nrate = 1e-5", None),
        ("rate = rate", None),
    ],
)
def test_names_are_followed_where_their_value_is_certain(lines: str, rate: float | None) -> None:
    script = f"{lines}\nGRPOTrainer('m', 'accuracy_reward', GRPOConfig(learning_rate=rate))"
    recipe, listed = converted(script)
    assert recipe["train"].get("lr") == rate  # not TRL's default for a value that is unknown
    assert any(line.startswith("learning_rate: its value is `rate`") for line in listed) == (rate is None)
    assert recipe["reward"] == "MathReward"


def test_credentials_and_style_of_a_script_are_not_shown(recwarn: pytest.WarningsRecorder) -> None:
    _, listed = converted("GRPOConfig(hub_token=key('hf_abc'), max_steps=3)\nx = '\\d'")
    assert not [line for line in listed if "hf_abc" in line]
    assert any(line.startswith("hub_token: ") for line in listed)
    assert not recwarn.list


def test_options_after_a_script_win() -> None:
    assert converted(SCRIPT, "--learning_rate", "5e-6")[0]["train"]["lr"] == 5e-6


def test_the_class_chooses_the_trainer() -> None:
    recipe, _ = converted("trl.RLOOTrainer(model='m', args=trl.RLOOConfig(beta=0.1, max_steps=1))")
    assert recipe["advantage"] == "RLOO"
    assert recipe["kl_reward"]["coef"] == 0.1


def test_arguments_that_are_none_are_the_defaults() -> None:
    options = "peft_config=None, eval_dataset=None, callbacks=None, data_collator=none, ref_model=None"
    recipe, listed = converted(f"none = None\nDPOTrainer('m', args=DPOConfig(max_steps=1), {options})")
    assert "lora" not in recipe["model"]
    assert not [line for line in listed if any(f"{word.split('=')[0]}" in line for word in options.split(", "))]


def test_a_script_that_is_nested_too_deep_is_refused_with_the_reason() -> None:
    with pytest.raises(RecipeError, match=r"train\.py is no Python script: .*(nested|recursion)"):
        converted(f"x = {'-' * 50_000}1\nGRPOConfig(max_steps=1)")


@pytest.mark.parametrize("text", ["def f(:", "x = (" * 5000, "print(1)", "GRPOConfig", "\ud800", "0" * 5000])
def test_other_files_are_refused_in_words(text: str) -> None:
    with pytest.raises(RecipeError, match=r"train\.py (is no Python script|has no options of trl)"):
        converted(text)


@pytest.mark.parametrize(
    "call",
    ["GRPOConfig(**options())", "GRPOConfig(*options())", "GRPOConfig(learning_rate=__import__('os').system('x'))",
     "GRPOTrainer(reward_funcs=lambda completions: [1])", "GRPOTrainer(train_dataset=rows())",
     "GRPOTrainer(peft_config=adapters())", "GRPOConfig(**{1: 2})", "GRPOConfig(**{'a\\nb': '\\n- x'})",
     "GRPOTrainer(reward_funcs=['a:b\\nmodel: x'], args=GRPOConfig(reward_weights='x'))"],
)  # fmt: skip
def test_hostile_calls_are_listed(call: str) -> None:
    recipe, listed = converted(f"{call}\nGRPOConfig(max_steps=3)")
    assert recipe["train"]["steps"] == 3
    assert "model" not in recipe
    assert all("\n" not in line for line in listed)


FILES = {
    '"csv", data_files="senti.csv", split="train"': {"path": "senti.csv"},
    '"json", data_files=["a.jsonl", "b.jsonl"], split="train"': {"path": ["a.jsonl", "b.jsonl"]},
    '"parquet", data_files={"train": "a.parquet"}, split="train"': {"path": "a.parquet"},
    '"csv", data_files={"train": ["a.csv"], "validation": "b.csv"}, split="train"': {
        "path": ["a.csv"], "validation_path": "b.csv",
    },
    '"csv", data_files={"train": "a.csv", "test": "b.csv"}, split="train"': {
        "path": "a.csv", "validation_path": "b.csv",
    },
}  # fmt: skip


@pytest.mark.parametrize(("call", "task"), FILES.items())
def test_files_of_a_data_set_are_the_path(call: str, task: dict[str, object]) -> None:
    script = f"rows = load_dataset({call})\nGRPOTrainer('m', 'accuracy_reward', GRPOConfig(), rows)"
    recipe, listed = converted(script)
    assert recipe["task"] == {"class_path": "TRL", "init_args": task}
    assert not [line for line in listed if "dataset" in line]
    files = "{'train': 'a.csv', 'test': 'b.csv'}"
    script = f"rows = load_dataset('csv', data_files={files})\nGRPOTrainer(train_dataset=rows['train'], "
    recipe, _ = converted(f"{script}eval_dataset=rows['test'])")
    assert recipe["task"]["init_args"] == {"path": "a.csv", "validation_path": "b.csv"}


@pytest.mark.parametrize(
    "rows",
    [
        "def rows():\n    return rows()\ndata = rows()",
        "data = load_dataset('d')" + ".shuffle()" * 150,
        "data = load_dataset('d').map(lambda row: {'prompt': " + " + ".join(["row['a']"] * 700) + "})",
    ],
)
def test_data_without_an_end_are_listed(rows: str) -> None:
    conversion = convert("trl", f"{rows}\nGRPOTrainer('m', 'accuracy_reward', GRPOConfig(), data)", "train.py", [])
    assert {"dataset_name", "dataset_map", "map.template"} & {*conversion.by_hand, *conversion.options.values}


def test_files_that_are_unknown_are_listed() -> None:
    recipe, listed = converted("GRPOTrainer(train_dataset=load_dataset('csv', data_files=find(), split='train'))")
    assert recipe["task"] == "TRL"
    assert any(line.startswith("dataset_name: its value is `find()`, which is not run") for line in listed)
