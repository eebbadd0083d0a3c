#!/bin/bash
# Builds the fuzz targets of fuzz/ with coverage counters and runs each: scripts/fuzz.sh [target ...]
# Lists them: scripts/fuzz.sh --list
#
#   FUZZ_SECONDS  how long each target runs (30)
#   FUZZ_JOBS     how many run at the same time (2, or 1 where there is one processor)
#
# Inputs that reached something new are kept in target/fuzz/corpus and tried first the next time; an input that
# finds a fault is kept in target/fuzz/artifacts, with what it printed, and how to run it again is said.
# Needs no nightly compiler: stable rustc has LLVM's coverage pass, and libFuzzer comes with the libfuzzer-sys crate.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${FUZZ_SECONDS:-30}
jobs=${FUZZ_JOBS:-$(($(nproc) > 1 ? 2 : 1))}
all=(vhost_user_messages export_session iotlb_messages block_requests split_ring packed_ring net_control iommu_requests dma_mapper iova_allocators vfio_info frame_offloads worker_area)
if [ "${1:-}" = --list ]; then
    printf '%s\n' "${all[@]}"
    exit 0
fi
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=("${all[@]}")
for target in "${targets[@]}"; do
    [[ " ${all[*]} " == *" $target "* ]] || {
        echo "fuzz: there is no target '$target' (there are ${all[*]})" >&2
        exit 2
    }
done

home=target/fuzz
host=$(rustc -vV | sed -n 's/^host: //p')
flags=(
    --cfg fuzzing
    -Cpasses=sancov-module
    -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares
    -Cllvm-args=-simplifycfg-branch-fold-threshold=0
)

skip() {
    echo "fuzz: skipped: $1"
    exit 0
}

# Refused flags, or a compiler without the pass.
try=$(mktemp -d)
trap 'rm -rf "$try"' EXIT
if ! rustc "${flags[@]}" --crate-type lib --emit obj --crate-name try -o "$try/try.o" - \
    <<<'pub fn f(x: u32) -> bool { x == 5 }' 2>"$try/why"; then
    skip "$(rustc --version) refuses the coverage flags: $(head -n 1 "$try/why")"
fi
grep -q __sanitizer_cov "$try/try.o" || skip "$(rustc --version) ignores the coverage flags"
./scripts/setup.sh fuzz

mkdir -p "$home/artifacts"
# --target: programs that run while building are not instrumented.
RUSTFLAGS="${flags[*]}" CARGO_TARGET_DIR=$home/build \
    cargo build --quiet --profile fuzz --target "$host" -p fuzz
programs=$home/build/$host/fuzz

# The set-up itself: a fault behind a four-byte word must be found, and coverage must grow on the way.
check_setup() {
    local log=$try/self_test
    mkdir -p "$try/corpus"
    if "$programs/self_test" -seed=1 -runs=4000000 -max_len=16 -artifact_prefix="$try/" \
        "$try/corpus" >"$log" 2>&1; then
        echo "fuzz: the planted fault of self_test was not found: coverage does not guide" >&2
        tail -n 5 "$log" >&2
        return 1
    fi
    grep -q "the planted fault" "$log" || {
        cat "$log" >&2
        return 1
    }
    if [ "$(find "$try/corpus" -type f | wc -l)" -lt 3 ]; then
        echo "fuzz: self_test's corpus does not grow" >&2
        return 1
    fi
}

# One target; one line.
run() {
    local name=$1 program=$programs/$1 corpus=$home/corpus/$1 log=$home/$1.log
    local seeds=$home/seeds/$name before code=0
    rm -rf "$seeds"
    mkdir -p "$corpus" "$seeds"
    FUZZ_SEEDS=$seeds "$program" >/dev/null 2>&1
    before=$(find "$corpus" -type f | wc -l)
    "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=2048 \
        -print_final_stats=1 -artifact_prefix="$home/artifacts/$name-" \
        "$corpus" "$seeds" >"$log" 2>&1 || code=$?
    if [ "$code" != 0 ]; then
        local artifact
        artifact=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
        {
            echo "fuzz: $name failed:"
            grep -m 1 -A 2 -E "panicked at|ERROR: libFuzzer" "$log" | sed 's/^/    /' || tail -n 5 "$log"
            echo "  input:  ${artifact:-none written}"
            echo "  output: $log"
            echo "  again:  cargo run -p fuzz --bin $name -- ${artifact:-FILE}"
        } >&2
        return 1
    fi
    local speed coverage after
    speed=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
    coverage=$(grep -oE 'cov: [0-9]+ ft: [0-9]+' "$log" | tail -n 1)
    after=$(find "$corpus" -type f | wc -l)
    echo "fuzz: $name: $seconds s, $speed runs/s, $coverage, corpus $before -> $after inputs"
}

check_setup
echo "fuzz: self_test: the planted fault was found"
failed=0
for name in "${targets[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do
        wait -n || failed=1
    done
    run "$name" &
done
while [ -n "$(jobs -rp)" ]; do
    wait -n || failed=1
done
exit "$failed"
