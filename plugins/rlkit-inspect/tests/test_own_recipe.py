"""A recipe of one's own from a table and a function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rlkit_inspect import recipe
from rlkit_inspect.own_recipe import SAVINGS, own_recipe, recorded_recipe

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.models.load import load_tokenizer
from rlkit.recipe import Model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def score(text, label):\n    return float(label in text)\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("columns", "prompt", "answer"),
    [
        (["id", "Question", "Answer"], "Question", "Answer"),
        (["label", "text"], "text", "label"),
        (["review", "stars"], "review", "stars"),
        (["prompt"], "prompt", None),
        (["input", "notes: #1", "target"], "input", "target"),
        (["prompt", "Gold", "source"], "prompt", "Gold"),
    ],
)
def test_columns_are_read_by_their_names(folder: Path, columns: list[str], prompt: str, answer: str | None) -> None:
    rows = [{column: f"{column} {i}" for column in columns} for i in range(400)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = yaml.safe_load(own_recipe("mine.jsonl", "reward.py:score", "tiny"))["task"]["init_args"]
    assert (options["prompt_field"], options["answer_field"]) == (prompt, answer)
    assert options["validation_split"] == 0.38  # of 400 rows 150
    (folder / "mine.yaml").write_text(own_recipe("mine.jsonl", "reward.py:score", "tiny"), encoding="utf-8")
    assert parse("fit", ["--recipe", "mine.yaml"]).recipe.train.prompts_per_step == 16


def test_an_answer_under_another_name_is_a_guess(folder: Path) -> None:
    rows = [{"prompt": f"{i} + 1", "sum": str(i + 1), "lang": "en"} for i in range(9)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = own_recipe("mine.jsonl", "reward.py:score", "tiny")
    assert 'answer_field: "sum"  # a guess: no column has a usual name for answers\n' in text


def test_two_rewards_are_refused(folder: Path) -> None:
    (folder / "mine.csv").write_text("prompt,answer\na,b\nc,d\n", encoding="utf-8")
    words = ["new", "new.yaml", "--task=mine.csv", "--reward=MathReward", "--reward", "QAReward"]
    with pytest.raises(RecipeError, match="--reward is given twice.*Composite"):
        recipe.run(words)
    assert not (folder / "new.yaml").exists()


def test_a_model_of_the_hub_gets_options_that_suit_it(folder: Path) -> None:
    (folder / "mine.csv").write_text("prompt,answer\na,b\nc,d\n", encoding="utf-8")
    recipe = yaml.safe_load(own_recipe("mine.csv", "reward.py:score", "Qwen/Qwen2.5-0.5B-Instruct"))
    assert (recipe["train"]["lr"], recipe["rollout"]["sampling"]["max_tokens"]) == (1e-6, 512)
    assert recipe["fabric"] == {"precision": "bf16-mixed"}
    assert "fabric" not in yaml.safe_load(own_recipe("mine.csv", "reward.py:score", "tiny"))


def test_names_of_files_and_columns_stay_data(folder: Path) -> None:
    (folder / 'a"b: {c}.csv').write_text('"x: [y","z}#"\nprompt,answer\nprompt 2,answer 2\n', encoding="utf-8")
    text = own_recipe('a"b: {c}.csv', "reward.py:score", 'm: "odd"')
    recipe = yaml.safe_load(text)
    assert recipe["model"]["path"] == 'm: "odd"'
    assert recipe["task"]["init_args"]["path"] == 'a"b: {c}.csv'
    assert recipe["task"]["init_args"]["prompt_field"] == "x: [y"
    assert recipe["train"]["prompts_per_step"] == 1


def test_a_line_break_in_a_name_writes_no_line(folder: Path) -> None:
    name = "a\nreward: null\U0001f600"
    rows = [{name: "x", "answer": "y"}, {name: "z", "answer": "y"}]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = own_recipe("mine.jsonl", "reward.py:score", "tiny")
    assert text.count("\nreward: ") == 1
    assert yaml.safe_load(text)["task"]["init_args"]["prompt_field"] == name


def test_rows_without_columns_are_refused(folder: Path) -> None:
    (folder / "mine.jsonl").write_text("{}\n{}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="has no columns"):
        own_recipe("mine.jsonl", "reward.py:score", "tiny")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "gone.csv", "--reward", "reward.py:score"], "--task is 'gone.csv', which does not exist"),
        (["--task", "sums.csv", "--reward", "reward.py"], "expected FILE.py:FUNCTION, such as reward.py:score"),
        (["--task", "sums.csv", "--reward", "gone.py:score"], "but there is no such file; "),
        (["--task", "sums.csv", "--reward", "rewards.py:score"], "no such file; did you mean 'reward.py'?"),
        (
            ["--task", "sums.csv", "--reward", "reward.py:scor"],
            "--reward is 'reward.py:scor', but reward.py has no function 'scor'; did you mean 'score'?",
        ),
        (
            ["--task", "sums.csv"],
            "needs --reward FILE.py:FUNCTION, or --reward NAME: its columns are ['question', 'total']",
        ),
        (["--task=sums.csv", "--reward=reward.py:score", "--train.lr=1"], "change the rest in the file"),
        (["--task", "one.csv", "--reward", "reward.py:score"], "has 1 row, expected at least 2"),
        (["--task=sums.csv", "--reward=MathRewrad"], "did you mean 'MathReward'?"),
        (["--task=sums.csv", "--reward=MathReward", "--reward.format=1"], "reward MathReward has no option 'format'"),
        (["--task=sums.csv", "--reward=ModelReward"], "path"),
        (["--task=sums.csv", "--reward=MathReward", "--gpu=h99"], "--gpu is 'h99', expected h100"),
        ([], "or your data and reward: --task mine.csv --reward reward.py:score"),
    ],
)
def test_what_cannot_be_written_is_explained(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (folder / "one.csv").write_text("question,answer\n1 + 1 = ?,2\n", encoding="utf-8")
    assert main(["data", "sample", "sums.csv"]) == 0
    assert main(["recipe", "new", "mine.yaml", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "mine.yaml").exists()


@pytest.mark.parametrize(
    ("words", "reward"),
    [
        (["ExactReward"], "ExactReward"),
        (["MathReward"], "MathReward"),
        (
            ["MathReward", "--reward.format_weight=0.1"],
            {"class_path": "MathReward", "init_args": {"format_weight": 0.1}},
        ),
    ],
)
def test_a_reward_may_be_named(folder: Path, words: list[str], reward: object) -> None:
    assert main(["data", "sample", "sums.csv"]) == 0
    assert main(["recipe", "new", "mine.yaml", "--task", "sums.csv", "--reward", *words]) == 0
    assert yaml.safe_load((folder / "mine.yaml").read_text(encoding="utf-8"))["reward"] == reward
    assert parse("fit", ["--recipe", "mine.yaml"])


TURN = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("row", "loss"),
    [
        ({"prompt": "1 + 1 = ?", "chosen": "2", "rejected": "3"}, "DPO"),
        ({"chosen": [TURN], "rejected": [TURN], "prompt": [{"role": "user", "content": "1 + 1 = ?"}]}, "DPO"),
        ({"prompt": "1 + 1 = ?", "completion": "2", "label": True}, "KTO"),
        ({"Question": "1 + 1 = ?", "completion": "2"}, "CrossEntropy"),
        ({"prompt": "1 + 1 = ?", "completion": "2", "label": "easy"}, "CrossEntropy"),
        ({"messages": [{"role": "user", "content": "1 + 1 = ?"}, TURN]}, "CrossEntropy"),
        ({"text": "1 + 1 = 2"}, "CrossEntropy"),
    ],
)
def test_rows_with_completions_need_no_reward(folder: Path, row: dict[str, object], loss: str) -> None:
    lines = [json.dumps(row).replace("1 + 1", f"{number} + 1") for number in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert main(["recipe", "new", "mine.yaml", "--task", "rows.jsonl"]) == 0
    recipe = parse("fit", ["--recipe", "mine.yaml"]).recipe
    assert type(recipe.loss).__name__ == loss
    assert (recipe.train.prompts_per_step, recipe.validation is not None) == (20, True)
    assert main(["recipe", "check", "mine.yaml"]) == 0


def test_the_first_value_of_a_column_decides(folder: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "0 + 1 = ?", "completion": None, "label": None}]
    rows += [{"prompt": f"{n} + 1 = ?", "completion": str(n + 1), "label": False} for n in range(1, 9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert yaml.safe_load(recorded_recipe("rows.jsonl", "tiny"))["loss"] == "KTO"


def test_a_column_without_values_records_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "1 + 1 = ?", "chosen": None, "rejected": None, "answer": "2"}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
    assert main(["recipe", "new", "mine.yaml", "--task", "rows.jsonl"]) == 2
    assert "record no completions" in capsys.readouterr().err


@pytest.mark.parametrize(("loss", "rate"), [("DPO", 1e-6), ("CrossEntropy", 2e-5)])
def test_a_model_of_the_hub_learns_from_completions_at_the_usual_rate(folder: Path, loss: str, rate: float) -> None:
    row = {"prompt": "a", **({"chosen": "b", "rejected": "c"} if loss == "DPO" else {"completion": "b"})}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
    written = yaml.safe_load(recorded_recipe("rows.jsonl", "Qwen/Qwen2.5-0.5B-Instruct"))
    assert (written["loss"], written["train"]["lr"]) == (loss, rate)
    with_lora = yaml.safe_load(recorded_recipe("rows.jsonl", "Qwen/Qwen2.5-7B-Instruct", SAVINGS[2]))
    assert (with_lora["model"]["lora"], with_lora["train"]["lr"]) == ({"rank": 16}, pytest.approx(10 * rate))


@pytest.fixture
def seven_billion(folder: Path) -> str:
    """Return the folder of a model of 7B parameters without its weights, which a plan does not need."""
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    config = {**shape, "model_type": "qwen2", "num_key_value_heads": 4, "vocab_size": 152064}
    load_tokenizer(Model("tiny")).save_pretrained(folder / "7b")
    (folder / "7b" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}), encoding="utf-8")
    assert main(["data", "sample", "sums.csv"]) == 0
    return "7b"


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["24GB", "h100"])
def test_a_large_model_gets_adapters_that_fit(seven_billion: str, gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", "sums.csv", "--reward", "MathReward", "--model", seven_billion, "--gpu", gpu]
    assert main(["recipe", "new", "mine.yaml", *words]) == 0
    assert "LoRA" in capsys.readouterr().out
    recipe = yaml.safe_load(Path("mine.yaml").read_text(encoding="utf-8"))
    assert (recipe["model"]["lora"], recipe["train"]["lr"]) == ({"rank": 16}, 1e-5)
    assert main(["recipe", "check", "mine.yaml", "--gpu", gpu]) == 0


def test_a_small_model_is_trained_in_full(folder: Path) -> None:
    assert main(["data", "sample", "sums.csv"]) == 0
    words = ["--task", "sums.csv", "--reward", "reward.py:score", "--gpu", "24GB"]
    assert main(["recipe", "new", "mine.yaml", *words]) == 0
    assert yaml.safe_load((folder / "mine.yaml").read_text(encoding="utf-8"))["model"] == {"path": "tiny"}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "rlkit recipe check mine.yaml, and"),
        (["--gpu", "24GB"], "rlkit recipe check mine.yaml --gpu 24GB, and"),
        (["--model", "org/model"], "rlkit recipe check mine.yaml --gpu 24GB (your GPU's memory), and"),
    ],
)
def test_the_check_that_follows_plans_for_the_gpu(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    assert main(["data", "sample", "sums.csv"]) == 0
    assert main(["recipe", "new", "mine.yaml", "--task", "sums.csv", "--reward", "reward.py:score", *words]) == 0
    assert hint in capsys.readouterr().out


def test_a_single_row_is_counted_as_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "two.csv").write_text("question,answer\n1 + 1 = ?,2\n1 + 2 = ?,3\n", encoding="utf-8")
    assert main(["recipe", "new", "mine.yaml", "--task", "two.csv", "--reward", "MathReward"]) == 0
    assert main(["recipe", "check", "mine.yaml"]) == 0
    assert "ok: 1 training row, 1 validation prompt, context" in capsys.readouterr().out


def test_no_recipe_is_written_that_fits_no_gpu(seven_billion: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", "sums.csv", "--reward", "MathReward", "--model", seven_billion, "--gpu", "3GB"]
    assert main(["recipe", "new", "mine.yaml", *words]) == 2
    assert "take a smaller model" in capsys.readouterr().err
    assert not Path("mine.yaml").exists()


def test_the_sample_overwrites_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "sample", "sums.csv"]) == 0
    lines = (folder / "sums.csv").read_text(encoding="utf-8").splitlines()
    assert (lines[0], len(lines), len(set(lines))) == ("question,total", 301, 301)
    assert all(eval(line.replace(" = ?,", " == ")) for line in lines[1:])
    for words in (["sums.csv"], [], ["sums.txt"], ["a.csv", "b.csv"], ["gone/sums.csv"]):
        assert main(["data", "sample", *words]) == 2
    assert "name a new file" in capsys.readouterr().err
    assert not any(folder.glob("*.txt"))


def test_a_recipe_is_not_overwritten(folder: Path) -> None:
    assert main(["data", "sample", "sums.csv"]) == 0
    (folder / "mine.yaml").write_text("mine", encoding="utf-8")
    assert main(["recipe", "new", "mine.yaml", "--task", "sums.csv", "--reward", "reward.py:score"]) == 2
    assert (folder / "mine.yaml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("a.csv", "Where is it?,delivery\nPay me,refund\nWhen?,delivery\n", "delivery"),
        ("b.csv", "1 + 1,2\n1 + 2,3\n1 + 3,4\n", "2"),
        ("c.tsv", "is 1.5 more?\t1.5\nmore?\t2.5\nless?\t0.5\n", "1.5"),
        ("d.csv", "prompt,label\nis it a label?,no\nsecond label,yes\n", None),
        ("e.jsonl", '{"prompt": "prompt", "2": "2"}\n{"prompt": "b", "2": "3"}\n', None),
    ],
)
def test_a_table_without_names_of_columns_is_noticed(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, value: str | None
) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    assert main(["recipe", "new", "mine.yaml", "--task", name, "--reward", "reward.py:score"]) == 0
    output = capsys.readouterr().out
    assert ("write a line of names above it" in output) == (value is not None)
    if value is not None:
        assert f"the columns' names, but '{value}' looks like a value" in output
