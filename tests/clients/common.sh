# shellcheck shell=bash
# What the scripts of this directory share: a scratch directory, the daemon, guests, verdicts.
#
# Environment: EXITLESS  the program under test           [target/release/exitless]
#              EXITLESS_LAB_PROGRAM  the one that has the lab [exitless-lab beside it]
#              GUEST_DIR what `exitless-lab lab --export` wrote [made in the scratch directory]
#              BACKEND   exitless, or qsd (qemu-storage-daemon) to tell whose fault a failure is
#              KEEP=1    keep the scratch directory
# Exit status: 0 passed, 1 failed (logs are printed and kept), 77 skipped (the last line says why).

set -euo pipefail

tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
EXITLESS=${EXITLESS:-$tree/target/release/exitless}
EXITLESS_LAB_PROGRAM=${EXITLESS_LAB_PROGRAM:-$(dirname "$EXITLESS")/exitless-lab}
BACKEND=${BACKEND:-exitless}
# Short, because a socket's path has at most 107 bytes.
scratch=$(mktemp -d "${TMPDIR:-/tmp}/xlc-XXXXXX")
processes=() # those to be ended with the script
cleanups=()  # functions to be called after that
daemon=      # process of the daemon that was started last
daemons=0    # how many were started
verdict=     # set by the three ways to end

finish() {
    local status=$? process cleanup log
    for process in "${processes[@]}"; do
        kill -KILL "$process" 2>/dev/null || true
    done
    { wait || true; } 2>/dev/null
    for cleanup in "${cleanups[@]}"; do
        "$cleanup"
    done
    if [ -z "$verdict" ]; then
        # Neither passed, failed nor skipped: a command failed that should not.
        echo "FAILED: a command ended with status $status"
        status=1
    fi
    if [ "$status" -eq 1 ]; then
        for log in "$scratch"/*.log; do
            [ -s "$log" ] || continue
            echo "--- $log, its end:"
            tail -n 25 "$log" | tr -d '\r' | cut -c1-300
        done
        echo "--- all files: $scratch"
    elif [ -z "${KEEP:-}" ]; then
        rm -rf "$scratch"
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 1' INT TERM

pass() {
    verdict=passed
    echo "$*"
    exit 0
}

fail() {
    verdict=failed
    echo "FAILED: $*"
    exit 1
}

skip() {
    verdict=skipped
    echo "skipped: $*"
    exit 77
}

# need PROGRAM PACKAGE
need() {
    command -v "$1" >/dev/null || skip "$1 is missing (Debian: $2)"
}

now_ms() {
    local now=${EPOCHREALTIME/[.,]/}
    echo $((now / 1000))
}

# until_true SECONDS COMMAND…: whether the command succeeded in time.
until_true() {
    local deadline=$(($(now_ms) + $1 * 1000))
    shift
    until "$@"; do
        [ "$(now_ms)" -lt "$deadline" ] || return 1
        sleep 0.01
    done
}

is_gone() { ! kill -0 "$1" 2>/dev/null; }

# Kernel, images and a script that starts QEMU, in $GUEST_DIR.
need_guest() {
    [ -x "$EXITLESS" ] || fail "there is no program $EXITLESS (make build)"
    if [ -z "${GUEST_DIR:-}" ]; then
        GUEST_DIR=$scratch/guest
        "$EXITLESS_LAB_PROGRAM" lab --export "$GUEST_DIR" 2>"$scratch/export.log" ||
            skip "no guest: $(tail -n 1 "$scratch/export.log")"
    fi
}

# start_daemon IMAGE raw|qcow2 QUEUES [MORE,…]: serves it at $scratch/b.sock, sets $daemon.
start_daemon() {
    local image=$1 format=$2 queues=$3 more=${4:-} log
    daemons=$((daemons + 1))
    log=$scratch/daemon-$daemons.log
    if [ "$BACKEND" = qsd ]; then
        rm -f "$scratch/b.sock"
        qemu-storage-daemon --object iothread,id=t0 \
            --blockdev "driver=file,node-name=f,filename=$image,discard=unmap" \
            --blockdev "driver=$format,node-name=n,file=f,discard=unmap" \
            --export "type=vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=$scratch/b.sock,writable=on,num-queues=$queues,iothread=t0" \
            >"$log" 2>&1 &
    else
        RUST_LOG=${RUST_LOG:-info} "$EXITLESS" serve --stats "$scratch/stats.json" \
            --block "id=disk0,path=$image,format=$format,queues=$queues,socket=$scratch/b.sock$more" \
            >"$log" 2>&1 &
    fi
    daemon=$!
    processes+=("$daemon")
}

# Whether the daemon started last serves, which it says once its sockets are there.
is_serving() {
    if [ "$BACKEND" = qsd ]; then
        [ -S "$scratch/b.sock" ]
    else
        grep -qs ' serving' "$scratch/daemon-$daemons.log"
    fi
}

wait_for_daemon() {
    until_true 10 is_serving || fail "the daemon does not serve"
}

kill_daemon() {
    kill -KILL "$daemon" 2>/dev/null || fail "the daemon had ended by itself"
    { wait "$daemon" || true; } 2>/dev/null
}

# The daemon outlived its guest, ends when asked, with status 0, and leaves no socket.
end_daemon() {
    local status=0
    kill -TERM "$daemon" 2>/dev/null || fail "the daemon had ended by itself"
    until_true 10 is_gone "$daemon" || fail "the daemon does not end"
    wait "$daemon" || status=$?
    [ "$BACKEND" = exitless ] || return 0
    [ "$status" -eq 0 ] || fail "the daemon ended with status $status"
    ! compgen -G "$scratch/*.sock" >"$scratch/sockets.txt" || fail "the daemon left $(head -n 1 "$scratch/sockets.txt")"
    # A predecessor that was killed may be waited for, as long as this machine takes to end it.
    ! grep -E '^exitless: (warning|error): |panicked' "$scratch/daemon-$daemons.log" |
        grep -vE ': waiting for .*\(disk_image::lock\)$' >"$scratch/complaints.txt" ||
        fail "the daemon complained: $(head -n 1 "$scratch/complaints.txt")"
}

# Kernel options of a QEMU guest with several processors: they start when the buses have been scanned. A thread of QEMU's for
# each (TCG) may have a store of another processor to its APIC end in any other device while a BAR is moved: see «What QEMU
# gets wrong» in lab/README.md.
# shellcheck disable=SC2034  # used by the scripts
late_cpus='maxcpus=1 exitless.cpus=late'

# run_option SCRIPT: the kernel option that makes the guest run it.
run_option() { printf 'exitless.run64=%s' "$(printf %s "$1" | base64 -w 0)"; }

# set_qemu_args QUEUES PACKED=on|off [MORE]: arguments of a guest with that disk, in the array $qemu_args.
#
# There may be more processors than one: TCG translates for a single one without the fences of locked instructions, and
# the guest's barrier between its avail index and the event index is one of those: kicks were lost, one in minutes.
# shellcheck disable=SC2034,SC2054  # used by the scripts; the commas are QEMU's
set_qemu_args() {
    qemu_args=(-machine q35 -accel tcg,thread=multi -cpu max -smp "$1,maxcpus=$(($1 + 1))" -m 256
        -object memory-backend-memfd,id=mem,size=256M,share=on -numa node,memdev=mem
        -nodefaults -no-user-config -display none -no-reboot
        -chardev "socket,id=disk,path=$scratch/b.sock,reconnect=1"
        -device "vhost-user-blk-pci,chardev=disk,num-queues=$1,packed=$2${3:-}")
}

# console_value FILE KEY: what the guest printed after KEY=, up to the next blank.
console_value() { tr -d '\r' <"$1" | sed -n "s/.*\<$2=\([^ ]*\).*/\1/p" | tail -n 1; }

# The guest's script ended well, and its mixed I/O did all it can, without error.
check_console() {
    local console=$1 line
    [ "$(console_value "$console" exitless-guest:\ status)" = 0 ] ||
        fail "the guest's script ended with status '$(console_value "$console" exitless-guest:\ status)'"
    line=$(tr -d '\r' <"$console" | grep '^mixed ok') || fail "no verified I/O on the console"
    case "$line" in
        *discards=0* | *zeroes=0*) fail "the guest was offered no discard or write-zeroes: $line" ;;
        *errors=0*) ;;
        *) fail "$line" ;;
    esac
    # shellcheck disable=SC2034  # used by the scripts
    mixed=$line
}

# The content of an image as its format's own tool sees it.
content_sum() {
    if [ "$2" = raw ]; then
        sha256sum <"$1" | cut -d' ' -f1
    else
        qemu-img convert -f "$2" -O raw "$1" "$scratch/content.raw"
        sha256sum <"$scratch/content.raw" | cut -d' ' -f1
        rm "$scratch/content.raw"
    fi
}
