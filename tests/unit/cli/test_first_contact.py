"""What newcomers type first: names that are nearly right, runs that are not here, several prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rlkit_inspect.recipe import SENTENCE_END

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.models.load import load_policy
from rlkit.models.source import locate
from rlkit.ops.logps import Reads
from rlkit.recipe import Model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("verb", "meant"),
    [("train", "fit"), ("trian", "fit"), ("eval", "validate"), ("valdate", "validate"), ("evaluat", "validate")],
)
def test_verbs_of_other_toolkits_are_named(verb: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb]) == 2
    assert f"did you mean {meant!r}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fit --receipe quickstart", "unknown option '--receipe'; did you mean '--recipe'?"),
        ("fit --receipe=quickstart", "unknown option '--receipe'; did you mean '--recipe'?"),
        ("fit quickstart --resum runs/x", "unknown option '--resum'; did you mean '--resume'?"),
        ("fit quickstart --ot=x", "unknown option '--ot'; did you mean '--out'?"),
        ("fit quickstart --fource", "unknown option '--fource'; did you mean '--force'?"),
        ("fit quickstart --rewrad=MathReward", "unknown option 'rewrad'; did you mean 'reward'?"),
        ("validate --chekpoint x", "unknown option '--chekpoint'; did you mean '--checkpoint'?"),
        ("generate --promt x", "unknown option '--promt'; did you mean '--prompt'?"),
        ("sweep quickstart --jsno", "unknown option '--jsno'; did you mean '--json'?"),
        ("data show --reciep quickstart", "unknown option '--reciep'; did you mean '--recipe'?"),
        ("explain --reciep quickstart", "unknown option '--reciep'; did you mean '--recipe'?"),
        ("recipe check quickstart --pgu 24GB", "unknown option '--pgu'; did you mean '--gpu'?"),
        ("recipe new m.yaml --task=x --reward=y --modle=z", "unknown option '--modle'; did you mean '--model'?"),
        ("export --chekpoint x", "unknown option '--chekpoint'; did you mean '--checkpoint'?"),
        ("report x --opne=1", "unknown option '--opne'; expected: --out, --max-mb, --serve, --port"),
        ("report x --sevre", "unknown option '--sevre'; did you mean '--serve'?"),
        ("diff x y --jsno", "unknown option '--jsno'; did you mean '--json'?"),
        ("doctor --modle tiny", "unknown option '--modle'; did you mean '--model'?"),
        ("plugins new x --kind reward --ot=y", "unknown option '--ot'; did you mean '--out'?"),
    ],
)
def test_a_misspelt_option_of_a_verb_is_answered_with_the_nearest(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_the_nearest_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*"abcdefgh", "sums.csv"):
        (folder / name).write_text("question,total\n1 + 1 = ?,2\n")
    task = ("--task=HFDataset", "--task.path=sum.csv", "--task.prompt_field=question", "--task.answer_field=total")
    assert main(["data", "stats", "--recipe=quickstart", *task]) == 2
    expected = f"task.path is 'sum.csv', which does not exist in {folder}; did you mean 'sums.csv'?"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "fit --resume gone",
        "validate --checkpoint gone",
        "generate --checkpoint gone",
        "report gone",
        "diff gone lost",
        "replay gone --step 1",
        "export --checkpoint gone --out out",
        "reward try quickstart --rollouts gone --reward ExactReward",
    ],
)
def test_a_missing_run_has_one_exit_status(words: str) -> None:
    assert main(words.split()) == 2


@pytest.mark.parametrize(
    ("path", "hint"),
    [("runs/rm", "train it first: rlkit fit --recipe quick_rm --out runs/rm"), ("runs/mine", " holds: nothing")],
)
def test_a_run_that_is_not_here_is_not_asked_of_the_hub(
    path: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=hint):
        locate(path)


def test_several_prompts_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ("2 + 3 = ?", "4 + 4 = ?")
    assert main(["generate", "quickstart", *(f"--prompt={text}" for text in prompts)]) == 0
    out = capsys.readouterr().out
    assert [out.count(text) for text in prompts] == [1, 1]


def test_generate_is_greedy_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """`tiny` forgets most carries, of which samples differ by the seed; its likeliest completion does not."""

    def complete(seed: int, *options: str) -> str:
        assert main(["generate", "quickstart", "--prompt=19 + 25 = ?", f"--train.seed={seed}", *options]) == 0
        return capsys.readouterr().out

    assert len({complete(seed) for seed in range(4)}) > 1
    assert len({complete(seed, "--greedy") for seed in range(4)}) == 1


def test_generate_sends_the_task_s_system_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (f"--task.path={tmp_path}/rows.jsonl", "--task.system=Add them.", "--task.validation_split=0.5")
    assert main(["generate", "quickstart", "--task=Jsonl", *options, "--prompt=4 + 4 = ?"]) == 0
    out = capsys.readouterr().out
    assert out.index("Add them.") < out.index("4 + 4 = ?")


def test_abbreviations_end_no_sentence() -> None:
    line = "Dr. GRPO, e.g. on GSM8K, on one GPU of 80 GB. It has no division."
    assert SENTENCE_END.split(line) == ["Dr. GRPO, e.g. on GSM8K, on one GPU of 80 GB.", "It has no division."]


def test_outputs_of_the_policy_are_no_views() -> None:
    """FSDP2 warns on each rank of a module that returns a view."""
    from rlkit.models.actor import Actor

    actor = Actor(load_policy(Model("tiny")))
    tokens = torch.arange(2, 14).reshape(2, 6)
    output = actor(tokens, torch.ones(2, 6, dtype=torch.bool), 1.0, Reads(entropy=True))
    tensors = [value for value in output if isinstance(value, torch.Tensor)]
    assert len(tensors) > 1
    assert all(tensor._base is None for tensor in tensors)
