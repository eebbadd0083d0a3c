#!/usr/bin/env bash
# words.sh fails for the example of each of its rules, for an exception without reason, for one that
# allows nothing, and for a long subject; and passes without them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/scripts"
cp "$here/words.sh" "$here/words.txt" "$tree/scripts"
: >"$tree/scripts/words.allow"
cd "$tree"
git init -q
commit() { git add -A && git -c user.name=test -c user.email=test@localhost commit -q -m "$1"; }

# expect STATUS WHAT: the script's status, for the tree as it is.
expect() {
    local status=0
    git add -A
    WORDS_BASE=start scripts/words.sh >out 2>&1 || status=$?
    if [ "$status" != "$1" ]; then
        echo "words-test: status $status, not $1, for $2:"
        cat out
        exit 1
    fi
}

echo '// Frees the page.' >code.rs
commit "Begin"
git tag start
expect 0 "nothing wrong"
rules=0
while IFS=$'\t' read -r pattern _ example; do
    case $pattern in '' | '#'*) continue ;; esac
    echo "$example" >code.rs
    expect 1 "$example"
    rules=$((rules + 1))
done <"$here/words.txt"
[ $rules -ge 20 ] || { echo "words-test: $rules rules"; exit 1; }

echo '// A stranger frees it.' >code.rs
printf 'code.rs\tstranger\ta quotation\n' >scripts/words.allow
expect 0 "an exception"
printf 'code.rs\tstranger\n' >scripts/words.allow
expect 1 "an exception without reason"
echo '// Frees the page.' >code.rs
printf 'code.rs\tstranger\ta quotation\n' >scripts/words.allow
expect 1 "an exception that allows nothing"
: >scripts/words.allow
commit "a subject that is far longer than the seventy-two characters that there may be"
expect 1 "a long subject"
echo "words-test: $rules rules, each finds its example"
