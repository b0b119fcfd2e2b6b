"""Ten configurations with options of late 2025, in the form of `behaviour_cases`."""

from __future__ import annotations

from behaviour_cases import ACTOR, ROLLOUT, TURNS, Case, openrlhf, verl

IS = "algorithm.rollout_correction"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"

VERL = {
    "dapo with rejection": verl(
        f"data.max_response_length=8192 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm "
        f"{IS}.rollout_is=token {IS}.rollout_is_threshold=2.0 {IS}.rollout_rs=seq_mean_k1 "
        f"{IS}.rollout_rs_threshold=0.5_2.0 {IS}.rollout_token_veto_threshold=1e-4 reward_model.reward_manager=dapo "
        f"+{OVERLONG}.enable=True +{OVERLONG}.len=4096 +{OVERLONG}.penalty_factor=1.0 +{OVERLONG}.log=False "
        "+reward_model.reward_kwargs.max_resp_len=6144 +data.apply_chat_template_kwargs.enable_thinking=False",
        {"correction.level": "token", "correction.high": 2.0, "rejection.statistic": "k1",
         "rejection.level": "seq_mean", "rejection.low": 0.5, "rejection.high": 2.0, "reward": "Composite",
         "reward.rewards": {"math": "MathReward", "length": {"class_path": "Overlong", "init_args": {
             "max_tokens": 6144, "buffer": 4096, "factor": 1.0}}},
         "model.chat_template_kwargs.enable_thinking": False, "train.aggregation": "seq_mean_token_sum_norm"},
        f"{IS}.rollout_token_veto_threshold",
    ),
    "ratios to the engine": verl(
        f"{IS}.bypass_mode=True {IS}.rollout_is=sequence {IS}.rollout_rs=sequence {IS}.rollout_rs_threshold=3.0 "
        f"{IS}.rollout_rs_threshold_lower=0.25 {ROLLOUT}.repetition_penalty=1.05 "
        "async_training.staleness_threshold=0.5",
        {"train.old_logps": "rollout", "rejection.level": "seq_sum", "rejection.low": 0.25, "rejection.high": 3.0},
        f"{ROLLOUT}.repetition_penalty", "async_training.staleness_threshold",
    ),
    "tools of one's own in a file": Case(
        "verl", "grpo.yaml",
        "{hydra: {searchpath: [file://verl]}, defaults: [ppo_trainer], data: {train_files: a.parquet}, "
        "actor_rollout_ref: {model: {path: org/model}, actor: {policy_loss: {loss_mode: gspo}}, rollout: {"
        "name: sglang, multi_turn: {enable: true, max_assistant_turns: 3, max_parallel_calls: 2, "
        "tool_config_path: own_tools.yaml}}}, "
        "algorithm: {adv_estimator: grpo, rollout_correction: {rollout_rs: [token], rollout_rs_threshold: high}}, "
        "custom_reward_function: {path: mine.py, reward_kwargs: {weight: 0.2}}, trainer: {total_training_steps: 9}}",
        {"loss": "GSPO", "conversation.turns": 3, "reward.function": "mine.py:compute_score",
         "tools": {"search": {"class_path": "SearchTool", "init_args": {"url": "http://127.0.0.1:1/retrieve"}}}},
        {"defaults", f"{TURNS}.max_parallel_calls", f"{TURNS}.tool_config_path", f"{IS}.rollout_rs",
         f"{IS}.rollout_rs_threshold", "custom_reward_function.reward_kwargs.weight"},
    ),
}  # fmt: skip

DAPO = """from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment
class Trainer(GRPOTrainer):
    def compute_loss(self, *args): return 0
args = GRPOConfig(
    "out", loss_type="dapo", epsilon_high=.28, mask_truncated_completions=True, vllm_mode="colocate", use_vllm=True,
    scale_rewards="batch", vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_cap=2.0,
    importance_sampling_level="sequence_token", delta=4.0, max_steps=5,
)
args.num_generations = 16
if large: args.learning_rate = 1e-5
trainer = Trainer(
    "org/model", [accuracy_reward, get_soft_overlong_punishment(512, 128)], args, load_dataset("org/rows"),
    eval_dataset=load_dataset("org/others", split="test"),
)
trainer.add_callback(print)
"""
QUANTISED = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
tokenizer = AutoTokenizer.from_pretrained("org/model")
tokenizer.chat_template = open("chat.jinja").read()
tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
model = AutoModelForCausalLM.from_pretrained(
    "org/model", quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
    attn_implementation="flash_attention_2", torch_dtype=torch.bfloat16, revision="v2", device_map="auto",
)
model.resize_token_embeddings(len(tokenizer))
for weight in model.parameters(): weight.requires_grad = False
config = GRPOConfig("out", loss_type="sapo", importance_sampling_level="sequence", max_steps=5)
GRPOTrainer(model, "accuracy_reward", config, load_dataset("org/rows"), processing_class=tokenizer,
            peft_config=LoraConfig(target_modules="all-linear"), optimizers=(torch.optim.SGD([weight]), None))
"""
TOOLS = """def multiply(a: int, b: int) -> int: return a * b
rows = load_dataset("org/rows", split="train")
config = GRPOConfig("out", max_tool_calling_iterations=4, loss_type="cispo", epsilon_high=5.0, max_steps=5,
                    multi_objective_aggregation="normalize_then_sum", eval_strategy="steps", eval_steps=5)
GRPOTrainer("org/model", ["accuracy_reward"], config, rows.select(range(100)), rows.select(range(100, 120)),
            tools=[multiply])
"""
PARSED = """from trl.rewards import accuracy_reward
parser = TrlParser((ScriptArguments, RLOOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
training_args.normalize_advantages = True
training_args.reward_clip_range = (-2.0, 2.0)
RLOOTrainer("org/model", accuracy_reward, training_args, load_dataset("org/rows"))
"""
TRL = {
    "dapo": Case(
        "trl", "dapo.py", DAPO,
        {"loss": "ClipLoss", "loss.clip_high": 0.28, "train.mask_truncated": True, "advantage.scale_by_std": "batch",
         "rollout.engine": "VllmEngine", "correction.level": "token", "rollout.group_size": 16,
         "task.path": "org/rows"},
        {"reward_funcs", "importance_sampling_level", "learning_rate", "class Trainer", "eval_dataset", "callbacks"},
    ),
    "a model in four bits": Case(
        "trl", "qlora.py", QUANTISED,
        {"model.quantization": "nf4", "model.attention": "flash_attention_2", "model.dtype": "bfloat16",
         "model.lora.rank": 16, "loss": "SAPO"},
        {"model_revision", "processing_class.chat_template", "processing_class.add_special_tokens", "optimizers",
         "model.resize_token_embeddings", "model.requires_grad", "importance_sampling_level"},
    ),
    "tools": Case(
        "trl", "tools.py", TOOLS,
        {"train.max_rows": 100, "loss": "CISPO", "loss.clip_high": 4.0, "validation.every": 5},
        {"eval_dataset", "tools", "max_tool_calling_iterations", "multi_objective_aggregation"},
    ),
    "options of a command line": Case(
        "trl", "rloo.py", PARSED, {"advantage": "RLOO", "shaping.clip": 2.0, "model.path": "org/model"},
        {"args", "normalize_advantages"},
    ),
}  # fmt: skip

OPENRLHF = {
    "names of 2025": Case(
        "openrlhf", "run.sh",
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain org/model --prompt_data a.jsonl,b.jsonl --prompt_data_probs "
        "0.7,0.3 --label_key label --apply_chat_template --agent_func_path agent.py --lr_scheduler "
        "constant_with_warmup --lr_warmup_ratio 0.1 --advantage_estimator reinforce_baseline "
        "--n_samples_per_prompt 8 --async_train --async_queue_size 2 --partial_rollout --enable_vllm_is_correction "
        "--use_icepop --vllm_is_truncated_threshold 0.5 5.0 --policy_loss_type gspo --dual_clip 10 "
        "--freezing_actor_steps 5 --eval_temperature 0.6 --eval_n_samples_per_prompt 4 --reward_clip_range -5 5 "
        "--full_determinism",
        {"task.path": ["a.jsonl", "b.jsonl"], "train.schedule": "Constant", "train.warmup_ratio": 0.1,
         "rollout.max_staleness": 2, "correction.low": 0.5,
         "correction.high": 5.0, "validation.samples": 4, "validation.sampling.temperature": 0.6, "loss": "GSPO"},
        {"data.prompt_probs", "train.agent_func_path", "train.partial_rollout_enable",
         "actor.dual_clip", "critic.freezing_steps", "reward.clip_range"},
    ),
    "critic and reward models": openrlhf(
        "--algo.advantage.estimator gae --reward.model_name_or_path org/a,org/b --critic.max_epochs 2 "
        "--critic.lr_warmup_ratio 0.1 --critic.num_nodes 1 --algo.advantage.is_correction_enable "
        "--algo.advantage.is_correction_threshold 0.5 3.0 --actor.optim muon --actor.freeze_layers 4",
        {"advantage": "GAE", "critic.warmup_ratio": 0.1, "correction.high": 3.0},
        "reward.model_name_or_path", "critic.max_epochs", "algo.advantage.is_correction_enable", "actor.optim",
        "actor.freeze_layers",
    ),
}  # fmt: skip

PRIME_RL = {
    "adapters and a buffer": Case(
        "prime-rl", "rl.toml",
        "max_steps = 5\n[model]\nname = 'org/model'\n[trainer.model.experimental.lora]\nrank = 8\ndropout = 0.05\n"
        "target_modules = ['q_proj']\n[trainer.optim]\nbetas1 = 0.8\n"
        "[orchestrator]\nbatch_size = 64\nrollouts_per_example = 8\n"
        "oversampling_factor = 2.0\nmask_truncated_completions = true\n[orchestrator.sampling]\nmax_tokens = 64\n"
        "min_p = 0.1\nrepetition_penalty = 1.05\n[orchestrator.buffer]\ntype = 'difficulty-pool'\n"
        "[[orchestrator.env]]\nid = 'math'\n[orchestrator.eval]\nrollouts_per_example = 4\n"
        "[[orchestrator.eval.env]]\nid = 'aime'\n[orchestrator.eval.sampling]\ntemperature = 0.2\ntop_p = 0.9\n"
        "[ckpt]\ninterval = 5\nkeep = 3\n",
        {"model.lora.targets": ["q_proj"], "train.mask_truncated": True, "validation.sampling.temperature": 0.2,
         "validation.samples": 4, "save.keep_last": 3},
        {"orchestrator.train.source", "trainer.model.lora.dropout", "orchestrator.oversampling_factor",
         "orchestrator.sampling.min_p", "orchestrator.sampling.repetition_penalty", "orchestrator.buffer.type",
         "orchestrator.eval.source", "orchestrator.eval.sampling.top_p", "trainer.optim.betas1"},
    ),
}  # fmt: skip

CASES = {f"{case.peer}: {name}": case for group in (VERL, TRL, OPENRLHF, PRIME_RL) for name, case in group.items()}
