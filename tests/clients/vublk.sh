#!/bin/bash
# vublk, a vhost-user-blk front end without any guest: mixed reads and writes at depth 32, as a guest that polls or as
# one that sleeps until it is called. No request may fail and no wake-up be lost; it does not look at the data.
#
#   vublk.sh poll|event
#
# It is no Debian package: the program is $VUBLK, or vublk on PATH.
# Environment: SECONDS_IO [2], VUBLK, and that of common.sh.
. "$(dirname "$0")/common.sh"

mode=${1:-}
case $mode in
    poll | event) ;;
    *) fail "usage: vublk.sh poll|event" ;;
esac
vublk=${VUBLK:-vublk}
command -v "$vublk" >/dev/null || skip "there is no vublk (give its path as VUBLK)"
[ -x "$EXITLESS" ] || fail "there is no program $EXITLESS (make build)"

truncate -s 64M "$scratch/disk.raw"
start_daemon "$scratch/disk.raw" raw 1
wait_for_daemon
timeout 60 "$vublk" -q 32 -t "${SECONDS_IO:-2}" -d 64 -r mixed -m "$mode" "$scratch/b.sock" \
    >"$scratch/vublk.log" 2>&1 || fail "vublk ended with status $?: $(tail -n 1 "$scratch/vublk.log")"
! grep -i 'lost wakeup' "$scratch/vublk.log" >"$scratch/lost.txt" || fail "$(head -n 1 "$scratch/lost.txt")"
grep -q '"err":0,' "$scratch/vublk.log" || fail "requests failed: $(tail -n 1 "$scratch/vublk.log")"
end_daemon
pass "$(grep -o '"\(iops\|p50\|p99\|kicks_s\|calls_s\)":[0-9]*' "$scratch/vublk.log" | head -n 5 | tr -d '"' | tr '\n' ' ')"
