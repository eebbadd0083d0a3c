#!/usr/bin/env bash
# The long runs, case by case: make soak, make soak SOAK_MINUTES=60
#
# Without SOAK_MINUTES every long run is made whole, in order. Those that have passed are noted in target/soak/passed, so that a soak
# that was interrupted goes on where it was: at the same commit (a changed tree is another one) and with the same commands, options
# and seeds included. When all have passed the note is removed, and the next soak begins anew.
#
# With SOAK_MINUTES=N short cases are run instead, each self-test alone, the others for a slice of time and with a new seed: first those
# that failed the last time, then those that were run longest ago, at whatever commit (target/soak/history), as long as time
# is left for them. What has not been run at this commit is listed at the end.
#
# A case that fails does not stop the others. The status is 1 if one failed, or if none ran.
#
#   SOAK_CASES  a table in place of the own ones, for scripts/soak-test.sh: name, seconds, command, with tabs between
#   SOAK_TREE   the tree whose state keys the notes, likewise
#   SOAK_CLOCK  a file with the seconds that have passed, likewise
set -euo pipefail
cd "${SOAK_TREE:-$(dirname "$0")/..}"

state=target/soak
lab=target/release/exitless-lab
seed=$(date +%s)
mkdir -p $state
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
exec 9>$state/lock
flock -n 9 || { echo "soak: another one is running here"; exit 1; }

# The commit, and what differs from it.
tree_key() {
    local commit changes
    commit=$(git rev-parse HEAD 2>/dev/null) || { echo unknown; return; }
    changes=$({
        git diff HEAD --binary
        git ls-files --others --exclude-standard -z | xargs -0 -r sha256sum
    } | sha256sum | cut -c1-16)
    [ -n "$(git status --porcelain)" ] && echo "$commit+$changes" || echo "$commit"
}

# Seconds that have passed.
now() { if [ -n "${SOAK_CLOCK:-}" ]; then cat "$SOAK_CLOCK"; else echo $SECONDS; fi; }

# row NAME SECONDS COMMAND: one of a table.
row() { printf '%s\t%s\t%s\n' "$@"; }

# The long runs.
whole_table() {
    local test="cargo test --release --quiet"
    row "dma-soak" 0 "cargo run --release --quiet -p dma-soak -- --operations ${DMA_SOAK_OPS:-1000000000} --state $state/dma"
    row "self-tests" 0 "$lab selftest --soak"
    row "self-tests of Debian" 0 "$lab selftest --soak --debian"
    row "self-tests with Linux 6.12: too little memory" 0 "$lab selftest --soak --kernel 6.12 --only 'of 256 MiB in memory'"
    row "vfio" 0 "EXITLESS_LAB=1 $test -p lab --test lab -- --ignored --nocapture --exact vfio::a_hundred_thousand_blocks_under_each_policy"
    assigned 0
    row "barriers" 0 "BARRIER_OPERATIONS=${BARRIER_OPERATIONS:-100000000} $test -p dma-map --test barrier -- --ignored --nocapture"
    row "frames" 0 "NET_FRAMES=${NET_FRAMES:-1000000} NET_SEED=${NET_SEED:-1} $test -p net-offload --test frames --test kernel -- --nocapture"
    row "episodes in the lab" 0 "$lab selftest --soak --episodes ${LAB_EPISODES:-50} --seed ${EPISODE_SEED:-1}"
    row "episodes" 0 "EPISODES=${EPISODES:-2000} EPISODE_SEED=${EPISODE_SEED:-1000} $test -p exitless --test episodes"
    row "swapper's model" 0 "SWAP_EVENTS=${SWAP_EVENTS:-100000000} $test -p swap --lib book"
    row "swapper's threads" 0 "SWAP_SECONDS=${SWAP_SECONDS:-300} $test -p swap --test threads"
    mutants 0
    row "fuzz targets" 0 "FUZZ_SECONDS=${FUZZ_SECONDS:-3600} ./scripts/fuzz.sh"
}

# mutants SECONDS: each by its name.
mutants() {
    local run="cargo run --release --quiet -p mutants --" name
    $run --list >"$scratch/mutants"
    while IFS= read -r name; do
        row "mutant: $name" "$1" "$run $name"
    done <"$scratch/mutants"
}

# assigned SECONDS: guests with devices of the emulated host, each test by its name.
assigned() {
    local run="EXITLESS_LAB=1 cargo test --release --quiet -p harness --test assign -- --ignored" name
    bash -c "$run --list" | sed -n 's/: test$//p' >"$scratch/assigned"
    while IFS= read -r name; do
        row "assigned: $name" "$1" "$run --nocapture --exact $name"
    done <"$scratch/assigned"
}

# self_tests OPTIONS SECONDS: each by its name. A tenth of the forced sleeps: all of them take half an hour of one mode.
self_tests() {
    local name sleeps=10000
    $lab selftest --soak --sleeps $sleeps $1 --list >"$scratch/names"
    while IFS= read -r name; do
        row "self-test${1:+ $1}: $name" "$2" "$lab selftest --soak --sleeps $sleeps --restart $1 --exact --only $(printf %q "$name")"
    done <"$scratch/names"
}

# Short cases, and the seconds that one may take before it has been run.
slice_table() {
    local test="cargo test --release --quiet" target
    row "dma-soak" 60 "cargo run --release --quiet -p dma-soak -- --operations 30000000 --seed $seed --quiet"
    row "frames" 60 "NET_FRAMES=300000 NET_SEED=$seed $test -p net-offload --test frames --test kernel -- --nocapture"
    row "barriers" 60 "BARRIER_OPERATIONS=5000000 $test -p dma-map --test barrier -- --ignored --nocapture"
    row "swapper's model" 60 "SWAP_SEED=$seed SWAP_EVENTS=30000000 $test -p swap --lib a_million_events"
    row "swapper's threads" 60 "SWAP_SECONDS=30 $test -p swap --test threads"
    row "episodes" 120 "EPISODES=100 EPISODE_SEED=$seed $test -p exitless --test episodes"
    for target in $(./scripts/fuzz.sh --list); do
        row "fuzz: $target" 120 "FUZZ_SECONDS=60 ./scripts/fuzz.sh $target"
    done
    mutants 60
    row "episodes in the lab" 300 "$lab selftest --episodes 2 --seed $seed"
    row "vfio" 180 "EXITLESS_LAB=1 $test -p lab --test lab -- --ignored --nocapture --exact vfio::a_hundred_thousand_blocks_under_each_policy"
    assigned 240
    row "self-tests with Linux 6.12: a store that fails" 300 "$lab selftest --soak --restart --kernel 6.12 --only 'a store with'"
    self_tests "" 180
    self_tests --debian 300
}

# run NAME COMMAND: runs a case; its verdict is in $verdict, and counted: ok, FAILED, or skipped if it said so.
passed=0 failed=0
run() {
    local name=$1 command=$2 log=$scratch/log began status=0
    began=$(now)
    echo "soak: $name: $command"
    # Without the lock: what it leaves running must not keep it.
    EXITLESS_SOAK_KEY=$key bash -c "$command" 2>&1 9>&- | tee "$log" 9>&- || status=$?
    if [ $status != 0 ]; then
        verdict=FAILED
    elif grep -q '^test result:' "$log" && ! grep -q '^test result: ok. [1-9]' "$log"; then
        echo "soak: the command selects no test"
        verdict=FAILED
    elif tail -n 1 "$log" | grep -Eq '^(0 passed, 0 failed$|fuzz: skipped)'; then
        verdict=skipped
    else
        verdict=ok
    fi
    took=$(($(now) - began))
    case $verdict in
        ok) passed=$((passed + 1)) ;;
        FAILED) failed=$((failed + 1)) ;;
    esac
    printf '%s\t%s\t%s\t%s\n' "$key" $took $verdict "$name" >>$state/history
    echo "soak: $verdict $name ($took s)"
    [ $verdict != FAILED ] || row "$name" $took "$command" >>"$scratch/failures"
}

# The closing lines, and the status.
close() {
    local name took command
    if [ -e "$scratch/failures" ]; then
        while IFS=$'\t' read -r name took command; do
            echo "soak: FAILED $name ($took s): $command"
        done <"$scratch/failures"
    fi
    echo "$passed passed, $failed failed"
    [ $failed = 0 ] && [ $((passed + before)) -gt 0 ]
}

# All of the table, but what an interrupted soak has passed.
run_whole() {
    local note=$state/passed soak name seconds command
    soak="$key $(sha256sum <"$table" | cut -c1-16)"
    [ "$(head -n 1 $note 2>/dev/null)" = "$soak" ] || echo "$soak" >$note
    before=$(($(wc -l <$note) - 1))
    [ "$before" = 0 ] || echo "soak: $before cases passed before, at this commit; they are not run again"
    while IFS=$'\t' read -r -u 3 name seconds command; do
        if ! tail -n +2 $note | grep -Fxq -- "$name"; then
            run "$name" "$command"
            [ $verdict = FAILED ] || echo "$name" >>$note
        fi
    done 3<"$table"
    [ $failed != 0 ] || rm $note
}

# The table's rows as they are to be run: those that failed the last time, then those never run, then by how long ago; with
# the seconds that each took the last time it passed, if it has.
in_order() {
    awk -F'\t' -v OFS='\t' '
        FILENAME == ARGV[1] { last[$4] = FNR; verdict[$4] = $3; if ($3 == "ok") took[$4] = $2; next }
        { order = verdict[$1] == "FAILED" ? -1 : last[$1] + 0
          print order, FNR, $1, ($1 in took) ? took[$1] : $2, $3 }
    ' $state/history "$table" | sort -t $'\t' -k1,1n -k2,2n | cut -f3-
}

# As much of the table as there is time for.
run_slices() {
    local end left name seconds command
    end=$(awk "BEGIN { print int($(now) + $SOAK_MINUTES * 60 + 0.5) }")
    in_order >"$scratch/order"
    while IFS=$'\t' read -r -u 3 name seconds command; do
        left=$((end - $(now)))
        [ $left -gt 0 ] || break
        # The first one runs in any case: else one that is longer than all the time never would.
        [ "$seconds" -le $left ] || [ $((passed + failed)) = 0 ] || continue
        run "$name" "$command"
    done 3<"$scratch/order"
    awk -F'\t' -v key="$key" '
        FILENAME == ARGV[1] { if ($1 == key && $3 != "skipped") run[$4] = 1; next }
        { all++ } !($1 in run) { never[++count] = $1 }
        END { printf "soak: never run at this commit: %d of %d cases\n", count, all
              for (i = 1; i <= count; i++) print "    " never[i] }
    ' $state/history "$table"
}

key=$(tree_key)
before=0
table=$scratch/table
touch $state/history
if [ -n "${SOAK_CASES:-}" ]; then
    sed "s/{seed}/$seed/g" "$SOAK_CASES" >"$table"
else
    cargo build --release --quiet -p exitless -p exitless-lab
    if [ -n "${SOAK_MINUTES:-}" ]; then slice_table; else whole_table; fi >"$table"
fi
if [ -n "${SOAK_MINUTES:-}" ]; then
    [[ $SOAK_MINUTES =~ ^[0-9]+(\.[0-9]+)?$ ]] || { echo "soak: SOAK_MINUTES=$SOAK_MINUTES: not a number of minutes"; exit 1; }
    run_slices
else
    run_whole
fi
close
