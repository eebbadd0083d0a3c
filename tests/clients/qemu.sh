#!/bin/bash
# A QEMU guest (TCG, stock Debian kernel) on vhost-user-blk-pci: verified reads, writes, flushes, discards and
# write-zeroes; clean shutdown; what the guest read last is what the image holds.
#
#   qemu.sh split-1|split-4|packed-1|packed-4      ring layout and number of queues (and of vCPUs)
#
# Environment: SECONDS_IO [3], and that of common.sh.
. "$(dirname "$0")/common.sh"

case ${1:-} in
    split-1) packed=off queues=1 format=raw ;;
    split-4) packed=off queues=4 format=qcow2 ;;
    packed-1) packed=on queues=1 format=qcow2 ;;
    packed-4) packed=on queues=4 format=raw ;;
    *) fail "usage: qemu.sh split-1|split-4|packed-1|packed-4" ;;
esac
need qemu-img qemu-utils
need_guest

image=$scratch/disk.$format
qemu-img create -q -f "$format" "$image" 32M
start_daemon "$image" "$format" "$queues"
wait_for_daemon

# A feature's bit is a character of the file.
# shellcheck disable=SC2016  # the guest's variables
script='cat /sys/block/vda/serial; echo
echo packed=$(cut -c35 /sys/block/vda/device/features) queues=$(ls -d /sys/block/vda/mq/* | wc -l)
workload mixed /dev/vda --seconds '${SECONDS_IO:-3}' --trim || exit 1
echo sha=$(sha256sum </dev/vda)'
set_qemu_args "$queues" "$packed"
status=0
timeout -k 1 120 "$GUEST_DIR/qemu" "${qemu_args[@]}" -serial "file:$scratch/console.log" \
    -kernel "$GUEST_DIR/vmlinuz" -initrd "$GUEST_DIR/guest.img" \
    -append "console=ttyS0 quiet panic=-1 $late_cpus $(run_option "$script")" >"$scratch/qemu.log" 2>&1 || status=$?
[ "$status" -eq 0 ] || fail "QEMU ended with status $status"
check_console "$scratch/console.log"
end_daemon

[ "$(console_value "$scratch/console.log" queues)" = "$queues" ] || fail "the guest does not use $queues queues"
want=$([ "$packed" = on ] && echo 1 || echo 0)
[ "$(console_value "$scratch/console.log" packed)" = "$want" ] || fail "the ring layout is not packed=$packed"
if [ "$BACKEND" = exitless ]; then
    grep -q '^disk0' "$scratch/console.log" || fail "the serial number is not the device's id"
fi
[ "$format" = raw ] || qemu-img check -q "$image" >"$scratch/check.log" 2>&1 || fail "qemu-img check"
[ "$(console_value "$scratch/console.log" sha)" = "$(content_sum "$image" "$format")" ] ||
    fail "the image does not hold what the guest read"
pass "$format, ${mixed#mixed ok }"
