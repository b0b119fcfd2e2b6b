"""Pre-flight: the plan's arithmetic, the template's proof, the reward's trial."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rlkit_authors.models import save_random_model

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.data.data import load_data
from rlkit.models.load import load_policy, load_tokenizer
from rlkit.models.save import save_policy
from rlkit.ops.batching import assign
from rlkit.recipe import Lora, Model
from rlkit.rollout.template import CALL_ID, USER, ChatTemplate
from rlkit.rollout.template_check import check_template
from rlkit.run.preflight import plan
from rlkit.run.preflight.structure_texts import structured_texts
from rlkit.types import Prompt, Score, Structure, Trajectory

DPO = ("--loss=DPO", "--advantage=null")
FEW = "--task.max_operand=12"
"""169 problems instead of 10,000, of which the longest prompt has 30 tokens, too."""


def check(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["recipe", "check", "quickstart", FEW, *options]) == 0
    return capsys.readouterr().out


def test_the_plan_says_how_sizes_work_out(capsys: pytest.CaptureFixture[str]) -> None:
    """33 prompts on 2 ranks in 2 mini-batches: 32 or 34 would be even. Rows of 30 + 12 tokens: 47 in 2000."""
    out = check(
        capsys, "--train.prompts_per_step=33", "--train.minibatches=2", "--train.max_tokens_per_micro_batch=2000",
        "--fabric.devices=2", "--fabric.strategy=ddp",
    )  # fmt: skip
    assert "100 steps of 33 prompts x 8 samples = 264 trajectories, 2 optimizer steps each" in out
    assert "32 or 34 prompts would be even" in out
    assert "2 ranks: 16.5 prompts each" in out
    assert "longest prompt 30 tokens, answers up to 12, context 4096" in out
    assert "at most 2000 tokens: 47 of the longest rows" in out
    assert "reward: 1 for the reference answer" in out


def test_long_rows_and_truncated_completions_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = check(capsys, "--train.max_tokens_per_micro_batch=40", "--rollout.sampling.max_tokens=5000")
    assert "answers to it end after 4066" in out
    assert "the longest row has 4096 tokens, more than train.max_tokens_per_micro_batch = 40" in out


def test_a_context_below_the_positions_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rotations = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    save_random_model(tmp_path, "phi3", original_max_position_embeddings=160, rope_scaling=rotations)
    out = check(capsys, f"--model.path={tmp_path}")
    assert "context: 160 of the model's 512 positions; a longer row" in out
    assert "answers up to 12, context 160" in out


def test_a_row_of_exactly_a_micro_batch_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """30 tokens of the longest prompt and 12 of its answer."""
    assert "at most 42 tokens: 1 of the longest rows" in check(capsys, "--train.max_tokens_per_micro_batch=42")
    assert "the longest row has 42 tokens, more than" in check(capsys, "--train.max_tokens_per_micro_batch=41")


def test_a_group_that_the_loss_reads_has_all_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """8 rows of 42 tokens."""
    fits, larger = (f"--train.max_tokens_per_micro_batch={limit}" for limit in (336, 335))
    assert "at most 336 tokens: 8 of the longest rows" in check(capsys, *DPO, fits)
    assert "the longest group has 336 tokens, more than" in check(capsys, *DPO, larger)
    longer = ("--task.max_operand=99", "--train.max_tokens_per_micro_batch=40")
    pairs = ("--rollout.engine=Recorded", "--task.mistakes=1", *longer)
    assert "the longest group has 78 tokens, more than" in check(capsys, *DPO, *pairs)  # two of 30 and 9 tokens
    assert "a step, estimated: 64 rows of a prompt of " in check(capsys, *DPO, *pairs)


def test_memory_is_estimated_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and two moments: 3 x 477,824 x 4 bytes = 5 MiB. A step has 256 rows of 42 tokens = 10,752 tokens.

    Sampling: 3 layers x 2 x 64 numbers x 4 bytes a token = 16 MiB. Learning: 3 layers x (33 x 128 + 16 x 256) bytes
    for each of 1,280 tokens = 30 MiB, gradients of activations, 3 x 4 x 256 + 16 x 128 bytes a token = 6 MiB,
    and of 477,824 weights x 4 bytes = 2 MiB, and 4 bytes for 1,280 rows of 264 logits = 1 MiB.
    """
    out = check(capsys)
    sizes = dict(re.findall(r"^ ([a-z ,]+?) +│ +([\d,]+) *$", out, re.M))
    assert sizes.pop("weights and optimizer") == "5"
    assert sizes.pop("sampling, besides") == "16"
    assert sizes.pop("learning, besides") == "40"
    assert sizes.pop("at the peak of a step") == "45"
    assert "memory of this machine (--gpu h100 plans for a GPU) │" in " ".join(out.split())
    # of a reference, 477,824 x 4 bytes more; a group of 8 rows instead of one of them at least
    small = check(capsys, *DPO, "--train.max_tokens_per_micro_batch=42")
    assert "weights and optimizer │ 7" in " ".join(small.split())
    assert "learning, besides │ 12" in " ".join(small.split())  # of 336 tokens


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_memory_is_estimated_without_attention(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A configuration as it is published: it has no number of heads."""
    file = save_random_model(tmp_path, kind, state_size=8, num_heads=8, head_dim=8, n_groups=1) / "config.json"
    values = json.loads(file.read_text())
    for name in ("num_attention_heads", "num_key_value_heads"):
        del values[name]
    file.write_text(json.dumps(values))
    assert "free" in check(capsys, "--model.path", str(tmp_path), "--gpu=24GB")


def test_the_reference_of_an_adapter_is_said_to_be_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model("tiny", lora=Lora(4, 8))
    save_policy(load_policy(model), load_tokenizer(model), tmp_path / "adapter")
    lora = ("--model.lora.rank=4", "--train.lr=1e-4")
    further = (f"--model.path={tmp_path / 'adapter'}", "--model.lora.alpha=8", *lora)
    warning = "KL is measured against the base without the adapter"
    assert warning in check(capsys, *further, "--kl_loss.coef=0.1")
    assert warning not in check(capsys, *further)
    assert warning not in check(capsys, *lora, "--kl_loss.coef=0.1")


def test_a_reward_that_cannot_tell_right_from_wrong_is_warned_of() -> None:
    prompt = Prompt("p", [USER], "7")

    async def constant(trajectories: object) -> list[Score]:
        return [Score(1.0), Score(1.0)]

    async def strict(trajectories: object) -> list[Score]:
        return [Score(0.0), Score(0.0)]

    async def inverted(trajectories: object) -> list[Score]:
        return [Score(0.1), Score(0.4)]

    async def broken(trajectories: object) -> list[Score]:
        return [Score(None, error="no service"), Score(0.0)]

    def tried(scorer: plan.Scorer, *prompts: Prompt) -> plan.Trial:
        return asyncio.run(plan.try_reward(scorer, prompts))

    question = repr(USER["content"])
    both = f"warning: reward: 1 for the reference answer '7' to {question}, 1 for 'I do not know.'"
    assert tried(constant, prompt, prompt).lines == [f"{both}: both are scored alike", both]
    [of_json] = tried(strict, prompt).lines
    assert of_json.startswith(
        f"reward: 0 for the reference answer '7' to {question}, 0 for 'I do not know.': fine if answers"
    )
    without_reference = Prompt("p", [USER], None)
    for scorer, reward in ((constant, 1), (strict, 0)):  # neither answer is right, so nothing is to be told apart
        [line] = tried(scorer, without_reference).lines
        assert line == f"reward: {reward} for an empty answer to {question}, {reward} for 'I do not know.'"
    assert tried(inverted, prompt).lines == [
        f"warning: reward: 0.1 for the reference answer '7' to {question}, 0.4 for 'I do not know.'"
        ": the wrong answer is scored higher"
    ]
    assert tried(broken, prompt) == ([f"the reward fails on '7' in answer to {question}: no service"], True)


def test_the_trial_scores_what_the_structure_allows() -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}

    async def of_json(trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(float(json.loads(t.text)["sum"] == 62)) for t in trajectories]

    prompt = Prompt("p", [USER], "62")
    structure = Structure(json_schema={**schema, "additionalProperties": False})
    [line] = asyncio.run(plan.try_reward(of_json, [prompt], structure)).lines
    assert line.startswith("reward: 1 for the reference answer '{\"sum\": 62}' to ")
    assert line.endswith("0 for '{\"sum\": 0}'")
    endless = Structure(regex="<think>.+</think>[0-9]+")
    assert "no short text follows" in asyncio.run(plan.try_reward(of_json, [prompt], endless)).lines[0]


@pytest.mark.parametrize(
    ("structure", "reference", "texts"),
    [
        (Structure(regex="(yes|no)"), "no", ("no", "yes")),
        (Structure(regex=r"Answer: \d+"), "62", ("Answer: 62", "Answer: 0")),
        (Structure(json_schema={"enum": ["a", "b"]}), "a", ('"a"', '"b"')),
        (Structure(json_schema={"type": "string"}), 'a "b"\n', ('"a \\"b\\"\\n"', '""')),
        (Structure(json_schema={"type": "integer"}), "many", ("0", "0")),
        (
            Structure(json_schema={"type": "array", "items": {"type": "number"}, "minItems": 2}),
            "3",
            ("[3, 3]", "[0, 0]"),
        ),
    ],
)
def test_texts_of_a_structure_hold_the_reference(structure: Structure, reference: str, texts: tuple[str, str]) -> None:
    assert structured_texts(structure, reference) == texts


def test_a_reward_that_fails_is_refused_as_in_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def bad(text):\n    raise ValueError('no')\n", encoding="utf-8")
    function = f"--reward.function={tmp_path}/bad.py:bad"
    words = ["recipe", "check", "quickstart", FEW, "--reward=PythonReward", function, "--reward.allow_code=true"]
    assert main([*words, "--deep", "--fabric.accelerator=cpu"]) == 2
    assert re.search(
        r"ValueError: no \(.*bad.py, line 2: raise ValueError\('no'\)\); fix it\n", capsys.readouterr().err
    )
    remote = (FEW, "--reward=RemoteReward", "--reward.url=http://127.0.0.1:9")
    assert main(["recipe", "check", "quickstart", *remote, "--reward.timeout=1"]) == 2
    assert "fix it, or set train.require_reward: false if its service starts later" in capsys.readouterr().err
    out = check(capsys, *remote, "--reward.timeout=1", "--train.require_reward=false")
    assert "warning: the reward fails on" in out


def test_groups_go_to_the_rank_with_the_least() -> None:
    """9 to rank 0, 7 to rank 1, 6 to rank 1 (13), 5 to rank 0 (14), 2 to rank 1 (15)."""
    assert assign([5, 9, 2, 7, 6], 2) == [0, 0, 1, 1, 1]
    assert assign([], 3) == []


def tokenizer_with(template: str) -> object:
    tokenizer = load_tokenizer(Model("tiny"))
    tokenizer.chat_template = template
    return tokenizer


CHATML = (Path(plan.__file__).parents[2] / "models" / "tiny" / "chat_template.jinja").read_text()


def test_a_delta_is_what_the_template_adds_after_the_end_token() -> None:
    """Prompt + the policy's own tokens + delta is the template's rendering of the whole conversation."""
    tokenizer = load_tokenizer(Model("tiny"))
    template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    answer = [*tokenizer.encode("It is 7.", add_special_tokens=False), tokenizer.eos_token_id]
    reply = {"role": "user", "content": "Are you sure?"}
    flat = template.start([USER]) + answer + template.delta([reply])
    assert flat == tokenizer.apply_chat_template(
        [USER, {"role": "assistant", "content": "It is 7."}, reply], add_generation_prompt=True, return_dict=False
    )
    tool = template.delta([{"role": "tool", "content": "7", "tool_call_id": CALL_ID}])
    assert tokenizer.decode(tool) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"


def proof(template: str) -> str:
    tokenizer = tokenizer_with(template)
    return "\n".join(check_template(ChatTemplate(tokenizer, {tokenizer.eos_token_id})).warnings)  # type: ignore[attr-defined]


def test_the_proof_of_a_template() -> None:
    assert proof(CHATML) == ""
    assert "continues with '\\n'" in proof(CHATML.replace("<|im_end|>", ""))
    strips = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}"
    )
    assert "strips thinking from earlier turns" in proof(strips)
    last_only = CHATML.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
    assert "renders earlier turns anew" in proof(last_only)
    assert "does not render an assistant's turn as it was written" in proof(
        CHATML.replace("m['content']", "m['content'] | upper")
    )


def test_doctor_examines_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "tiny"]) == 0
    out = capsys.readouterr().out
    assert "477,824 parameters, context 4096" in out
    assert "a tool turn is appended" in out
    for wrong in (
        ["--modle=tiny"],
        ["--model"],
        ["--model="],
        ["--model", "tiny", "more"],
        ["--model=tiny", "more"],
        ["tiny"],
    ):
        assert main(["doctor", *wrong]) == 2


def test_a_deep_check_measures_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--train.prompts_per_step=2", "--rollout.group_size=2", "--train.max_tokens_per_micro_batch=200")
    out = check(capsys, "--deep", "--fabric.accelerator=cpu", *small)
    assert "reward: 1 for the reference answer" in out
    measured = [float(line.split()[2].replace(",", "")) for line in out.splitlines() if "memory, measured" in line]
    assert len(measured) == 4
    assert 100 < measured[0] <= measured[-1]


def test_prompts_are_measured_with_their_tools() -> None:
    data = load_data(parse("fit", ["--recipe=quick_tool"]).recipe)
    plain = data.longest
    template = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
    data.dialogue.tokenizer.chat_template = template + data.dialogue.tokenizer.chat_template
    data.bind_tools()
    assert data.longest == plain + len("calculator")  # a token is a byte
    data.dialogue.context = data.longest
    with pytest.raises(RecipeError, match=rf"has {data.longest} tokens, but the context .* is {data.longest} "):
        data.bind_tools()


def test_a_prompt_that_was_measured_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the samples of its group nor after the parts are bound."""
    data = load_data(parse("fit", ["--recipe=quickstart", "--train.steps=50"]).recipe)  # 1600 prompts
    data.bind_tools()
    rendered: list[object] = []
    monkeypatch.setattr(
        data.dialogue.tokenizer, "apply_chat_template", lambda *arguments, **_: rendered.append(arguments)
    )
    starts = [data.dialogue.template.start(prompt.messages) for step in (1, 50) for _, prompt in data.prompts(step)]
    assert not rendered
    starts[0].append(0)  # what the caller does with it changes nothing
    assert data.dialogue.template.start(data.prompts(1)[0][1].messages) == starts[0][:-1]
