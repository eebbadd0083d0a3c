#!/bin/busybox sh
# PID 1 of the lab's emulated host; see host_image.rs.
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/root TERM=linux
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
while read -r module; do
    insmod "/modules/$module.ko" || echo "lab: module $module failed"
done < /modules/order
# Guest RAM is a memory file that asks for huge pages: a guest then takes one exit for its first touch of
# 2 MiB instead of one for each page, and boots in half the time.
echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled
# QEMU's emulation of SVM can lose an interrupt that another processor sends while a guest is entered or left. On a
# processor without ticks nothing sends a second one, and the sender waits for as long as the guest spins: seen as
# stalls of seconds, once of a minute, in a TLB flush. A timer four times a second on the guests' processor ends them.
read -r tickless < /sys/devices/system/cpu/nohz_full
case $tickless in
[0-9]*)
    # Else the timer would be kept by a processor that has ticks.
    echo 0 > /proc/sys/kernel/timer_migration
    mkfifo /run/never
    taskset -c "${tickless%%-*}" sh -c 'while :; do read -r -t 0.25 _; done <> /run/never' &
    ;;
esac
ip link set lo up
hostname lab
cd /root
lab-agent
poweroff -f
