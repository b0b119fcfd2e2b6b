"""References of a recipe to its own options, `${section.option}`, some of them written to do harm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import rlkit.api
import rlkit.run.build
from rlkit.api.roles import placed_recipe
from rlkit.base.errors import RecipeError
from rlkit.commands import Parsed, parse, with_recipe_of
from rlkit.recipe.parsing.compose import Composer
from rlkit.recipe.parsing.references import References
from rlkit.recipe.yaml_text import MAX_BYTES
from rlkit.registry import load_plugins
from tests.conftest import rlkit_in_process

PARTS = "task: Arithmetic\nloss: ClipLoss\nadvantage: GRPO\nreward: MathReward\n"
BASE = f"model: {{path: tiny}}\n{PARTS}"  # five lines
STEPS = "train: {steps: 3}\n"  # the sixth
Compose = Callable[..., Parsed]


@pytest.fixture
def compose(tmp_path: Path) -> Compose:
    def parsed(text: str, *options: str, base: str = BASE) -> Parsed:
        (tmp_path / "mine.yaml").write_text(base + text)
        return parse("fit", [f"--recipe={tmp_path / 'mine.yaml'}", "--fabric.accelerator=cpu", *options], trains=True)

    return parsed


def refusal(compose: Compose, text: str, *options: str, base: str = BASE) -> str:
    with pytest.raises(RecipeError) as error:
        compose(text, *options, base=base)
    return str(error.value)


def stop_texts(parsed: Parsed) -> list[str]:
    return list(parsed.recipe.rollout.sampling.stop)


def test_a_reference_has_the_value_after_all_overrides(compose: Compose) -> None:
    text = "train: {steps: 3, prompts_per_step: 16}\nrollout:\n  group_size: ${train.prompts_per_step}\n"
    text += "save:\n  every: ${train.steps}\nvalidation:\n  samples: ${save.keep_last}\n"  # by default 2
    made = compose(text).recipe
    assert made.validation is not None
    assert (made.rollout.group_size, made.save.every, made.validation.samples) == (16, 3, 2)
    made = compose(text, "--train.prompts_per_step=4", "--train.steps=7", "--save.keep_last=5").recipe
    assert made.validation is not None
    assert (made.rollout.group_size, made.save.every, made.validation.samples) == (4, 7, 5)
    assert compose(text, "--rollout.group_size=2").recipe.rollout.group_size == 2
    assert compose(text, "--rollout.group_size=${train.steps}").recipe.rollout.group_size == 3


def test_a_whole_value_keeps_its_type_and_a_part_of_one_is_text(compose: Compose) -> None:
    parsed = compose(
        "train: {steps: 3, lr: 0.5, shuffle: false, checkpoint_activations: '${train.shuffle}'}\n"
        "rollout:\n  max_prompt_tokens: ${rollout.max_gap}\n"
        "  sampling_column: s-${train.steps}-${train.shuffle}-${save.keep_best}\n"
        "log:\n  loggers:\n  - class_path: Wandb\n    init_args: {project: 'p-${train.lr}-${model.path}'}\n"
    )
    assert parsed.recipe.train.checkpoint_activations is False
    assert parsed.recipe.rollout.max_prompt_tokens is None
    assert parsed.recipe.rollout.sampling_column == "s-3-false-null"
    assert vars(parsed.recipe.log.loggers[0])["project"] == "p-0.5-tiny"
    [logger] = yaml.safe_load(parsed.yaml)["log"]["loggers"]
    assert logger["init_args"]["project"] == "p-0.5-tiny"


def test_an_option_of_any_type_takes_what_it_is_given(compose: Compose, tmp_path: Path) -> None:
    """On the command line a text of digits is a number there; two numbers beside one another are text."""
    compose(f"{STEPS}rollout: {{sampling_column: '7'}}\n")
    composer = Composer(load_plugins())
    composer.add_file(tmp_path / "mine.yaml")
    references = {"a": "${train.steps}", "b": "${train.steps}${train.steps}", "c": "${rollout.sampling_column}"}
    composer.add({"model.config": references | {"d": "${loss.normalize}", "e": "${rollout.max_gap}"}})
    with pytest.raises(RecipeError, match="unknown option 'loss.normalize'"):
        composer.finish()
    composer.problems.clear()
    composer.add({"model.config.d": "${train.shuffle}"})
    config = composer.finish().model.config
    assert config == {"a": 3, "b": "33", "c": "7", "d": True, "e": None}
    assert config is not None
    assert [type(value) for value in config.values()] == [int, str, str, bool, type(None)]


def test_the_recorded_recipe_has_values_and_is_read_as_it_is(compose: Compose, tmp_path: Path) -> None:
    parsed = compose("train: {steps: 3}\nsave: {every: '${train.steps}'}\nrollout: {sampling: {stop: ['$${a.b}']}}\n")
    recorded = yaml.safe_load(parsed.yaml)
    assert recorded["save"]["every"] == 3
    assert recorded["rollout"]["sampling"]["stop"] == ["$${a.b}"]
    (tmp_path / "recipe.yaml").write_text(parsed.yaml)
    again = parse("fit", [*with_recipe_of(tmp_path, []), "--train.steps=9"])
    assert again.recipe.save.every == 3
    assert stop_texts(parsed) == stop_texts(again) == ["${a.b}"]


@pytest.mark.parametrize(
    "text",
    [
        "$", "$5", "$$", "${x}", "${}", "$ {a.b}", "{a.b}", "$x^{a.b}$", "\\frac{$a}{b}", "${a:b}", "${a.b", "${a{.}b",
        "${train\u2024steps}", "${train\u3002steps}", "${train\uff0esteps}",
    ],
)  # fmt: skip
def test_other_dollars_and_other_dots_are_text(text: str, compose: Compose) -> None:
    assert stop_texts(compose(f"{STEPS}rollout: {{sampling: {{stop: ['{text}']}}}}\n")) == [text]


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("$${train.steps}", "${train.steps}"),
        ("$$${train.steps}", "$${train.steps}"),
        ("a$${x.y}b$${x.z}", "a${x.y}b${x.z}"),
        ("$${x}", "$${x}"),
    ],
)
def test_a_literal_reference_has_two_dollars(text: str, literal: str, compose: Compose) -> None:
    parsed = compose(f"{STEPS}rollout: {{sampling: {{stop: ['{text}']}}, sampling_column: '{text}'}}\n")
    assert stop_texts(parsed) == [literal]
    assert parsed.recipe.rollout.sampling_column == literal
    text = f"{STEPS}rollout: {{sampling_column: '{text}-${{train.steps}}'}}\n"
    assert compose(text).recipe.rollout.sampling_column == f"{literal}-3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "save:\n  every: ${train.stepz}\n",
            "save.every refers to '${train.stepz}': unknown option 'train.stepz'; did you mean 'train.steps'? (a text "
            "is written $${...}) (mine.yaml:8)",
        ),
        ("save:\n  every: ${data.size}\n", "save.every refers to '${data.size}': unknown option 'data.size'; "),
        (
            "save:\n  every: ${critic.lr}\n",
            "save.every refers to '${critic.lr}': it has no single value in this recipe; set it, or",
        ),
        ("save:\n  every: ${oc.env:HOME}\n", "save.every refers to '${oc.env:HOME}': unknown option"),
        ("save:\n  every: ${\uff54rain.steps}\n", "unknown option '\uff54rain.steps'; did you mean 'train.steps'?"),
        ("save:\n  every: ${.}\n", "save.every refers to '${.}': unknown option '.'"),
        ("save:\n  every: ${rollout.sampling}\n", "'${rollout.sampling}': it has no single value in this recipe"),
        ("save:\n  every: ${rollout.sampling.stop}\n", "it has no single value"),
        ("save:\n  every: ${loss.class_path}\n", "unknown option 'loss.class_path'"),
        ("save:\n  every: ${loss.init_args.clip_low}\n", "unknown option 'loss.init_args.clip_low'"),
        ("save:\n  every: ${model.path}\n", "save.every is 'tiny', expected a whole number"),
        ("save:\n  every: ${train.steps}0.5\n", "save.every is 30.5, expected a whole number"),
        ("save:\n  every: ${rollout.max_gap}\n", "save.every is null, expected a whole number"),
        ("curriculum: ${loss.clip_low}\n", "curriculum is '${loss.clip_low}', "),
        ("rollout: {sampling: {stop: ['${model.path}']}}\n", "rollout.sampling.stop has a reference in a list"),
        ("rollout: {sampling: {stop: '${model.path}'}}\n", "rollout.sampling.stop is 'tiny', expected a list"),
        ("rollout: {sampling: {stop: '[a, ${model.path}]'}}\n", "rollout.sampling.stop takes more than one value"),
        (
            "interaction:\n  class_path: Retry\n  init_args:\n    tries: ${model.path}\n",
            "interaction.tries is 'tiny', ",
        ),
    ],
)
def test_what_cannot_be_referred_to_is_named(text: str, message: str, compose: Compose, tmp_path: Path) -> None:
    assert message in refusal(compose, STEPS + text).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("${validation.limit}'}\nvalidation: {limit: '${train.steps}", ("validation.limit", "train.steps")),
        ("${validation.limit}'}\nvalidation: {limit: '${save.every}", ("validation.limit", "save.every")),
        ("${save.every}", ("save.every", "save.every")),
    ],
)
def test_a_chain_is_refused_with_both_names(text: str, names: tuple[str, str], compose: Compose) -> None:
    refused = refusal(compose, f"{STEPS}save: {{every: '{text}'}}\n")
    assert f"save.every refers to '${{{names[0]}}}', which refers to '${{{names[1]}}}'; refer to that" in refused


SECRETS = ("--reward=RemoteReward", "--reward.url=https://me:hunter2@h.example/", "--train.steps=1")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reward.url", SECRETS),
        ("reward.url", (*SECRETS, "--reward.url=https://h.example/?key=hunter2hunter2")),
        ("reward.url", (*SECRETS, "--reward.url=https://${RLKIT_HOST}/")),
        ("agent.environment.FOO", ("--agent=CommandAgent", "--agent.command=x", "--agent.environment={FOO: hunter2}")),
        ("task.function", ("--task.function=sk-proj-abcDEF0123456789",)),
    ],
)
def test_a_credential_is_not_referred_to(
    name: str, options: tuple[str, ...], compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be saved where nothing tells that it is one."""
    monkeypatch.setenv("RLKIT_HOST", "hunter2")
    refused = refusal(compose, "", *options, f"--rollout.sampling_column=x${{{name}}}")
    assert f"rollout.sampling_column refers to '${{{name}}}'" in refused
    assert "hunter2" not in refused


@pytest.mark.parametrize("name", ["reward.url", "agent.environment.FOO"])
def test_a_credential_with_a_reference_is_not_shown(name: str, compose: Compose) -> None:
    options = ("--agent=CommandAgent", "--agent.command=x", "--agent.environment={FOO: 'hunter2${model.path}'}")
    url = "--reward.url=https://me:hunter2@h.example/${model.path}"
    refused = refusal(compose, "", *SECRETS, *options, url, f"--rollout.sampling_column=${{{name}}}")
    assert f"rollout.sampling_column refers to '${{{name}}}', which is secret" in refused
    assert "hunter2" not in refused


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward.url", "https://${RLKIT_HOST}/${model.path}"),
        ("reward.url", "https://me:hunter2@h.example/${model.path}"),
        ("reward.url", "https://me:${model.path}@h.example/"),
        ("agent.environment", "{FOO: '${model.path}'}"),
        ("agent.environment.FOO", "x${model.path}"),
        ("model.trust_remote_code", "${train.shuffle}"),
        ("agent.allow_code", "${train.shuffle}"),
        ("rollout.sampling_column", "${agent.allow_code}"),
        ("rollout.sampling_column", "${model.trust_remote_code}"),
        ("log.loggers", "[{class_path: TensorBoard, init_args: {folder: '${model.path}'}}]"),
    ],
)
def test_nothing_refers_from_or_to_what_is_secret_or_asks_for_trust(key: str, value: str, compose: Compose) -> None:
    agent = ("--agent=CommandAgent", "--agent.command=x")
    refused = refusal(compose, "", *SECRETS, *agent, f"--{key}={value}")
    assert "hunter2" not in refused
    assert key in refused
    assert "asks for trust" in refused or "would become a reference, a login or a credential" in refused


@pytest.mark.parametrize("text", ["${rollout.sampling_column}{RLKIT_KEY}", "${rollout.sampling_column}{train.steps}"])
def test_no_reference_is_put_together(text: str, compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_KEY", "hunter2")
    refused = refusal(
        compose,
        f"{STEPS}rollout: {{sampling_column: $}}\ntask: {{class_path: Jsonl, init_args: {{path: '{text}'}}}}\n",
        base=BASE.replace("task: Arithmetic\n", ""),
    )
    assert "task.path would become a reference, a login or a credential; write its value" in refused


STRANGER = BASE.replace(
    "reward: MathReward", "reward: {class_path: PythonReward, init_args: {function: 'evil.py:f', allow_code: VALUE}}"
)
NO_REFERENCES = "but the recipe of a run folder has no references; write the value"


@pytest.mark.parametrize("value", ["${train.shuffle}", "tru${loss.eos}", "${train.shuffle}$${a.b}"])
@pytest.mark.parametrize("trust", [[], ["--allow-code"]])
def test_a_run_folder_has_no_references(value: str, trust: list[str], tmp_path: Path) -> None:
    """With an override of what it refers to, a stranger's recipe could run code, and nobody would be asked."""
    text = STRANGER.replace("VALUE", f"'{value}'")
    (tmp_path / "recipe.yaml").write_text(f"{text}train: {{steps: 1, shuffle: false}}\n")
    with pytest.raises(RecipeError) as error:
        parse("validate", [*with_recipe_of(tmp_path, trust), "--train.shuffle=true"])
    assert f"reward.allow_code is '{value}', {NO_REFERENCES}" in str(error.value)


def test_a_credential_of_a_run_folder_is_not_shown(tmp_path: Path) -> None:
    agent = "{class_path: CommandAgent, init_args: {command: x, environment: {FOO: 'hunter2${a.b}'}}}"
    (tmp_path / "recipe.yaml").write_text(f"{BASE}{STEPS}agent: {agent}\n")
    with pytest.raises(RecipeError, match=r"agent.environment.FOO is .*has no references") as error:
        with_recipe_of(tmp_path, [])
    assert "hunter2" not in str(error.value)


def test_neither_a_verb_nor_a_pool_takes_references_of_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"{BASE}{STEPS}save: {{every: '${{train.steps}}'}}\n")
    done = rlkit_in_process("fit", f"--resume={tmp_path}", "--train.steps=5", cwd=tmp_path)
    assert f"save.every is '${{train.steps}}', {NO_REFERENCES}" in done.stderr
    assert done.returncode == 2
    with pytest.raises(RecipeError, match=NO_REFERENCES):
        placed_recipe(tmp_path, "a")


def test_references_through_anchors_and_aliases_of_yaml(compose: Compose) -> None:
    text = "train: &train {steps: 3}\nsave: {every: &steps '${train.steps}'}\nvalidation: {limit: *steps}\n"
    made = compose(text, "--train.steps=4").recipe
    assert made.validation is not None
    assert (made.save.every, made.validation.limit) == (4, 4)
    laughs = "a0: &a0 ['${train.steps}', '${train.steps}']\n"
    laughs += "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 12))
    assert "has more than 20,000 nodes" in refusal(compose, f"{STEPS}{laughs}")


def test_billions_of_laughs_are_refused(compose: Compose) -> None:
    """Ten references to each level before would be 10^9 texts."""
    levels = "".join(f"    b{n}: '{f'${{model.config.b{n - 1}}}' * 10}'\n" for n in range(1, 10))
    text = f"model:\n  path: tiny\n  config:\n    b0: lol\n{levels}{PARTS}{STEPS}"
    refused = refusal(compose, text, base="").splitlines()
    assert len(refused) == 8  # all but the first level
    assert all("which refers to" in line for line in refused)
    long = "x" * (MAX_BYTES // 4)
    text = f"model:\n  path: tiny\n  config:\n    b0: {long}\n    b1: '{'${model.config.b0}' * 5}'\n{PARTS}{STEPS}"
    message = f"model.config.b1 refers to '${{model.config.b0}}', but all references have more than {MAX_BYTES:,}"
    assert message in refusal(compose, text, base="")
    text = text.replace("x" * (MAX_BYTES // 4), "9" * 4000).replace("${model.config.b0}", "${model.config.b0}" * 60)
    assert message in refusal(compose, text, base="")  # numbers are as long as texts


def test_many_references_are_each_resolved_once(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = 0
    find = References._value

    def counted(self: References, key: str, name: str) -> object:
        nonlocal looked_up
        looked_up += 1
        return find(self, key, name)

    monkeypatch.setattr(References, "_value", counted)
    tasks = "".join(
        f"    t{n}: {{class_path: Arithmetic, init_args: {{max_operand: '${{train.steps}}'}}}}\n" for n in range(99)
    )
    made = compose(f"train: {{steps: 5}}\nvalidation:\n  tasks:\n{tasks}", "--fabric.precision=32-true").recipe
    assert made.validation is not None
    assert made.validation.tasks is not None
    assert {vars(task)["max_operand"] for task in made.validation.tasks.values()} == {5}
    assert looked_up == 99


def test_numbers_as_keys(compose: Compose) -> None:
    """A number names an option of a mapping, and no element of a list."""
    pools = "placement:\n  roles: {critic: '0'}\n  pools: {0: {devices: 1, accelerator: cpu, precision: 32-true}}\n"
    ppo = BASE.replace("advantage: GRPO", "advantage: GAE") + "critic: {}\nfabric: {devices: 1}\n"
    made = compose(f"{pools}train: {{steps: 2, minibatches: '${{placement.pools.0.devices}}'}}\n", base=ppo).recipe
    assert made.train.minibatches == 1
    loggers = "log: {loggers: [{class_path: Wandb, init_args: {project: p}}]}\n"
    refused = refusal(compose, f"{STEPS}{loggers}rollout: {{sampling_column: '${{log.loggers.0.project}}'}}\n")
    assert "rollout.sampling_column refers to '${log.loggers.0.project}': unknown option" in refused
    betas = "train: {steps: 3, optimizer: {class_path: AdamW, init_args: {eps: '${train.optimizer.betas.0}'}}}\n"
    assert "unknown option 'train.optimizer.betas.0'" in refusal(compose, betas)
    assert "unknown option '1.2'" in refusal(compose, f"{STEPS}rollout: {{sampling_column: '${{1.2}}'}}\n")


def test_names_of_yaml_s_own_structure_hide_no_reference(compose: Compose) -> None:
    """Messages leave `init_args` out of keys, but a task may have this name; its options are resolved alike."""
    task = "{class_path: Arithmetic, init_args: {max_operand: '${train.steps}'}}"
    made = compose(f"train: {{steps: 5}}\nvalidation: {{tasks: {{init_args: {task}}}}}\n").recipe
    assert made.validation is not None
    assert made.validation.tasks is not None
    assert vars(made.validation.tasks["init_args"])["max_operand"] == 5
    code = "{class_path: PythonReward, init_args: {function: 'evil.py:f', allow_code: '${train.shuffle}'}}"
    reward = f"reward: {{class_path: Composite, init_args: {{rewards: {{init_args: {code}}}}}}}\n"
    refused = refusal(compose, f"{STEPS}{reward}", base=BASE.replace("reward: MathReward\n", ""))
    assert "allow_code is secret, asks for trust" in refused


def test_the_precision_that_is_chosen_is_referred_to(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlkit.run.build, "choose_precision", lambda _: "bf16-mixed")
    parsed = compose(f"{STEPS}rollout: {{sampling_column: '${{fabric.precision}}'}}\nfabric: {{precision: auto}}\n")
    assert parsed.recipe.fabric.precision == parsed.recipe.rollout.sampling_column == "bf16-mixed"
    assert yaml.safe_load(parsed.yaml)["rollout"]["sampling_column"] == "bf16-mixed"


def test_verbs_show_values(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"{BASE}{STEPS}rollout: {{group_size: '${{train.steps}}'}}\n")
    shown = rlkit_in_process("recipe", "show", "mine.yaml", "--train.steps=7", cwd=tmp_path).stdout
    assert yaml.safe_load(shown)["rollout"]["group_size"] == 7
    assert "x 7 samples" in rlkit_in_process("explain", "mine.yaml", "--train.steps=7", cwd=tmp_path).stdout
    assert (
        "group_size=7"
        in rlkit_in_process("recipe", "show", "mine.yaml", "--train.steps=7", "--python", cwd=tmp_path).stdout
    )


def test_a_recipe_in_python_refers_as_in_yaml(tmp_path: Path) -> None:
    section = {"save": {"every": "${train.steps}"}, "rollout": {"sampling_column": "$${a.b}"}}
    built, recorded, _ = rlkit.api._build("quickstart", {"train": {"steps": 4}, **section})
    assert built.save.every == 4
    assert built.rollout.sampling_column == "${a.b}"
    assert yaml.safe_load(recorded)["rollout"]["sampling_column"] == "$${a.b}"


def test_only_the_user_says_where_a_run_writes(compose: Compose, tmp_path: Path) -> None:
    folder = f"rollout: {{sampling_column: {tmp_path}}}\nsave: {{folder: '${{rollout.sampling_column}}'}}\n"
    assert "which no recipe file may set" in refusal(compose, STEPS + folder)
    folder = f"rollout: {{sampling_column: {tmp_path}}}\n"
    refused = refusal(compose, STEPS + folder, "--save.folder=${rollout.sampling_column}")
    assert "save.folder is secret, asks for trust or leads out of the run folder" in refused
    assert os.listdir(tmp_path) == ["mine.yaml"]
