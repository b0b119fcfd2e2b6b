"""What `placement:` refuses before anything is loaded, and how rows travel to a pool and back."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rlkit_placement import StartedPools, rows, wire
from rlkit_placement.started import PoolProcess

import rlkit
from rlkit.api.roles import placed_recipe
from rlkit.base.errors import PoolError, RecipeError
from rlkit.commands import parse
from rlkit.interfaces.launcher import ServerCommand, ServerSite
from rlkit.optimizers import AdamW
from rlkit.recipe import Fabric, Placement
from rlkit.types import RolloutBatch
from tests.conftest import rlkit_in_process

POOL = {"accelerator": "cpu", "devices": 1}
PPO = ("quick_ppo_rm", "--model.path=tiny", "--reward.rewards.proxy.path=rm", "--critic.path=rm")


def problems(tmp_path: Path, roles: dict[str, str], pool: dict[str, object], *options: str) -> str:
    """Return what `recipe check` prints of a recipe with these roles in a pool `a`."""
    recipe, *rest = options or PPO
    section = {"roles": roles, "pools": {"a": {**POOL, **pool}}}
    (tmp_path / "placement.yaml").write_text(yaml.safe_dump({"placement": section}))
    words = ("recipe", "check", f"--recipe={recipe}", "--recipe=placement.yaml", *rest)
    done = rlkit_in_process(*words, cwd=tmp_path)
    return done.stdout + done.stderr


CRITIC = {"critic": "a"}
LORA = "--model.lora.rank=4"


@pytest.mark.parametrize(
    ("roles", "pool", "options", "message"),
    [
        ({"critic": "b"}, {}, (), "placement.roles.critic is 'b', expected a pool of placement.pools: a"),
        ({"critic": "b"}, {}, (), "placement.pools.a has no role"),
        ({"judge": "a"}, {}, (), "placement.roles has 'judge', expected critic, reference, reward, teacher"),
        (CRITIC, {}, ("quickstart",), "placement.roles.critic is set, but the recipe has no `critic:`"),
        ({"reference": "a"}, {}, ("quickstart",), "but nothing reads a reference"),
        ({"reference": "a"}, {}, (*PPO, LORA), "with model.lora the reference is the policy without adapters"),
        ({"reference": "a"}, {}, (*PPO, "--reference.refresh_every=2"), "whose weights no pool gets"),
        ({"reward": "a"}, {}, ("quickstart",), "but the recipe has no ModelReward"),
        ({"reward": "a"}, {"strategy": "fsdp2"}, (), "reward models are not sharded"),
        ({"teacher": "a"}, {}, (), "no teacher is loaded from a path"),
        (CRITIC, {"devices": "auto"}, (), "placement.pools.a.devices is 'auto', expected a number"),
        (CRITIC, {"devices": 3}, (*PPO, "--fabric.devices=2"), "expected one to be a multiple of the other"),
        (CRITIC, {"num_nodes": 2}, (), "placement.pools.a has num_nodes or plugins, but `devices`"),
        (CRITIC, {"precision": "auto"}, (), "placement.pools.a.precision is 'auto'"),
        (CRITIC, {"precision": "bf16-true"}, (), "in which most small updates of AdamW round to zero"),
        (CRITIC, {"strategy": {"class_path": "FSDP2", "init_args": {"tensor_parallel": 2}}}, (), "tensor_parallel=2"),
        (CRITIC, {}, (*PPO, "--fabric.num_nodes=2"), "one machine without a launcher; set fabric.num_nodes: 1, or"),
        (CRITIC, {"devices": [1, 2]}, (*PPO, "--launcher=Slurm"), "chooses devices; set it to their number, 2"),
        (CRITIC, {"devices": 3}, (*PPO, "--fabric.devices=1", "--fabric.num_nodes=2"), "the trainer 2 ranks, expected"),
        (CRITIC, {}, (*PPO, "--launcher=Slurm"), "beside those of the ranks, which Slurm does not start; set launcher"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_named(
    tmp_path: Path, roles: dict[str, str], pool: dict[str, object], options: tuple[str, ...], message: str
) -> None:
    assert message in problems(tmp_path, roles, pool, *options)


def test_more_gpus_than_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    printed = problems(tmp_path, CRITIC, {"accelerator": "gpu", "devices": 4}, *PPO)
    assert "placement.pools.a would have the GPUs [0, 1, 2, 3]" not in printed
    gpu = ("--fabric.accelerator=gpu", "--fabric.devices=2")
    printed = problems(tmp_path, CRITIC, {"accelerator": "gpu", "devices": 4}, *PPO, *gpu)
    assert "placement.pools.a would have the GPUs [2, 3, 4, 5], but this machine has 4" in printed


def test_check_refuses_a_model_that_reads_pictures(tmp_path: Path) -> None:
    printed = problems(tmp_path, {"reference": "a"}, {}, "quick_image", "--kl_loss.coef=0.01")
    assert "which reads pictures, but `placement:` carries texts alone" in printed


def test_a_model_that_reads_pictures_is_refused(tmp_path: Path) -> None:
    parsed = parse("fit", ["--recipe=quick_image"])
    recipe = replace(parsed.recipe, placement=Placement({"reward": "a"}, {"a": Fabric(devices=1)}))
    ranks: Any = None  # none is asked before
    with pytest.raises(RecipeError, match="which reads pictures, but `placement:` carries texts alone"):
        StartedPools(recipe, ranks, tmp_path)


def test_a_socket_has_a_path_that_systems_take(tmp_path: Path) -> None:
    """A folder of temporary files may have a longer one; then the process listens at a port of this machine."""
    process = PoolProcess(("run", "a", "1", "."), {}, tmp_path / "log", 0, None)
    site = ServerSite(Path("/tmp/rlkit-pool-12345678"), "127.0.0.1", 20001, "python")
    words = ["python", "-m", "rlkit_placement", "run", "a", "1", "."]
    assert process._words(site) == [*words, "/tmp/rlkit-pool-12345678/socket"]
    assert process._words(site._replace(folder=Path("/tmp", "x" * 90))) == [*words, "127.0.0.1:20001"]
    process.close()


def test_a_step_whose_reward_model_was_lost_is_not_recorded() -> None:
    """A reward that fails would only leave out its samples, and the step would stand in the checkpoint."""
    pools = object.__new__(StartedPools)
    pool: Any = SimpleNamespace(lost="pool judge (reward) has lost its process 0", busy=0.0)
    pools._pools, pools._since = {"judge": pool}, 0.0
    with pytest.raises(PoolError, match="pool judge"):
        pools.idle()
    pool.lost = None
    assert pools.idle().keys() == {"judge"}


def test_a_process_on_another_node_loads_the_plugins_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gets no credential of theirs."""
    monkeypatch.setenv("RLKIT_DISABLE_PLUGINS", "games")
    monkeypatch.setenv("RLKIT_PASSWORD", "hunter2")
    commands: list[ServerCommand] = []
    launcher: Any = SimpleNamespace(host_server=commands.append)
    PoolProcess(("run", "a", "1", "."), {}, tmp_path / "log", 0, launcher).close()
    assert commands[0].environment["RLKIT_DISABLE_PLUGINS"] == "games"
    assert "RLKIT_PASSWORD" not in commands[0].environment


def test_rows_of_two_ranks_are_joined_and_separated() -> None:
    def batch(lengths: list[int], first_group: int) -> RolloutBatch:
        attention = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        tokens = torch.arange(len(lengths) * max(lengths)).view(len(lengths), -1) * attention
        group = first_group + torch.arange(len(lengths))
        candidates = torch.ones(*tokens.shape, first_group + 1, dtype=torch.int32)
        zeros = torch.zeros(tokens.shape)
        row = {"tokens": tokens, "attention": attention, "mask": attention, "group": group, "candidates": candidates}
        return RolloutBatch(**row, rollout_logps=zeros, versions=tokens)

    [first], [second] = rows.divided(batch([2, 4], 0), "logps", 1), rows.divided(batch([3], 2), "logps", 1)
    both = rows.joined([first, second], torch.device("cpu"))
    assert both.tokens.tolist() == [[0, 1, 0, 0], [4, 5, 6, 7], [0, 1, 2, 0]]
    assert both.attention.sum(-1).tolist() == [2, 4, 3]
    assert both.group.tolist() == [0, 1, 2]
    assert both.required("candidates")[0, 0].tolist() == [1, -1, -1]
    assert both.required("candidates")[2].tolist() == [[1, 1, 1]] * 3 + [[-1, -1, -1]]
    own = rows.separated({"values": both.tokens}, [first, second])
    assert own[0]["values"].tolist() == [[0, 1, 0, 0], [4, 5, 6, 7]]
    assert own[1]["values"].tolist() == [[0, 1, 2]]
    assert [len(part["tokens"]) for part in rows.divided(batch([1], 0), "values", 2)] == [1, 0]


def test_a_message_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 20)
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.zeros(0, 4).long()}
    left, right = Pipe()
    wire.send(left, {"work": "load"}, tensors)
    header, received = wire.receive(right, 5.0)
    assert header == {"work": "load", "parts": 1}
    assert received.keys() == tensors.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())
    wire.send(left, {}, {"a": torch.zeros(6), "b": torch.zeros(1)})
    assert wire.receive(right, 5.0)[0] == {"parts": 2}
    with pytest.raises(TimeoutError, match=r"no message within 0\.01 s"):
        wire.receive(right, 0.01)
    left.close()
    with pytest.raises(EOFError):
        wire.receive(right)


def test_a_pool_reads_a_recipe_of_python(tmp_path: Path) -> None:
    """Rows and functions are the trainer's; an optimizer that no recipe can name is the pool's, and is refused."""

    class Mine(AdamW):
        pass

    def right(text: str, answer: str) -> float:
        return float(answer in text)

    def text_with(critic: dict[str, object]) -> str:
        recipe = rlkit.Recipe(
            model="tiny", task=[{"prompt": "1 + 1 = ?", "answer": "2"}], reward=right, advantage="GAE", critic=critic,
            fabric={"accelerator": "cpu", "devices": 1},
            placement=Placement({"critic": "a"}, {"a": Fabric("cpu", 1, precision="64-true")}),
        )  # fmt: skip
        return recipe.yaml()

    (tmp_path / "recipe.yaml").write_text(text_with({"lr": 0.5}))
    recipe = placed_recipe(tmp_path, "a")
    assert recipe.critic is not None
    assert (recipe.critic.lr, recipe.fabric.precision, recipe.train.steps) == (0.5, "64-true", 100)
    (tmp_path / "recipe.yaml").write_text(text_with({"optimizer": Mine()}))
    with pytest.raises(RecipeError, match="critic.optimizer is the Python object .*, which no recipe can name"):
        placed_recipe(tmp_path, "a")


def test_a_pool_reads_a_recipe_without_its_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run folder names a variable in place of the query, and nobody has set it."""
    name = "RLKIT_REWARD_URL_QUERY"
    monkeypatch.setenv(name, "")  # so that it is removed after the test
    monkeypatch.delenv(name)
    placed = ("--placement.roles.critic=a", "--placement.pools.a.devices=1", "--fabric.devices=1")
    secret = ("--reward=RemoteReward", "--reward.url=http://127.0.0.1:9/?token=hidden")
    shown = rlkit_in_process("recipe", "show", "quick_ppo", *placed, *secret, cwd=tmp_path)
    assert f"${{{name}}}" in shown.stdout
    (tmp_path / "recipe.yaml").write_text(shown.stdout)
    recipe = placed_recipe(tmp_path, "a")
    assert recipe.critic is not None
    assert recipe.fabric.devices == 1
