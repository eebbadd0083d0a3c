#!/bin/bash
# A QEMU guest boots from a qcow2 image that the daemon serves: SeaBIOS, syslinux, kernel and initramfs all read it.
# It then does verified I/O on the rest of the image while the daemon is killed and started again. Afterwards
# more guests boot, and the daemon is killed while their firmware and boot loader read.
#
# After every kill the image must be clean, the guest must go on by itself, and no write that was acknowledged may
# be lost: every block says what it is, all are read back, and the image is compared with what the guest read last.
# A kill in the firmware may also make the guest fail, but visibly. QEMU up to 8.2 does fail, with "vhost start
# failed" on its standard error, when the daemon dies while the device is not started (before the firmware's driver,
# and between it and the kernel's): it connects again but never sends another message.
#
# Environment: DURATION        seconds of verified I/O [15]
#              KILLS           during it [1]
#              FIRMWARE_KILLS  each in a boot of its own [1]
#              PACKED, QUEUES  what the guest's driver uses [off, 1]
#              STALL_MEDIAN_MS, STALL_MAX_MS  longest gap between two acknowledged writes around a kill [1500, 3000];
#                              QEMU connects again after a whole second
#              and that of common.sh
. "$(dirname "$0")/common.sh"

duration=${DURATION:-15} kills=${KILLS:-1} firmware_kills=${FIRMWARE_KILLS:-1}
packed=${PACKED:-off} queues=${QUEUES:-1}
stall_median_ms=${STALL_MEDIAN_MS:-1500} stall_max_ms=${STALL_MAX_MS:-3000}

need qemu-img qemu-utils
need mformat mtools
need syslinux syslinux
need_guest

# The disk, in MiB: a FAT with boot loader, kernel and initramfs; then the blocks for the verified I/O.
#
# There is no partition table, because there must be no master boot record: that one has run where it then has the
# firmware read the next boot sector to, and QEMU's TCG runs its translation of the old code when the new one was
# written there by another process (so also with qemu-storage-daemon). From here on code is copied by the processor.
fat_size=32 data_size=64
skip=$((fat_size * 256)) # in blocks of 4 KiB

# make_image QCOW2 SCRIPT: a disk whose guest runs it; what it was made of stays in $scratch/boot.raw.
make_image() {
    local raw=$scratch/boot.raw
    rm -f "$raw"
    truncate -s "$((fat_size + data_size))M" "$raw"
    mformat -i "$raw" -T $((fat_size * 2048)) -h 64 -s 32 -H 0 -c 4 ::
    syslinux --install "$raw" >"$scratch/syslinux.log" 2>&1 || fail "syslinux --install"
    cat >"$scratch/syslinux.cfg" <<END
SERIAL 0 115200
DEFAULT exitless
PROMPT 0
LABEL exitless
KERNEL vmlinuz
INITRD guest.img
APPEND console=ttyS0 loglevel=3 panic=-1 $late_cpus $(run_option "$2")
END
    mcopy -i "$raw" "$(readlink -f "$GUEST_DIR/vmlinuz")" ::vmlinuz
    mcopy -i "$raw" "$GUEST_DIR/guest.img" "$scratch/syslinux.cfg" ::
    qemu-img convert -O qcow2 "$raw" "$1"
}

# start_guest NAME: in the background, from the disk alone. Sets $guest, $console and $guest_start.
start_guest() {
    console=$scratch/console-$1.log
    set_qemu_args "$queues" "$packed" ,bootindex=0
    guest_start=$(now_ms)
    : >"$console"
    "$GUEST_DIR/qemu" "${qemu_args[@]}" -serial "file:$console" \
        -chardev "file,id=bios,path=$scratch/bios-$1.log" -device isa-debugcon,iobase=0x402,chardev=bios \
        >"$scratch/qemu-$1.log" 2>&1 &
    guest=$!
    processes+=("$guest")
}

# shellcheck disable=SC2317  # called by name
has_loaded() { grep -aq 'Loading guest.img\.*ok' "$console"; }
# shellcheck disable=SC2317  # called by name
does_io() { grep -aq '^mixed progress' "$console" || is_gone "$guest"; }
stalls() { grep -ac '^mixed stall' "$console" || true; }
progress() { grep -ac '^mixed progress' "$console" || true; }

# Whether no write has ended for a second, as far as the guest has said.
stands_still() {
    local writes
    mapfile -t writes < <(tr -d '\r' <"$console" | sed -n 's/^mixed progress .*writes=//p' | tail -n 3)
    [ "${#writes[@]}" -eq 3 ] && [ "${writes[0]}" = "${writes[2]}" ]
}

# shellcheck disable=SC2317  # called by name
goes_on() { [ "$(stalls)" -gt "$1" ] || [ "$(progress)" -gt $(($2 + 2)) ] || is_gone "$guest"; }

# check_killed IMAGE: nothing worse than leaked clusters (status 3), which a killed writer may leave.
check_killed() {
    local status=0
    qemu-img check "$1" >"$scratch/check.log" 2>&1 || status=$?
    [ "$status" -eq 0 ] || [ "$status" -eq 3 ] ||
        fail "qemu-img check after a kill: $(tr '\n' ' ' <"$scratch/check.log")"
}

# kill_and_restart IMAGE: the image is looked at while nobody serves it.
kill_and_restart() {
    kill_daemon
    check_killed "$1"
    start_daemon "$1" qcow2 "$queues"
    wait_for_daemon
}

# The daemons said nothing that a sound run has no reason for.
check_daemons() {
    ! grep -hE '^exitless: (warning|error): |panicked' "$scratch"/daemon-*.log >"$scratch/complaints.txt" ||
        fail "a daemon complained: $(head -n 1 "$scratch/complaints.txt")"
}

# --- kills after the guest's init -------------------------------------------------------------------------------

image=$scratch/main.qcow2
# shellcheck disable=SC2016  # the guest's variables
make_image "$image" "workload mixed /dev/vda --skip $skip --seconds $duration --trim --stall-ms 200 --progress-ms 500"' || exit 1
echo sha=$(sha256sum </dev/vda)'
start_daemon "$image" qcow2 "$queues"
wait_for_daemon
start_guest main
until_true 120 has_loaded || fail "the firmware does not load the guest"
firmware_ms=$(($(now_ms) - guest_start))
until_true 120 does_io || fail "the guest does no I/O"
begin=$(now_ms)
marks=()
RANDOM=${SEED:-7}
for ((kill = 1; kill <= kills; kill++)); do
    # Somewhere in its share of the time.
    share=$((duration * 1000 / (kills + 1)))
    at=$((begin + share * kill + share * (RANDOM % 100 - 50) / 200))
    while [ "$(now_ms)" -lt "$at" ]; do sleep 0.02; done
    ! is_gone "$guest" || fail "the guest had ended before kill $kill"
    # A daemon that is killed heals what it had lost.
    ! stands_still || fail "the guest stood still before kill $kill: a kick or a call was lost"
    marks+=("$(stalls)")
    lines=$(progress)
    kill_and_restart "$image"
    until_true 30 goes_on "${marks[-1]}" "$lines" || fail "the guest hangs after kill $kill"
done
until_true $((duration + 180)) is_gone "$guest" || fail "the guest does not end"
status=0
wait "$guest" || status=$?
[ "$status" -eq 0 ] || fail "QEMU ended with status $status"
check_console "$console"
main_mixed=${mixed#mixed ok }
end_daemon
check_daemons
check_killed "$image"
qemu-img convert -O raw "$image" "$scratch/after.raw"
cmp -n $((fat_size << 20)) "$scratch/boot.raw" "$scratch/after.raw" || fail "what the guest booted from has changed"
[ "$(console_value "$console" sha)" = "$(content_sum "$scratch/after.raw" raw)" ] ||
    fail "the image does not hold what the guest read"
rm "$scratch/after.raw"
replayed=$(sed -n 's/.*resuming what a predecessor left.* requests=\([0-9]*\).*/\1/p' "$scratch"/daemon-*.log |
    awk '{ sum += $1 } END { print sum + 0 }')

# The longest gap around each kill: of those told between it and the next.
all=()
while read -r gap; do all+=("$gap"); done < <(tr -d '\r' <"$console" | sed -n 's/^mixed stall ms=\([0-9]*\) .*/\1/p')
marks+=("${#all[@]}")
gaps=()
for ((kill = 0; kill < kills; kill++)); do
    gap=0
    for ((n = marks[kill]; n < marks[kill + 1]; n++)); do
        [ "${all[n]}" -le "$gap" ] || gap=${all[n]}
    done
    gaps+=("$gap")
done
summary="$kills kills, $replayed requests replayed"
if [ "$kills" -gt 0 ]; then
    mapfile -t sorted < <(printf '%s\n' "${gaps[@]}" | sort -n)
    median=${sorted[(kills - 1) / 2]} longest=${sorted[-1]}
    summary+=", stall median $median ms, max $longest ms"
    echo "stalls in ms: ${gaps[*]}"
    [ "$median" -lt "$stall_median_ms" ] || fail "$summary: the median is to be below $stall_median_ms ms"
    [ "$longest" -lt "$stall_max_ms" ] || fail "$summary: the maximum is to be below $stall_max_ms ms"
fi

# --- kills while the firmware boots -----------------------------------------------------------------------------

# What the guest or QEMU said when it gave up; empty if it only hangs.
visible_failure() {
    local words='No bootable device|Boot failed|Could not read|Boot error|Load error|Kernel panic|status=[1-9]'
    grep -ahoE "$words|vhost start failed" "$console" "$scratch/bios-$1.log" "$scratch/qemu-$1.log" | head -n 1
}

# Ended, or so long after a visible failure that nothing more will come.
# shellcheck disable=SC2317  # called by name
is_over() {
    is_gone "$guest" || { [ $(($(now_ms) - guest_start)) -gt 60000 ] && [ -n "$(visible_failure "$1")" ]; }
}

# boot_and_kill NUMBER MS: kills that long after QEMU's start; false if the guest had already loaded. Sets $result.
boot_and_kill() {
    local name=firmware-$1 at wait_ms status=0
    start_daemon "$image" qcow2 "$queues"
    wait_for_daemon
    start_guest "$name"
    at=$((guest_start + $2))
    while [ "$(now_ms)" -lt "$at" ]; do sleep 0.005; done
    if has_loaded; then
        kill -KILL "$guest"
        { wait "$guest" || true; } 2>/dev/null
        kill_daemon
        return 1
    fi
    wait_ms=$(($(now_ms) - guest_start))
    kill_and_restart "$image"
    until_true 120 is_over "$name" || fail "the guest hangs after a kill $wait_ms ms from its start, silently"
    kill -KILL "$guest" 2>/dev/null || true
    { wait "$guest" || status=$?; } 2>/dev/null
    if [ "$status" -eq 0 ] && grep -aq '^mixed ok' "$console"; then
        check_console "$console"
        result=recovered
    else
        result=$(visible_failure "$name")
        result="visible failure: ${result:-QEMU ended with status $status}"
    fi
    qemu-img check "$image" >"$scratch/check.log" 2>&1 && fail "nobody holds the image of a running daemon"
    end_daemon
    check_killed "$image"
    echo "firmware kill at $wait_ms ms: $result"
}

image=$scratch/firmware.qcow2
recovered=0
[ "$firmware_kills" -eq 0 ] || make_image "$image" "workload mixed /dev/vda --skip $skip --seconds 1 --trim"
for ((kill = 0; kill < firmware_kills; kill++)); do
    at=$((firmware_ms * (2 * kill + 1) / (2 * firmware_kills)))
    result=
    for attempt in 1 2 3 4; do
        [ "$attempt" -lt 4 ] || fail "no kill while the firmware boots came early enough"
        ! boot_and_kill "$kill-$attempt" "$at" || break
        at=$((at / 2))
    done
    [ "$result" != recovered ] || recovered=$((recovered + 1))
done
check_daemons
pass "$summary; $firmware_kills kills in the firmware, $recovered recovered; $main_mixed"
