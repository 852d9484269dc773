#!/usr/bin/env bash
# Two network namespaces joined by a veth pair of limited rate, one rank in each; needs root, iproute2
# and util-linux. Each rank also gets its own host name and its own /dev/shm, as on two machines.
#
#   slow_link.sh [RATE] [options of slow_link.py]      RATE as tc writes it; default 1gbit
#   slow_link.sh 200mbit --backends lightning_ddp zero2 zero3 --rounds 3
set -euo pipefail

rate=1gbit
if [[ $# -gt 0 && $1 != -* ]]; then rate=$1; shift; fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
first=zbA$$ second=zbB$$ device=link0 subnet=10.$((RANDOM % 200 + 20)).$((RANDOM % 250))

remove_namespaces() {  # the devices go with them
  ip netns del "$first" 2>/dev/null || true
  ip netns del "$second" 2>/dev/null || true
}
trap remove_namespaces EXIT
trap 'exit 130' INT TERM

ip netns add "$first"
ip netns add "$second"
ip -n "$first" link add "$device" type veth peer name "$device" netns "$second"
host=1
for namespace in "$first" "$second"; do
  ip -n "$namespace" link set lo up
  ip -n "$namespace" addr add "$subnet.$host/24" dev "$device"
  ip -n "$namespace" link set "$device" up
  # tc takes latency as the longest wait in the queue; the burst must hold the largest packet (64 KiB).
  ip netns exec "$namespace" tc qdisc add dev "$device" root tbf rate "$rate" burst 256kb latency 50ms
  host=$((host + 1))
done

"${PYTHON:-python}" "$here/slow_link.py" --rate "$rate" --namespaces "$first" "$second" \
  --master-address "$subnet.1" --interface "$device" "$@"
