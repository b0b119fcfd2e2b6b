"""Programs in C++, JavaScript and bash, in the real sandbox with real compilers."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rlkit_code.runners import LANGUAGES
from test_code import PAIRS, nothing_left, rewards, scores

from rlkit.base.errors import RecipeError
from rlkit.rewards import CodeReward
from rlkit.testing import example_trajectory

DOUBLE = {
    "cpp": '#include <cstdio>\nint main() { int n; scanf("%d", &n); printf("%d\\n", 2 * n); }',
    "javascript": "console.log(2 * Number(require('fs').readFileSync('/dev/stdin', 'utf8')))",
    "bash": "read n < <(cat /dev/stdin)\necho $((2 * n))",
}
NO_PROGRAM = {"cpp": "int main() { return x; }", "javascript": "console.log(", "bash": "if true; then echo 2"}
EXITS = {
    "cpp": DOUBLE["cpp"].replace("2 * n); }", "2 * n); return 3; }"),
    "javascript": f"{DOUBLE['javascript']}\nprocess.exit(3)",
    "bash": f"{DOUBLE['bash']}\nexit 3",
}
TWO = {
    "cpp": '#include <cstdio>\nint main() { puts("2"); }', "javascript": "console.log(2)", "bash": "echo 2"
}  # fmt: skip


@pytest.fixture(autouse=True)
def _unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the probe of the sandbox, which the tests of commands have."""
    monkeypatch.setattr("rlkit_code.command.Command.check", lambda self: None)


@pytest.fixture(params=["cpp", "javascript", "bash"])
def language(request: pytest.FixtureRequest) -> str:
    """A language whose compiler is on this machine; a missing one skips, and fails with RLKIT_REQUIRE_COMPILERS."""
    name = str(request.param)
    compiler = LANGUAGES[name].compiler[0]
    if shutil.which(compiler) is None:
        refuse = pytest.fail if os.environ.get("RLKIT_REQUIRE_COMPILERS") else pytest.skip
        refuse(f"this test needs {compiler}: apt-get install {LANGUAGES[name].package}")
    return name


def test_outputs_decide_and_compile_errors_are_apart(language: str) -> None:
    programs = [table[language] for table in (DOUBLE, TWO, NO_PROGRAM, EXITS)]
    graded = scores(programs, PAIRS, language=language, partial=True)
    assert [score.reward for score in graded] == [1, 0.5, 0, 0]
    assert [score.components["compile_error"] for score in graded] == [0, 0, 1, 0]
    assert [score.feedback for score in graded] == [
        None, "The program fails test 2 of 2.", "The program does not compile.", "The program fails test 1 of 2."
    ]  # fmt: skip


HOSTILE = {
    "cpp": {
        "hangs": "int main() { for (volatile int i = 0;; i = i + 1) {} }",
        "floods": '#include <cstdio>\nint main() { for (;;) puts("70707"); }',
        "memory": "#include <cstdlib>\n#include <cstring>\n#include <cstdio>\n"
        'int main() { for (int i = 0; i < 300; i++) memset(malloc(1 << 22), 1, 1 << 22); puts("70707"); }',
        "embeds the tests": '#include <cstdio>\n#include <cstring>\nextern char text[];\n'
        'asm("text: .incbin \\"tests.json\\"\\n.byte 0");\nint main() { if (strstr(text, "70707")) puts("70707"); }',
        "never compiles": "template <int n> struct S : S<n + 1>, S<n + 2> {};\nint main() { S<0> s; }",
        "forks": "#include <unistd.h>\nint main() { for (;;) fork(); }",
        "kills": "#include <csignal>\n#include <unistd.h>\nint main() { kill(getppid(), 9); kill(-1, 9); }",
    },
    "javascript": {
        "hangs": "for (;;) {}",
        "floods": "for (;;) require('fs').writeSync(1, '70707\\n'.repeat(1000))",
        "memory": "const a = []; for (let i = 0; i < 300; i++) a.push(Buffer.alloc(1 << 22, 1)); console.log(70707)",
        "reads the tests": "if (String(require('fs').readFileSync('tests.json')).includes('70707')) console.log(70707)",
        "reads the grader": "require('fs').openSync(`/proc/${process.ppid}/mem`); console.log(70707)",
        "kills": "process.kill(process.ppid, 'SIGKILL'); process.kill(-1, 'SIGKILL')",
    },
    "bash": {
        "hangs": "while :; do :; done",
        "floods": "yes 70707",
        "reads the tests": "grep -q 70707 tests.json /proc/$PPID/environ /proc/$PPID/fd/* && echo 70707",
        "writes verdicts": "for n in {0..60}; do echo 1111 >&$n; echo 1111 > /proc/$PPID/fd/$n; done",
        "forks": "f() { f | f & }; f",
        "kills": "kill -9 $PPID; kill -9 -1",
    },
}  # fmt: skip


@pytest.mark.slow
def test_hostile_programs_earn_nothing(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one language are scored together, beside an honest one."""
    monkeypatch.setattr("rlkit_code.runners.GRACE_SECONDS", 1.0)
    pairs = {"inputs": ["35353.5", "35353.5"], "outputs": ["70707", "70707"]}
    honest = {"cpp": DOUBLE["cpp"].replace("int n", "double n").replace("%d", "%lf", 1).replace("%d", "%g"),
              "javascript": DOUBLE["javascript"], "bash": "read n; awk \"BEGIN { print 2 * $n }\""}  # fmt: skip
    programs = [honest[language], *HOSTILE[language].values()]
    options = {"seconds": 2.0, "compile_seconds": 5.0, "total_seconds": 3.0, "concurrency": 3, "partial": True}
    with nothing_left():
        earned = rewards(programs, pairs, language=language, memory_mb=512, **options)
    assert dict(zip(["honest", *HOSTILE[language]], earned, strict=True)) == {
        "honest": 1, **dict.fromkeys(HOSTILE[language], 0)
    }  # fmt: skip


def test_rows_name_their_languages_as_data_sets_do() -> None:
    reward = CodeReward(allow_code=True, tests="tests", language_column="lang")

    def refusal(name: object, tests: object = PAIRS) -> str | None:
        return reward.unscorable(replace(example_trajectory("").prompt, meta={"lang": name, "tests": tests}))

    assert [refusal(name) for name in ("bash", "Python3", None)] == [None] * 3
    assert "language 'fortran', expected bash, cpp, javascript, python" in str(refusal("fortran"))
    assert "language 3, expected" in str(refusal(3))
    assert "no column 'lang'" in str(reward.unscorable(example_trajectory("").prompt))
    calls = PAIRS | {"fn_name": "double"}
    assert refusal("python", calls) is None
    for tests in (calls, ["assert double(1) == 2"]):
        assert "its programs are in bash, which needs tests with inputs and outputs" in str(refusal("bash", tests))
    row = {"lang": "shell", "tests": []}
    assert "language 'shell'" in str(scores(["echo 2"], PAIRS, row, language_column="lang")[0].error)
    assert rewards(["read n; echo $((2 * n))"], PAIRS, {"lang": "bash"}, language_column="lang") == [1]


def test_a_missing_compiler_is_named_before_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reward = CodeReward(allow_code=True, language="C++", tests="tests")
    with pytest.raises(RecipeError, match=r"language='C\+\+', which needs g\+\+, which is not installed; apt-get"):
        reward.bind(None)  # type: ignore[arg-type]
    row = replace(example_trajectory("").prompt, meta={"tests": PAIRS})
    assert "in cpp, which needs g++, which is not installed; apt-get install g++" in str(reward.unscorable(row))
    (tmp_path / "node").symlink_to("/bin/true")  # in the system, hence in the sandbox's reach
    assert CodeReward(allow_code=True, language="javascript", tests="tests").unscorable(row) is None
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    assert "out of the sandbox's reach; install it in /usr" in str(reward.unscorable(row))
    assert CodeReward(allow_code=True, language="cpp", tests="tests", sandbox=False).unscorable(row) is None
    small = CodeReward(allow_code=True, language="cpp", tests="tests", memory_mb=256)
    assert "memory_mb of at least 512, which is 256" in str(small.unscorable(row))


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(RecipeError, match="language 'rust', expected bash, cpp, javascript, python; with `url`"):
        CodeReward(allow_code=True, language="rust")
