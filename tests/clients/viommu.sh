#!/bin/bash
# A QEMU guest (TCG, stock Debian kernel) on vhost-user-blk-pci behind QEMU's intel-iommu: the daemon asks QEMU for each
# translation, and gives it back when the guest unmaps. Verified reads, writes, flushes, discards and write-zeroes; the
# daemon is killed meanwhile; at the end what the guest read last is what the image holds.
#
#   viommu.sh strict|strict-ats|strict-7.2|strict-7.2-ats|lazy|lazy-ats|…-packed
#
#   strict: the guest invalidates at each unmap; lazy: now and then, everything. ats: by messages to the device's own IOTLB
#   (device-iotlb=on, ats=on), else by those to the unit. 7.2: Debian's QEMU, of which lazy is no mode: it sends back ends no
#   invalidation then. Otherwise the lab's.
#
# Environment: SECONDS_IO [4], KILLS [1], and that of common.sh.
. "$(dirname "$0")/common.sh"

mode=${1:-} seconds=${SECONDS_IO:-4} kills=${KILLS:-1}
case $mode in
    strict*) caching=on kernel='iommu.strict=1' ;;
    lazy-7.2*) fail "QEMU 7.2 sends back ends no invalidation of a lazy guest" ;;
    lazy*) caching=off kernel='iommu.strict=0' ;;
    *) fail "usage: viommu.sh strict|lazy[-7.2][-ats][-packed]" ;;
esac
case $mode in *-ats*) ats=on ;; *) ats=off ;; esac
case $mode in *-packed*) packed=on ;; *) packed=off ;; esac
need qemu-img qemu-utils
need_guest
qemu=$GUEST_DIR/qemu
case $mode in
    *-7.2*)
        need qemu-system-x86_64 qemu-system-x86
        qemu=qemu-system-x86_64
        ;;
esac

image=$scratch/disk.raw
qemu-img create -q -f raw "$image" 32M
start_daemon "$image" raw 2
wait_for_daemon

# Groups exist where Linux translates for the device; its domain is DMA (strict) or DMA-FQ (lazy).
# shellcheck disable=SC2016  # the guest's variables
script='for group in /sys/kernel/iommu_groups/*; do
    for device in "$group"/devices/*; do
        case $(cat "$device/class") in 0x010000|0x018000) echo domain=$(cat "$group/type") ;; esac
    done
done
echo platform=$(cut -c34 /sys/block/vda/device/features) packed=$(cut -c35 /sys/block/vda/device/features)
workload mixed /dev/vda --seconds '$seconds' --trim --stall-ms 200 --progress-ms 200 || exit 1
echo sha=$(sha256sum </dev/vda)'
# shellcheck disable=SC2054  # the commas are QEMU's
qemu_args=(-machine q35,kernel-irqchip=split -accel tcg,thread=multi -cpu max -smp 2,maxcpus=3 -m 256
    -object memory-backend-memfd,id=mem,size=256M,share=on -numa node,memdev=mem
    -nodefaults -no-user-config -display none -no-reboot
    -device "intel-iommu,intremap=on,caching-mode=$caching,device-iotlb=$ats"
    -chardev "socket,id=disk,path=$scratch/b.sock,reconnect=1"
    -device "vhost-user-blk-pci,chardev=disk,num-queues=2,packed=$packed,iommu_platform=on,ats=$ats,disable-legacy=on")
console=$scratch/console.log
: >"$console"
"$qemu" "${qemu_args[@]}" -serial "file:$console" -kernel "$GUEST_DIR/vmlinuz" -initrd "$GUEST_DIR/guest.img" \
    -append "console=ttyS0 quiet panic=-1 $late_cpus intel_iommu=on $kernel $(run_option "$script")" >"$scratch/qemu.log" 2>&1 &
guest=$!
processes+=("$guest")

progress() { grep -ac '^mixed progress' "$console" || true; }
# shellcheck disable=SC2317  # called by name
goes_on() { [ "$(progress)" -gt "$1" ] || is_gone "$guest"; }

until_true 120 goes_on 0 || fail "the guest does no I/O"
for ((kill = 1; kill <= kills; kill++)); do
    until_true 60 goes_on "$(($(progress) + 1))" || fail "the guest hangs before kill $kill"
    ! is_gone "$guest" || fail "the guest had ended before kill $kill"
    cp "$scratch/stats.json" "$scratch/stats-$kill.json" 2>/dev/null || true
    kill_daemon
    start_daemon "$image" raw 2
    wait_for_daemon
    until_true 60 goes_on "$(progress)" || fail "the guest hangs after kill $kill"
done
until_true $((seconds + 120)) is_gone "$guest" || fail "the guest does not end"
status=0
wait "$guest" || status=$?
[ "$status" -eq 0 ] || fail "QEMU ended with status $status"
check_console "$console"
end_daemon

want=DMA
[ "$caching" = on ] || want=DMA-FQ
[ "$(console_value "$console" domain)" = "$want" ] ||
    fail "the guest's domain is '$(console_value "$console" domain)' where $want is meant"
[ "$(console_value "$console" platform)" = 1 ] || fail "the guest's addresses are not translated"
[ "$(console_value "$console" packed)" = "$([ "$packed" = on ] && echo 1 || echo 0)" ] || fail "the ring layout is not packed=$packed"
[ "$(console_value "$console" sha)" = "$(content_sum "$image" raw)" ] ||
    fail "the image does not hold what the guest read"
! grep -h 'needs a reset\|cannot be shown' "$scratch"/daemon-*.log >"$scratch/complaints.txt" ||
    fail "$(head -n 1 "$scratch/complaints.txt")"
pass "$mode, $kills kills, ${mixed#mixed ok }"
