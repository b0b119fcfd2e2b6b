"""Recipes without credentials: what is left out, and what restores it."""

from __future__ import annotations

import random
import string

import pytest
import yaml

from rlkit.base.errors import RecipeError
from rlkit.base.text import REFERENCE, redact
from rlkit.models.checkpoint_schema import RunState
from rlkit.recipe.credentials import expand, withhold, without_credentials
from tests.conftest import ROOT

TOKENS = [
    "sk-proj-abcDEF0123456789", "sk-ant-api03-abcDEF0123456789", "sk_live_abcDEF0123456789", "hf_abcDEF0123456789",
    "ghp_abcDEF0123456789", "github_pat_abcDEF0123456789_x", "glpat-abcDEF0123456789", "AKIAABCDEFGHIJKLMNOP",
    "xoxb-123456789-abcdef", "AIzaabcDEF0123456789abcdef", "npm_abcDEF0123456789abcdef",
    "SG.abcDEF0123456789.abcDEF0123456789",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcDEF", "https://hooks.slack.com/services/T000/B000/abcDEF",
    "https://api.telegram.org/bot123456789:AAabcdefghijklmnopqrstuvwxyz0123456/send",
    "-----BEGIN RSA PRIVATE KEY-----\nabcDEF\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_are_recognized_in_any_text(token: str) -> None:
    for text in (token, f"it failed: {token!r}.", f"a={token} b", f'{{"x": "{token}"}}'):
        assert "abcdef" not in redact(text).lower()
        assert "abcdef" not in str(withhold({"task": {"prompt": text}})).lower()
    assert redact(f"before {token} after").split()[::2] == ["before", "after"]


@pytest.mark.parametrize(
    "text",
    [
        "sk-learn and risk-averse", "hf_hub_download(hf_transfer)", "pass=3 key=4 max_tokens=5", "s3://b/part-????.jsonl",
        "https://host/docs#section", "https://host:80/a@b", "//a[@href='x']", "hf://datasets/me/sums", "is it? yes; no",
    ],
)  # fmt: skip
def test_what_is_no_credential_stays(text: str) -> None:
    assert redact(text) == text
    assert withhold({"task": {"prompt": text}}) == {"task": {"prompt": text}}


def test_no_shipped_recipe_seems_to_hold_credentials() -> None:
    recipes = [*(ROOT / "recipes").glob("*.yaml"), *ROOT.glob("rlkit/**/recipes/*.yaml")]
    assert recipes
    for path in recipes:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert withhold(tree) == tree, path


def test_credentials_are_left_out_by_where_they_stand() -> None:
    variables = {"FOO": "a", "foo": "b", "X-Y": "c", "X_Y": "d", "ÄÖ": "e", "EMPTY": "", "REF": "${RLKIT_MINE}"}
    given = {
        "agent": {"class_path": "CommandAgent", "init_args": {"command": "x", "environment": variables}},
        "tools": {"search": {"class_path": "McpTool", "init_args": {"env": {"A": "f"}}}},
        "task": {"class_path": "VerifiersTask", "init_args": {"environment": {"taskset": {"id": "gsm8k"}, "key": "i"}}},
        "launch": {"args": ["--api-key", "g", "--port", "80", "--admin-api-key=h"]},
    }
    values: dict[str, str] = {}
    withheld = withhold(given, values)
    assert withheld == {
        "agent": {
            "class_path": "CommandAgent",
            "init_args": {
                "command": "x",
                "environment": {
                    "FOO": "${RLKIT_AGENT_ENVIRONMENT_FOO}",
                    "foo": "${RLKIT_AGENT_ENVIRONMENT_FOO_2}",
                    "X-Y": "${RLKIT_AGENT_ENVIRONMENT_X_Y}",
                    "X_Y": "${RLKIT_AGENT_ENVIRONMENT_X_Y_2}",
                    "ÄÖ": "${RLKIT_AGENT_ENVIRONMENT___}",
                    "EMPTY": "",
                    "REF": "${RLKIT_MINE}",
                },
            },
        },
        "tools": {"search": {"class_path": "McpTool", "init_args": {"env": {"A": "${RLKIT_TOOLS_SEARCH_ENV_A}"}}}},
        "task": {
            "class_path": "VerifiersTask",
            "init_args": {"environment": {"taskset": {"id": "gsm8k"}, "key": "${RLKIT_TASK_ENVIRONMENT_KEY}"}},
        },
        "launch": {
            "args": [
                "--api-key",
                "${RLKIT_LAUNCH_ARGS_1}",
                "--port",
                "80",
                "--admin-api-key=${RLKIT_LAUNCH_ARGS_4_KEY}",
            ]
        },
    }
    assert sorted(values.values()) == list("abcdefghi")
    assert withhold(withheld) == withheld


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://me:a@h/x", "https://${RLKIT_URL_LOGIN}@h/x"),
        ("https://h/?n=1&sig=a#top", "https://h/?${RLKIT_URL_QUERY}"),
        ("https://h/#access_token=a", "https://h/#${RLKIT_URL_QUERY}"),
        ("jdbc:sqlserver://h:1433;user=sa;password=a", "jdbc:sqlserver://h:1433;${RLKIT_URL_QUERY}"),
        ("http://h/a?x=1 http://h/b?x=2", "http://h/a?${RLKIT_URL_QUERY} http://h/b?${RLKIT_URL_QUERY_2}"),
        ("http://h/a?x=1 http://h/b?x=1", "http://h/a?${RLKIT_URL_QUERY} http://h/b?${RLKIT_URL_QUERY}"),
        ("s3://KEY:a/b@bucket/x", "s3://${RLKIT_URL_LOGIN}@bucket/x"),
        ("https://me:${RLKIT_P}@h/?key=${RLKIT_K}", "https://me:${RLKIT_P}@h/?key=${RLKIT_K}"),
        ("https://h/?sig=a&key=${RLKIT_K}", "https://h/?${RLKIT_URL_QUERY}&key=${RLKIT_K}"),
    ],
)
def test_urls_are_written_without_login_and_query(url: str, expected: str) -> None:
    assert withhold({"url": url}) == {"url": expected}
    assert withhold({"url": expected}) == {"url": expected}


def test_a_recipe_is_restored_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any tree is itself again once the variables are set, and what was left out is left out alike a second time."""
    draw = random.Random(0)
    pieces = (*"a&;#= '/h", "://", "u:p@", "?k=v", "--token ", "token=", "sk-abcDEF0123456789", "${RLKIT_MINE}")

    def text() -> str:
        return "".join(draw.choices(pieces, k=draw.randrange(8)))

    def tree(depth: int) -> object:
        if depth == 0:
            return draw.choice([text(), 1, None])
        if draw.random() < 0.3:
            return [tree(depth - 1) for _ in range(draw.randrange(4))]
        names = draw.choices(["environment", "url", "headers", "api_key", *string.ascii_lowercase], k=3)
        return {name: tree(depth - 1) for name in names}

    monkeypatch.setenv("RLKIT_MINE", "mine")
    for _ in range(300):
        given, values = {"x": tree(3)}, dict[str, str]()
        withheld = withhold(given, values)
        assert withhold(withheld) == withheld
        with monkeypatch.context() as patch:
            for name, value in values.items():
                assert REFERENCE.fullmatch(f"${{{name}}}")
                patch.setenv(name, value)
            assert expand(withheld) == expand(given)


def test_all_missing_variables_are_named_at_once() -> None:
    tree = {"agent": {"environment": {"A": "${RLKIT_NOT_SET_A}", "B": "${RLKIT_NOT_SET_B}", "C": "${HOME}"}}}
    with pytest.raises(RecipeError) as refused:
        expand(tree)
    lines = str(refused.value).splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "agent.environment.A refers to ${RLKIT_NOT_SET_A}",
        "agent.environment.B refers to ${RLKIT_NOT_SET_B}",
        "agent.environment.C refers to ${HOME}",
    ]
    assert "or pass --agent.environment.A" in lines[0]


def test_a_text_is_a_recipe_or_is_searched() -> None:
    variables = "agent: {environment: {MODE: hunter2}}\n"
    assert "hunter2" not in without_credentials(variables)
    assert without_credentials("a: 1\n") == "a: 1\n"
    bomb = "a0: &a0 [x, http://me:hunter2@h]\n" + "".join(
        f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * 9}]\n" for n in range(20)
    )
    for text in (bomb, "- http://me:hunter2@h", "{"):
        assert without_credentials(text) == text.replace("me:hunter2", "***")


def test_an_old_checkpoint_loses_its_credentials() -> None:
    recipe = {"agent": {"init_args": {"environment": {"DB_PASS": "hunter2"}}}}
    state = RunState.model_validate({"step": 1, "recipe": recipe, "numbers": {"version": 1}})
    assert "hunter2" not in state.model_dump_json()
