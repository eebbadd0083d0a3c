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
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# For groups below; a program may move itself into one.
for controller in cpu io memory pids; do echo "+$controller" > /sys/fs/cgroup/cgroup.subtree_control; done
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
while read -r module; do
    insmod "/modules/$module.ko" || echo "lab: module $module failed"
done < /modules/order
# Guest RAM is a memory file that asks for huge pages: a guest then takes one exit for its first touch of
# 2 MiB instead of one for each page, and boots in half the time.
echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled
# But none are put together later, under a guest that runs: see "What QEMU gets wrong" in the README.
echo 4294967295 > /sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs
ip link set lo up
hostname lab
cd /root
lab-agent
poweroff -f
