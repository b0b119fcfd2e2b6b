"""Conversion of verl's and TRL's configurations: what is carried over, what is listed, and that nothing is run."""

from __future__ import annotations

import re
from pathlib import Path

import peer_examples
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rlkit_convert import convert, openrlhf, prime_rl, slime, trl, verl
from rlkit_convert.command import NO_ACTION
from rlkit_convert.conversion import NO_RULE, Conversion
from rlkit_convert.rules import Equivalent
from rlkit_convert.shell import commands
from rlkit_convert.write import recipe_problems, recipe_text, remark
from verl_generated import VERL_GENERATED

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.recipe.parsing.compose import Composer
from rlkit.registry import load_plugins
from tests.conftest import ROOT, read_jsonl, write_metadata

GRPO = """set -x
# the data
gsm8k_train_path=$HOME/data/gsm8k/train.parquet
math_train_path=$HOME/data/math/train.parquet
train_files="['$gsm8k_train_path', '$math_train_path']"

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.train_batch_size=1024 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name='verl_grpo_example_gsm8k' \\
    trainer.experiment_name='qwen2_7b_function_rm' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=1 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 $@ 2>&1 | tee run.log
"""
PPO = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=a.parquet \\
    data.val_files=b.parquet \\
    data.train_batch_size=1024 actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \\
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    critic.optim.lr=2e-5 critic.model.path=deepseek-ai/deepseek-llm-7b-chat critic.cliprange_value=0.3 \\
    critic.ppo_micro_batch_size_per_gpu=32 algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive \\
    algorithm.kl_ctrl.kl_coef=0.01 trainer.critic_warmup=3 trainer.total_training_steps=100
"""
TRL_YAML = """model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward]
learning_rate: 1.0e-5
use_peft: true
lora_r: 8
lora_alpha: 16
use_rslora: true
use_dora: true
lora_target_modules: [q_proj, v_proj]
dtype: bfloat16
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
steps_per_generation: 8
num_generations: 8
max_completion_length: 1024
max_steps: 200
beta: 0.01
use_bias_correction_kl: true
epsilon: 0.2
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: none
report_to: wandb
run_name: first
eval_strategy: steps
eval_steps: 50
bf16: true
logging_steps: 10
output_dir: out
push_to_hub: false
"""
TRL_LINE = """accelerate launch --config_file=zero3.yaml --num_processes 4 trl/scripts/grpo.py \\
    --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/tldr --num_generations 8 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --bf16 --max_steps 10 \\
    --reward_funcs think_format_reward my.module.f --use_vllm --vllm_mode=colocate
"""


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `rlkit convert` a verb, as `pip install ./plugins/rlkit-convert` does."""
    site = tmp_path_factory.mktemp("site")
    for name in ("rlkit-convert", "rlkit-engine-vllm"):
        write_metadata(ROOT / "plugins" / name, site)
    monkeypatch.syspath_prepend(site)


def remarks_of(conversion: Conversion) -> list[str]:
    return [remark(conversion, key) for key in conversion.notes]


def sections(peer: str, content: str, name: str) -> tuple[dict, list[str]]:
    conversion = convert(peer, content, name, [])
    names = set(conversion.options.values) | set(conversion.options.unresolved)
    sources = {source for _, text in conversion.recipe.values() for source in text.split(", ")}
    lost = names - sources - set(conversion.notes)
    assert not lost  # each key is carried over or listed
    return yaml.safe_load(recipe_text(conversion)), remarks_of(conversion)


def test_verls_grpo_on_gsm8k() -> None:
    recipe, _ = sections("verl", GRPO, "run.sh")
    files = ["~/data/gsm8k/train.parquet", "~/data/math/train.parquet"]
    task = {"path": files, "validation_path": "~/data/gsm8k/test.parquet"}
    assert recipe["task"] == {"class_path": "Verl", "init_args": task}
    assert recipe["model"] == {"path": "Qwen/Qwen2-7B-Instruct"}
    assert recipe["advantage"] == "GRPO"
    assert recipe["kl_loss"] == {"coef": 0.002, "estimator": "k3"}
    assert recipe["loss"]["init_args"] == {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0}
    assert recipe["train"]["prompts_per_step"] == 1024
    assert recipe["train"]["minibatches"] == 4  # 1024 / 256 prompts
    assert recipe["train"]["weight_decay"] == 0.01  # verl's default
    assert recipe["rollout"]["group_size"] == 5
    assert recipe["rollout"]["overlong"] == "drop"
    launch = {"release_memory": True, "tensor_parallel": 2}
    assert recipe["rollout"]["engine"] == {"class_path": "VllmEngine", "init_args": {"launch": launch}}
    assert recipe["fabric"] == {"devices": 8, "num_nodes": 1, "precision": "bf16-mixed", "strategy": "fsdp2"}
    assert recipe["validation"]["every"] == 5
    assert recipe["log"]["loggers"][0]["init_args"]["project"] == "verl_grpo_example_gsm8k"
    assert recipe["train"]["data_epochs"] == 15
    assert recipe_problems(recipe_text(convert("verl", GRPO, "run.sh", []))) == []


def test_verls_ppo_with_a_critic() -> None:
    recipe, _ = sections("verl", PPO, "run.sh")
    assert recipe["advantage"] == "GAE"
    assert recipe["critic"] == {"lr": 2e-5, "clip": 0.3, "weight_decay": 0.01, "policy_delay_steps": 2}
    assert recipe["kl_reward"] == {"coef": 0.01, "estimator": "k1", "target": 0.1, "horizon": 10000}
    assert recipe["train"]["steps"] == 100
    assert recipe_problems(recipe_text(convert("verl", PPO, "run.sh", []))) == []


def test_verls_yaml_says_the_same_as_its_command_line() -> None:
    nested: dict = {}
    words = [word for line in commands(PPO, "run.sh") for word in line]
    for word in words:
        key, _, value = word.partition("=")
        if "." in key and "=" in word:
            *parents, last = key.split(".")
            node = nested
            for name in parents:
                node = node.setdefault(name, {})
            node[last] = yaml.safe_load(value)
    text = yaml.safe_dump(nested)
    assert sections("verl", text, "ppo.yaml")[0] == sections("verl", PPO, "run.sh")[0]


def test_trls_grpo_config() -> None:
    recipe, listed = sections("trl", TRL_YAML, "grpo.yaml")
    lora = {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"], "use_rslora": True, "use_dora": True}
    assert recipe["model"] == {"path": "Qwen/Qwen2.5-0.5B-Instruct", "lora": lora, "dtype": "bfloat16"}
    # a generation of 8 x 8 = 64 completions is 8 prompts; an update takes 8 x 4 = 32 of them, so there are 2
    assert recipe["train"]["prompts_per_step"] == 8
    assert recipe["train"]["minibatches"] == 2
    assert recipe["train"]["steps"] == 100  # TRL counts 200 updates
    assert recipe["train"]["aggregation"] == "seq_mean_token_sum_norm"
    assert recipe["train"]["schedule"] == "Linear"  # transformers' default
    assert recipe["advantage"] == {"class_path": "GRPO", "init_args": {"eps": 1e-4, "scale_by_std": False}}
    assert recipe["loss"]["init_args"] == {"clip_low": 0.2, "clip_high": 0.28}
    assert recipe["kl_loss"] == {"coef": 0.01, "importance_weighted": True}
    assert recipe["reward"] == "MathReward"
    assert recipe["validation"] == {"every": 25}  # as eval_steps
    assert any(line.startswith("push_to_hub=False: nothing to do") for line in listed)
    assert recipe_problems(recipe_text(convert("trl", TRL_YAML, "grpo.yaml", []))) == []


def test_trls_command_line() -> None:
    recipe, _ = sections("trl", TRL_LINE, "run.sh")
    assert recipe["train"]["prompts_per_step"] == 8  # 4 a device x 4 devices x 4 / 8 samples
    assert recipe["fabric"]["devices"] == 4
    assert recipe["rollout"]["engine"]["class_path"] == "VllmEngine"
    assert recipe["correction"]["level"] == "sequence"
    assert recipe["validation"] is None  # as in transformers, where nothing asks for it
    assert recipe["reward"]["init_args"]["rewards"] == {
        "think_format_reward": {
            "class_path": "PythonReward",
            "init_args": {"function": "trl.rewards:think_format_reward"},
        },
        "f": {"class_path": "PythonReward", "init_args": {"function": "my.module:f"}},
    }


@pytest.mark.parametrize(
    ("line", "advantage", "loss"),
    [
        ("trl rloo --model_name_or_path m --beta 0.1", "RLOO", "ClipLoss"),
        (
            "trl grpo --model_name_or_path m --loss_type sapo",
            {"class_path": "GRPO", "init_args": {"eps": 1e-4}},
            "SAPO",
        ),
        (
            "trl grpo --model_name_or_path m --loss_type vespo --vespo_lambda_neg 1.5",
            {"class_path": "GRPO", "init_args": {"eps": 1e-4}},
            {"class_path": "VESPO", "init_args": {"k_pos": 2.0, "decay_pos": 3.0, "k_neg": 3.0, "decay_neg": 1.5}},
        ),
        (
            "python ppo.py --model_name_or_path m --gamma 0.9",
            {"class_path": "GAE", "init_args": {"gamma": 0.9, "lam": 0.95}},
            {"class_path": "ClipLoss", "init_args": {"clip_low": 0.2, "clip_high": 0.2}},
        ),
    ],
)
def test_the_trainer_chooses_the_algorithm(line: str, advantage: object, loss: object) -> None:
    recipe, _ = sections("trl", line, "run.sh")
    assert recipe["advantage"] == advantage
    assert recipe["loss"] == loss or recipe["loss"]["class_path"] == loss


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
ENGINE = {f"{ROLLOUT}.gpu_memory_utilization", "actor_rollout_ref.ref.fsdp_config.param_offload"}
VERLS_REST = {
    "grpo with lora": ENGINE | {"data.shuffle", f"{ROLLOUT}.load_format"}
    | {f"{ROLLOUT}.layered_summon"},
    "ppo with a reward model": ENGINE
    | {"reward_model.micro_batch_size_per_gpu", "reward_model.model.use_remove_padding"},
    "rloo": ENGINE,
    "remax": ENGINE,
    "several turns": ENGINE | {"--config-path", "--config-name"}
    | {f"{ROLLOUT}.multi_turn.tool_config_path"},
    "gspo": {"trainer.experiment_name", "trainer.nnodes"}
    | {f"{ROLLOUT}.enable_chunked_prefill", f"{ROLLOUT}.max_num_batched_tokens", "trainer.resume_mode"}
    | {f"{ACTOR}.loss_agg_mode"},
    "dapo": {f"{ROLLOUT}.gpu_memory_utilization", "trainer.resume_mode"}
    | {f"{ACTOR}.fsdp_config.fsdp_size", "data.gen_batch_size"},
}  # fmt: skip
"""The options of verl's examples that cannot be carried over, and ask something of the user."""
TRLS_REST = {
    "gspo": {"config_file", "output_dir", "reward_funcs"},
    "agent": {"push_to_hub", "output_dir", "reward_funcs"},
    "ppo": {"output_dir", "missing_eos_penalty", "model_name_or_path"},
    "rloo": {"output_dir", "vllm_gpu_memory_utilization", "epsilon", "use_peft"},
}


@pytest.mark.parametrize(
    ("peer", "name"), [*(("verl", name) for name in VERLS_REST), *(("trl", name) for name in TRLS_REST)]
)
def test_published_examples(peer: str, name: str) -> None:
    """Each option is carried over or listed by its own rule; with what the example leaves open the recipe can run."""
    text = {"verl": peer_examples.VERL, "trl": peer_examples.TRL}[peer][name]
    _, listed = sections(peer, text, "run.sh")
    assert not [line for line in listed if NO_RULE in line]
    remaining = {line.partition(":")[0].partition("=")[0] for line in listed if NO_ACTION not in line}
    assert remaining == {"verl": VERLS_REST, "trl": TRLS_REST}[peer][name]
    more = {
        "verl": [
            "trainer.total_training_steps=10",
            "actor_rollout_ref.model.path=a/model",
            "critic.model.path=a/model",
        ],
        "trl": ["--max_steps", "10", "--dataset_name", "trl-lib/tldr", "--reward_funcs", "accuracy_reward"],
    }[peer]
    assert recipe_problems(recipe_text(convert(peer, text, "run.sh", more))) == []


def test_verls_sequence_parallelism_and_override_config() -> None:
    words = [
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
        "actor_rollout_ref.model.override_config.attention_dropout=0.1",
        "+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=32768",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    ]
    recipe, listed = sections("verl", f"python3 -m verl.trainer.main_ppo {' '.join(words)}", "run.sh")
    assert recipe["fabric"]["strategy"] == {"class_path": "FSDP2", "init_args": {"sequence_parallel": 4}}
    assert recipe["model"]["config"] == {"attention_dropout": 0.1, "max_position_embeddings": 32768}
    assert recipe["model"]["attention"] == "eager"
    assert not [line for line in listed if "ulysses" in line or "override_config" in line]


def test_every_option_of_the_peers_has_a_rule() -> None:
    trls = peer_examples.TRL_OPTIONS.split()
    verls = [f"{begin}{end}" for begin, ends in peer_examples.VERL_OPTIONS.items() for end in ends.split()]
    assert (len(trls), len(verls)) == (218, 258)
    conversion = convert("trl", "", "run.sh", ["--model_name_or_path", "m"])
    assert [name for name in trls if conversion.rule(name) is None] == []
    conversion = convert("verl", "", "run.sh", ["trainer.nnodes=1"])
    assert [name for name in verls if conversion.rule(name) is None] == []
    words = [f"{begin}{end}" for begin, ends in VERL_GENERATED.items() for end in ends.split()]
    assert len(words) == 293
    renamed = convert("verl", "", "run.sh", [f"{word}=1" for word in words])
    assert [name for name in renamed.options.values if renamed.rule(name) is None] == []


def test_verls_dapo() -> None:
    recipe, _ = sections("verl", peer_examples.DAPO, "run.sh")
    assert recipe["model"]["path"] == "~/verl/models/Qwen2.5-32B"  # a default with a variable whose default has another
    overlong = {"max_tokens": 20 * 1024, "buffer": 4 * 1024, "factor": 1.0}
    assert recipe["reward"]["init_args"]["rewards"]["length"] == {"class_path": "Overlong", "init_args": overlong}
    assert recipe["rollout"]["filter"]["init_args"] == {"max_refills": 9, "component": "accuracy"}
    assert recipe["rollout"]["overlong"] == "left"
    assert recipe["loss"]["init_args"] == {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 10.0}
    assert recipe["train"]["minibatches"] == 16  # 512 / 32 prompts
    assert recipe["fabric"]["num_nodes"] == 16  # the default of ${NNODES:-16}


def test_trls_gspo() -> None:
    recipe, _ = sections("trl", peer_examples.TRL_GSPO, "run.sh")
    assert recipe["loss"] == {"class_path": "GSPO", "init_args": {"clip_low": 3e-4, "clip_high": 4e-4}}
    assert recipe["train"]["aggregation"] == "seq_mean_token_mean"  # --loss_type grpo, and not the trainer `grpo`
    assert recipe["model"]["lora"]["targets"] == ["q_proj", "v_proj"]  # "q_proj", "v_proj" in the script
    # a generation of 8 x 8 = 64 completions is 8 prompts; an update takes 8 x 2 = 16 of them
    assert (recipe["train"]["prompts_per_step"], recipe["train"]["minibatches"]) == (8, 4)


GOLD = """
from trl.experimental.gold import GOLDConfig, GOLDTrainer
args = GOLDConfig(use_uld_loss=True, uld_use_hybrid_loss=True, uld_hybrid_matched_weight=0.5, beta=0.2, lmbda=1.0,
    uld_hybrid_unmatched_weight=0.75, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=10)
GOLDTrainer(model="m", teacher_model="t", args=args, train_dataset=load_dataset("d", split="train")).train()
"""


def test_trls_gold() -> None:
    """Its weights are relative to that of the divergence; a step has 4 x 2 prompts, and there is no reward."""
    conversion = convert("trl", GOLD, "gold.py", [])
    recipe = yaml.safe_load(recipe_text(conversion))
    assert recipe["teacher"] == {"path": "t", "retokenize": True}
    assert recipe["loss"] == {"class_path": "Distillation", "init_args": {"beta": 0.2, "unmatched": 1.5}}
    assert recipe["rollout"]["sampling"] == {"max_tokens": 128, "temperature": 0.9}
    assert (recipe["train"]["prompts_per_step"], recipe["train"]["steps"]) == (8, 10)
    assert recipe["rollout"]["group_size"] == 1
    assert recipe["rollout"]["engine"] == "TorchEngine"
    assert recipe.get("reward") is None
    assert "advantage" not in recipe
    assert recipe_problems(recipe_text(conversion)) == []


@pytest.mark.parametrize(
    ("words", "loss", "listed"),
    [
        ("trl gold --use_uld_loss --lmbda 0.3", {"beta": 0.5}, {"lmbda", "uld_use_hybrid_loss"}),
        ("gold.py --use_uld_loss --uld_use_hybrid_loss", {"beta": 0.5}, {"lmbda", "uld_hybrid_matched_weight"}),
    ],
)
def test_what_trls_gold_does_otherwise_is_listed(words: str, loss: object, listed: set[str]) -> None:
    line = f"{words} --model_name_or_path m --teacher_model_name_or_path t"
    conversion = convert("trl", line if line.startswith("trl") else f"python {line}", "run.sh", [])
    recipe = yaml.safe_load(recipe_text(conversion))
    assert recipe["loss"] == {"class_path": "Distillation", "init_args": loss}
    assert listed <= set(conversion.notes)


def test_trls_rloo_of_several_updates_differs() -> None:
    note = "TRL's RLOO clips the ratio of whole answers"
    words = ["--model_name_or_path", "m", "--gradient_accumulation_steps", "2"]
    assert note not in str(convert("trl", "trl rloo --seed 1", "run.sh", words).notes)
    assert note in str(convert("trl", "trl rloo --seed 1", "run.sh", [*words, "--num_iterations", "2"]).notes)
    assert note in str(convert("trl", "trl rloo --seed 1", "run.sh", [*words, "--steps_per_generation", "8"]).notes)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$((1024 * 2))", 2048),
        ("$(( (n + 2) * $n ))", 24),
        ("$((7 / 2))", 3),
        ("$((-7 / 2))", -3),  # as a shell divides
        ("$((-7 % 4))", -3),
        ("$(((n + 1) * (n - 1)))", 15),
        ("${none:-5}", 5),
        ("${none:-${other:-${n}}}", 4),
        ('${none:-"$n"}', 4),
        ("${n:-5}", 4),
        ("$((none * 2))", None),
        ("$((2 ** 90))", None),
        ("$((10 / 0))", None),
        ("$((99999999999 * 99999999999))", None),
        ("$((__import__('os').system('true')))", None),
        ("$(( $(touch trap) ))", None),
        ("$((" + "1+" * 5000 + "1))", None),
        ("$((" + "(" * 300 + "1" + ")" * 300 + "))", None),
    ],
)
def test_sums_and_defaults_of_a_shell(text: str, value: int | None, tmp_path: Path) -> None:
    options = verl.read(f"n=4\npython -m verl.trainer.main_ppo data.seed={text} trainer.nnodes=1\n", "run.sh", [])
    assert options.values.get("data.seed") == value
    assert ("data.seed" in options.unresolved) == (value is None)
    assert not (tmp_path / "trap").exists()


def test_variables_that_grow_stay_unknown() -> None:
    """Each is ten times the one before it: the last one would have 10^13 characters."""
    lines = [f"{chr(98 + i)}={f'${chr(97 + i)}' * 10}" for i in range(12)]
    text = "\n".join(["a=0123456789", *lines, "python -m verl.trainer.main_ppo data.seed=$m trainer.project_name=$b"])
    options = verl.read(text, "run.sh", [])
    assert options.unresolved.keys() == {"data.seed"}
    assert options.values == {"trainer.project_name": "0123456789" * 10}


def test_rows_of_files_at_hand_are_counted(tmp_path: Path) -> None:
    for name, rows in (("a", 7), ("b", 4)):
        pq.write_table(pa.table({"prompt": ["?"] * rows}), tmp_path / f"{name}.parquet")
    (tmp_path / "c.jsonl").write_text('{"prompt": "?"}\n' * 9)
    files = f"data.train_files=['{tmp_path}/a.parquet','{tmp_path}/b.parquet']"
    words = [files, "data.train_batch_size=4", "trainer.total_epochs=3", "trainer.nnodes=1"]
    conversion = convert("verl", "", "run.sh", words)
    assert conversion.recipe["train.steps"] == (6, "trainer.total_epochs")  # 11 rows, 2 full batches an epoch, 3 epochs
    conversion = convert("verl", "", "run.sh", [*words, "data.train_max_samples=5"])
    assert conversion.recipe["train.max_rows"] == (5, "data.train_max_samples")
    assert conversion.recipe["train.steps"][0] == 3  # 5 rows, 1 full batch an epoch
    unlimited = convert("verl", "", "run.sh", [*words, "data.train_max_samples=-1"])
    assert "train.max_rows" not in unlimited.recipe
    words = ["--dataset_name", f"{tmp_path}/c.jsonl", "--model_name_or_path", "m", "--num_train_epochs", "1.5"]
    conversion = convert("trl", "", "run.sh", [*words, "--per_device_train_batch_size", "16"])
    assert conversion.recipe["train.steps"][0] == 6  # 9 rows, 16 / 8 = 2 prompts a step, 4 steps an epoch
    for wrong in ("data.train_files=/dev/null", f"data.train_files={tmp_path}", "data.train_files=~nobody9/x"):
        unread = convert("verl", "", "run.sh", [wrong, "trainer.nnodes=1"]).recipe
        assert "train.steps" not in unread
        assert unread["train.data_epochs"] == (30, "default of trainer.total_epochs")  # verl's default
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no table")
    words = [f"data.train_files={tmp_path}/d.parquet", "trainer.nnodes=1"]
    assert "train.steps" not in convert("verl", "", "run.sh", words).recipe


def test_what_is_printed_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{n} + 7 = ?", "answer": "{n + 7}"}}\n' for n in range(8)))
    Path("grpo.yaml").write_text(
        "{model_name_or_path: tiny, dataset_name: rows.jsonl, reward_funcs: [accuracy_reward], num_train_epochs: 1, "
        "per_device_train_batch_size: 16, num_generations: 4, max_completion_length: 12, bf16: no}"
    )
    assert main(["convert", "--from", "trl", "grpo.yaml"]) == 0
    Path("mine.yaml").write_text(capsys.readouterr().out)
    assert main(["fit", "--recipe", "mine.yaml", "--out", "run"]) == 0
    rows = read_jsonl(Path("run/metrics.jsonl"))
    assert [row["rollout/samples"] for row in rows] == [16, 16]  # 8 rows, 16 / 4 = 4 prompts a step


def test_values_of_yaml_that_name_others() -> None:
    text = """
data: {max_response_length: 2048, apply_chat_template_kwargs: {enable_thinking: false}}
actor_rollout_ref:
  rollout:
    response_length: "${oc.select:data.max_response_length,512}"
    n: "${oc.select:data.none,4}"
    temperature: "${f:1}"
  actor: {ppo_epochs: "${data.none}"}
critic: {model: {lora_rank: 8, target_modules: all-linear}}
"""
    conversion = convert("verl", text, "ppo.yaml", [])
    assert conversion.options.values["actor_rollout_ref.rollout.response_length"] == 2048
    assert conversion.recipe["rollout.group_size"][0] == 4  # what stands for an option that is not given
    assert conversion.options.unresolved.keys() == {
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.actor.ppo_epochs",
    }
    assert conversion.recipe["model.chat_template_kwargs.enable_thinking"][0] is False
    assert (conversion.recipe["critic.lora.rank"][0], conversion.recipe["critic.lora.alpha"][0]) == (8, 16.0)


def test_the_routers_loss_is_carried_over() -> None:
    key = "train.router_aux_loss_coef"
    text = "{model_name_or_path: m, dataset_name: d, router_aux_loss_coef: 0.002, model_init_kwargs: {dtype: float32}}"
    conversion = convert("trl", text, "grpo.yaml", [])
    assert conversion.recipe[key] == (0.002, "router_aux_loss_coef")
    assert key in conversion.notes["model_init_kwargs"]
    option = f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff"
    own = "actor_rollout_ref.model.override_config.output_router_logits"
    conversion = convert("verl", "", "run.sh", [f"+{option}=0.01", f"+{own}=True", "trainer.nnodes=1"])
    assert conversion.recipe[key] == (0.01, option)
    assert key in conversion.notes[own]
    assert not any("router_logits" in name for name in conversion.recipe)


@pytest.mark.parametrize(
    ("contents", "has_optimizer"), [("[model,extra]", False), ("['model','optimizer','extra','hf_model']", True)]
)
def test_contents_of_checkpoints_are_carried_over(contents: str, has_optimizer: bool) -> None:
    option, loaded = (f"{ACTOR}.checkpoint.{which}_contents" for which in ("save", "load"))
    words = [f"{option}={contents}", f"{loaded}=[model]", "trainer.del_local_ckpt_after_load=True"]
    conversion = convert("verl", "", "run.sh", words)
    assert conversion.recipe["save.optimizer"] == (has_optimizer, option)
    assert "model.path: CHECKPOINT" in conversion.notes[loaded]
    assert "save.keep_last" in conversion.notes["trainer.del_local_ckpt_after_load"]
    conversion = convert("verl", "", "run.sh", [f"{option}=model"])
    assert "expected a list" in conversion.notes[option]
    text = f"{{model_name_or_path: m, dataset_name: d, save_only_model: {not has_optimizer}}}"
    assert convert("trl", text, "grpo.yaml", []).recipe["save.optimizer"] == (has_optimizer, "save_only_model")


@pytest.mark.parametrize(("value", "quantization"), [("true", "nf4"), ("false", None)])
def test_a_base_in_four_bits_is_carried_over(value: str, quantization: str | None) -> None:
    text = (
        f"{{model_name_or_path: m, dataset_name: d, use_peft: true, load_in_4bit: {value}, use_bnb_nested_quant: true}}"
    )
    conversion = convert("trl", text, "grpo.yaml", [])
    assert conversion.recipe["model.quantization"] == (quantization, "load_in_4bit")
    assert "double quantization" in conversion.notes["use_bnb_nested_quant"]


def test_verls_correction_of_the_engine() -> None:
    words = [
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_threshold=4.0",
    ]
    conversion = convert("verl", "", "run.sh", [*words, "algorithm.rollout_correction.rollout_rs=token"])
    assert {key: conversion.recipe[key][0] for key in ("correction.level", "correction.high")} == {
        "correction.level": "sequence",
        "correction.high": 4.0,
    }
    assert conversion.recipe["rejection.level"][0] == "token"
    assert convert("verl", "", "run.sh", [f"{ACTOR}.tis_imp_ratio_cap=2"]).recipe["correction.high"][0] == 2


@pytest.mark.parametrize(
    ("words", "sampling"),
    [
        (["top_p=0.9", "top_k=-1"], {"top_p": 0.9, "top_k": 1024}),
        (["top_p=0.9", "top_k=50"], {"top_p": 0.9, "top_k": 50}),
        (["top_k=5000"], {"top_k": 1024}),
        (["top_p=1.0", "top_k=-1"], {"top_p": 1.0, "top_k": 0}),
    ],
)
def test_training_samples_from_the_tokens_that_verl_keeps(words: list[str], sampling: dict[str, float]) -> None:
    conversion = convert("verl", "", "run.sh", [*(f"{ROLLOUT}.{word}" for word in words), "trainer.nnodes=1"])
    prefix = "rollout.sampling."
    options = {key.removeprefix(prefix): value for key, (value, _) in conversion.recipe.items() if prefix in key}
    assert {name: options[name] for name in sampling} == sampling
    notes = " ".join(conversion.notes.get(f"{ROLLOUT}.{name}", "") for name in ("top_p", "top_k"))
    assert ("1024 likeliest" in notes) is (sampling["top_k"] == 1024)


def test_trls_min_p_keeps_the_likeliest_tokens() -> None:
    conversion = convert("trl", "trainer: grpo\nmin_p: 0.1\nlearning_rate: 1.0e-6\n", "grpo.yaml", [])
    assert conversion.recipe["rollout.sampling.min_p"][0] == 0.1
    assert conversion.recipe["rollout.sampling.top_k"][0] == 1024


@pytest.mark.parametrize(
    ("manager", "reward"),
    [
        ("reward_model.reward_manager=batch", "BatchReward"),
        ("reward_manager.name=batch", "BatchReward"),
        ("trainer.nnodes=1", "PythonReward"),
    ],
)
def test_verls_batch_manager_is_batch_reward(manager: str, reward: str) -> None:
    words = ["custom_reward_function.path=reward.py", "custom_reward_function.name=score", manager]
    conversion = convert("verl", "", "run.sh", words)
    assert conversion.recipe["reward"][0] == reward
    assert conversion.recipe["reward.function"][0] == "reward.py:score"


@pytest.mark.parametrize("prefix", ["reward_model.sandbox_fusion", "reward.sandbox_fusion"])
def test_verls_sandbox_fusion_runs_programs(prefix: str) -> None:
    url = "http://127.0.0.1:8080/run_code"
    words = [f"{prefix}.url={url}", f"{prefix}.max_concurrent=128", f"{prefix}.memory_limit_mb=512"]
    conversion = convert("verl", "", "run.sh", words)
    options = {"allow_code": True, "url": url, "partial": True, "seconds": 10.0, "compile_seconds": 10.0,
               "concurrency": 128, "memory_mb": 512}  # fmt: skip
    code = {"class_path": "CodeReward", "init_args": options}
    rewards = {"apps": code, "codecontests": code, "codeforces": code, "taco": code, "*": "MathReward"}
    assert conversion.recipe["reward"][0] == "Router"
    assert conversion.recipe["reward.rewards"][0] == rewards
    assert not [key for key in conversion.notes if "sandbox_fusion" in key]
    buffer = [f"reward_model.overlong_buffer.{word}" for word in ("enable=True", "len=8", "penalty_factor=1.0")]
    both = convert("verl", "", "run.sh", [*words, *buffer]).recipe
    assert both["reward"][0] == "Composite"
    assert both["reward.rewards"][0]["math"] == {"class_path": "Router", "init_args": {"rewards": rewards}}
    assert convert("verl", "", "run.sh", [f"{prefix}.url=null", "trainer.nnodes=1"]).recipe["reward"][0] == "MathReward"


TOOLS = """
tools:
  - class_name: "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
    config: {type: native, default_timeout: 20, memory_limit_mb: 512, num_workers: 10}
    tool_schema: {type: function, function: {name: code_interpreter, parameters: {}}}
  - class_name: verl.tools.search_tool.SearchTool
    config: {type: native, retrieval_service_url: "http://127.0.0.1:8000/retrieve", timeout: 30}
    tool_schema: {type: function, function: {name: search}}
  - class_name: mine.tools.Weather
    config: {type: native}
    tool_schema: {type: function, function: {name: weather}}
"""


def test_verls_files_of_tools_and_interactions_are_read(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(TOOLS)
    entry = "{name: gsm8k, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}"
    (tmp_path / "interaction.yaml").write_text(f"interaction:\n  - {entry}\n")
    turns = f"{ROLLOUT}.multi_turn"
    words = [f"{turns}.tool_config_path={tmp_path}/tools.yaml", f"{turns}.max_assistant_turns=5"]
    words.append(f"{turns}.interaction_config_path={tmp_path}/interaction.yaml")
    conversion = convert("verl", "", "run.sh", words)
    url = "http://127.0.0.1:8000/retrieve"
    assert conversion.recipe["tools"][0] == {
        "code_interpreter": {"class_path": "PythonTool", "init_args": {"timeout": 20, "memory_mb": 512}},
        "search": {"class_path": "SearchTool", "init_args": {"url": url, "timeout": 30}},
    }
    assert conversion.recipe["interaction"][0] == "Retry"
    assert conversion.recipe["conversation.turns"][0] == 5
    note = conversion.notes[f"{turns}.tool_config_path"]
    assert "weather: a tool of your own in place of Weather" in note
    assert "rlkit-tool-python" in note


@pytest.mark.parametrize(
    ("assistant", "user", "turns"),
    [
        ("5", None, 5),
        (None, "5", 6),
        ("5", "5", 5),
        ("5", "4", 5),
        ("5", "3", 4),
        ("0", "3", 4),
        ("null", "null", None),
    ],
)
def test_verls_limits_of_both_sides_are_one(
    tmp_path: Path, assistant: str | None, user: str | None, turns: int | None
) -> None:
    """In verl the policy takes one more turn after `max_user_turns` replies, of tools too; 0 is no limit."""
    (tmp_path / "tools.yaml").write_text(TOOLS)
    words = [f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path}/tools.yaml"]
    limits = {"max_assistant_turns": assistant, "max_user_turns": user}
    words += [f"{ROLLOUT}.multi_turn.{name}={limit}" for name, limit in limits.items() if limit is not None]
    conversion = convert("verl", "", "run.sh", words)
    assert conversion.recipe.get("conversation.turns", (None,))[0] == turns
    assert not [key for key in conversion.by_hand if key.endswith("_turns")]


@pytest.mark.parametrize("name", ["max_assistant_turns", "max_user_turns"])
def test_verls_limits_without_another_side_are_listed(name: str) -> None:
    key = f"{ROLLOUT}.multi_turn.{name}"
    conversion = convert("verl", "", "run.sh", [f"{key}=5"])
    assert key in conversion.by_hand
    assert conversion.notes[key].startswith(f"conversation.turns: {5 + (name == 'max_user_turns')}, beside the tools")


def test_several_interactions_are_chosen_by_the_row(tmp_path: Path) -> None:
    entries = [f"{{name: {n}, class_name: x.Gsm8kInteraction}}" for n in ("a", "b")]
    (tmp_path / "many.yaml").write_text("interaction: [" + ", ".join(entries) + "]")
    conversion = convert("verl", "", "run.sh", [f"{ROLLOUT}.multi_turn.interaction_config_path={tmp_path}/many.yaml"])
    assert conversion.recipe["interaction"][0] == "InteractionRouter"
    assert set(conversion.recipe["interaction.interactions"][0]) == {"a", "b"}  # type: ignore[call-overload]


@pytest.mark.parametrize("content", [None, "tools: 3", "[1]", "x: [", "tools: [1]"])
def test_a_file_of_tools_that_cannot_be_read_is_listed(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tools.yaml").write_text(content)
    key = f"{ROLLOUT}.multi_turn.tool_config_path"
    conversion = convert("verl", "", "run.sh", [f"{key}={tmp_path}/tools.yaml"])
    assert "tools" not in conversion.recipe
    assert key in conversion.notes


def test_options_after_the_file_win(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(PPO)
    assert main(["convert", "--from", "verl", str(script), "data.train_batch_size=512", "nothing.known=1"]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["train"]["prompts_per_step"] == 512
    assert "# - nothing.known=1: rlkit convert has no rule for it" in out
    by_hand = out.partition("# To be set by hand:")[2]
    assert [line.split("=")[0] for line in by_hand.split("\n# - ")[1:]] == ["nothing.known", "data.train_files"]
    assert err.endswith("2 to be set by hand\n")


def test_what_a_shell_would_run_is_listed_and_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    text = (
        f"touch {trap}\n"
        f"python -m verl.trainer.main_ppo data.train_files=$(touch {trap}) trainer.project_name=`touch {trap}` "
        f"trainer.experiment_name=$UNSET_NAME actor_rollout_ref.model.path=a;touch {trap}\n"
    )
    conversion = convert("verl", text, "run.sh", [])
    assert not trap.exists()
    assert conversion.options.unresolved.keys() == {
        "data.train_files",
        "trainer.project_name",
        "trainer.experiment_name",
    }
    assert f"its value is `$(touch {trap})`, which is not run" in conversion.notes["data.train_files"]
    assert "its value is `$UNSET_NAME`, which is not run" in conversion.notes["trainer.experiment_name"]
    assert conversion.recipe["model.path"][0] == "a"


def test_unknown_values_are_left_out_and_to_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    words = (
        "actor_rollout_ref.actor.optim.lr=$LR data.train_batch_size=$(wc -l x) actor_rollout_ref.rollout.n=$N "
        "algorithm.adv_estimator=$EST actor_rollout_ref.actor.policy_loss.loss_mode=$LOSS data.max_response_length=$M "
        "custom_reward_function.path=$R trainer.total_training_steps=$S trainer.logger=wandb "
        "trainer.experiment_name=$(date) actor_rollout_ref.actor.ppo_mini_batch_size=64 data.train_files=a.parquet"
    )
    script.write_text(f"python -m verl.trainer.main_ppo {words}\n")
    assert main(["convert", "--from", "verl", str(script)]) == 0
    out = capsys.readouterr().out
    recipe = yaml.safe_load(out)
    assert "advantage" not in recipe
    assert "loss" not in recipe
    assert "reward" not in recipe
    assert not {"lr", "prompts_per_step", "minibatches", "steps"} & recipe["train"].keys()
    assert "group_size" not in recipe["rollout"]
    assert "max_tokens" not in recipe["rollout"].get("sampling", {})
    assert recipe["log"]["loggers"] == [{"class_path": "Wandb", "init_args": {"project": "verl_examples"}}]
    before, _, to_be_set = out.partition("# To be set by hand:")
    for name in re.findall(r"([\w.]+)=\$", words):
        assert f"# - {name}: its value is `$" in to_be_set, name
        assert f"# - {name}" not in before
    assert "which is not run; give it after the file, with its value, or set train.lr" in to_be_set


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", b"data: !!python/object/apply:os.system ['true']\n", "python/object/apply:os.system"),
        ("a.yaml", b"[1, 2]\n", "expected options by name"),
        ("a.yaml", b"a: &a [*a]\n", "inside of"),
        ("a.yaml", b"a: {{{{", "is not plain YAML"),
        ("a.sh", b"python -m verl.trainer.main_ppo data.train_files='a\n", "a quotation is not closed"),
        ("a.sh", b"x=" + b"'" * 3 + b"\na" * 400, "more than"),
        ("a.sh", b"data.train_files=a\0b\n", "expected plain text"),
        ("a.sh", b"data.train_files=\xff\n", "is not UTF-8 text"),
        ("a.sh", b"# " + b"a" * (1 << 20), "expected a configuration of at most"),
        ("a.sh", b"echo hello\n", "has no options of verl"),
    ],
)
def test_hostile_files_are_refused_in_words(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=words):
        main(["convert", "--from", "verl", str(path), "--debug"])


def test_values_cannot_name_a_class_or_leave_their_line(tmp_path: Path) -> None:
    text = "data.train_files='{class_path: os.system}'\ntrainer.project_name='a\n# b: c\nreward: x'\n"
    conversion = convert("verl", text, "run.sh", ["trainer.logger=wandb", "trainer.nothing='\x1b[31m'"])
    out = recipe_text(conversion)
    assert yaml.safe_load(out)["log"]["loggers"][0]["init_args"]["project"] == "a\n# b: c\nreward: x"
    assert yaml.safe_load(out)["reward"] == "MathReward"
    assert any("names the class 'os.system'" in line for line in recipe_problems(out))
    assert not any("\x1b" in line or "\n" in line for line in remarks_of(conversion))


def test_credentials_are_not_shown() -> None:
    words = ["--hub_token", "hf_abcdef", "--wandb_api_key=abcdef", "--model_name_or_path", "m"]
    assert not [line for line in remarks_of(convert("trl", "", "run.sh", words)) if "abcdef" in line]


@pytest.mark.parametrize("argv", [[], ["--from"], ["--from", "verl"], ["--from", "nemo", "a.sh"], ["a.sh"]])
def test_usage_is_explained(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", *argv]) == 2
    out, err = capsys.readouterr()
    assert "--from verl" in out + err


@pytest.mark.parametrize("rules", [verl.RULES, trl.RULES, openrlhf.RULES, prime_rl.RULES, slime.RULES])
def test_every_rule_names_an_option_of_rlkit(rules: dict) -> None:
    """With a class where the option is one of a class."""
    composer = Composer(load_plugins())
    composer.add({"task": "HFDataset"})
    before = len(composer.problems)
    for rule in rules.values():
        if isinstance(rule, Equivalent):
            composer.add({rule.key: "\ue000"})
    assert not [line for line in composer.problems[before:] if "has no option" in line or "unknown option" in line]


ODD = [
    "1" + "0" * 400,
    "-1",
    "0",
    "nan",
    "inf",
    "1e400",
    "[]",
    "{}",
    "[1, [2]]",
    "{a: b}",
    "''",
    "x" * 5000,
    "*",
    "\x1b",
    "1.5",
]
ODD += ["2020-01-01", "0o17", "yes", "~", "{class_path: x}", "!!python/name:os.system"]


@pytest.mark.parametrize(
    ("peer", "rules"),
    [
        ("verl", verl.RULES),
        ("trl", trl.RULES),
        ("openrlhf", openrlhf.RULES),
        ("prime-rl", prime_rl.RULES),
        ("slime", slime.RULES),
    ],
)
def test_any_value_is_carried_over_or_listed(peer: str, rules: dict) -> None:
    """Every ninth option with an odd value, alone among usual ones, and all options with each of them."""
    keys = [key.replace("*", "x") for key in rules if key not in (trl.TRAINER, "--config-name", "--config-path")]
    keys = [key for key in keys if peer != "verl" or "." in key]
    usual = {
        "verl": ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
        "trl": ["--use_vllm"],
        "openrlhf": ["--train.async_enable"],
        "prime-rl": ["--max_steps", "5"],
        "slime": ["--num-rollout", "5"],
    }[peer]

    def words(key: str, value: str) -> list[str]:
        return [f"{key}={value}"] if peer == "verl" else [f"--{key}", value]

    alone = [words(key, ODD[index // 9 % len(ODD)]) for index, key in enumerate(keys) if index % 9 == 0]
    for more in [*alone, *([word for key in keys for word in words(key, value)] for value in ODD)]:
        file = "rl.toml" if peer == "prime-rl" else "run.sh"
        conversion = convert(peer, "", file, [*usual, *more, *words("no.rule", "1")])  # beside null, which is none
        assert yaml.safe_load(recipe_text(conversion))["task" if peer != "prime-rl" else "train"]
        names = set(conversion.options.values) | set(conversion.options.unresolved)
        sources = {source for _, text in conversion.recipe.values() for source in text.split(", ")}
        assert names <= sources | set(conversion.notes) | {trl.TRAINER}
        assert not any("\x1b" in line for line in remarks_of(conversion))


POOL = {"precision": "bf16-mixed"}
PPO_RAY = (
    "python3 -m openrlhf.cli.train_ppo_ray --pretrain a/m --reward_pretrain a/rm --prompt_data rows.jsonl "
    "--actor_num_nodes 1 --actor_num_gpus_per_node 4 "
)
APART = (
    "--ref_num_nodes 1 --ref_num_gpus_per_node 2 --critic_num_nodes 1 --critic_num_gpus_per_node 4 "
    "--reward_num_nodes 1 --reward_num_gpus_per_node 1 "
)
EACH = {
    "roles": {"critic": "critic", "reference": "reference", "reward": "reward"},
    "pools": {
        "critic": {"devices": 4, "strategy": "fsdp2", **POOL},
        "reference": {"devices": 2, "strategy": "fsdp2", **POOL},
        "reward": {"devices": 1, **POOL},
    },
}
SHARED = {
    "roles": dict.fromkeys(("critic", "reward"), "critic_reward"),
    "pools": {"critic_reward": {"devices": 2, **POOL}},
}
NEWER = PPO_RAY.replace("_num_", ".num_") + APART.replace("_num_", ".num_")


@pytest.mark.parametrize(
    ("words", "placement", "listed"),
    [
        (APART, EACH, ""),
        (NEWER.removeprefix(PPO_RAY), EACH, ""),
        (f"{APART} --colocate_all_models", None, "ref_num_gpus_per_node=2: nothing to do: the model is in the trainer"),
        (f"{APART} --train.colocate_fsdp_models", None, "reward_num_gpus_per_node=1: nothing to do"),
        (
            "--colocate_actor_ref --ref_num_gpus_per_node 4 --colocate_critic_reward --critic_num_gpus_per_node 2 "
            "--reward_num_gpus_per_node 2",
            SHARED,
            "ref_num_gpus_per_node=4: nothing to do: the model is in the trainer's processes",
        ),
        ("--critic_num_gpus_per_node 3", None, "critic_num_gpus_per_node=3: the section `placement:`"),
        ("--critic_num_gpus_per_node 4 --critic_num_nodes 2", None, "on several machines with `--launcher Ray`"),
        ("--ref_num_gpus_per_node 4 --lora_rank 8", None, "the reference is the policy without its adapters"),
        ("--ref_num_gpus_per_node 4 --init_kl_coef 0", None, "nothing to do: the recipe has no such model"),
        (
            "--critic_num_gpus_per_node 4 --advantage_estimator rloo",
            None,
            "nothing to do: the recipe has no such model",
        ),
        ("--reward_num_gpus_per_node 4 --remote_rm_url http://h.example", None, "the recipe has no such model"),
    ],
)
def test_openrlhfs_models_with_gpus_of_their_own_are_placed(words: str, placement: object, listed: str) -> None:
    recipe, lines = sections("openrlhf", f"{PPO_RAY}{words}", "run.sh")
    assert recipe.get("placement") == placement
    assert listed in "\n".join(lines)


RM = "reward_model.enable=True reward_model.model.path=a/rm trainer.n_gpus_per_node=4 trainer.nnodes=1 "


@pytest.mark.parametrize("prefix", ["reward_model", "reward.reward_model"])
def test_verls_resource_pool_of_the_reward_model_is_placed(prefix: str) -> None:
    pool = "reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=2 reward_model.nnodes=1"
    words = f"{RM}{pool}".replace("reward_model.", f"{prefix}.").replace(
        "reward.reward_model.model.path", "reward.reward_model.model_path"
    )
    recipe, lines = sections("verl", f"python3 -m verl.trainer.main_ppo {words}", "run.sh")
    assert recipe["placement"] == {"roles": {"reward": "reward"}, "pools": {"reward": {"devices": 2, **POOL}}}
    assert not [line for line in lines if "resource_pool" in line or "n_gpus" in line]


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (
            "reward_model.enable_resource_pool=False reward_model.n_gpus_per_node=8",
            "the model is in the trainer's processes",
        ),
        ("reward_model.enable_resource_pool=True", "enable_resource_pool=True: the section `placement:`"),
        (
            "reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=3",
            "one must be a multiple of the other",
        ),
        (
            "reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=4 reward_model.nnodes=2",
            "on several machines with `--launcher Ray`",
        ),
        (
            "reward_model.enable_resource_pool=True reward_model.n_gpus_per_node=4 "
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            "sequence_parallel: 1",
        ),
    ],
)
def test_what_of_verls_resource_pools_is_not_carried_over_is_listed(words: str, listed: str) -> None:
    recipe, lines = sections("verl", f"python3 -m verl.trainer.main_ppo {RM}{words}", "run.sh")
    assert "placement" not in recipe
    assert listed in "\n".join(lines)


def test_a_placement_that_is_carried_over_can_run() -> None:
    text = recipe_text(convert("openrlhf", f"{PPO_RAY}{APART}", "run.sh", ["--train.num_episodes", "1"]))
    assert [line for line in recipe_problems(text) if "placement" in line] == []


@pytest.mark.parametrize("words", [["--out", "mine.yaml"], ["mine.yaml"], ["--trainer.total_epochs", "3"]])
def test_a_word_that_is_no_option_of_verl_is_refused(words: list[str]) -> None:
    with pytest.raises(RecipeError, match=rf"{words[0]!r} is no option of verl, expected .*`> mine.yaml`"):
        convert("verl", GRPO, "run.sh", words)
    assert convert("verl", GRPO, "run.sh", ["+trainer.total_epochs=3"]).recipe["train.data_epochs"][0] == 3


def test_a_tool_of_verl_is_to_be_written_as_a_plugin(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: my.Add, tool_schema: {function: {name: add}}}]\n")
    option = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    conversion = convert("verl", GRPO, "run.sh", [f"{option}={tmp_path}/tools.yaml"])
    remark = "add: a tool of your own in place of Add, with the same name: rlkit plugins new NAME --kind tool"
    assert remark in conversion.notes[option]
