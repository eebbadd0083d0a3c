# shellcheck shell=bash
# What the scripts of network clients share, on top of common.sh: a namespace with TAP interfaces, the daemon in it, a guest that
# answers, sends and receives, pings, transfers that are compared, and figures.
#
# The host's side is in the namespace alone: nothing of this machine's network is touched. That needs root and /dev/net/tun;
# without, scripts are skipped.
#
# Environment: PINGS     pings of a run [1000]
#              PING_MS   between two of them, in ms [5]
#              NET_MIB   MiB of a transfer, in each direction [8]

. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pings=${PINGS:-1000} ping_ms=${PING_MS:-5} mib=${NET_MIB:-8}
space=xlc$$        # the namespace
host_ip=10.77.0.1  # of the first interface
guest_ip=10.77.0.2 # of the guest on it
disk_image=        # of a disk that the same daemon serves, at $scratch/b.sock
is_lossy=          # set where a frame may be lost: the daemon is killed
figures=()         # KEY=VALUE, which `pass_net` says

# shellcheck disable=SC2317  # called by name
end_space() { ip netns delete "$space" 2>/dev/null || true; }

in_space() { ip netns exec "$space" "$@"; }

# make_space MTU INTERFACE…: the first has the host's address; with several, all are on a bridge and none has.
make_space() {
    local mtu=$1 interface
    shift
    PATH=$PATH:/usr/sbin:/sbin
    need ip iproute2
    need ping iputils-ping
    [ "$(id -u)" = 0 ] || skip "network namespaces and TAP interfaces need root"
    [ -c /dev/net/tun ] || skip "there is no /dev/net/tun"
    ip netns add "$space" 2>"$scratch/netns.log" || skip "no network namespace: $(tail -n 1 "$scratch/netns.log")"
    cleanups+=(end_space)
    in_space sysctl -q -w net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1 2>/dev/null || true
    in_space ip link set lo up
    for interface; do
        in_space ip tuntap add dev "$interface" mode tap vnet_hdr 2>"$scratch/tap.log" ||
            skip "no TAP interface: $(tail -n 1 "$scratch/tap.log")"
        in_space ip link set "$interface" mtu "$mtu" txqueuelen 1000 up
    done
    if [ $# = 1 ]; then
        in_space ip addr add $host_ip/24 dev "$1"
        return
    fi
    in_space ip link add br0 type bridge forward_delay 0 || skip "no bridge of interfaces"
    for interface; do
        in_space ip link set "$interface" master br0
    done
    in_space ip link set br0 mtu "$mtu" up
}

# start_net_daemon DEVICE…: what `--net` takes besides id and socket, for devices net0 at $scratch/n0.sock and so on.
start_net_daemon() {
    local options=() nth=0 device log
    for device; do
        options+=(--net "id=net$nth,socket=$scratch/n$nth.sock,$device")
        nth=$((nth + 1))
    done
    [ -z "$disk_image" ] || options+=(--block "id=disk0,path=$disk_image,format=raw,queues=2,socket=$scratch/b.sock")
    daemons=$((daemons + 1))
    log=$scratch/daemon-$daemons.log
    RUST_LOG=${RUST_LOG:-info} ip netns exec "$space" "$EXITLESS" serve --stats "$scratch/stats.json" "${options[@]}" >"$log" 2>&1 &
    daemon=$!
    processes+=("$daemon")
}

# counter DEVICE KEY: of the daemon started last, now.
counter() {
    rm -f "$scratch/stats.json"
    kill -USR1 "$daemon"
    until_true 5 test -s "$scratch/stats.json" || fail "the daemon does not write its counters"
    sed -n 's/.*"'"$1"'":{[^}]*"'"$2"'":\([0-9]*\).*/\1/p' "$scratch/stats.json"
}

# link_count INTERFACE rx_packets|tx_packets: what the kernel took from the daemon, or gave it.
link_count() { in_space cat "/sys/class/net/$1/statistics/$2"; }

# --- the guest ---------------------------------------------------------------------------------------------------

# add_file ARCHIVE NAME MODE [FILE]: appends a file, or a directory, to an archive as an initramfs is one (newc).
add_file() {
    local archive=$1 name=$2 mode=$3 file=${4:-} size=0
    [ -z "$file" ] || size=$(stat -Lc %s "$file")
    printf '070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\0' \
        $((++inode)) $((mode)) 0 0 1 0 "$size" 0 0 0 0 $((${#name} + 1)) 0 "$name" >>"$archive"
    pad "$archive"
    [ -z "$file" ] || cat "$file" >>"$archive"
    pad "$archive"
}
inode=70000
pad() { truncate -s "%4" "$1"; }

# make_initrd BASE SCRIPT: $scratch/net.img, the image BASE with iperf3, its libraries and the script /net.sh.
make_initrd() {
    local image=$scratch/net.img library
    need iperf3 iperf3
    cp "$1" "$image"
    # The next archive of a sequence begins at a multiple of four bytes.
    truncate -s "%512" "$image"
    printf '%s\n' "$2" >"$scratch/net.sh"
    add_file "$image" net.sh 0100755 "$scratch/net.sh"
    add_file "$image" lib 040755
    add_file "$image" lib64 040755
    add_file "$image" bin/iperf3 0100755 "$(command -v iperf3)"
    while read -r library; do
        case $library in
            */ld-linux*) add_file "$image" "lib64/${library##*/}" 0100755 "$library" ;;
            *) add_file "$image" "lib/${library##*/}" 0100644 "$library" ;;
        esac
    done < <(ldd "$(command -v iperf3)" | grep -o '/[^ ]*')
    add_file "$image" 'TRAILER!!!' 0
}

# What a guest does with its first interface: it answers pings; port 7001 sends what $scratch/down.bin is to be, 7002 says
# the sum of what it gets, 7003 (1B5B) is iperf3, and a connection to 7009 ends it.
# shellcheck disable=SC2016,SC2034  # the guest's variables; used by the scripts
guest_serves='
head -c '$((mib << 20))' /dev/urandom >/tmp/down
echo "net down=$(sha256sum </tmp/down | cut -c1-64)"
while :; do nc -l -p 7001 </tmp/down >/dev/null; done &
while :; do echo "net up=$(nc -l -p 7002 </dev/null | sha256sum | cut -c1-64)"; done &
iperf3 -s -p 7003 -D
until grep -q :1B5B /proc/net/tcp*; do sleep 0.1; done
echo net ready
nc -l -p 7009 </dev/null >/dev/null
'

# shellcheck disable=SC2154,SC2317  # set by the scripts; called by name
guest_is_ready() { grep -aqs '^net ready' "$console" || is_gone "$guest"; }
# shellcheck disable=SC2317  # called by name
guest_listens() { in_space bash -c "exec 3<>/dev/tcp/$guest_ip/$1" 2>/dev/null; }
# shellcheck disable=SC2317  # called by name
sums_said() { [ "$(grep -ac '^net up=[0-9a-f]' "$console")" -ge "$1" ]; }

wait_for_guest() {
    until_true "${1:-120}" guest_is_ready || fail "the guest is not ready"
    ! is_gone "$guest" || fail "the guest ended before it was ready"
}

# end_guest: tells it to end, and expects it to end well.
end_guest() {
    local status=0
    in_space bash -c "exec 3<>/dev/tcp/$guest_ip/7009" || fail "the guest cannot be told to end"
    until_true 60 is_gone "$guest" || fail "the guest does not end"
    { wait "$guest" || status=$?; } 2>/dev/null
    [ "$status" -eq 0 ] || fail "the client ended with status $status"
    [ "$(console_value "$console" exitless-guest:\ status)" = 0 ] ||
        fail "the guest's script ended with status '$(console_value "$console" exitless-guest:\ status)'"
}

# --- what is verified --------------------------------------------------------------------------------------------

# ping_guest KEY [OPTION…]: $pings of them, of which none may be lost, come twice or changed.
ping_guest() {
    local key=$1 out=$scratch/ping-$1.log sent received status=0
    shift
    in_space ping -q -n -c "$pings" -i "$(awk "BEGIN { print $ping_ms / 1000 }")" -W 10 "$@" $guest_ip >"$out" 2>&1 || status=$?
    read -r sent received < <(sed -n 's/^\([0-9]*\) packets transmitted, \([0-9]*\) received.*/\1 \2/p' "$out")
    [ "${sent:-0}" = "$pings" ] || fail "$key: ping ended with status $status: $(tail -n 1 "$out")"
    figures+=("$key=$((sent - received))")
    [ "$received" = "$sent" ] || [ -n "$is_lossy" ] || fail "$key: $((sent - received)) of $sent pings were lost"
    ! grep -E 'duplicates|corrupted|errors' "$out" >"$scratch/complaints.txt" || fail "$key: $(head -n 1 "$scratch/complaints.txt")"
}

# fetch: what the guest sends is what it says that it has sent.
fetch() {
    local got
    got=$(in_space timeout 120 bash -c "exec 3<>/dev/tcp/$guest_ip/7001; cat <&3" | sha256sum | cut -c1-64)
    [ "$got" = "$(console_value "$console" down)" ] || fail "what the guest sent did not arrive whole"
}

# push: what the guest got is what it was sent.
push() {
    local sums
    [ -f "$scratch/up.bin" ] || head -c $((mib << 20)) /dev/urandom >"$scratch/up.bin"
    sums=$(grep -ac '^net up=[0-9a-f]' "$console" || true)
    in_space timeout 120 bash -c "exec 3<>/dev/tcp/$guest_ip/7002; cat '$scratch/up.bin' >&3" || fail "the guest does not take what it is sent"
    until_true 60 sums_said $((sums + 1)) || fail "the guest does not say what it got"
    [ "$(console_value "$console" up)" = "$(sha256sum <"$scratch/up.bin" | cut -c1-64)" ] ||
        fail "what the guest was sent did not arrive whole"
}

# iperf NAME SECONDS [OPTION…]: iperf3 to the guest; adds Mbit/s as NAME.
iperf() {
    local name=$1 seconds=$2 rate
    shift 2
    in_space timeout $((seconds + 60)) iperf3 -c $guest_ip -p 7003 -t "$seconds" -f m "$@" >"$scratch/iperf-$name.log" 2>&1 ||
        fail "iperf3 $*: $(tail -n 1 "$scratch/iperf-$name.log")"
    rate=$(sed -n 's/.* \([0-9.]*\) Mbits\/sec.*receiver.*/\1/p' "$scratch/iperf-$name.log" | tail -n 1)
    awk "BEGIN { exit !(${rate:-0} > 0) }" || fail "iperf3 $*: nothing arrived"
    figures+=("$name=$rate")
}

# per_mib INTERFACE rx_packets|tx_packets COMMAND…: runs it and answers how many frames a MiB of its transfer took, in $frames.
per_mib() {
    local interface=$1 what=$2 before
    shift 2
    before=$(link_count "$interface" "$what")
    "$@"
    # shellcheck disable=SC2034  # used by the scripts
    frames=$((($(link_count "$interface" "$what") - before) / mib))
}

# check_net_daemon: no device needed a reset.
check_net_daemon() {
    ! grep -h 'needs a reset\|cannot be shown' "$scratch"/daemon-*.log >"$scratch/complaints.txt" ||
        fail "$(head -n 1 "$scratch/complaints.txt")"
}

pass_net() { pass "$* ${figures[*]}"; }
