"""The command line: recipes found and stacked, overrides that win, and one message for each mistake."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
import torch

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse, split
from rlkit.recipe import FSDP2, Train
from rlkit.registry.builtin import rlkit_recipes


@pytest.mark.parametrize("recipe", sorted(p.stem for p in rlkit_recipes().glob("*.yaml")))
def test_every_shipped_recipe_parses_and_is_short(recipe: str) -> None:
    assert parse("fit", ["--recipe", recipe, "--model.lora.rank=16"]).recipe.model.lora is not None
    lines = (rlkit_recipes() / f"{recipe}.yaml").read_text().splitlines()
    assert len(lines) <= 25
    assert lines[0].startswith("# ")


def test_overrides_win_wherever_they_stand_and_recipes_stack(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train: {lr: 0.5}\nadvantage: {class_path: GRPO, init_args: {eps: 0.1}}\n")
    mine = ["--recipe", str(tmp_path / "mine.yaml")]
    parsed = parse("fit", ["--train.steps=9", "--recipe", "quickstart", *mine, "--advantage.scale_by_std", "false"])
    recipe = parsed.recipe
    assert (recipe.train.steps, recipe.train.lr, recipe.train.prompts_per_step) == (9, 0.5, 32)
    assert vars(recipe.advantage) == {"eps": 0.1, "scale_by_std": False}
    assert parsed.name == "quickstart"
    (tmp_path / "runs" / "mine-20261124-010203-1").mkdir(parents=True)
    copy = tmp_path / "runs" / "mine-20261124-010203-1" / "recipe.yaml"
    copy.write_text(parsed.yaml)
    assert parse("fit", ["--recipe", str(copy)]).name == "mine"


@pytest.mark.parametrize("flag", ["--{}=1", "--train.{}=1", "--{}", "{}", "--recipe={}", "--train.lr={}"])
def test_a_huge_word_is_not_repeated(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--recipe=quickstart", flag.format("x" * 1500)]) == 2
    assert len(capsys.readouterr().err) < 1000


def test_a_command_line_is_taken_apart() -> None:
    own = [("--out", {"type": str}), ("--merge-it", {"action": "store_true"})]
    given = split(["--train.steps=9", "--recipe=a", "--out", "o", "--train.lr", "-1", "--recipe", "b"], own)
    assert (given.recipes, given.problems) == (["a", "b"], [])
    assert given.overrides == [("train.steps", "9"), ("train.lr", "-1")]
    assert (given.options.out, given.options.merge_it) == ("o", False)
    assert split(["quickstart", "--merge-it"], own).recipes == ["quickstart"]
    assert split(["--merge-it"], own).options.merge_it


def test_the_resolved_recipe_parses_to_itself(tmp_path: Path) -> None:
    first = parse("fit", ["--recipe", "quickstart", "--model.lora.rank=4", "--kl_loss.coef=0.01"])
    (tmp_path / "recipe.yaml").write_text(first.yaml)
    assert parse("fit", ["--recipe", str(tmp_path / "recipe.yaml")]).yaml == first.yaml


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--train.stepz 3", "unknown option 'train.stepz'; did you mean 'train.steps'?"),
        ("--advantage GRP", "advantage is 'GRP', which no plugin offers; did you mean 'GRPO'?"),
        (
            "--rollout.engine SGLangServer --rollout.engine.launch.tensor_paralel 2",
            "did you mean 'rollout.engine.launch.tensor_parallel'?",
        ),
        ("--advantage.epz 1", "advantage GRPO has no option 'epz'; did you mean 'eps'?"),
        (
            "--reward GRPO",
            "reward is 'GRPO', which is one of the advantages; known rewards: BatchReward, CodeReward, CommandReward, "
            "Composite, EpisodeReward",
        ),
        (
            "--fabric.plugins os.system",
            "fabric.plugins is 'os.system', expected a list, each of it one of LightningEnv",
        ),
        ("--rollout.group_size 1", "rollout.group_size is 1; set rollout.group_size to 2 or more"),
        ("--rollout.sampling.top_p 0.9", "set top_k as well, from 1 to 1024, such as 100"),
        ("--rollout.sampling.min_p 0.1", "has top_p=1.0, top_k=0 and min_p=0.1"),
        ("--rollout.sampling.structure.regex=a+", "and a structure, but the trainer keeps the ids"),
        (
            '--rollout.sampling={"structure":{"regex":"a+","json_schema":{}},"top_k":9}',
            "a structure has json_schema={} and regex='a+', expected one of them",
        ),
        (
            "--rollout.sampling.structure.regex=( --rollout.sampling.top_k=9",
            "rollout.sampling.structure: llguidance cannot follow it: ",
        ),
        (
            "--validation.sampling.structure.regex=a+ --rollout.engine=SGLangServer",
            "validation.sampling.structure: SGLangServer samples any text; remove it, or choose rollout.engine: Torch",
        ),
        ("--rollout.sampling.temperature 0", "temperature is 0"),
        ("--rollout.sampling.max_tokens 0", "rollout.sampling.max_tokens is 0, expected a whole number of 1 or more"),
        ("--train.aggregation mean", "train.aggregation is 'mean', expected one of token_mean"),
        ("--train.lr 0", "train.lr is 0, expected a number above 0"),
        (
            "--model.lora 3",
            "model.lora is 3, expected a section with: alpha, rank, targets, use_dora, use_rslora, or null",
        ),
        ("--fabric.precision bf16-true", "or fabric.precision: bf16-mixed"),
        ("--model.path ./nope", "model.path is './nope', which does not exist; "),
        ("--loss.clip_low 3", "loss.clip_low is 3, expected a number from 0 to 1"),
        (
            '--advantage GDPO --advantage.weights={"accuracy":1} --shaping.clip=1',
            "components of the reward, which `shaping:` leaves",
        ),
        ('--advantage GDPO --advantage.weights={"accuracy":1} --kl_reward.coef=1', "remove it, or use `kl_loss:`"),
        ("--save.keep_best best", "save.keep_best is 'best', expected a metric of metrics.jsonl, such as"),
        ("--save.keep_best validation/acc", "save.keep_best is 'validation/acc', expected one of validation/accuracy"),
        ("--save.keep_best validation/reward", "but no step validates; set validation.every to 1 or more"),
        (f"--recipe {'n' * 5000}", "neither a file nor a known recipe; rlkit recipe list names them"),
        ("--task.path=\udc80", "'--task.path' holds bytes that are not"),
        ("--tools={'':Calculator}", "tools has the name '', expected a name that is not empty"),
        (f"--reward={'{a:' * 30}1{'}' * 30}", "reward is {a:{a:"),
        ("--fabric.devices=[]", "fabric.devices is [], expected a count, the indices of at least one device, or auto"),
        ("--advantage GAE", "advantage GAE needs values, but the recipe has no `critic:` section; add one"),
        ("--critic.lr 0.1", "the recipe has a `critic:` section, but advantage GRPO reads no values"),
        ('--advantage GDPO --advantage.weights={"style":1}', "weighs the component 'style', but reward MathReward has"),
        ("--reference.refresh_every 5", "a `reference:` section, but nothing measures KL"),
        (
            "--loss DPO --rollout.group_size 1 --advantage null",
            "loss DPO compares the samples of a prompt, but rollout.g",
        ),
        (
            "--loss DPO --advantage null --train.aggregation token_mean",
            "loss DPO is per sequence, but `train.aggregation` is per token",
        ),
        (
            "--loss SimPO --advantage null --rejection.high 3",
            "loss SimPO is per sequence, but `rejection` is per token; remove it",
        ),
        ("--loss DPO --loss.label_smoothing 0.1 --loss.kind hinge", "expected kind='sigmoid'"),
        ("--kl_loss.coef -1", "kl_loss.coef is -1, expected a number above 0"),
        ("--kl_loss.estimator k3+ --kl_loss.importance_weighted true", "choose k3, or set kl_loss.importance_weighted"),
        ("--train.ema 2", "train.ema is 2, expected a number above 0 and at most 1, or null"),
        (
            "--rollout.filter ZeroSignal --rollout.filter.component acuracy",
            "rollout.filter ZeroSignal compares the component 'acuracy', but reward MathReward has only: accuracy",
        ),
        (
            "--train.old_logps rollout --correction.high 2",
            "`correction:` would weigh by trainer / engine a second time",
        ),
        ("train.steps=1", "'train.steps=1' is no option: write --train.steps=1"),
        ("grpo_gsm8k", "'grpo_gsm8k' is no option; a recipe is given by --recipe grpo_gsm8k"),
        ("--task qa.jsonl", "task is 'qa.jsonl', a file, expected a class: write --task Jsonl --task.path qa.jsonl"),
        ("--task d/qa.parquet", "write --task HFDataset --task.path d/qa.parquet"),
        ("--advantage null", "loss ClipLoss reads advantages, but the recipe has no `advantage:`; add one"),
        (
            "--model X",
            "model is 'X', expected a section with: attention, chat_template, chat_template_kwargs, config, dtype",
        ),
        ("--train null", "train is null, expected a section with: aggregation"),
        ("--train.steps", "--train.steps has no value; write --train.steps=VALUE"),
        ("--resume", "--resume has no value; write --resume=VALUE. Go on from a checkpoint, a run folder, or `auto`"),
        ("--tools.add=tool.py:add", "no plugin of a package 'tool' is installed; rlkit plugins new NAME makes one"),
        ("--advantage.help GRP", "advantage.help is 'GRP', which no plugin offers; did you mean 'GRPO'?"),
        ("--advantage.help", "--advantage.help names no class, expected one of: GAE"),
        ("--train.lr.help", "'train.lr' names no class and is no section"),
        ("--reward Overlong --reward.buffer 1", "reward Overlong needs 'max_tokens', which is not given"),
        ("--log.loggers=[Wandb]", "log.loggers.0 Wandb needs 'project', which is not given: write"),
        (
            '--reward=Composite --reward.rewards={"o":{"class_path":"Overlong","init_args":{"buffer":1}}}',
            "reward.rewards.o Overlong needs 'max_tokens', which is not given",
        ),
        ("--tools.c.bonus=1", "tools.c.bonus is given, but tools.c names no class; expected the name of a class"),
        ("--fabric.precision 16-mixed", "fabric.precision is '16-mixed', expected one of 32-true, 64-true, bf16-mixed"),
        ("--fabric.strategy deepspeed", "expected one of auto, ddp, fsdp2 or FSDP2 with: expert_parallel, offload"),
        ("--conversation.turns=3", "all its conversations have a single turn"),
        (
            "--recipe=quick_tool --conversation.user_turns=3",
            "conversation.user_turns is 3, but the recipe has no user to reply: add `interaction:` or `environment:`",
        ),
        ("--parser=HermesParser", "no `tools:`"),
        ("--fabric.devices 0", "fabric.devices is 0, expected auto or a whole number"),
        ("--fabric.callbacks x", "fabric.callbacks is not an option of rlkit: rlkit's callbacks are the recipe's own"),
        ('--reward {"class_path":3}', "reward is 3, expected the name of a class: BatchReward"),
        ("--validation.watch=nosuch", "validation.watch is 'nosuch', expected one of accuracy"),
        ("--profile.steps=[]", "profile.steps is [], expected at least one step, and each step once"),
        ("--profile.steps=[1,1]", "profile.steps is [1, 1], expected at least one step, and each step once"),
        ("--rollout.sampling.stop_ids=[99999999]", "stop_ids has 99999999, expected token ids of the model, below"),
        ("--rollout.sampling.stop_ids=[-1]", "rollout.sampling.stop_ids is [-1], expected"),
        ("--rollout.sampling.temperature=1e-300", "rollout.sampling.temperature is 1e-300, by which logits are"),
        ("--validation.sampling.temperature=1e-9", "set it to 0.01 or more, or to 0"),
        ("--rejection.low=1", "rejection has low: 1.0 and high: None, which leave no room around 1"),
        ("--rejection.high=1", "rejection has low: None and high: 1.0, which leave no room around 1"),
        ("--rejection.statistic=k3 --rejection.low=0.5", "rejection.low is 0.5, but k3 has no lower bound; remove it"),
        ("--correction.high=0.5", "correction has low: None and high: 0.5, which exclude 1"),
        ("--loss=ClipCov --loss.cov_high=-7", "loss.cov_high is -7, expected a number above 0"),
        ("--loss=ClipCov --loss.cov_low=5", "ClipCov has cov_low=5.0 and cov_high=5.0, expected cov_low < cov_high"),
        ("--reward.format_weight=-7", "reward.format_weight is -7, expected a number of 0 or more"),
        ("--log.loggers=[CSV,CSV]", "log.loggers has CSV twice with the same options; remove one"),
        ("--reward=PythonReward --reward.function=r.py:f", "PythonReward names 'r.py:f', whose code would run; set"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--recipe", "quickstart", *options.split()]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_a_run_that_is_not_there_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = "expected a run folder or one of its checkpoints"
    assert main(["fit", f"--resume={tmp_path / 'nosuch'}"]) == 2
    assert f"--resume is {str(tmp_path / 'nosuch')!r}, {expected}; {tmp_path} holds: nothing" in capsys.readouterr().err
    assert main(["fit", f"--resume={tmp_path}"]) == 2
    assert f"--resume is {str(tmp_path)!r}, {expected}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    ["fit --resume {}", "validate --checkpoint {}", "report {}", "diff runs/mine {}", "replay {} --step 1"],
)
def test_a_misspelt_run_is_named_with_the_nearest(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "recipe.yaml").write_text("model: {path: tiny}\n", encoding="utf-8")
    assert main(words.format("runs/mien").split()) == 2
    assert "did you mean 'runs/mine'?" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "./", "sub [1]/"])
def test_a_misspelt_file_is_named_with_the_nearest(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "mine.yaml").write_text("model: {path: tiny}\n", encoding="utf-8")
    assert main(["fit", f"--recipe={folder}minee.yaml"]) == 2
    assert f"neither a file nor a known recipe; did you mean '{folder}mine.yaml'?" in capsys.readouterr().err
    assert main(["fit", f"--recipe={folder}mine.yml"]) == 2
    assert f"did you mean '{folder}mine.yaml'?" in capsys.readouterr().err
    assert main(["fit", f"--recipe={folder}mine"]) == 2
    assert f"did you mean '{folder}mine.yaml'?" in capsys.readouterr().err
    assert main(["fit", f"--recipe={folder}nosuch/minee.yaml"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_misspelt_function_is_named_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("def score(text):\n    return 1.0\n", encoding="utf-8")
    reward = ("--reward=PythonReward", f"--reward.function={tmp_path}/reward.py:scor", "--reward.allow_code=true")
    assert main(["fit", "--recipe=quickstart", *reward, "--validation=null", f"--out={tmp_path}/run"]) != 0
    assert "reward.py has no function 'scor'; did you mean 'score'?" in capsys.readouterr().err


def test_an_endless_value_is_shown_without_its_middle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--recipe=quickstart", "--reward=RemoteReward", f"--reward.url={'x' * 100_000}"]) == 2
    printed = capsys.readouterr().err
    assert len(printed) < 2100
    assert printed.startswith("error: RemoteReward has url='xxx")
    assert printed.endswith("expected http://… or https://…\n")


@pytest.mark.parametrize(
    "options",
    [
        "--train.prompts_per_step=4 --train.minibatches=4",  # one prompt each
        "--rollout.group_size=2",
        "--advantage=ReinforcePP --rollout.group_size=1",
        "--correction.low=1",
        "--save.keep_best=validation/accuracy --validation.every=1",
        "--save.keep_best=validation/sampled_accuracy --validation.every=1 --validation.samples=1",
        "--fabric.precision=bf16-true --model.lora.rank=4",
    ],
)
def test_what_just_fits_is_accepted(options: str) -> None:
    assert parse("fit", ["--recipe", "quickstart", *options.split()]).recipe.train.steps == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--train.prompts_per_step=4 --train.minibatches=5", "train.minibatches is 5, but a step has only"),
        ("--correction.low=1.1", "which exclude 1"),
        (
            "--save.keep_best=validation/sampled_accuracy --validation.every=1 --validation.samples=0",
            "but validation.samples is 0; set it to 1 or more",
        ),
    ],
)
def test_what_just_does_not_fit_is_refused(options: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse("fit", ["--recipe", "quickstart", *options.split()])


@pytest.mark.parametrize("name", ["FSDP2", "rlkit.recipe.FSDP2"])
def test_a_section_may_be_named_as_a_class(name: str) -> None:
    for given, expected in (
        (name, FSDP2()),
        (f'{{"class_path":"{name}"}}', FSDP2()),
        (f'{{"class_path":"{name}","init_args":{{"replicate":2}}}}', FSDP2(replicate=2)),
    ):
        assert parse("fit", ["quickstart", f"--fabric.strategy={given}"]).recipe.fabric.strategy == expected


def test_old_log_probs_are_computed_if_something_compares() -> None:
    for words, needed in (
        ("--loss ClipLoss --advantage GRPO", True),
        ("", False),
        ("--kl_loss.coef 0.1", False),
        ("--kl_loss.importance_weighted true", True),
    ):
        recipe = parse("fit", ["quick_online_dpo", "--train.minibatches=2", *words.split()]).recipe
        assert recipe.needs_old_logps is needed


def test_pairs_and_their_reference_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--recipe=quick_online_dpo"]) == 0
    out = capsys.readouterr().out
    assert "-log sigmoid(0.1 (d_better - d_worse))" in out
    assert "mean over the pairs of each group, mean over the groups that have some" in out
    assert "the initial policy, frozen" in out
    assert "old policy" not in out


def test_one_update_of_a_rollout_is_on_policy_and_two_are_not() -> None:
    for minibatches, epochs, on_policy in ((1, 1, True), (2, 1, False), (1, 2, False), (2, 2, False)):
        assert Train(1, minibatches=minibatches, epochs=epochs).on_policy is on_policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {sampling: {temprature: 0.5}}", "did you mean 'rollout.sampling.temperature'?"),
        ("modl: {path: tiny}", "unknown option 'modl'; did you mean 'model'?"),
        ("model: {path: tiny", "is not YAML: "),
        ("- a list", "holds list, expected sections"),
        ("reward: {class_path: os.system, init_args: {command: ls}}", "no plugin of a package 'os'"),
        ("reward: {class_path: subprocess.Popen, init_args: {args: [ls]}}", "no plugin of a package 'subprocess'"),
        ("advantage: {class_path: GRPO, init_args: {epz: 1}}", "advantage GRPO has no option 'epz'"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_message(text: str, message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert main(["fit", "--recipe", "quickstart", "--recipe", str(tmp_path / "bad.yaml")]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def refusal_of_files(tmp_path: Path, texts: Sequence[str], *options: str) -> str:
    """Return the message about recipes that are stacked, `1.yaml`, `2.yaml` and so on, with options after them."""
    words = []
    for number, text in enumerate(texts, 1):
        (tmp_path / f"{number}.yaml").write_text(text)
        words.append(f"--recipe={tmp_path / f'{number}.yaml'}")
    with pytest.raises(RecipeError) as error:
        parse("fit", [*words, "--train.steps=1", *options])
    return str(error.value).replace(f"{tmp_path}/", "")


QUICK = "model: {path: tiny}\ntask: Arithmetic\nloss: ClipLoss\n"  # three lines


NEEDS_PATH = "ModelReward needs 'path', which is not given: write `path: ...` with text in its init_args"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward:\n  class_path: ModelReward\n", f"reward {NEEDS_PATH}, or pass --reward.path (1.yaml:4)"),
        (
            "reward:\n  class_path: Composite\n  init_args:\n    rewards:\n      a: {class_path: ModelReward}\n",
            f"reward.rewards.a {NEEDS_PATH}, or pass --reward.rewards.a.path (1.yaml:8)",
        ),
        (
            "reward: MathReward\nlog:\n  loggers:\n  - CSV\n  - Wandb\n",
            "write `project: ...` with text in its init_args, or pass --log.loggers (1.yaml:8)",
        ),
        (
            "reward: MathReward\nrollout:\n  replay: {}\n",
            "rollout.replay needs 'size', which is not given: write `size: ...` with a whole number from 1 to 65536 in "
            "it, or pass --rollout.replay.size (1.yaml:6)",
        ),
        ("reward: MathReward\nrollout:\n\n  group_size: x\n", "expected a whole number from 1 to 65536 (1.yaml:7)"),
        ("reward: MathReward\nadvantage: GRP\n", "did you mean 'GRPO'? (1.yaml:5)"),
        ("reward: MathReward\nadvantage: {class_path: GRPO, init_args: {\n  epz: 1}}\n", "mean 'eps'? (1.yaml:6)"),
        ("reward: MathReward\ntrian: {}\n", "did you mean 'train'? (1.yaml:5)"),
        ("reward: MathReward\ntrain.lrr: 1\n", "did you mean 'train.lr'? (1.yaml:5)"),
        ("reward: MathReward\n", "add one, such as advantage: GRPO (1.yaml:3)"),
        ("reward: MathReward\nrollout:\n  lead: 1\n", "or remove rollout.lead (1.yaml:6)"),
    ],
)
def test_a_mistake_in_a_recipe_names_its_file_and_line(text: str, message: str, tmp_path: Path) -> None:
    assert refusal_of_files(tmp_path, [QUICK + text]).endswith(message)


def test_the_line_is_that_of_the_recipe_that_counts(tmp_path: Path) -> None:
    """The last recipe that has the option, or the part around it; none if the command line has it."""
    first = QUICK + "reward:\n  class_path: ModelReward\n"
    assert refusal_of_files(tmp_path, [first, "\nreward: ModelReward\n"]).endswith("(2.yaml:2)")
    assert refusal_of_files(tmp_path, [first, "train: {lr: 1}\n"]).endswith("(1.yaml:4)")
    assert refusal_of_files(tmp_path, [first], "--reward=ModelReward").endswith("or pass --reward.path")
    assert refusal_of_files(tmp_path, [first], "--reward.path=x", "--reward.batch_size=x").endswith("65536")


def test_what_a_later_recipe_replaces_no_longer_has_a_line(tmp_path: Path) -> None:
    """A list, and a part by another class; a key of the same name in the earlier recipe is of what is gone."""
    logged = QUICK + "reward: MathReward\nlog: {loggers: [{class_path: Wandb, init_args: {\n  project: a}}]}\n"
    assert refusal_of_files(tmp_path, [logged, "log:\n  loggers:\n  - Wandb\n"]).endswith("(2.yaml:3)")
    rewarded = QUICK + "reward: {class_path: ModelReward, init_args: {\n  path: a}}\n"
    second, third = "\nreward: MathReward\n", "\n\nreward: ModelReward\n"
    assert refusal_of_files(tmp_path, [rewarded, second, third]).endswith("(3.yaml:3)")
    assert refusal_of_files(tmp_path, [rewarded, second], "--reward=ModelReward").endswith("or pass --reward.path")
    assert refusal_of_files(tmp_path, [rewarded, "reward: {max_length: 0}\n"]).endswith("(2.yaml:1)")


def test_a_recipe_without_a_required_section_names_it(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: {path: tiny}\n")
    with pytest.raises(RecipeError, match="the recipe has no .*task"):
        parse("fit", ["--recipe", str(tmp_path / "r.yaml")])


def test_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "rlkit fit --recipe quickstart" in capsys.readouterr().out
    assert main(["ft"]) == 2
    assert "did you mean 'fit'?" in capsys.readouterr().err
    assert main(["fit"]) == 2
    assert "rlkit fit needs a recipe" in capsys.readouterr().err


def test_options_of_a_part_are_shown_with_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--recipe", "quickstart", "--advantage.help", "GRPO"])
    assert stopped.value.code == 0
    assert "sample standard deviation" in capsys.readouterr().out


def test_recipe_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    assert "quickstart" in capsys.readouterr().out
    assert main(["recipe", "show", "quickstart", "--train.lr=0.25"]) == 0
    assert "lr: 0.25" in capsys.readouterr().out
    assert main(["recipe", "check", "quickstart"]) == 0
    assert "ok: 9,000 training rows, 200 validation prompts, context 4096" in capsys.readouterr().out
    assert main(["recipe", "chek"]) == 2


def test_plugin_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list"]) == 0
    assert main(["plugins", "show", "ClipLoss"]) == 0
    assert "--loss.clip_dual CLIP_DUAL\n                        Upper bound of the ratio" in capsys.readouterr().out
    assert main(["plugins", "show", "ClipLos"]) == 2
    assert "did you mean 'ClipLoss'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.5.21", "0.5.21"),
        ("0.6.0", "SGLang is 0.6.0, but rlkit works with 0.5.17 to 0.5.23"),
        (None, "not installed (pip install -e '.[sglang]' in a checkout of rlkit)"),
    ],
)
def test_doctor_says_what_is_missing(
    version: str | None, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if name == "sglang" and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if name == "sglang" and version is not None else real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", found)
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert torch.__version__ in text
    assert f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads" in text
    assert said in text
