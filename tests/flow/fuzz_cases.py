"""What `fuzz.py` runs: one legal recipe, and everything that can be wrong with it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TRAIN = "".join(json.dumps({"prompt": f"{n} + 2 = ?", "answer": str(n + 2)}) + "\n" for n in range(8))

RECIPE = """
model: {path: tiny, lora: {rank: 4, alpha: 8.0, targets: all-linear}}
task:
  class_path: Jsonl
  init_args: {path: train.jsonl, validation_path: validation.jsonl, system: Be brief.}
rollout:
  engine: {class_path: TorchEngine, init_args: {max_rows: 16, max_kv_tokens: 4096}}
  group: 4
  sampling: {temperature: 1.0, max_tokens: 16, top_p: 1.0, top_k: 0, min_p: 0.0, stop_ids: []}
  filter: {class_path: ZeroSignal, init_args: {tries: 1}}
  max_gap: 0.1
reward:
  class_path: Composite
  init_args:
    rewards:
      math: {class_path: MathReward, init_args: {format_weight: 0.1, timeout: 5.0}}
      length: {class_path: Overlong, init_args: {max_tokens: 16, buffer: 4, factor: 1.0}}
    weights: {math: 1.0, length: 0.5}
    timeout: 20.0
advantage: {class_path: GRPO, init_args: {scale_by_std: true, eps: 1.0e-06}}
loss: {class_path: ClipLoss, init_args: {clip_low: 0.2, clip_high: 0.28, clip_dual: 3.0}}
train:
  steps: 2
  prompts_per_step: 4
  minibatches: 2
  epochs: 1
  max_tokens_per_micro_batch: 4096
  lr: 1.0e-05
  weight_decay: 0.01
  schedule: Cosine
  warmup_steps: 1
  max_grad_norm: 1.0
  entropy_coef: 0.001
  deadline: 60.0
  aggregation: token_mean
  ema: 0.9
  seed: 1
kl_loss: {coef: 0.001, estimator: k3}
shaping: {clip: 5.0, normalize: true}
correction: {level: token, low: 0.5, high: 2.0}
rejection: {statistic: k1, level: token, low: 0.5, high: 2.0}
tools: {calc: {class_path: Calculator, init_args: {bonus: 0.1, argument: expression}}}
parser: HermesParser
conversation: {turns: 3, tokens: 64, tool_calls: 4, seconds: 30.0, check: warn}
validation: {every: 1, limit: 2, samples: 1, sampling: {temperature: 0.5, max_tokens: 8}}
save: {every: 1, keep_last: 2, keep_best: validation/accuracy}
fabric: {accelerator: cpu, devices: 1}
"""

NULLABLE = {
    "model.lora",
    "rollout.filter",
    "rollout.max_gap",
    "train.ema",
    "train.aggregation",
    "kl_loss",
    "shaping",
    "correction",
    "rejection",
    "tools",
    "parser",
    "conversation",
    "validation",
    "validation.sampling",
    "save.keep_best",
    "critic",
    "loss.init_args.clip_dual",
    "correction.low",
    "rejection.low",
    "conversation.tokens",
    "conversation.tool_calls",
    "conversation.seconds",
    "shaping.clip",
    "reward.init_args.weights",
    "task.init_args.validation_path",
    "task.init_args.system",
    "rollout.engine.init_args",
    "rollout.filter.init_args",
    "advantage.init_args",
}
"""What may be null."""
SIGNED = {
    "train.entropy_coef",
    "reward.init_args.rewards.math.init_args.format_weight",
    "reward.init_args.weights.math",
    "reward.init_args.weights.length",
    "tools.calc.init_args.bonus",
}
"""Numbers that may be negative."""
FREE_TEXT = ("task.init_args.system", "tools.calc.init_args.argument", "model.lora.targets")


@dataclass
class Case:
    """One thing that is wrong: `make` writes files into a folder and returns the command line."""

    name: str
    make: Callable[[Path], list[str]]
    legal: str | None = None
    """Why it may be accepted; None if it must be refused."""


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of everything in a recipe, sections included."""
    for name, value in tree.items():
        here = f"{key}.{name}".lstrip(".")
        yield here, value
        if isinstance(value, dict):
            yield from leaves(value, here)


def spoil(key: str, value: Any) -> str:
    """Return the legal recipe, as YAML, with another value for a key."""
    tree = yaml.safe_load(RECIPE)
    section = tree
    *path, last = key.split(".")
    for name in path:
        section = section[name]
    section[last] = value
    return yaml.safe_dump(tree)


VALUES: dict[str, Any] = {
    "null": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "1e40": 1e40,
    "-1e40": -1e40,
    "-5": -5,
    "-0.5": -0.5,
    "0": 0,
    "2.5": 2.5,
    "999999999999": 999999999999,
    "10**25": 10**25,
    "true": True,
    "false": False,
    "text": "nosuch",
    "number as text": "0.25",
    "empty text": "",
    "long text": "x" * 100_000,
    "list": [1, 2],
    "empty list": [],
    "mapping": {"a": 1},
    "empty mapping": {},
    "class": {"class_path": "GRPO"},
    "path": "/dev/zero",
    "folder": "/proc",
    "dict_kwargs": {"dict_kwargs": {"a": 1}},
    "nested": {"a": {"b": [{"c": [None, float("nan")]}]}},
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "import": "os.system",
    "import number": "builtins.int",
    "date": "2024-13-45",
}


def reason(key: str, old: Any, name: str, override: bool) -> str | None:
    """Return why a value (by its name in VALUES) is legal for a key, None if it must be refused."""
    empty = name == "empty text" and (override or isinstance(old, dict))
    new = None if empty else VALUES[name]
    if (key, name) in (("advantage", "class"), ("fabric.devices", "list")):
        return "another estimator, and which devices"
    number = isinstance(old, int | float) and not isinstance(old, bool)
    if new is None:
        return "null is legal there" if key in NULLABLE else None
    if isinstance(old, bool):
        return "a truth value" if isinstance(new, bool) else None
    if number and name == "number as text":
        new = float(new)
    if number:
        most = 100 if key.endswith((".lr", ".temperature")) else 1e30
        if not isinstance(new, int | float) or isinstance(new, bool) or not abs(new) <= most:
            return None
        if new < 0:
            return "a number of either sign" if key in SIGNED else None
        whole = isinstance(old, int)
        if whole and (new != int(new) or new > 2**31):
            return None
        return "a number where a number is legal"
    if isinstance(old, str):
        return _reason_of_text(key, new)
    if isinstance(old, list):  # stop_ids
        return "a list of token ids" if new in ([1, 2], []) else None
    if new == {} and key.endswith(
        (
            "init_args",
            "sampling",
            "lora",
            "kl_loss",
            "save",
            "validation",
            "shaping",
            "correction",
            "rejection",
            "conversation",
            "weights",
            "tools",
            "fabric",
        )
    ):
        return "all options at their defaults"
    return None


def _reason_of_text(key: str, new: Any) -> str | None:
    if key not in FREE_TEXT:
        return None
    if key == "model.lora.targets" and isinstance(new, list):
        return "what modules a model has is known once it is loaded"
    return "a text" if isinstance(new, str) else None


def leaf_cases() -> Iterator[Case]:
    """Yield each value for each key, in the file and as an override."""
    for key, old in leaves(yaml.safe_load(RECIPE)):
        for name, new in VALUES.items():
            if new == old and type(new) is type(old):
                continue
            legal = {override: reason(key, old, name, override) for override in (False, True)}

            def in_file(folder: Path, key: str = key, new: Any = new) -> list[str]:
                return recipe(folder, spoil(key, new))

            def override(folder: Path, key: str = key, new: Any = new) -> list[str]:
                value = new if isinstance(new, str) else json.dumps(new)
                return [*recipe(folder, RECIPE), f"--{key.replace('.init_args', '')}={value}"]

            yield Case(f"file {key}: {name}", in_file, legal[False])
            if not any(part in key for part in ("class_path", "init_args.rewards", "tools", "init_args.weights.")):
                text = "an override is text" if key in FREE_TEXT else None
                merged = "merged with the recipe's" if isinstance(old, dict) and new == {} else None
                yield Case(f"override {key}: {name}", override, legal[True] or text or merged)


def recipe(folder: Path, text: str | bytes) -> list[str]:
    """Write a recipe and its data, and return the arguments that name it."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    (folder / "recipe.yaml").write_bytes(raw)
    (folder / "train.jsonl").write_text(TRAIN)
    (folder / "validation.jsonl").write_text(TRAIN)
    return ["--recipe", str(folder / "recipe.yaml")]


def key_cases() -> Iterator[Case]:
    """Yield unknown keys at each level."""
    tree = yaml.safe_load(RECIPE)
    places = [""] + [key for key, value in leaves(tree) if isinstance(value, dict)]
    for place in places:
        if place.endswith((".rewards", "tools", "weights")):
            continue  # names of the user's own
        for name in ("nosuch", "dict_kwargs", "class_path", "init_args", "__class__", "Steps", "a.b", ""):
            value: Any = {"nosuch": 1} if name in ("init_args", "dict_kwargs") else 1
            if name in ("class_path", "init_args") and f"{place}.{name}" in dict(leaves(tree)):
                continue
            key = f"{place}.{name}" if place else name

            def make(folder: Path, place: str = place, name: str = name, value: Any = value) -> list[str]:
                changed = yaml.safe_load(RECIPE)
                section = changed
                for part in place.split(".") if place else ():
                    section = section[part]
                section[name] = value
                return recipe(folder, yaml.safe_dump(changed))

            legal = "Fabric's own option" if place.startswith("fabric") and name == "nosuch.x" else None
            yield Case(f"unknown key {key!r}", make, legal)


def bomb(levels: int) -> str:
    """Return YAML whose aliases stand for 9**levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"train: *a{levels - 1}"])


def nested(levels: int) -> dict[str, Any]:
    """Return a reward inside a reward inside …"""
    reward: dict[str, Any] = {"class_path": "MathReward"}
    for _ in range(levels):
        reward = {"class_path": "Composite", "init_args": {"rewards": {"a": reward}}}
    return reward


FILES: dict[str, str | bytes] = {
    "empty": "",
    "blank": "\n\n  \n",
    "a number": "5",
    "a text": "train",
    "a list": "- train",
    "null": "null",
    "NaN": ".nan",
    "unclosed": "train: {steps: 2",
    "unclosed quote": 'model: {path: "tiny}',
    "tab": "train:\n\tsteps: 2",
    "two documents": f"{RECIPE}\n---\n{RECIPE}",
    "no colon": "train\nsteps 2",
    "bad indent": "train:\n  steps: 2\n lr: 1",
    "duplicate section": f"{RECIPE}\ntrain: {{steps: 3}}",
    "duplicate key": RECIPE.replace("steps: 2", "steps: 2\n  steps: 3"),
    "unknown alias": "train: *nosuch",
    "tag": "train: !!python/object/apply:os.system [ls]",
    "own tag": "train: !mine {a: 1}",
    "binary tag": "train: !!binary aGVsbG8=",
    "set": "train: !!set {a, b}",
    "date": f"{RECIPE}\nsave: 2024-13-45",
    "a date for a number": RECIPE.replace("steps: 2", "steps: 2024-01-01"),
    "number keys": f"{RECIPE}\n5: 6",
    "list as key": f"{RECIPE}\n? [a, b]\n: c",
    "null key": f"{RECIPE}\n? \n: c",
    "3,000 deep": "train: " + "[" * 3000 + "]" * 3000,
    "3,000 deep unclosed": "[" * 3000,
    "3,000 deep mappings": "".join("{" + f"a{n}: " for n in range(3000)) + "1" + "}" * 3000,
    "alias bomb": bomb(9),
    "small alias bomb": bomb(4),
    "itself": "train: &a {steps: *a}",
    "itself in a list": "train: &a [*a]",
    "itself at the top": "&a {train: *a}",
    "merge of itself": "train: &a {<<: *a, steps: 2}",
    "merge of a number": "train: {<<: 5, steps: 2}",
    "60 nested rewards": yaml.safe_dump({"reward": nested(60)}),
    "10 nested rewards": yaml.safe_dump({"reward": nested(10)}),
    "5,000 digits": RECIPE.replace("steps: 2", "steps: " + "9" * 5000),
    "5,000 digits as text": RECIPE.replace("steps: 2", f"steps: '{'9' * 5000}'"),
    "hex": RECIPE.replace("steps: 2", "steps: 0xZZ"),
    "UTF-16": RECIPE.encode("utf-16"),
    "UTF-16 without mark": RECIPE.encode("utf-16-le"),
    "UTF-32": RECIPE.encode("utf-32"),
    "latin-1": RECIPE.replace("Be brief", "S\xe9rieux").encode("latin-1"),
    "binary": bytes(range(256)) * 8,
    "NUL": b"\0" * 100,
    "ELF": b"\x7fELF" + os.urandom(64),
    "gzip": b"\x1f\x8b\x08" + bytes(60),
    "control": RECIPE.replace("Be", "\x07Be"),
    "surrogate": RECIPE.replace("Be brief.", "'\ud800'"),
    "2 MB": "# " + "x" * 2**21,
    "JSON": "{]",
    "100,000 keys": "{" + ", ".join(f"k{n}: {n}" for n in range(100_000)) + "}",
    "a long key": f"{'k' * 5000}: 1",
    "percent": "%YAML 9.9\n---\na: 1",
    "only a comment": "# nothing",
    "print_config": f"{RECIPE}\nprint_config: true",
    "recipe in recipe": f"{RECIPE}\nrecipe: other.yaml",
    "help": f"{RECIPE}\nhelp: true",
    "class text": f"{RECIPE}\ncritic: GAE",
}
LEGAL_FILES: dict[str, str | bytes] = {
    "BOM": b"\xef\xbb\xbf" + RECIPE.encode(),
    "a word for true as key": RECIPE.replace("tools: {calc:", "tools: {on:"),
    "DOS": RECIPE.replace("\n", "\r\n"),
    "carriage returns": RECIPE.replace("\n", "\r"),
    "anchor": RECIPE.replace("steps: 2", "steps: &n 2").replace("limit: 2", "limit: *n"),
    "JSON recipe": json.dumps(yaml.safe_load(RECIPE)),
    "document mark": f"---\n{RECIPE}...\n",
    "umlaut": RECIPE.replace("Be brief", "K\xfcrzer \u2603"),
}
PATHS = {
    "a folder": ".",
    "a device": "/dev/zero",
    "a terminal": "/dev/tty",
    "random": "/dev/urandom",
    "null": "/dev/null",
    "a pipe": "pipe",
    "missing": "nosuch.yaml",
    "empty": "",
    "long": "n" * 5000,
    "NUL": "a\0b",
    "memory": "/proc/self/mem",
    "link to itself": "loop",
    "link to nothing": "dangling",
    "surrogate": "\udc80.yaml",
    "user": "~nosuch/x.yaml",
    "url": "http://127.0.0.1:9/x.yaml",
    "dash": "-",
    "option": "--train.steps=2",
}
ARGUMENTS = (
    ["--train"],
    ["--train="],
    ["--train=/dev/zero"],
    ["--train=/proc"],
    ["--train=pipe"],
    ["--rollout=/dev/zero"],
    ["-"],
    ["--"],
    ["fit"],
    ["--=5"],
    ["--train.steps"],
    ["--train..steps=3"],
    ["--.steps=3"],
    ["--train.steps+=3"],
    ["--no_train.steps=1"],
    ["--reward=/dev/zero"],
    ["--reward=pipe"],
    ["--model.lora=/dev/zero"],
    ["--advantage.class_path=GRPO.x"],
    ["--advantage=."],
    ["--advantage=GRPO."],
    ["--advantage=rlkit"],
    ["--advantage=rlkit.advantages"],
    ["--advantage=rlkit.cli.main.main"],
    ["--advantage=builtins.exec"],
    ["--advantage.dict_kwargs.a=1"],
    ["--advantage.dict_kwargs={}"],
    ["--advantage.init_args=5"],
    ["--reward=&a [*a]"],
    ["--reward=[" * 50],
    ["--train=" + "[" * 3000],
    ["--train=" + "{a: " * 3000],
    ["--train.lr=" + "9" * 5000],
    ["--train=" + bomb(9)],
    ["--reward=" + json.dumps(nested(60))],
    ["--reward", json.dumps(nested(60))],
    ["--reward=" + json.dumps(nested(7))],
    ["--train.steps", "1", "2"],
    ["--fabric.callbacks=os.system"],
    ["--fabric.strategy=nosuch"],
    ["--fabric.devices=-3"],
    ["--fabric.precision=nosuch"],
    ["--fabric.plugins={}"],
    ["--fabric.loggers=5"],
    ["--tools=[]"],
    ["--tools={calc: 5}"],
    ["--tools={calc: null}"],
    ["--tools={'': Calculator}"],
    ["--reward.rewards={}"],
    ["--reward.rewards=5"],
    ["--reward.rewards={a: null}"],
    ["--reward.rewards={a: GRPO}"],
    ["--reward.weights={x: 1}"],
    ["--advantage=GDPO", "--advantage.weights={}"],
    ["--advantage=GDPO", "--advantage.weights={math: .nan}"],
    ["--recipe"],
    ["--task=Arithmetic", "--task.max_operand=1e40"],
    ["--task=Arithmetic", "--task.validation_size=-7"],
    ["--task=Arithmetic", "--task.max_operand=100000"],
    ["--task=HFDataset"],
    ["--task=HFDataset", "--task.path=/dev/zero"],
    ["--task=HFDataset", "--task.path=."],
    ["--task=GSM8K", "--task.path=/dev/zero"],
    ["--task=GSM8K", "--task.path=."],
    ["--reward=PythonReward"],
    ["--reward=PythonReward", "--reward.function=os:system"],
    ["--reward=RemoteReward", "--reward.url=file:///etc/passwd"],
    ["--reward=RemoteReward", "--reward.url=http://h", "--reward.retry.retries=-1"],
    ["--reward=ModelReward"],
    ["--reward=Router", "--reward.rewards={}"],
    ["--rollout.engine=SGLangServer", "--rollout.engine.servers=0"],
    ["--rollout.engine=SGLangServer", "--rollout.engine.urls=[http://h, 5]"],
    ["--rollout.engine=SGLangServer", "--rollout.engine.launch=null"],
    ["--rollout.engine=SGLangServer", "--rollout.engine.launch=5"],
    ["--rollout.engine=SGLangServer", "--rollout.engine.launch.tensor_parallel=.inf"],
    ["--rollout.engine=SGLangServer", "--rollout.engine.retry.hang_seconds=-1"],
    ["--interaction=Retry", "--interaction.tries=-1"],
    ["--interaction=Retry", "--interaction.tries=.nan"],
    ["--environment=Calculator"],
    ["--save.keep_best=nosuch"],
    ["--save.keep_best=validation/nosuch"],
    ["--save.folder="],
    ["--critic.lr=-1"],
    ["--critic=5"],
    ["--critic={}"],
    ["--log=5"],
    ["--log=[]"],
    ["--log.loggers=5"],
    ["--log.loggers=[{}]"],
    ["--log.loggers=[Wandb]"],
    ["--log.loggers=[{class_path: Wandb, init_args: {project: 5, offline: 7}}]"],
    ["--callbacks=[5]"],
    ["--callbacks={}"],
    ["--train.optimizer=5"],
    ["--train.optimizer.betas=[0.9]"],
    ["--train.optimizer.betas=[0.9, .nan]"],
    ["--train.schedule=null"],
    ["--train.warmup_ratio=1"],
    ["--reference=5"],
    ["--reference.mix=0"],
    ["--kl_reward.horizon=0"],
    ["--parser=5"],
    ["--parser=Calculator"],
    ["--validation=5"],
    ["--validation=true"],
)
LEGAL_ARGUMENTS = {
    "--train=": "an option without a value",
    "--fabric.plugins={}": "Fabric's own option",
    "--tools=[]": "no tools",
    "--save.folder=": "no folder of its own",
    "--task=HFDataset": "reads JSON lines too",
}
"""What among `ARGUMENTS` may be accepted, and why."""


def file_cases() -> Iterator[Case]:
    """Yield recipe files that are broken, paths that are none, and odd arguments."""
    for name, text in FILES.items():
        yield Case(f"file {name}", lambda folder, text=text: recipe(folder, text))
    for name, text in LEGAL_FILES.items():
        yield Case(f"file {name}", lambda folder, text=text: recipe(folder, text), "YAML in UTF-8")
    for name, path in PATHS.items():
        yield Case(f"path {name}", lambda folder, path=path: ["--recipe", path])
    for arguments in ARGUMENTS:
        name = " ".join(arguments)
        yield Case(
            f"arguments {name[:60]}",
            lambda folder, arguments=arguments: [*recipe(folder, RECIPE), *arguments],
            LEGAL_ARGUMENTS.get(name),
        )


ROWS: dict[str, str | bytes] = {
    "a number": '{"prompt": 5, "answer": "7"}',
    "null": '{"prompt": null, "answer": "7"}',
    "true": '{"prompt": true, "answer": "7"}',
    "a list of texts": '{"prompt": ["a", "b"], "answer": "7"}',
    "an empty list": '{"prompt": [], "answer": "7"}',
    "a mapping": '{"prompt": {"role": "user"}, "answer": "7"}',
    "messages without content": '{"prompt": [{"role": "user"}], "answer": "7"}',
    "messages without role": '{"prompt": [{"content": "a"}], "answer": "7"}',
    "a role that is a number": '{"prompt": [{"role": 5, "content": "a"}], "answer": "7"}',
    "content null": '{"prompt": [{"role": "user", "content": null}], "answer": "7"}',
    "content a number": '{"prompt": [{"role": "user", "content": 5}], "answer": "7"}',
    "half a pair": '{"prompt": "a\\ud800", "answer": "7"}',
    "half a pair inside": '{"prompt": [{"role": "user", "content": "\\udfff"}], "answer": "7"}',
    "half a pair in the answer": '{"prompt": "a", "answer": "\\ud800"}',
    "5,000 digits": f'{{"prompt": "a", "answer": {"9" * 5000}}}',
    "5,000 digits prompt": f'{{"prompt": {"9" * 5000}, "answer": "7"}}',
    "no prompt": '{"answer": "7"}',
    "no answer": '{"prompt": "a"}',
    "a list": "[1, 2]",
    "a bare number": "5",
    "a bare null": "null",
    "not JSON": "{prompt: a}",
    "unclosed": '{"prompt": "a"',
    "two on a line": '{"prompt": "a", "answer": "7"}{"prompt": "b", "answer": "7"}',
    "100,000 deep": "[" * 100_000,
    "deep inside": '{"prompt": ' + "[" * 5000,
    "UTF-16": TRAIN.encode("utf-16"),
    "UTF-16 without mark": TRAIN.encode("utf-16-le"),
    "UTF-32": TRAIN.encode("utf-32"),
    "latin-1": '{"prompt": "caf\xe9", "answer": "7"}'.encode("latin-1"),
    "binary": bytes(range(256)),
    "NUL": b"\0" * 10,
    "gzip": b"\x1f\x8b\x08\0",
    "empty": "",
    "blank": "\n\n",
    "too long": json.dumps({"prompt": "2 + 2 " * 20_000, "answer": "7"}),
    "NUL in a prompt": '{"prompt": "a\x00b", "answer": "7"}',
    "content a list of numbers": '{"prompt": [{"role": "user", "content": [1]}], "answer": "7"}',
}
LEGAL_ROWS: dict[str, str | bytes] = {
    "answer null": '{"prompt": "a", "answer": null}',
    "answer a number": '{"prompt": "a", "answer": 7}',
    "answer NaN": '{"prompt": "a", "answer": NaN}',
    "answer a list": '{"prompt": "a", "answer": [1]}',
    "empty prompt": '{"prompt": "", "answer": "7"}',
    "BOM": b"\xef\xbb\xbf" + TRAIN.encode(),
    "a duplicate key": '{"prompt": "a", "prompt": "b", "answer": "7"}',
    "a NUL written out": '{"prompt": "a\\u0000b", "answer": "7"}',
    "id a list": '{"prompt": "a", "answer": "7", "id": [1]}',
    "unknown role": '{"prompt": [{"role": "x", "content": "a"}], "answer": "7"}',
    "DOS": TRAIN.replace("\n", "\r\n"),
    "an assistant first": '{"prompt": [{"role": "assistant", "content": "a"}], "answer": "7"}',
    "extra fields": '{"prompt": "a", "answer": "7", "x": {"y": [1e999]}}',
    "a pair": '{"prompt": "\\ud83d\\ude00", "answer": "7"}',
}


def data_cases() -> Iterator[Case]:
    """Yield data files with one row that is wrong among eight, and paths that are no data files."""
    for split in ("train", "validation"):
        for name, row in (ROWS | LEGAL_ROWS).items():

            def make(folder: Path, split: str = split, row: str | bytes = row) -> list[str]:
                arguments = recipe(folder, RECIPE)
                raw = row if isinstance(row, bytes) else row.encode("utf-8", "surrogatepass")
                rest = "".join(TRAIN.splitlines(keepends=True)[:3]).encode()
                whole = raw if isinstance(row, bytes) or not row.strip() else raw + b"\n" + rest
                (folder / f"{split}.jsonl").write_bytes(whole)
                return arguments

            yield Case(f"{split} data {name}", make, "a row that can be used" if name in LEGAL_ROWS else None)
        for name, path in PATHS.items():
            option = "path" if split == "train" else "validation_path"
            if name in ("option", "url", "dash"):
                continue
            yield Case(
                f"{split} data path {name}",
                lambda folder, path=path, option=option: [*recipe(folder, RECIPE), f"--task.{option}={path}"],
            )


def noise_cases(count: int, rng: random.Random) -> Iterator[Case]:
    """Yield the legal recipe with some bytes changed at random."""
    for number in range(count):
        raw = bytearray(RECIPE.encode())
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(raw))
            match rng.randrange(4):
                case 0:
                    raw[place] = rng.choice(b"{}[]:,&*!|>'\"%@`#-\t\n 0aZ.\xff\x00")
                case 1:
                    del raw[place : place + rng.randint(1, 8)]
                case 2:
                    raw[place:place] = rng.choice(
                        (b"{", b"[", b"&a ", b"*a", b": ", b"\n", b"!!int ", b"- ", b"null", b"\xe9")
                    )
                case _:
                    raw[place:place] = raw[place : place + rng.randint(1, 40)]
        yield Case(
            f"noise {number}", lambda folder, raw=bytes(raw): recipe(folder, raw), "noise may leave a legal recipe"
        )
