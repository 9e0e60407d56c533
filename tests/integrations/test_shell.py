"""The reader of launch scripts against bash itself, and against scripts whose reading is written here by hand."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.integrations.shell import Script, ShellSyntaxError, interpret

BASH = shutil.which("bash")


def read(text: str, given: Mapping[str, str] | None = None) -> Script:
    files: dict[str, str] = {}
    return interpret(text, given or {}, files.get)


def words(text: str, given: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The words of the command `run`."""
    return next(command.words[1:] for command in read(text, given).commands if command.words[0] == "run")


SAME_AS_BASH = {
    "variables": 'A=1; B="$A x"; run a=$A b="$B" c=${A}2',
    "a value that is not set": "run a=${NONE:-d} b=${NONE-e} c=${NONE:+f}g",
    "a default that is itself a variable": "D=4; run tp=${TP:-$D} pp=${PP:-$((D / 2))}",
    "an empty value": 'E=""; run a=${E:-d} b=${E-d}',
    "arithmetic": "N=3; M=5; run a=$((N * M)) b=$(( (N + M) / 3 )) c=$((N - M)) d=$((2**N % 5)) e=$((${N}*$M))",
    "arithmetic rounds towards zero": "run a=$(( -7 / 2 )) b=$(( 7 / 2 ))",
    "line continuations": "run a=1 \\\n    b=2 \\\n    c=3",
    "a comment ends a line": "run a=1 # b=2\nfalse c=3",
    "a comment inside an array": "A=(\n  --x 1\n  # --y 2\n  --z 'a b'\n)\nrun ${A[@]} \"${A[@]}\"",
    "arrays grow": 'A=(--x); A+=(--y "1 2"); run "${A[@]}" n=${#A[@]} first=${A[0]}',
    "words are split outside quotes alone": 'S="a=1 b=2"; run $S "$S"',
    "single quotes keep signs": "run a='$HOME `x`' b=\"it's\"",
    "escapes": 'run a=\\$b c="\\$d \\"e\\"" f\\ g',
    "cut suffix and prefix": "P=/data/models/x.tar.gz; run ${P##*/} ${P%.gz} ${P%%.*} ${P#*/}",
    "replacement": "P=a-b-c; run ${P/-/_} ${P//-/_} ${P^^} ${P:2:3} ${#P}",
    "if and else": 'A=2; if [ "$A" = "1" ]; then B=x; elif [ $A -gt 1 ]; then B=y; else B=z; fi; run $B',
    "a test on what is not set": 'if [ -z "$NONE" ]; then B=x; else B=y; fi; run $B',
    "double brackets": 'A=megatron; if [[ "$A" == mega* && -n "$A" ]]; then B=1; fi; run b=$B',
    "and / or lists": '[ -n "$NONE" ] && A=1 || A=2; [[ $A -eq 2 ]] && B=3; run $A $B',
    "case": 'A=8b; case "$A" in 7b|8b) L=32;; *) L=0;; esac; run $L',
    "functions with arguments": "f() {\n  local m=$1\n  run model=$m tp=${2:-4}\n}\nf llama 8",
    "export and declare": "export A=1 B=2; declare C=3; run $A$B$C",
    "a here-document in a variable": "read -r -d '' C <<EOF\nrun a=1\nEOF\nrun $C",
    "here-document by cat": "V=2\nC=$(cat <<EOF\nx=$V\nEOF\n)\nrun $C",
    "echo": "A=$(echo hello world); run $A",
    "eval": 'C="run a=1"; eval "$C b=2"',
    "false conditions of loops": "while [[ $# -gt 0 ]]; do A=1; shift; done; run a=${A:-0}",
    "a while once": "I=0; while [ $I -lt 1 ]; do A=1; I=1; done; run $A",
    "redirections": "run a=1 > /dev/stderr 2>&1",
    "a group": "{ A=1; B=2; }; run $A$B",
    "nested quotes and braces": 'run "a=${NONE:-"x y"}" b="$(echo "q")"',
}


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("text", SAME_AS_BASH.values(), ids=SAME_AS_BASH.keys())
def test_words_are_those_of_bash(text: str) -> None:
    harness = 'run() { for w in "$@"; do printf "%s\\0" "$w"; done >&3; exit 0; }\n'
    done = subprocess.run(
        [str(BASH), "-c", f"exec 3>&1\n{harness}{text}"],
        capture_output=True,
        text=True,
        check=False,
        env={},
        timeout=20,
    )
    assert words(text) == tuple(done.stdout.split("\0")[:-1])


@given(st.integers(-999, 999), st.integers(1, 99), st.sampled_from("+-*/%"), st.booleans())
def test_arithmetic_is_that_of_c(a: int, b: int, sign: str, nested: bool) -> None:
    truncated = abs(a) // b * (1 if a >= 0 else -1)
    expected = {"+": a + b, "-": a - b, "*": a * b, "/": truncated, "%": a - truncated * b}[sign]
    if sign == "%" and a < 0:
        return  # the sign of a remainder is nobody's batch size
    text = f"A={a}; B={b}; run $(( ({'A' if nested else a}) {sign} ({'$B' if nested else b}) ))"
    assert words(text) == (str(expected),)


def test_given_variables_win_over_the_script() -> None:
    assert words("N=${N:-1}; M=2; run $N $M", {"N": "4", "M": "8"}) == ("4", "8")


def test_what_nothing_sets_stays_visible() -> None:
    assert words("run n=$NODES m=${MODELS[@]} x=$(nproc)") == ("n=${NODES}", "m=${MODELS[@]}", "x=$(nproc)")


def test_arms_of_an_unknowable_condition_that_disagree_leave_a_variable_open() -> None:
    script = read("A=1\nB=1\nif command -v nvidia-smi; then\n A=8\n B=1\nfi\nrun $A $B")
    assert [c.words for c in script.commands][-1] == ("run", "${A}", "1")
    assert script.undecided == {"A": 3}


def test_commands_in_every_arm_of_an_unknowable_condition_are_read() -> None:
    script = read("if [ -f /x ]; then run a=1; else run a=2; fi")
    assert [c.words for c in script.commands if c.words[0] == "run"] == [("run", "a=1"), ("run", "a=2")]


def test_commands_know_their_line() -> None:
    script = read("#!/bin/bash\nset -x\n\nrun a=1 \\\n  b=2\nrun c=3")
    assert [(c.words[0], c.line) for c in script.commands] == [("set", 2), ("run", 4), ("run", 6)]


def test_a_script_in_the_arguments_of_a_shell_is_read() -> None:
    script = read('N=4\nsrun --nodes=$N bash -c "run n=$N"')
    assert script.commands[-1].words == ("run", "n=4")


def test_sourced_files_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("ARGS=(--layers 4)\n")
    files = {"model.sh": (tmp_path / "model.sh").read_text()}
    script = interpret('source model.sh\n. other.sh\nrun "${ARGS[@]}"', {}, files.get)
    assert script.commands[-1].words == ("run", "--layers", "4")
    assert script.missing == ("other.sh",)


def test_functions_that_call_themselves_end() -> None:
    assert read("f() { f; }\nf\nrun a=1").commands[-1].words == ("run", "a=1")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A=1\nrun 'a\nb", 2),
        ('run a=1\n\nrun "x', 3),
        ("run ${A", 1),
        ("run $((1 + 2)", 1),
        ("if true; then\n run a\n", 1),
        ("A=(1 2\n3", 1),
        ("\nfor x in 1 2; do run\n", 2),
        ("case $A in\n a) run;;\n", 3),
        ("f() {\n run\n", 1),
        ("run\nfi\n", 2),
        ("cat <<EOF\nabc\n", 1),
        ("run a ) b", 1),
    ],
)
def test_bad_syntax_names_its_line(text: str, line: int) -> None:
    with pytest.raises(ShellSyntaxError) as error:
        read(text)
    assert error.value.line == line


PIECES = (
    "a=1 $A ${A:- } ( ) (( )) $( ' \" ` \\ ; && || | if then fi for in do done while case esac ;; <<E E { [ [[ ] ]] "
    "f() A=( A+=( run # = eval source read $((1/0)) $((9**9**9))"
)
FRAGMENTS = [*PIECES.split(), "\n", " "]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25), st.booleans())
def test_any_text_is_read_or_refused(parts: list[str], spaced: bool) -> None:
    with suppress(ShellSyntaxError):
        read((" " if spaced else "").join(parts))


@pytest.mark.parametrize("text", ["A=aaaaaaaaaa\n" + "A=$A$A$A$A\n" * 40, "A=(a b)\n" + 'A+=("${A[@]}")\n' * 60])
def test_a_variable_that_grows_without_end_is_refused_at_its_line(text: str) -> None:
    with pytest.raises(ShellSyntaxError, match="A becomes longer than") as caught:
        read(text + "run $A")
    assert 1 < caught.value.line < 20


def test_what_an_unknown_command_prints_stays_one_word() -> None:
    """Or a nested script would be given the half of a bracket."""
    script = 'hosts=$(list of "$JOB")\nall=( $hosts )\nrun "${all[0]}" x=$hosts'
    assert words(script) == ('$(list of "$JOB")', 'x=$(list of "$JOB")')
