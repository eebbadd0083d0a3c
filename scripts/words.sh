#!/usr/bin/env bash
# Looks for words and forms of words.txt in Rust sources, and for subjects of commits that are too
# long. What is found and does not stand in words.allow is printed, with what to write instead, and
# makes the script fail; so does a line of words.allow that allows nothing any more.
#
# usage: scripts/words.sh [PATH...]     all tracked sources, or those below the paths
#
# WORDS_BASE   commit from which on subjects are looked at (default: origin/main, if it is there)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
paths=()
for path; do
    [ ! -d "$path" ] || path=${path%/}/*.rs
    paths+=("$path")
done
[ $# -gt 0 ] || paths=('*.rs')
found=$(mktemp)
trap 'rm -f "$found"' EXIT

while IFS=$'\t' read -r pattern instead example; do
    case $pattern in '' | '#'*) continue ;; esac
    if ! grep -qiP -- "$pattern" <<<"$example"; then
        echo "scripts/words.txt: the pattern does not find its example: $pattern" >&2
        exit 2
    fi
    # Nothing found is status 1.
    git grep -niP -e "$pattern" -- "${paths[@]}" ':!scripts' | sed "s|\$|\t$instead|" >>"$found" || true
done <"$here/words.txt"

failed=0
awk -F'\t' -v whole=$(($# == 0)) '
    NR == FNR {
        if ($0 ~ /^#/ || NF == 0) next
        if (NF != 3) { printf "scripts/words.allow:%d: path, text and reason, divided by tabs\n", FNR; bad = 1; next }
        path[++count] = $1; text[count] = $2; at[count] = FNR
        next
    }
    {
        split($0, part, ":")
        for (number = 1; number <= count; number++)
            if (index(part[1], path[number]) == 1 && index($0, text[number])) { used[number] = 1; next }
        instead = $NF
        line = substr($0, 1, length($0) - length(instead) - 1)
        printf "%s\n    write: %s\n", line, instead
        hits++
    }
    END {
        for (number = 1; whole && number <= count; number++)
            if (!used[number]) { printf "scripts/words.allow:%d: allows nothing any more\n", at[number]; bad = 1 }
        printf "words: %d found\n", hits
        exit hits > 0 || bad
    }' "$here/words.allow" "$found" || failed=1

base=${WORDS_BASE:-origin/main}
if git rev-parse -q --verify "$base^{commit}" >/dev/null; then
    while IFS= read -r subject; do
        if [ ${#subject} -gt 72 ]; then
            echo "a commit's subject has ${#subject} characters, of at most 72: $subject"
            failed=1
        fi
    done < <(git log --no-merges --format=%s "$base..HEAD")
else
    echo "subjects of commits: not looked at, there is no $base (WORDS_BASE names another)"
fi
exit $failed
