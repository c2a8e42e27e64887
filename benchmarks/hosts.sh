#!/usr/bin/env bash
# Hosts on one machine: network namespaces on one bridge, named by a number so that two sets do not collide.
#   hosts.sh up ID N            hosts 0 .. N-1 of set ID: addresses 10.77.0.1 .. 10.77.0.N, interface eth0
#   hosts.sh run ID I COMMAND…  run a command on host I
#   hosts.sh down ID            end what runs on them and take them away
# Needs root and iproute2. ID is a number of at most 8 digits, as a process id: interface names hold 15 characters.
set -euo pipefail
id=${2:-} bridge=olb${2:-}
case "${1:-}" in
  up)
    ip link add "$bridge" type bridge && ip link set "$bridge" up
    for ((i = 0; i < $3; i++)); do
      ip netns add "ol$id-$i"
      ip link add "ol${id}v$i" type veth peer name eth0 netns "ol$id-$i"
      ip link set "ol${id}v$i" master "$bridge" up
      ip -n "ol$id-$i" addr add "10.77.0.$((i + 1))/24" dev eth0
      ip -n "ol$id-$i" link set lo up && ip -n "ol$id-$i" link set eth0 up
    done ;;
  run)  i=$3; shift 3; GLOO_SOCKET_IFNAME=eth0 TP_SOCKET_IFNAME=eth0 exec ip netns exec "ol$id-$i" "$@" ;;
  down)
    for ns in $(ip netns list | awk -v set="ol$id-" 'index($1, set) == 1 {print $1}'); do
      ip netns pids "$ns" | xargs -r kill -9 2>/dev/null || true
      ip netns del "$ns"
    done
    # A namespace is taken away after the command that says so, and its interfaces with it: these must be gone when it returns.
    for end in $(ip -o link show master "$bridge" 2>/dev/null | awk -F'[ @:]+' '{print $2}'); do ip link del "$end" 2>/dev/null || true; done
    ip link del "$bridge" 2>/dev/null || true ;;
  *) sed -n '2,6p' "$0"; exit 2 ;;
esac
