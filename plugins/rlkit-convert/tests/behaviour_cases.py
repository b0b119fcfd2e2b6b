"""Thirty configurations of the four systems as their users write them, with the behaviour that each one asks for.

A case is the system, the file, its text, what the recipe must have, and the options that must be under "To be set by
hand", besides the code that a user allows and what is not installed.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One configuration and the behaviour that it asks for."""

    peer: str
    file: str
    text: str
    carried: dict[str, object]
    by_hand: set[str]


ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{name}" for name in ("rollout", "actor", "model"))
TURNS = f"{ROLLOUT}.multi_turn"
MAIN = "python3 -m verl.trainer.main_ppo data.train_files=~/data/gsm8k/train.parquet"
PATH = f"{MODEL}.path=org/model trainer.total_training_steps=10"
GRPO = f"{MAIN} {PATH} algorithm.adv_estimator=grpo {ROLLOUT}.n=8"


def verl(options: str, carried: dict[str, object], *by_hand: str) -> Case:
    return Case("verl", "run.sh", f"{GRPO} {options}", carried, set(by_hand))


VERL = {
    "gsm8k tool": verl(
        f"{ROLLOUT}.name=sglang {TURNS}.enable=True {TURNS}.max_assistant_turns=5 "
        f"{TURNS}.tool_config_path=gsm8k_tool.yaml",
        {"rollout.engine": "SGLangEngine", "conversation.turns": 5, "rollout.group_size": 8,
         "tools": {"calc_gsm8k_reward": {"class_path": "AnswerScore", "init_args": {"description": "Scores."}}}},
    ),
    "tool file elsewhere": verl(
        f"{TURNS}.enable=True {TURNS}.max_assistant_turns=5 {TURNS}.tool_config_path=$PROJECT/tools.yaml",
        {}, f"{TURNS}.enable", f"{TURNS}.max_assistant_turns", f"{TURNS}.tool_config_path",
    ),
    "interaction": verl(
        f"{TURNS}.enable=True {TURNS}.interaction_config_path=interaction.yaml {TURNS}.max_user_turns=5",
        {"interaction": "Retry", "conversation.turns": 6},
    ),
    "lora": verl(
        f"{MODEL}.lora_rank=64 {MODEL}.lora_alpha=32 {MODEL}.target_modules=all-linear {ROLLOUT}.name=vllm "
        f"{ROLLOUT}.load_format=safetensors",
        {"model.lora.rank": 64, "model.lora.alpha": 32, "model.lora.targets": "all-linear",
         "rollout.engine": "VllmEngine"},
    ),
    "megatron lora": verl(
        f"{MODEL}.lora.rank=16 {MODEL}.lora.alpha=32 {MODEL}.lora.type=dora {MODEL}.lora.dropout=0.1 "
        f"{MODEL}.lora.target_modules='[linear_qkv,linear_proj,linear_fc1,linear_fc2]' "
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        {"model.lora.rank": 16, "model.lora.targets": "all-linear", "model.lora.use_dora": True},
        f"{MODEL}.lora.dropout",
    ),
    "quantization-aware": verl(
        f"{ACTOR}.fsdp_config.qat.enable=True {ACTOR}.fsdp_config.qat.mode=w4a16 {ACTOR}.optim.optimizer=Adam8bit",
        {}, f"{ACTOR}.fsdp_config.qat.enable", f"{ACTOR}.fsdp_config.qat.mode", f"{ACTOR}.optim.optimizer",
    ),
    "newer reward": verl(
        "reward.custom_reward_function.path=mine.py reward.custom_reward_function.name=score "
        "reward.reward_manager.name=batch",
        {"reward": "BatchReward", "reward.function": "mine.py:score"},
    ),
    "data of its own": verl(
        "data.prompt_key=question data.custom_cls.path=mine.py data.custom_cls.name=Rows data.shuffle=False "
        "data.reward_fn_key=kind data.val_max_samples=64",
        {"validation.limit": 64},
        "data.prompt_key", "data.custom_cls.path", "data.custom_cls.name", "data.shuffle", "data.reward_fn_key",
    ),
    "dapo": verl(
        f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 algorithm.filter_groups.enable=True "
        "algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=1536 data.train_batch_size=512 "
        f"{ACTOR}.use_token_level_loss=False +{ACTOR}.router_replay.mode=R2",
        {"loss.clip_high": 0.28, "rollout.filter": "ZeroSignal", "rollout.filter.max_refills": 9,
         "train.aggregation": "seq_mean_token_mean"},
        "data.gen_batch_size", f"{ACTOR}.router_replay.mode",
    ),
    "ppo with a reward model": Case(
        "verl", "run.sh",
        f"{MAIN} {PATH} reward_model.enable=True reward_model.model.path=org/reward critic.ppo_epochs=4 "
        "critic.model.path=org/model critic.model.lora.rank=8 distillation.enabled=True "
        f"{ROLLOUT}.agent.default_agent_loop=my_loop",
        {"advantage": "GAE", "reward": "ModelReward", "reward.path": "org/reward", "critic.lora.rank": 8},
        {"critic.ppo_epochs", "distillation.enabled", f"{ROLLOUT}.agent.default_agent_loop"},
    ),
}  # fmt: skip

HEAD = """import os
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
SYSTEM = "Think first."
MODEL = os.environ.get("MODEL", "org/model")
def score(completions, **kwargs): return [0.0]
def form(completions, **kwargs): return [0.0]
"""


def script(rows: str, trainer: str, carried: dict[str, object], *by_hand: str) -> Case:
    text = f"{HEAD}{rows}\nif __name__ == '__main__':\n    {trainer}\n"
    return Case("trl", "train.py", text, {"model.path": "org/model", **carried}, set(by_hand))


def trainer(config: str, more: str = "") -> str:
    return f"GRPOTrainer(MODEL, [score, form], GRPOConfig('out', max_steps=5, {config}), data{more})"


ROWS = "data = load_dataset('org/rows', split='train')"
CHAT = "[{'role': 'system', 'content': SYSTEM}, {'role': 'user', 'content': row['question']}]"
TRL = {
    "system prompt": script(
        f"def chat(row):\n    return {{'prompt': {CHAT}, 'answer': row['solution']}}\n{ROWS}.map(chat)", trainer(""),
        {"task": "HFDataset", "task.system": "Think first.", "task.prompt_field": "question",
         "task.answer_field": "solution", "reward": "Composite"},
    ),
    "map that computes": script(
        f"{ROWS}.map(lambda row: {{'prompt': {CHAT}, 'answer': row['answer'].split('####')[1]}})", trainer(""),
        {"task.system": "Think first.", "task.prompt_field": "question"}, "map.answer",
    ),
    "template": script(
        f"{ROWS}.map(lambda row: {{'prompt': [{{'role': 'user', 'content': f\"Q: {{row['q']}}\"}}]}})", trainer(""),
        {"task.template": "Q: {q}"},
    ),
    "map with branches": script(
        f"def chat(row):\n    if row['x']:\n        return {{}}\n    return {{'prompt': row['x']}}\n{ROWS}.map(chat)",
        trainer(""), {"task": "TRL"}, "dataset_map",
    ),
    "defaults of the environment": script(
        f"{ROWS}.shuffle(seed=1).select(range(100))",
        trainer("learning_rate=float(os.getenv('LR', '2e-6')), num_generations=int(os.environ.get('N', 4))"),
        {"train.lr": 2e-6, "rollout.group_size": 4, "train.max_rows": 100},
    ),
    "lora and vllm": script(
        ROWS,
        trainer("use_vllm=True", ", peft_config=LoraConfig(r=8, lora_dropout=0.1, target_modules='all-linear')"),
        {"model.lora.rank": 8, "rollout.engine": "VllmEngine"}, "lora_dropout",
    ),
    "a tool and a callback": script(
        ROWS, trainer("vllm_mode='server', use_vllm=True", ", tools=[score], callbacks=[form]"),
        {"rollout.engine": "VllmServer"}, "tools", "callbacks",
    ),
    "rloo held out": script(
        "data = load_dataset('org/rows', split='train').train_test_split(test_size=0.1)",
        "RLOOTrainer(MODEL, score, RLOOConfig('out', max_steps=5, normalize_advantages=True), "
        "train_dataset=data['train'])",
        {"advantage": "RLOO", "task.validation_split": 0.1, "reward": "PythonReward"},
        "normalize_advantages",
    ),
    "penalties": Case(
        "trl", "grpo.yaml",
        "{model_name_or_path: org/model, dataset_name: org/rows, reward_funcs: [accuracy_reward], max_steps: 5, "
        "repetition_penalty: 1.1, top_entropy_quantile: 0.2, shuffle_dataset: false, optim: adamw_bnb_8bit, beta: 0.1}",
        {"reward": "MathReward", "kl_loss.coef": 0.1},
        {"repetition_penalty", "top_entropy_quantile", "shuffle_dataset", "optim"},
    ),
    "ppo": Case(
        "trl", "run.sh",
        "python ppo.py --model_name_or_path org/model --sft_model_path org/model --reward_model_path org/reward "
        "--dataset_name org/rows --missing_eos_penalty 1.0 --whiten_rewards --total_episodes 80 --num_mini_batches 1",
        {"advantage": "GAE", "reward": "ModelReward", "reward.path": "org/reward", "train.steps": 10},
        {"missing_eos_penalty", "whiten_rewards"},
    ),
}  # fmt: skip

RLHF = (
    "ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray "
    "--actor.model_name_or_path org/model --data.prompt_dataset org/rows --rollout.max_new_tokens 512"
)


def openrlhf(options: str, carried: dict[str, object], *by_hand: str) -> Case:
    return Case("openrlhf", "run.sh", f"{RLHF} {options}", {"model.path": "org/model", **carried}, set(by_hand))


OPENRLHF = {
    "ppo": openrlhf(
        "--reward.model_name_or_path org/reward --critic.adam.lr 9e-6 --algo.kl.init_coef 0.02 --data.input_key chat "
        "--data.apply_chat_template --reward.normalize_enable --critic.freezing_steps 5",
        {"advantage": "GAE", "critic.lr": 9e-6, "kl_reward.coef": 0.02, "reward.path": "org/reward",
         "task.prompt_field": "chat", "critic.policy_delay_steps": 5, "train.optimizer.betas": [0.9, 0.95]},
        "reward.normalize_enable",
    ),
    "names of before": Case(
        "openrlhf", "run.sh",
        "deepspeed --module openrlhf.cli.train_ppo_ray --pretrain org/model --prompt_data org/rows --label_key answer "
        "--remote_rm_url /code/reward.py --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 "
        "--init_kl_coef 1e-3 --n_samples_per_prompt 8 --rollout_batch_size 128 --train_batch_size 1024 "
        "--generate_max_len 512 --apply_chat_template",
        {"advantage": "GRPO", "kl_loss.coef": 1e-3, "kl_loss.estimator": "k3", "train.minibatches": 1,
         "task.answer_field": "answer", "rollout.sampling.max_tokens": 512},
        {"reward.remote_url"},
    ),
    "agent in arrays": Case(
        "openrlhf", "run.sh",
        "ARGS=(\n  --actor.model_name_or_path org/model\n  --data.prompt_dataset org/rows\n"
        "  --train.agent_func_path agent.py\n  --train.async_enable\n  --train.partial_rollout_enable\n"
        "  --algo.dynamic_filtering_enable\n  --algo.dynamic_filtering_range 0.0 1.0\n)\n",
        {"rollout.max_staleness": 1, "rollout.filter": "ZeroSignal"},
        {"train.agent_func_path", "train.partial_rollout_enable"},
    ),
    "dapo": openrlhf(
        "--algo.advantage.estimator dr_grpo --rollout.n_samples_per_prompt 8 --actor.eps_clip_low_high 0.2 0.28 "
        "--reward.overlong_buffer_len 128 --reward.remote_url http://127.0.0.1:5000/get_reward",
        {"advantage": "GRPO", "advantage.scale_by_std": False, "loss.clip_high": 0.28},
        "reward.overlong_buffer_len", "reward.remote_url",
    ),
    "lora on base models": openrlhf(
        "--ds.lora.rank 32 --ds.lora.dropout 0.05 --data.input_template 'User:{}\\nAssistant:' "
        "--reward.remote_url x.py "
        "--algo.advantage.estimator reinforce_baseline --rollout.n_samples_per_prompt 4 --train.enable_ema",
        {"model.lora.rank": 32, "model.chat_template": "plain", "task.template": "User:{input}\nAssistant:",
         "advantage": "ReinforcePPBaseline", "train.ema": 0.992},
        "ds.lora.dropout", "reward.remote_url",
    ),
}  # fmt: skip

TOML = """max_steps = 20
[model]
name = "org/model"
[[orchestrator.train.source]]
name = "wordle"
[orchestrator.train.source.env.taskset]
id = "wordle"
[orchestrator]
batch_size = 64
group_size = 8
"""
ENVIRONMENT = {
    "model.path": "org/model",
    "task.environment": {"taskset": {"id": "wordle"}},
    "reward": "VerifiersReward",
}
SOURCE = "orchestrator.train.source"


def prime(tables: str, carried: dict[str, object], *by_hand: str) -> Case:
    return Case("prime-rl", "rl.toml", f"{TOML}{tables}", {**ENVIRONMENT, **carried}, {SOURCE, *by_hand})


PRIME_RL = {
    "defaults": prime(
        "[trainer]\n[ckpt]\n",
        {"advantage.scale_by_std": False, "loss": "DPPO", "train.prompts_per_step": 8, "rollout.max_staleness": 8},
    ),
    "lora": prime(
        "[trainer.model.lora]\nrank = 8\ndropout = 0.1\n[trainer.optim]\nlr = 5e-5\n",
        {"model.lora.rank": 8, "train.lr": 5e-5}, "trainer.model.lora.dropout",
    ),
    "self-play": prime(
        "[orchestrator.algo]\ntype = 'rae'\ndecay = 0.9\n", {"advantage": "RAE", "advantage.decay": 0.9}
    ),
    "distillation": prime(
        "[orchestrator.algo]\ntype = 'opd'\nteacher = {name = 'org/teacher'}\n[orchestrator.eval]\ninterval = 50\n"
        "[[orchestrator.eval.source]]\nname = 'aime'\n[trainer.loss]\ntype = 'custom'\nimport_path = 'mine.loss'\n",
        {"validation.every": 50},
        "orchestrator.algo.type", "orchestrator.algo.teacher.name", "orchestrator.eval.source", "trainer.loss.type",
        "trainer.loss.import_path",
    ),
    "names of before": Case(
        "prime-rl", "rl.toml",
        "[trainer.model]\nname = 'org/model'\n"
        "[orchestrator]\nbatch_size = 64\nrollouts_per_example = 16\nseq_len = 2048\n"
        "[[orchestrator.env]]\nid = 'gsm8k'\nargs = {split = 'train'}\n[orchestrator.sampling]\nmax_tokens = 128\n"
        "[trainer.optim]\ntype = 'sgd'\nmomentum = 0.8\n",
        {"task.environment": {"taskset": {"id": "gsm8k", "split": "train"}}, "rollout.group_size": 16,
         "rollout.sampling.max_tokens": 128, "conversation.tokens": 2048},
        {SOURCE, "trainer.optim.type", "trainer.optim.momentum"},
    ),
}  # fmt: skip

CASES = {f"{case.peer}: {name}": case for group in (VERL, TRL, OPENRLHF, PRIME_RL) for name, case in group.items()}
FILES = {
    "gsm8k_tool.yaml": """tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema: {type: function, function: {name: calc_gsm8k_reward, description: Scores., parameters: {}}}
""",
    "own_tools.yaml": """tools:
  - class_name: verl.tools.search_tool.SearchTool
    config: {retrieval_service_url: "http://127.0.0.1:1/retrieve"}
    tool_schema: {type: function, function: {name: search}}
  - class_name: mine.Calculator
    config: {type: native}
""",
    "interaction.yaml": "interaction: [{name: gsm8k, class_name: verl.interactions.x.Gsm8kInteraction}]\n",
}
"""Files that the configurations name."""
