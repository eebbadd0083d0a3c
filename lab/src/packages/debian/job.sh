#!/bin/sh
# What the lab's Debian root does if its kernel's command line says so.
#
#   exitless.job=JOB[,JOB…]   in this order:
#
#   state          waits until systemd has started everything, and logind listens for the power button; says in which IOMMU's
#                  group the root's disk is
#   fio:MIB        writes a file of this size at random, reads it back and verifies it (crc32c)
#   reboot:N       reboots until this was done N times; at each boot the files of the boots before are verified
#
# Lines begin as those of the lab's other guest; the last is `exitless-guest: status=N`, and the machine stays up.
set -u
# The console that systemd writes to as well; no other terminal's hang-up closes it.
exec >/dev/console 2>&1
say() { echo "exitless-guest: $*"; }
dir=/var/lib/exitless-job

state() {
    state=$(systemctl is-system-running --wait)
    say "state $state, up $(cut -d ' ' -f 1 /proc/uptime) s, $(uname -r), $(nproc) CPU"
    dmesg | sed -n 's/.*\(DMA domain TLB invalidation policy.*\)/exitless-guest: \1/p'
    dmesg | grep -E 'DMAR: \[DMA|DRHD: handling fault|fault from EP' && return 1
    disk=$(findmnt -n -o SOURCE /)
    function=$(readlink -f "/sys/class/block/${disk##*/}/device/..")
    group=$(readlink -f "$function/iommu_group")
    [ ! -d "$group" ] || say "root on ${function##*/}, IOMMU group ${group##*/}"
    [ "$state" = running ] || { systemctl --failed --no-legend --plain; return 1; }
    # The button's driver comes when udev gets to it, later than all that systemd waits for; a press before that is lost.
    seconds=0
    until journalctl -b -u systemd-logind --no-pager | grep -q 'Watching system buttons'; do
        sleep 1
        seconds=$((seconds + 1))
        [ $seconds -lt 300 ] || { say "logind does not watch the power button"; return 1; }
    done
}

fio_verified() {
    file=/var/tmp/exitless-job.fio
    fio --name=verified --filename=$file --size="$1M" --rw=randwrite --bs=4k --ioengine=libaio --iodepth=16 \
        --direct=1 --eta=never --verify=crc32c --verify_fatal=1 --output=/run/exitless-job.fio
    status=$?
    sed -n 's/^ *\(\(verified: .*err=\|read: \|write: \).*\)/exitless-guest: fio \1/p' /run/exitless-job.fio
    [ $status = 0 ] || cat /run/exitless-job.fio
    rm -f $file
    return $status
}

# The count is on the disk, and so are the files that it speaks of.
reboots() {
    mkdir -p $dir && cd $dir || return 1
    boots=$(($(cat boots 2>/dev/null || echo 0) + 1))
    [ $boots = 1 ] || sha256sum --quiet -c sums || return 1
    say "boot $boots: $((boots - 1)) files verified"
    [ $boots -le "$1" ] || return 0
    head -c 4M /dev/urandom >"file$boots" && sha256sum "file$boots" >>sums && echo $boots >boots && sync || return 1
    systemctl reboot
    # systemd ends this.
    exec sleep infinity
}

jobs=$(sed -n 's/^\(.* \)\?exitless\.job=\([^ ]*\).*/\2/p' /proc/cmdline)
status=0
for job in $(echo "$jobs" | tr , ' '); do
    case $job in
        state) state ;;
        fio:*) fio_verified "${job#fio:}" ;;
        reboot:*) reboots "${job#reboot:}" ;;
        *) say "no job is called $job"; false ;;
    esac || { status=1; say "failed: $job"; break; }
done
say "status=$status"
