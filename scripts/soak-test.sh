#!/usr/bin/env bash
# Tests of scripts/soak.sh with cases that take no time, in a tree of their own.
set -euo pipefail
soak=$(cd "$(dirname "$0")" && pwd)/soak.sh
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cd "$tree"
git init -q .
echo target >.gitignore
git add . && git -c user.name=t -c user.email=t commit -qm one
mkdir target
export SOAK_TREE=$tree SOAK_CASES=$tree/target/cases SOAK_CLOCK=$tree/target/clock TMPDIR=$tree/target
echo 0 >"$SOAK_CLOCK"
# That a case takes two seconds.
two='echo $(($(cat target/clock) + 2)) >target/clock'

# cases COMMAND…: a table of cases a, b, c …, each with its command; `run-X` stands for a line in target/ran.
cases() {
    local names=(a b c d e) at=0 command
    for command in "$@"; do
        printf '%s\t1\techo %s >>target/ran; %s\n' "${names[at]}" "${names[at]}" "$command"
        at=$((at + 1))
    done >"$SOAK_CASES"
}
# soaks STATUS RAN [MINUTES]: a soak ends with that status and has run these cases in that order. What it printed is in target/out.
soaks() {
    local status=0 ran
    rm -f target/ran
    touch target/ran
    { env ${3:+SOAK_MINUTES=$3} "$soak" >target/out 2>&1 || status=$?; } 2>/dev/null
    ran=$(tr -d '\n' <target/ran)
    [ "$status $ran" = "$1 $2" ] || fail "status $status after $ran, not $1 after $2"
}
says() { grep -Fxq -- "$1" target/out || fail "it does not say: $1"; }
fail() { echo "soak-test: FAILED: line ${BASH_LINENO[1]}: $1"; sed 's/^/    /' target/out; exit 1; }

# A whole soak is cleared when all has passed: the next one runs everything again.
cases true true true
soaks 0 abc
says "3 passed, 0 failed"
soaks 0 abc

# A failure is shown, makes the soak fail, does not stop the others, and alone is run again at the same commit.
cases true "test -e target/cured" true
soaks 1 abc
says "2 passed, 1 failed"
grep -q "^soak: FAILED b .*target/cured" target/out || fail "the failure is not shown"
soaks 1 b
touch target/cured
soaks 0 b
soaks 0 abc

# One that is interrupted goes on where it was, but not in a changed tree, nor with other commands.
interrupted() { cases true 'test -e target/goes-on || kill -KILL $PPID' true; }
interrupted
soaks 137 ab
touch target/goes-on
soaks 0 bc
rm target/goes-on
soaks 137 ab
touch target/goes-on changed
soaks 0 abc
rm target/goes-on
soaks 137 ab
touch target/goes-on
echo more >>changed
soaks 0 abc
rm target/goes-on
soaks 137 ab
git add . && git -c user.name=t -c user.email=t commit -qm two
touch target/goes-on
soaks 0 abc
rm target/goes-on
soaks 137 ab
cases true true "true other"
soaks 0 abc

# Slices: those run longest ago first, at whatever commit, and as many as there is time for.
rm -r target/soak
cases "$two" "$two" "$two" "$two" "$two"
soaks 0 ab 0.066
says "soak: never run at this commit: 3 of 5 cases"
says "2 passed, 0 failed"
soaks 0 cd 0.066
git -c user.name=t -c user.email=t commit -q --allow-empty -m three
soaks 0 ea 0.066
says "soak: never run at this commit: 3 of 5 cases"

# A failure stays listed as the first to be run, until it passes.
rm -r target/soak target/cured
cases "$two" "$two; test -e target/cured" "$two" "$two" "$two"
soaks 1 ab 0.066
says "1 passed, 1 failed"
soaks 1 bc 0.066
touch target/cured
soaks 0 bd 0.066
soaks 0 ea 0.066

# Nothing passes for nothing: no case, a case that selects no test, one that is skipped.
rm -r target/soak
: >"$SOAK_CASES"
soaks 1 ""
soaks 1 "" 1
cases "echo 'test result: ok. 0 passed; 0 failed'"
soaks 1 a 0.066
rm -r target/soak
cases "echo 0 passed, 0 failed"
soaks 1 a 0.066
says "soak: never run at this commit: 1 of 1 cases"
echo "soak-test: ok"
