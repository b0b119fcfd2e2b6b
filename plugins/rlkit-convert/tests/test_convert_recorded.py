"""TRL's SFT and DPO become recipes for recorded completions; its other trainers are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from rlkit_convert import convert, run
from rlkit_convert.write import recipe_problems, recipe_text

from rlkit.base.errors import RecipeError

SFT = """trl sft --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 \\
    --max_steps 1000 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_length 2048 \\
    --eval_strategy steps --eval_steps 100 --load_best_model_at_end --metric_for_best_model eval_loss \\
    --label_smoothing_factor 0.1 --neftune_noise_alpha 5 --assistant_only_loss --use_peft --lora_r 32 --lora_alpha 16 \\
    --lora_target_modules all-linear --output_dir out
"""
DPO = """
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer
args = DPOConfig("out", beta=0.2, loss_type=["ipo"], sync_ref_model=True, ref_model_sync_steps=64, num_train_epochs=1,
    per_device_train_batch_size=4, gradient_accumulation_steps=4)
DPOTrainer("org/model", args=args, train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train")).train()
"""


def converted(text: str, name: str = "run.sh", *words: str) -> tuple[dict, dict[str, str]]:
    conversion = convert("trl", text, name, words)
    printed = recipe_text(conversion)
    assert recipe_problems(printed) == []
    return yaml.safe_load(printed), conversion.notes


def test_a_command_of_sft() -> None:
    recipe, notes = converted(SFT)
    assert recipe["rollout"] == {"engine": "Recorded", "overlong": "right"}
    assert recipe["loss"] == {"class_path": "CrossEntropy", "init_args": {"label_smoothing": 0.1, "neftune_alpha": 5}}
    assert recipe["task"] == {"class_path": "TRL", "init_args": {"path": "trl-lib/Capybara"}}
    assert recipe["train"] == {
        "prompts_per_step": 16,  # 2 x 8
        "steps": 1000, "lr": 2e-4, "schedule": "Linear", "checkpoint_activations": True,
    }  # fmt: skip
    assert recipe["model"]["lora"] == {"rank": 32, "alpha": 16, "targets": "all-linear"}
    assert recipe["validation"] == {"every": 100, "watch": "loss"}
    assert recipe["save"] == {"every": 500, "keep_best": "validation/loss"}
    assert recipe["reward"] is None
    assert not {"advantage", "kl_loss"} & recipe.keys()
    assert "context" in notes["max_length"]
    assert "assistant_only_loss" not in notes or "nothing to do" in notes["assistant_only_loss"]


def test_a_script_of_dpo() -> None:
    recipe, notes = converted(DPO, "train.py")
    assert recipe["loss"] == {"class_path": "DPO", "init_args": {"beta": 0.2, "kind": "ipo"}}
    assert recipe["reference"] == {"refresh_every": 64, "mix": 0.6}
    assert recipe["train"] == {
        "prompts_per_step": 16, "data_epochs": 1.0, "lr": 1e-6, "schedule": "Linear", "checkpoint_activations": True,
    }  # fmt: skip
    assert recipe["validation"] is None
    assert "kl_loss" not in recipe
    assert "1024" in notes["max_length"]  # the default of TRL


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("", {"beta": 0.1}),
        ("--loss_type hinge --beta 0.5", {"beta": 0.5, "kind": "hinge"}),
        ("--loss_type sigmoid --label_smoothing 0.1", {"beta": 0.1, "label_smoothing": 0.1}),
        ("--loss_type sigmoid_norm", {"beta": 0.1, "length_normalized": True}),
    ],
)
def test_kinds_of_dpo(words: str, options: dict[str, object]) -> None:
    recipe, _ = converted(f"trl dpo --model_name_or_path m --dataset_name d --max_steps 9 {words}")
    assert recipe["loss"] == {"class_path": "DPO", "init_args": options}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("dpo --loss_type sigmoid sft --loss_weights 1.0 0.5", "loss_type"),
        ("dpo --loss_type robust --label_smoothing 0.1", "loss_type"),
        ("dpo --f_divergence_type js_divergence", "f_divergence_type"),
        ("dpo --use_weighting", "use_weighting"),
        ("sft --loss_type dft", "loss_type"),
        ("sft --completion_only_loss false", "completion_only_loss"),
        ("sft --packing", "packing"),
        ("dpo --max_prompt_length 512", "max_prompt_length"),
        ("sft --dataset_text_field content", "dataset_text_field"),
        (
            "sft --eval_strategy steps --eval_steps 5 --load_best_model_at_end --metric_for_best_model eval_accuracy",
            "metric_for_best_model",
        ),
    ],
)
def test_what_changes_learning_and_has_no_equivalent_is_to_be_set_by_hand(words: str, key: str) -> None:
    assert key in convert("trl", f"trl {words} --model_name_or_path m --dataset_name d", "run.sh", []).by_hand


def test_an_empty_list_of_losses_is_to_be_set_by_hand() -> None:
    assert "loss_type" in convert("trl", "{loss_type: [], max_steps: 3}", "a.yaml", ["dpo"]).by_hand


def test_a_flag_that_begins_with_no_is_false() -> None:
    recipe, _ = converted("trl dpo --no_gradient_checkpointing --max_steps 3 --model_name_or_path m --dataset_name d")
    assert recipe["train"]["checkpoint_activations"] is False


def test_chats_are_trained_on_other_tokens_by_default() -> None:
    assert "assistant" in convert("trl", "trl sft --max_steps 3", "run.sh", []).notes["assistant_only_loss"]


TRAINERS = {
    "packing: true": "SFT",
    "assistant_only_loss: true": "SFT",
    "loss_type: nll": "SFT",
    "max_length: 512": "SFT",
    "eos_token: <|im_end|>": "SFT",
    "max_length: 512\nbeta: 0.1": "DPO",
    "loss_type: sigmoid": "DPO",
    "loss_type: [sigmoid]": "DPO",
    "precompute_ref_log_probs: true": "DPO",
    "num_generations: 4\nbeta: 0.1": "GRPO",
    "reward_funcs: [accuracy_reward]\nmax_length: 512": "GRPO",
    "loss_type: dapo": "GRPO",
    "lmbda: 0.5": "GOLD",
    "learning_rate: 1.0e-5": "GRPO",
}


@pytest.mark.parametrize(("options", "trainer"), TRAINERS.items())
def test_a_yaml_file_is_read_by_the_options_of_one_trainer(
    options: str, trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"model_name_or_path: m\ndataset_name: d\nmax_steps: 10\n{options}\n")
    assert run(["--from", "trl", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"# From trl (read as {trainer}): {file}. The comment")
    assert ("assumed" in out) == (options == "learning_rate: 1.0e-5")
    assert run(["--from", "trl", str(file), "dpo", "--beta", "0.3"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["loss"]["init_args"]["beta"] == 0.3


@pytest.mark.parametrize(
    ("text", "name", "trainer"),
    [
        ("python examples/scripts/sft.py --max_steps 3", "run.sh", "SFT"),
        ("accelerate launch --num_processes 2 dpo_vlm.py --max_steps 3", "run.sh", "DPO"),
        ("trl dpo --loss_type sft --max_steps 3", "run.sh", "DPO"),
        ("trl sft --max_steps 3 --run_name dpo", "run.sh", "SFT"),
        ("python sft/train_grpo.py --max_steps 3", "run.sh", "GRPO"),
        ("python train.py --max_steps 3", "run_dpo.sh", "DPO"),
        ("max_steps: 3", "sft.yaml", "SFT"),
        ("SFTTrainer('m', SFTConfig(max_steps=3))", "train.py", "SFT"),
        ("SFTTrainer('m', args=SFTConfig(max_steps=3))\nGRPOTrainer('n', args=GRPOConfig())", "train.py", "GRPO"),
    ],
)
def test_commands_and_scripts_name_their_trainer(text: str, name: str, trainer: str) -> None:
    assert convert("trl", text, name, []).options.values["the trainer"] == trainer.lower()


def test_arguments_of_earlier_versions_of_the_trainers_are_read() -> None:
    script = """
args = TrainingArguments("out", learning_rate=2e-4, max_steps=60, per_device_train_batch_size=2)
trainer = SFTTrainer(model="m", tokenizer=None, train_dataset=load_dataset("d", split="train"), args=args,
    dataset_text_field="content", max_seq_length=2048, packing=False)
"""
    conversion = convert("trl", script, "train.py", [])
    assert [conversion.recipe[key][0] for key in ("train.lr", "train.steps", "train.prompts_per_step")] == [2e-4, 60, 2]
    assert conversion.by_hand == {"dataset_text_field"}
    assert "max_seq_length" in conversion.notes
    conversion = convert("trl", script.replace("learning_rate=2e-4, ", ""), "train.py", [])
    assert conversion.recipe["train.lr"][0] == 5e-5  # of TrainingArguments; SFTConfig has 2e-5
    assert "TrainingArguments" in conversion.notes["learning_rate"]


def test_a_script_with_two_trainers_is_read_for_one_and_lists_the_other() -> None:
    script = "SFTTrainer('m', args=SFTConfig(max_steps=3))\nDPOTrainer('n', args=DPOConfig(max_steps=5))"
    conversion = convert("trl", script, "train.py", [])
    assert conversion.recipe["model.path"][0] == "n"
    assert "SFTTrainer" in conversion.by_hand
    assert convert("trl", script, "train.py", ["sft"]).recipe["model.path"][0] == "m"


@pytest.mark.parametrize(
    ("text", "name", "trainer"),
    [
        ("trl bco --max_steps 3", "run.sh", "BCO"),
        ("python examples/scripts/xpo.py --max_steps 3", "run.sh", "XPO"),
        ("python nash_md.py --max_steps 3", "run.sh", "NashMD"),
        ("max_steps: 3", "sdpo.yaml", "SDPO"),
        ("PRMTrainer('m', args=PRMConfig(max_steps=3))", "train.py", "PRM"),
        ("trl.TPOTrainer('m', args=trl.TPOConfig(max_steps=3))", "train.py", "TPO"),
    ],
)
def test_other_trainers_are_refused_by_name(text: str, name: str, trainer: str) -> None:
    with pytest.raises(
        RecipeError, match=rf"{name} trains with TRL's {trainer}Trainer, .*rlkit recipe new FILE --task ROWS"
    ):
        convert("trl", text, name, [])


def test_a_word_that_is_no_option_of_trl_is_refused() -> None:
    with pytest.raises(RecipeError, match="'mine.yaml' is neither an option of trl nor one of its trainers"):
        convert("trl", "max_steps: 3", "a.yaml", ["mine.yaml"])


def test_the_reference_of_a_script_is_the_policy_or_listed() -> None:
    script = DPO.replace('"org/model", args', '"org/model", ref_model="{}", args')
    assert "nothing to do" in convert("trl", script.format("org/model"), "train.py", []).notes["ref_model"]
    assert "ref_model" in convert("trl", script.format("org/other"), "train.py", []).by_hand


RECORDED_OPTIONS = """activation_offloading assistant_only_loss chat_template_path completion_only_loss dataset_kwargs
dataset_num_proc dataset_text_field eos_token eval_packing loss_type max_length packing packing_strategy pad_token
pad_to_multiple_of padding_free shuffle_dataset truncation_mode beta disable_dropout discopop_tau
f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha loss_weights precompute_ref_batch_size
precompute_ref_log_probs ref_model_mixup_alpha ref_model_sync_steps sync_ref_model use_weighting
"""
"""The options of TRL 1.16's SFT and DPO, besides those of its models and of transformers' trainer."""


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_every_option_of_sft_and_dpo_has_a_rule(trainer: str) -> None:
    conversion = convert("trl", f"trl {trainer} --max_steps 3", "run.sh", [])
    assert [name for name in RECORDED_OPTIONS.split() if conversion.rule(name) is None] == []
